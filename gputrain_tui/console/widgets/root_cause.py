"""Card of a failed run: rank, host, failure, log tail, and the states of the other ranks at that time."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass

from gputrain_tui.console.widgets.drawing import Row, fit_row, title_row
from gputrain_tui.console.widgets.panel import Panel
from gputrain_tui.headless.closing_report import LOG_LINES
from gputrain_tui.lifecycle.attempt_outcome import last_lines
from gputrain_tui.state import RankView, RunState
from gputrain_tui.state.finding_text import failure_step, failure_words
from gputrain_tui.state.rank_state import LOST_PEER, STOPPED
from gputrain_tui.tables import printable, ranks_text
from trainer.contract.record import Failure

MOST_GROUPS = 3
STATE_TEXTS = {
    "spawned": "were starting",
    "joining": "waited for the others to join",
    "ready": "were about to train",
    "training": "were training",
    "validating": "were validating",
    "saving": "were saving a checkpoint",
    "finished": "had finished",
    "failed": "failed as well",
    None: "had not reported yet",
}


@dataclass(frozen=True, kw_only=True)
class RootCause:
    """Content of the card: first failure, log tail and other ranks."""

    failure: Failure
    log: Sequence[str] = ()
    log_path: str = ""
    other_ranks: Sequence[str] = ()
    """States of the other ranks when it failed, as text, a line per state."""


def other_ranks(state: RunState, root_cause: int | None) -> list[str]:
    """Return the states of the other ranks when one failed, a line per state, the most frequent first."""
    groups: dict[str, list[int]] = {}
    for rank, view in sorted(state.ranks.items()):
        if rank != root_cause:
            groups.setdefault(_activity(view), []).append(rank)
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[1][0]))
    lines = []
    for activity, ranks in ordered[:MOST_GROUPS]:
        text = activity.replace("were ", "was ") if len(ranks) == 1 else activity
        lines.append(f"{ranks_text(ranks, limit=4)} {text}")
    if rest := sum(len(ranks) for _, ranks in ordered[MOST_GROUPS:]):
        lines.append(f"and {rest:,} more ranks")
    return lines


def _activity(view: RankView) -> str:
    """Return the activity of a rank when another one failed, as text for several ranks."""
    if view.outcome == LOST_PEER:
        activity = "waited for it in a collective"
    elif view.outcome == STOPPED:
        before = view.state if view.state != "failed" else "training" if view.last is not None else "spawned"
        activity = f"{STATE_TEXTS[before]}, then were stopped"
    elif view.failure is not None:
        activity = f"failed as well: {printable(view.failure.message)}"
    else:
        activity = STATE_TEXTS[view.state]
    return activity if view.last is None else f"{activity}, step {view.last.step:,} done"


def _headline(failure: Failure) -> str:
    who = f"rank {failure.rank}" if failure.rank is not None else "the run"
    where = f" on {printable(failure.host)}" if failure.host else ""
    return f"{who}{where} failed{failure_step(failure)}"


def failure_text(root_cause: RootCause) -> str:
    """Return the card as text to paste, with the whole traceback or else the whole log tail."""
    failure = root_cause.failure
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(failure.time))
    details = (failure.traceback or "").strip().splitlines() or root_cause.log
    lines = [f"{at}  {_headline(failure)}: {failure_words(failure)}", failure.message, *details]
    return "\n".join(map(printable, [*lines, *(f"meanwhile: {line}" for line in root_cause.other_ranks)]))


def draw_root_cause(root_cause: RootCause, width: int, most: int) -> list[Row]:
    """Return at most ``most`` rows of the card: log tail, other ranks and message are shortened, in this order."""
    failure = root_cause.failure
    head: Row = [(f"✗ {_headline(failure)}", "error"), (f"  {failure_words(failure)}", "warning")]
    at = time.strftime("%H:%M:%S", time.localtime(failure.time))
    rows: list[Row] = [title_row(width, head, [[(at, "dim")]])]
    most_lines = 2 if most < 9 else 4
    message = textwrap.wrap(printable(failure.message), max(width - 4, 20), max_lines=most_lines, placeholder=" …")
    rows += [[("  ", "base"), (line, "title")] for line in message]
    others: list[Row] = [
        [(f"  {'' if number else 'meanwhile':<9}  ", "dim"), (line, "bright")]
        for number, line in enumerate(root_cause.other_ranks)
    ][: max(1, most // 4)]
    free = most - len(rows) - len(others)
    log = [printable(line) for line in root_cause.log]
    if log and free >= 2:
        path = f", {root_cause.log_path}" if len(root_cause.log_path) + 24 < width else ""
        rows.append([("  end of its log", "dim"), (path, "dim")])
        log = log[-(free - 1) :]
    rows += [[("  │ ", "error"), (line, "dim")] for line in log[-free:] if free > 0]
    return [fit_row(row, width) for row in rows + others][:most]


class RootCauseCard(Panel):
    """Card of a failed run; empty for other runs."""

    DEFAULT_CSS = """
    RootCauseCard { background: $error 8%; }
    RootCauseCard:ansi { background: ansi_default; }
    """

    _log_key: tuple[int | None, str | None, int] | None = None
    """Rank, host and size in bytes of the log that was read."""
    _log: Sequence[str] = ()
    _log_path = ""

    def root_cause(self) -> RootCause | None:
        """Return the content of the card; None if nothing has failed, or the run has finished or was stopped."""
        if not self.live.caught_up:
            return None  # the failure may be that of an earlier attempt
        failure = self.live.state.root_cause
        status = self.live.status
        if failure is None and status == "failed" and self.live.message:
            failure = Failure(time=self.live.state.time, kind="launch", message=self.live.message)
        if failure is None or status not in ("failed", "running", "stopping", "lost"):
            return None
        self._read_log(failure)
        others = other_ranks(self.live.state, failure.rank)
        return RootCause(failure=failure, log=self._log, log_path=self._log_path, other_ranks=others)

    def seen_version(self) -> object:
        return self.live.version, self.live.status

    def draw(self, width: int, height: int) -> list[Row]:
        root_cause = self.root_cause()
        return [] if root_cause is None else draw_root_cause(root_cause, width, height)

    def _read_log(self, failure: Failure) -> None:
        """Read the tail of the failed rank's log, or of its node agent's, if it has grown."""
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
        key = (failure.rank, failure.host, size)
        if key != self._log_key:
            self._log_key, self._log_path = key, f"logs/{path.name}"
            self._log = last_lines(path, LOG_LINES)
