"""Stacks of several ranks, equal ones together, and as lines of text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gputrain_tui.tables import ranks_text
from trainer.contract.record import CodeFrame, Collective, RankStacks, ThreadStack
from trainer.contract.record.code_stacks import LOADER_FILE, waits_for_worker

WAITS = {
    "trainer/telemetry/comm_hook.py": "synchronising gradients",
    "torch/distributed/distributed_c10d.py": "in {}",
    LOADER_FILE: "waiting for a batch of the DataLoader",
    "torch/cuda/__init__.py": "waiting for the GPU",
}
"""File of a library to what a thread in it does; ``{}`` is a public function of the file."""
UNSEEN_WORKERS = (
    "its worker processes have no stack, as they were not forked or do not answer: num_workers = 0 reads in the rank; "
    "`py-spy dump --pid N` shows one of `pgrep -P {pid}`"
)
_FOLDER = re.compile(r".*/(?:site-packages|dist-packages|python3\.\d+)/")


@dataclass(frozen=True)
class StackGroup:
    """Ranks whose main threads are at the same place, or that gave the same reason for no answer."""

    ranks: list[int]
    """Ascending."""
    threads: list[ThreadStack]
    """Stacks of the first of these ranks, the main thread first; empty without an answer."""
    problem: str
    """Why there is no stack, or what the process was found to be; empty for a plain answer."""
    hosts: list[str] = field(default_factory=list)
    """Hosts of these ranks, in the order of the ranks."""
    collectives: list[tuple[list[int], list[Collective]]] = field(default_factory=list)
    """Ranks with the same last collectives, and these; those that have made the fewest first."""
    native: list[ThreadStack] = field(default_factory=list)
    """Stacks with native frames of the first of these ranks that has them."""
    native_problem: str = ""
    """Why there are none, where they were asked for."""
    pid: int | None = None
    """Process of the first of these ranks."""
    workers: list[ThreadStack] = field(default_factory=list)
    """Worker processes of the first of these ranks, where these wait for their DataLoader."""

    @property
    def line(self) -> str:
        """Where the main thread is, the innermost line of the user's code first; empty without an answer."""
        main = (self.threads or self.native)[:1]
        frames = main[0].frames if main else []
        own = next((frame for frame in frames if frame.user), None)
        texts = [waits_for(frames), frame_text(own) if own else "", frame_text(frames[0]) if frames and not own else ""]
        line = ", ".join(text for text in texts if text)
        busy = next((worker for worker in self.workers if worker.frames and not is_idle(worker)), None)
        if busy is None:
            return line
        call = next((frame for frame in busy.frames if frame.user), busy.frames[0])
        return f"{line}; {busy.name}: {frame_text(call)}"


def frame_text(frame: CodeFrame) -> str:
    """Return a call in a line, such as ``train.py:12 in augment``; a library's file without its folder.

    A native call may have no line number.
    """
    line = f":{frame.line}" if frame.line else ""
    return f"{_FOLDER.sub('', frame.file)}{line} in {frame.function}"


def waits_for(frames: Iterable[CodeFrame]) -> str:
    """Return what a thread waits for by its innermost calls outside of the user's code; empty if that is not known."""
    for frame in frames:
        if frame.user:
            return ""
        for file, text in WAITS.items():
            if frame.file.endswith(file) and not frame.function.startswith("_" if "{}" in text else "\0"):
                return text.format(frame.function)
    return ""


def is_idle(worker: ThreadStack) -> bool:
    """Whether a worker process of a DataLoader waits for the indices of its next batch."""
    return any(frame.function == "get" and frame.file.endswith("multiprocessing/queues.py") for frame in worker.frames)


def group_stacks(answers: Iterable[RankStacks]) -> list[StackGroup]:
    """Return the groups of equal answers, those with the fewest ranks first: they are where a run hangs.

    Ranks are at the same place if their main threads are in the same functions and at the same lines of the user's
    code, and if they wait for worker processes that are; the lines of libraries differ between ranks that wait in the
    same collective.
    """
    groups: dict[object, list[RankStacks]] = {}
    for answer in sorted(answers, key=lambda answer: answer.rank):
        frames = answer.threads[0].frames if answer.threads else []
        busy = frozenset(_position(worker.frames) for worker in answer.workers if not is_idle(worker))
        key = answer.problem, _position(frames), busy
        groups.setdefault(key, []).append(answer)
    return sorted(map(_group, groups.values()), key=lambda group: (len(group.ranks), group.ranks))


