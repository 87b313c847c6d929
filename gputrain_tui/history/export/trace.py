"""Writes a timeline in the Trace Event Format, which Perfetto and chrome://tracing open.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: ``X`` is a slice with its start and
duration, ``i`` an instant, ``M`` gives a process or a thread its name; times are microseconds. Perfetto drops a slice
that ends later than the one around it, if only by a nanosecond (github.com/google/perfetto issue 4280), and cuts
fractions off when it counts in nanoseconds: so times here are whole microseconds. Slices that begin at once are
written from the outermost inwards, and names have the time 0, before all else: Perfetto gives a name to the newest
thread of a number.

A rank is a process. The record has the durations of a step's phases but not their start times: they are drawn in the
order in which a step has them, with the measured durations. The buckets of a step are drawn from the start of its
synchronisation to its end, at even distances, each with its duration. Of single collectives the record has the start
times; those of a group that overlap are on several tracks. Texts of events are hidden as in an archive.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from gputrain_tui.history.export.archive import event_filter
from gputrain_tui.history.export.steps import RecordedSteps, SingleStep
from gputrain_tui.state.share_changes import shares_text
from trainer.contract.record import (
    SINGLE_VALUES,
    AnyEvent,
    Checkpoint,
    Failure,
    Finding,
    Lost,
    ShareChange,
    Step,
    Validation,
)

PHASES = {
    "data_ms": "data", "h2d_ms": "copy to device", "forward_ms": "forward", "backward_ms": "backward",
    "sync_exposed_ms": "wait for gradients", "optimizer_ms": "optimizer",
}  # fmt: skip
"""Fields of a step that are drawn within it, in the order of a step, and their names."""
WAIT_IN_GROUPS = "wait for other ranks"
"""Name of ``sync_exposed_ms`` in steps with collectives besides those of DDP's buckets, which are in all phases."""
STEP_ARGUMENTS = ("epoch", "loss", "lr", "samples", "tokens", "grad_norm", "gc_ms", "core_wait_ms", "sync_bytes")
STEPS_THREAD, SYNC_THREAD, FIRST_BUCKET_THREAD = 1, 2, 3
"""Numbers of a rank's tracks; each bucket has one."""
FIRST_CALL_THREAD = 1 << 20
"""Number of the first track of single collectives."""
INSTANTS = (Finding, Failure, Validation, Checkpoint, ShareChange, Lost)

Json = dict[str, Any]
_encode = msgspec.json.Encoder().encode


def write_trace(record: RecordedSteps, file: BinaryIO) -> None:
    """Write the timeline of the wanted ranks, and the events of the run and its nodes."""
    run, began, ranks = record.run, record.began, set(record.ranks)
    metadata = {"run": run.id, "recipe": run.status.recipe, "began_unix_seconds": began}
    file.write(b'{"displayTimeUnit":"ms","otherData":' + _encode(metadata) + b',"traceEvents":[\n')
    separator = b""
    for event in _events(record, began, run_process=run.status.recorded_ranks, ranks=ranks):
        file.write(separator + _encode(event))
        separator = b",\n"
    file.write(b"\n]}\n")


def _events(record: RecordedSteps, began: float, *, run_process: int, ranks: set[int]) -> Iterator[Json]:
    yield from _process(run_process, f"run {record.run.id}", -1)
    shown = event_filter(record.run, environment=os.environ, project=Path.cwd())
    names = [name for name in record.names() if not name.isdecimal() or int(name) in ranks or name == "0"]
    for event in record.notes(names):
        if isinstance(event, INSTANTS):
            rank = getattr(event, "rank", None)
            if rank is None or rank in ranks:
                yield _instant(shown.event(event), began, process=run_process if rank is None else rank)
    for rank in record.ranks:
        yield from _process(rank, f"rank {rank}", rank)
        timeline = _RankTimeline(rank, began)
        for single in record.of(rank):
            yield from timeline.step(single)
        yield from timeline.names()


def _process(number: int, name: str, order: int) -> Iterator[Json]:
    yield {"name": "process_name", "ph": "M", "ts": 0, "pid": number, "tid": 0, "args": {"name": name}}
    yield {"name": "process_sort_index", "ph": "M", "ts": 0, "pid": number, "tid": 0, "args": {"sort_index": order}}


def _instant(event: AnyEvent, began: float, *, process: int) -> Json:
    fields = {key: value for key, value in msgspec.to_builtins(event).items() if key not in ("time", "type", "rank")}
    return {
        "name": _name(event),
        "cat": str(event.__struct_config__.tag),
        "ph": "i",
        "ts": max(0, _micros(event.time - began)),
        "s": "g" if getattr(event, "rank", None) is None else "p",
        "pid": process,
        "tid": 0,
        "args": fields,
    }


def _name(event: AnyEvent) -> str:
    match event:
        case Finding():
            return f"{event.kind} cleared" if event.state == "cleared" else event.kind
        case Failure():
            return f"failed: {event.kind}"
        case Validation():
            return f"{event.split} loss {event.loss:.4g}"
        case Checkpoint():
            return f"saved step {event.step}"
        case ShareChange():
            return f"shares {shares_text(event.shares)}"
        case _:
            return "events lost"


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)


