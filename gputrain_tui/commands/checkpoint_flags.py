"""Flags that name a checkpoint, shared by ``eval`` and ``export``."""

from __future__ import annotations

from argparse import ArgumentParser


def add_checkpoint(parser: ArgumentParser) -> None:
    """Declare ``RUN|CHECKPOINT`` and ``--checkpoint``."""
    parser.add_argument(
        "named",
        metavar="RUN|CHECKPOINT",
        help="run id, a unique prefix of one, or `last`; or a checkpoint's file",
    )
    parser.add_argument(
        "--checkpoint",
        metavar="best|newest|FILE",
        help="which checkpoint of the run; default: the best one, or the newest if there is no best",
    )