def _position(frames: Iterable[CodeFrame]) -> tuple[tuple[str, str, int], ...]:
    return tuple((each.file, each.function, each.line if each.user else 0) for each in frames)


def _group(answers: Sequence[RankStacks]) -> StackGroup:
    """Return the group of equal answers, which are in the order of their ranks."""
    first = answers[0]
    by_last: dict[object, tuple[list[int], list[Collective]]] = {}
    for answer in answers:
        last = answer.collectives
        if last:
            key = tuple((each.name, each.number, each.state, each.group) for each in last)
            by_last.setdefault(key, ([], last))[0].append(answer.rank)
    with_native = next((answer for answer in answers if answer.native), first)
    return StackGroup(
        ranks=[answer.rank for answer in answers],
        threads=first.threads,
        problem=first.problem,
        hosts=list(dict.fromkeys(answer.host for answer in answers if answer.host)),
        collectives=sorted(by_last.values(), key=lambda each: (each[1][-1].number, each[0])),
        native=with_native.native,
        native_problem=with_native.native_problem,
        pid=first.pid,
        workers=first.workers,
    )


LineKind = Literal["place", "user", "call", "note"]
"""Kind of a line: ranks and where they are; a call of the user's code; another call; what is said of the group."""


def group_lines(
    groups: Sequence[StackGroup], *, threads: bool, key: str = "--threads"
) -> Iterator[list[tuple[str, LineKind]]]:
    """Yield each group as lines: ranks and where they are, the calls, the innermost first, the last collectives.

    Args:
        groups: all groups of an answer; their hosts are named if there are several.
        threads: whether the threads beside the main one are shown.
        key: what shows them otherwise.
    """
    most_hosts, most_sets = 4, 4  # named in a line; lines of collectives
    several = len({host for group in groups for host in group.hosts}) > 1
    for group in groups:
        hosts = ", ".join(group.hosts) if len(group.hosts) <= most_hosts else f"{len(group.hosts)} hosts"
        on = f" on {hosts}" if several and hosts else ""
        place = "; ".join(text for text in (group.line, group.problem) if text)
        lines: list[tuple[str, LineKind]] = [(f"{ranks_text(group.ranks)}{on}: {place}", "place")]
        shown = group.native or group.threads
        for number, thread in enumerate(shown):
            if number and not threads:
                count = len(shown) - 1
                lines.append((f"  {count} other thread{'s' if count > 1 else ''}: {key} shows them", "note"))
                break
            if number:
                lines.append((f"  {thread.name}", "note"))
            lines += _call_lines(thread)
        for worker in group.workers:
            if not is_idle(worker):
                lines += [(f"  {worker.name}", "note"), *_call_lines(worker)]
        if idle := sum(map(is_idle, group.workers)):
            processes = "worker processes wait" if idle > 1 else "worker process waits"
            lines.append((f"  {idle} {processes} for the next batch's indices", "note"))
        if shown and not group.workers and waits_for_worker(shown[0].frames):
            lines.append((f"  {UNSEEN_WORKERS.format(pid=group.pid or 'PID')}", "note"))
        if group.native_problem:
            lines.append((f"  no native frames: {group.native_problem}", "note"))
        for ranks, last in group.collectives[:most_sets]:
            of = f" of {ranks_text(ranks)}" if len(group.collectives) > 1 else ""
            lines.append((f"  last collectives{of}: {'; '.join(map(collective_text, last))}", "note"))
        if len(group.collectives) > most_sets:
            lines.append((f"  {len(group.collectives) - most_sets} other sets of last collectives: --json", "note"))
        yield lines


def _call_lines(thread: ThreadStack) -> list[tuple[str, LineKind]]:
    return [
        (f"  {'>' if frame.user else ' '} {frame_text(frame)}", "user" if frame.user else "call")
        for frame in thread.frames
    ]


def collective_text(collective: Collective) -> str:
    """Return a collective in words, such as ``all_reduce 3 of [4, 1000] (scheduled)``."""
    state = "" if collective.state == "complete" else f" ({collective.state})"
    group = "" if collective.group in ("", "default_pg") else f" in {collective.group}"
    return f"{collective.text}{group}{state}"
