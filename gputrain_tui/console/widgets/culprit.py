"""The card of a failed run: rank, host, failure, log tail, and what the other ranks were doing."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gputrain_tui.console.ramp import Ramp
from gputrain_tui.console.widgets.drawing import Row, cut, headline
from gputrain_tui.console.widgets.panel import Panel
from gputrain_tui.headless.progress import ranks_text
from gputrain_tui.lifecycle.attempt_outcome import last_lines
from gputrain_tui.state import RunState
from gputrain_tui.state.rank_outcome import LOST_PEER, STOPPED
from gputrain_tui.tables import printable
from trainer.contract.record import Failure

if TYPE_CHECKING:
    from gputrain_tui.console.live import LiveRun

LOG_LINES = 12
"""Last lines of the culprit's log that are kept at hand; the card shows as many as fit."""
GROUPS = 3
"""Kinds of what others were doing that are told apart."""
DOING = {
    "spawned": "were starting",
    "joining": "waited for the others to join",
    "ready": "were about to train",
    "training": "were training",
    "validating": "were validating",
    "saving": "were saving a checkpoint",
    "finished": "had finished",
    "failed": "failed as well",
    None: "had not been heard of",
}


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """What the card tells."""

    failure: Failure
    log: Sequence[str] = ()
    """Last lines that it printed."""
    log_path: str = ""
    others: Sequence[str] = ()
    """What the other ranks were doing, a line per kind."""


def others(state: RunState, culprit: int | None) -> list[str]:
    """Return what the other ranks were doing when one failed, most of them first."""
    groups: dict[str, list[int]] = {}
    for rank, view in sorted(state.ranks.items()):
        if rank == culprit:
            continue
        failure = view.failure
        if view.outcome == LOST_PEER:
            doing = "waited for it in a collective"
        elif view.outcome == STOPPED:
            before = view.state if view.state != "failed" else "training" if view.last is not None else "spawned"
            doing = f"{DOING[before]}, then were stopped"
        elif failure is not None:
            doing = f"failed as well: {printable(failure.message)}"
        else:
            doing = DOING[view.state]
        if view.last is not None:
            doing += f", step {view.last.step:,} done"
        groups.setdefault(doing, []).append(rank)
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[1][0]))
    lines = [f"{ranks_text(ranks, limit=4)} {_of_one(doing, ranks)}" for doing, ranks in ordered[:GROUPS]]
    if rest := sum(len(ranks) for _, ranks in ordered[GROUPS:]):
        lines.append(f"and {rest:,} more ranks")
    return lines


def _of_one(doing: str, ranks: Sequence[int]) -> str:
    return doing.replace("were ", "was ") if len(ranks) == 1 else doing


def culprit_height(culprit: Culprit, width: int, most: int) -> int:
    """Return the lines that the card wants, at most so many."""
    return min(len(_rows(culprit, width, most)), most)


def draw_culprit(culprit: Culprit, width: int, height: int) -> list[Row]:
    """Return the card as ``height`` rows of ``width`` cells."""
    rows = _rows(culprit, width, height)
    return [cut(row, width) for row in [*rows, *([[]] * height)][:height]]


def _rows(culprit: Culprit, width: int, most: int) -> list[Row]:
    """Return the card's lines; what there is no room for gives way in the order log, others, message."""
    failure = culprit.failure
    who = f"rank {failure.rank}" if failure.rank is not None else "the run"
    where = f" on {printable(failure.host)}" if failure.host else ""
    when = f" at step {failure.step:,}" if failure.step is not None else ""
    kind = failure.kind.replace("_", " ")
    head: Row = [(f"✗ {who}{where} failed{when}", "error"), (f"  {kind}", "warning")]
    at = time.strftime("%H:%M:%S", time.localtime(failure.time))
    rows: list[Row] = [headline(width, head, [[(at, "dim")]])]
    message = textwrap.wrap(printable(failure.message), max(width - 4, 20))[: 2 if most < 9 else 4]
    rows += [[("  ", "base"), (line, "title")] for line in message]
    told: list[Row] = []
    if culprit.others:
        told = [[("  meanwhile  " if not i else "             ", "dim"), (line, "bright")]
                for i, line in enumerate(culprit.others)]  # fmt: skip
        told = told[: max(1, most // 4)]
    room = most - len(rows) - len(told)
    log = list(culprit.log)
    if log and room >= 2:
        path = culprit.log_path
        rows.append([("  end of its log", "dim"), (f", {path}" if len(path) + 24 < width else "", "dim")])
        rows += [[("  │ ", "error"), (printable(line), "dim")] for line in log[-(room - 1) :]]
    elif log and room == 1:
        rows.append([("  │ ", "error"), (printable(log[-1]), "dim")])
    return rows + told


class CulpritCard(Panel):
    """The card of a failed run; without height in any other."""

    DEFAULT_CSS = """
    CulpritCard { background: $error 8%; }
    CulpritCard:ansi { background: ansi_default; }
    """

    live: LiveRun

    def __init__(self, live: LiveRun, *, id: str | None = None) -> None:
        super().__init__(live, id=id)
        self._log_of: tuple[int | None, str | None, int] | None = None
        self._log: list[str] = []
        self._log_path = ""

    def culprit(self) -> Culprit | None:
        """Return what is to be told; None while nothing has failed."""
        failure = self.live.state.root_cause
        status = self.live.status
        if failure is None and status == "failed" and self.live.message:
            failure = Failure(time=self.live.state.time, kind="launch", message=self.live.message)
        if failure is None or status not in ("failed", "running", "stopping", "lost"):
            return None
        self._read_log(failure)
        return Culprit(
            failure=failure, log=self._log, log_path=self._log_path, others=others(self.live.state, failure.rank)
        )

    def seen_version(self) -> object:
        """It changes with the failures, and with how the others end."""
        return self.live.version, self.live.status

    def draw(self, width: int, height: int, ramp: Ramp) -> list[Row]:
        """Return the card."""
        culprit = self.culprit()
        return [] if culprit is None else draw_culprit(culprit, width, height)

    def _read_log(self, failure: Failure) -> None:
        """Read the end of the culprit's log, again when it was written to."""
        run_dir = self.live.run.dir
        if failure.rank is not None:
            path = run_dir.rank_log(failure.rank)
        else:
            views = self.live.state.ranks.values()
            node = next((view.node for view in views if view.host == failure.host), None)
            path = run_dir.node_log(node or 0)
        try:
            size = path.stat().st_size
        except OSError:
            size = -1
        of = (failure.rank, failure.host, size)
        if of != self._log_of:
            self._log_of, self._log_path = of, f"logs/{path.name}"
            self._log = last_lines(path, LOG_LINES)
