"""Flags that several commands take: a recipe and its settings, a run and its ranks, a checkpoint."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from trainer.contract.errors import RequestError

if TYPE_CHECKING:
    from gputrain_tui.history.run_folders import Run

RUN_HELP = "run id, a unique prefix of one, `last`, a run directory, or an archive (FILE.tar.gz)"


def add_recipe(parser: ArgumentParser, *, optional: bool = False) -> None:
    """Declare ``RECIPE``, which may be omitted if ``optional``, and ``--set``."""
    text = "a recipe in TOML or JSON; - reads standard input"
    parser.add_argument("recipe", metavar="RECIPE", nargs="?" if optional else None, help=text)
    add_settings(parser)


def add_settings(parser: ArgumentParser) -> None:
    """Declare ``--set``."""
    text = "change a key of the recipe, such as train.lr=0.5; may be repeated"
    parser.add_argument("--set", metavar="KEY=VALUE", dest="overrides", action="append", default=[], help=text)


def add_checkpoint(parser: ArgumentParser) -> None:
    """Declare ``RUN|CHECKPOINT`` and ``--checkpoint``."""
    text = "run id, a unique prefix of one, or `last`; or a checkpoint: a file, or a folder of torch's DCP"
    parser.add_argument("named", metavar="RUN|CHECKPOINT", help=text)
    text = "which checkpoint of the run; default: the best one, or the newest if there is no best"
    parser.add_argument("--checkpoint", metavar="best|newest|FILE", help=text)


def add_ranks(parser: ArgumentParser) -> None:
    """Declare ``--rank``."""
    parser.add_argument("--rank", type=int, action="append", metavar="N", help="only this rank; may be repeated")


def chosen_ranks(args: Namespace, run: Run, *, command: str) -> list[int]:
    """Return the ranks of ``--rank``, ascending; empty without the flag."""
    ranks = sorted(set(args.rank or ()))
    for rank in ranks:
        if not 0 <= rank < run.status.recorded_ranks:
            last = run.status.recorded_ranks - 1
            raise RequestError(f"{command}: run {run.id} has no rank {rank}: its ranks are 0 to {last}")
    return ranks
