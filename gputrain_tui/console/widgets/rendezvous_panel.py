"""Panel of the rendezvous, shown until the first step: joined and missing ranks by host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gputrain_tui.console.widgets.drawing import Row, cell_count, fit_row, merge, pad, title_row
from gputrain_tui.console.widgets.panel import ClockPanel
from gputrain_tui.state import RunState
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


LOADING = {"absent", "spawned"}
"""States of a rank that still loads torch."""


@dataclass(frozen=True, kw_only=True)
class RendezvousProgress:
    """State of every rank before the first step."""

    hosts: Sequence[tuple[str, Sequence[tuple[int, str]]]]
    """Hosts with their ranks, each with a key of ``SIGNS``."""
    joined: int
    """Number of ranks that have joined."""
    missing: Sequence[int]
    """Ranks that have not joined."""
    waited_s: float | None = None
    """Seconds since the start of the run."""


def rendezvous_progress(state: RunState, now: float) -> RendezvousProgress:
    """Return the state of every rank before the first step."""
    joined = set(state.joined)
    hosts: dict[str, list[tuple[int, str]]] = {}
    for rank, view in sorted(state.ranks.items()):
        if view.outcome is not None:
            sign = "ended"
        elif rank in joined:
            sign = "here"
        elif view.state is None:
            sign = "absent"
        elif view.state in SIGNS:
            sign = view.state
        else:
            sign = "here"
        hosts.setdefault(view.host or "this machine", []).append((rank, sign))
    return RendezvousProgress(
        hosts=list(hosts.items()),
        joined=len(joined),
        missing=state.missing,
        waited_s=max(0.0, now - state.started) if state.started is not None else None,
    )


def draw_rendezvous(progress: RendezvousProgress, width: int, height: int) -> list[Row]:
    """Return the panel as ``height`` rows of ``width`` cells, hosts with missing ranks first."""
    total = sum(len(ranks) for _, ranks in progress.hosts)
    left: Row = [("joining", "title"), (f" {progress.joined:,}", "bright"), (f" of {total:,}", "dim")]
    remarks: list[Row] = []
    if progress.waited_s is not None:
        remarks.append([("waiting ", "dim"), (duration(progress.waited_s), "bright")])
    rows: list[Row] = [title_row(width, left, remarks), []]
    if progress.missing:
        rows.append([("  waiting for ", "dim"), (ranks_text(progress.missing, limit=12), "title")])
    elif total:
        rows.append([("  all ranks have joined; the first step comes next", "bright")])
    if total and {sign for _, ranks in progress.hosts for _, sign in ranks} <= LOADING:
        rows.append([("  a rank imports torch before it joins: seconds, longer on a busy machine", "dim")])
    rows.append([])
    legend: Row = []
    present = {sign for _, ranks in progress.hosts for _, sign in ranks}
    for key, (sign, role, word) in SIGNS.items():
        if key in present:
            legend += [(f"  {sign}", role), (f" {word}", "dim")]
    name_cells = min(max((cell_count(host) for host, _ in progress.hosts), default=0), 24)
    hosts = sorted(progress.hosts, key=lambda item: all(sign == "here" for _, sign in item[1]))
    room = height - len(rows) - 2
    for index, (host, ranks) in enumerate(hosts):
        if index >= room - 1 and len(hosts) > room:
            rows.append([(f"  … and {len(hosts) - index:,} more hosts", "dim")])
            break
        rows.append(_host(host, ranks, name_cells, width))
    rows += [[], legend]
    return [fit_row(row, width) for row in [*rows, *([[]] * height)][:height]]


def _host(host: str, ranks: Sequence[tuple[int, str]], name_cells: int, width: int) -> Row:
    count = sum(sign == "here" for _, sign in ranks)
    span = f"{ranks[0][0]}–{ranks[-1][0]}" if len(ranks) > 1 else f"{ranks[0][0]}"
    name = printable(host)
    word = "ranks" if len(ranks) > 1 else "rank"
    row: Row = [
        ("  ", "base"),
        (pad(name, name_cells), "bright" if count < len(ranks) else "dim"),
        (f"  {word} {span}".ljust(18), "dim"),
        (f"{count:>4}/{len(ranks)}  ", "bright" if count < len(ranks) else "dim"),
    ]
    used = sum(len(text) for text, _ in row)
    signs = merge((SIGNS[sign][0], SIGNS[sign][1]) for _, sign in ranks[: max(width - used - 2, 0)])
    return [*row, *signs]


class RendezvousView(ClockPanel):
    """Panel of joined and missing ranks."""

    def draw(self, width: int, height: int) -> list[Row]:
        """Return the panel."""
        live = self.live
        return draw_rendezvous(rendezvous_progress(live.state, live.now()), width, height)
