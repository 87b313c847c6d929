"""Flags that name a run and its ranks, shared by the commands that read its record."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from gputrain_tui.history.run_folders import Run
from trainer.contract.errors import RequestError

RUN_HELP = "run id, a unique prefix of one, `last`, a run directory, or an archive (FILE.tar.gz)"


def add_ranks(parser: ArgumentParser) -> None:
    """Declare ``--rank``."""
    parser.add_argument("--rank", type=int, action="append", metavar="N", help="only this rank; may be repeated")


def chosen_ranks(args: Namespace, run: Run, *, command: str) -> list[int]:
    """Return the ranks of ``--rank``, ascending; empty without the flag.

    Raises:
        RequestError: the run has no such rank.
    """
    ranks = sorted(set(args.rank or ()))
    for rank in ranks:
        if not 0 <= rank < run.status.world_size:
            last = run.status.world_size - 1
            raise RequestError(f"{command}: run {run.id} has no rank {rank}: its ranks are 0 to {last}")
    return ranks