class _RankTimeline:
    """The slices of one rank; those of a thread are consecutive or nested, as the format demands."""

    def __init__(self, rank: int, began: float) -> None:
        self._rank = rank
        self._began = began
        self._ends: dict[int, int] = {}
        """End of the last slice of each thread, in microseconds."""
        self._call_threads: dict[str, list[int]] = {}
        """Threads of each process group's collectives."""

    def names(self) -> Iterator[Json]:
        for thread in sorted(self._ends):
            own = {STEPS_THREAD: "steps", SYNC_THREAD: "gradient synchronisation"}
            own |= {of: f"collectives of {group}" for group, each in self._call_threads.items() for of in each}
            name = own.get(thread, f"bucket {thread - FIRST_BUCKET_THREAD}")
            for kind, value in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": thread})):
                yield {"name": kind, "ph": "M", "ts": 0, "pid": self._rank, "tid": thread, "args": value}

    def step(self, single: SingleStep) -> Iterator[Json]:
        step = single.step
        phases_ms = {name: value for name in PHASES if (value := getattr(step, name)) is not None and value > 0}
        length_ms = step.step_ms if step.step_ms is not None else sum(phases_ms.values())
        end = _micros(step.time - self._began)
        start = max(end - round(length_ms * 1e3), self._ends.get(STEPS_THREAD, 0))
        end = max(end, start + 1)  # the clock of day may have been set back
        arguments = {name: value for name in STEP_ARGUMENTS if (value := getattr(step, name)) is not None}
        arguments |= {"attempt": single.attempt} if single.attempt > 1 else {}
        if single.averaged_over > 1:
            arguments["averaged_over"] = single.averaged_over
        yield self._slice(STEPS_THREAD, f"step {step.step}", "step", start, end, arguments)
        at, sync_end = float(start), float(end)
        for name, width in self._widths(phases_ms, end - start).items():
            measured: Json = {name: phases_ms[name]}
            if single.averaged_over > 1 and name not in SINGLE_VALUES:
                measured["averaged_over"] = single.averaged_over
            until = min(at + width, end)
            shown = WAIT_IN_GROUPS if name == "sync_exposed_ms" and step.groups else PHASES[name]
            yield self._slice(STEPS_THREAD, shown, "phase", at, until, measured)
            at = until
            if name == "sync_exposed_ms":
                sync_end = until
        yield from self._synchronisation(step, sync_end)
        yield from self._collectives(step, start, end)

    @staticmethod
    def _widths(phases_ms: dict[str, float], available: float) -> dict[str, float]:
        """Return the width of each phase in microseconds; means are narrowed where a step is shorter than their sum."""
        own = min(phases_ms.get("sync_exposed_ms", 0.0) * 1e3, available)
        others = sum(value for name, value in phases_ms.items() if name != "sync_exposed_ms") * 1e3
        narrowed = min(1.0, (available - own) / others) if others else 1.0
        return {name: own if name == "sync_exposed_ms" else value * 1e3 * narrowed for name, value in phases_ms.items()}

    def _synchronisation(self, step: Step, end: float) -> Iterator[Json]:
        buckets = [value * 1e3 for value in step.bucket_ms or ()]
        whole = 0.0 if step.groups else (step.sync_ms or 0.0) * 1e3  # with groups it is that of all collectives
        length = max([*buckets, whole])
        if length <= 0:
            return
        start = max(end - length, self._ends.get(SYNC_THREAD, 0))
        if start >= end:
            return
        known = {"sync_ms": step.sync_ms, "sync_bytes": step.sync_bytes, "sync_buckets": step.sync_buckets}
        arguments = {name: value for name, value in known.items() if value is not None}
        yield self._slice(SYNC_THREAD, "all-reduce", "sync", start, end, arguments)
        last = end - buckets[-1] if buckets else start  # start of the last bucket
        for index, width in enumerate(buckets):
            thread = FIRST_BUCKET_THREAD + index
            share = index / (len(buckets) - 1) if len(buckets) > 1 else 1.0
            begin = max(start + (last - start) * share, self._ends.get(thread, 0))
            until = min(begin + width, end)
            if until > begin:
                measured = {"bucket_ms": round(width / 1e3, 4)}
                yield self._slice(thread, f"bucket {index}", "bucket", begin, until, measured)

    def _collectives(self, step: Step, start: int, end: int) -> Iterator[Json]:
        for call in step.calls or ():
            begin = start + round(call.start_ms * 1e3)
            until = min(begin + max(round(call.total_ms * 1e3), 1), end)
            if until <= begin:
                continue
            threads = self._call_threads.setdefault(call.group, [])
            thread = next((each for each in threads if self._ends[each] <= begin), None)
            if thread is None:
                thread = FIRST_CALL_THREAD + sum(map(len, self._call_threads.values()))
                threads.append(thread)
            arguments = {"group": call.group, "bytes": call.bytes, "exposed_ms": call.exposed_ms}
            yield self._slice(thread, call.operation, "collective", begin, until, arguments)

    def _slice(self, thread: int, name: str, category: str, start: float, end: float, arguments: Json) -> Json:
        """Return a slice; a phase, which is within the last step, does not move its thread's end."""
        begin, until = round(start), round(end)
        if category != "phase":
            self._ends[thread] = until
        return {
            "name": name, "cat": category, "ph": "X", "ts": begin, "dur": until - begin, "pid": self._rank,
            "tid": thread, "args": arguments,
        }  # fmt: skip
