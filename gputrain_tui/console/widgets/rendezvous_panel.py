"""Panel of the rendezvous, shown until the first step: joined and missing ranks by host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gputrain_tui.console.widgets.drawing import Row, cell_count, fit_rows, merge, pad, title_row
from gputrain_tui.console.widgets.panel import ClockPanel
from gputrain_tui.state import RunState
from gputrain_tui.state.job_queue import queued_text
from gputrain_tui.tables import duration, printable, ranks_text

SIGNS = {
    "absent": ("·", "dim", "not started"),
    "spawned": ("◌", "dim", "starting"),
    "joining": ("◍", "accent", "joining"),
    "here": ("●", "bright", "joined"),
    "failed": ("✗", "error", "failed"),
    "ended": ("╌", "victim", "ended too"),
}
"""Sign, role and word of each state of a rank before the first step."""


@dataclass(frozen=True, kw_only=True)
class RendezvousProgress:
    """State of every rank before the first step."""

    hosts: Sequence[tuple[str, Sequence[tuple[int, str]]]]
    """Hosts with their ranks, each with a key of ``SIGNS``."""
    joined: int
    missing: Sequence[int]
    waited_s: float | None = None
    """Seconds since the start of the run."""
    queued: str = ""
    """Where and why the run waits in a queue; empty if it does not."""


def rendezvous_progress(state: RunState, now: float) -> RendezvousProgress:
    """Return the state of every rank before the first step."""
    joined, queue = set(state.joined), state.queue
    queued = "" if queue.newest is None else queued_text(queue.newest)
    hosts: dict[str, list[tuple[int, str]]] = {}
    for rank, view in sorted(state.ranks.items()):
        sign = "here" if rank in joined else "absent" if view.state is None else view.state
        sign = "ended" if view.outcome is not None else sign if sign in SIGNS else "here"
        hosts.setdefault(view.host or ("queued" if queue.is_waiting else "this machine"), []).append((rank, sign))
    return RendezvousProgress(
        hosts=list(hosts.items()),
        joined=len(joined),
        missing=state.missing,
        waited_s=max(0.0, now - state.started) if state.started is not None else None,
        queued=f"queued {queued}".rstrip() if queue.is_waiting else "",
    )


def draw_rendezvous(progress: RendezvousProgress, width: int, height: int) -> list[Row]:
    """Return the panel as ``height`` rows of ``width`` cells, hosts with missing ranks first."""
    present = {sign for _, ranks in progress.hosts for _, sign in ranks}
    total = sum(len(ranks) for _, ranks in progress.hosts)
    left: Row = [("joining", "title"), (f" {progress.joined:,}", "bright"), (f" of {total:,}", "dim")]
    waited = progress.waited_s
    rights: list[Row] = [] if waited is None else [[("waiting ", "dim"), (duration(waited), "bright")]]
    rows: list[Row] = [title_row(width, left, rights), []]
    if progress.queued:
        rows += [[(f"  {printable(part)}", "title")] for part in progress.queued.split(", ")]
    elif progress.missing:
        rows.append([("  waiting for ", "dim"), (ranks_text(progress.missing, limit=12), "title")])
    elif total:
        rows.append([("  all ranks have joined; the first step comes next", "bright")])
    if total and present <= {"absent", "spawned"} and not progress.queued:
        rows.append([("  a rank imports torch before it joins: seconds, longer on a busy machine", "dim")])
    rows.append([])
    name_cells = min(max((cell_count(host) for host, _ in progress.hosts), default=0), 24)
    hosts = sorted(progress.hosts, key=lambda item: all(sign == "here" for _, sign in item[1]))
    lines = height - len(rows) - 2
    for index, (host, ranks) in enumerate(hosts):
        if index >= lines - 1 and len(hosts) > lines:
            rows.append([(f"  … and {len(hosts) - index:,} more hosts", "dim")])
            break
        rows.append(_host(host, ranks, name_cells, width))
    legend: Row = []
    for key, (sign, role, word) in SIGNS.items():
        legend += [(f"  {sign}", role), (f" {word}", "dim")] if key in present else []
    return fit_rows([*rows, [], legend], width, height)


def _host(host: str, ranks: Sequence[tuple[int, str]], name_cells: int, width: int) -> Row:
    count = sum(sign == "here" for _, sign in ranks)
    span = f"ranks {ranks[0][0]}–{ranks[-1][0]}" if len(ranks) > 1 else f"rank {ranks[0][0]}"
    role = "bright" if count < len(ranks) else "dim"
    row: Row = [
        (f"  {pad(printable(host), name_cells)}", role),
        (f"  {span}".ljust(18), "dim"),
        (f"{count:>4}/{len(ranks)}  ", role),
    ]
    used = sum(len(text) for text, _ in row)
    return [*row, *merge((SIGNS[sign][0], SIGNS[sign][1]) for _, sign in ranks[: max(width - used - 2, 0)])]


class RendezvousView(ClockPanel):
    """Panel of joined and missing ranks."""

    def draw(self, width: int, height: int) -> list[Row]:
        return draw_rendezvous(rendezvous_progress(self.live.state, self.live.now()), width, height)
