"""A run whose number of ranks changes between attempts, or grows while it goes on."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from synthetic import BEGIN, run as synthetic_run, write

from gputrain_tui.diagnosis import Diagnosis
from gputrain_tui.diagnosis.thresholds import HISTORY
from gputrain_tui.headless.closing_report import closing_table, status_line
from gputrain_tui.headless.foreground import JsonStream
from gputrain_tui.headless.progress import paint, plain_line
from gputrain_tui.history.comparison import CurveHistory
from gputrain_tui.history.export.extent import shortcomings
from gputrain_tui.history.export.live_scalars import LiveScalars
from gputrain_tui.history.export.steps import RecordedSteps
from gputrain_tui.history.export.table import write_csv
from gputrain_tui.history.known_ranks import KnownRanks
from gputrain_tui.history.run_folders import Run
from gputrain_tui.history.run_reader import RunReader
from gputrain_tui.history.series import Series
from gputrain_tui.history.status_file import write_status
from gputrain_tui.lifecycle.live_run import LiveRun
from gputrain_tui.state import RunState
from trainer.contract.outcome import RESTARTED
from trainer.contract.record import (
    AnyEvent,
    Checksum,
    Event,
    Failure,
    Finding,
    NodeSample,
    RankSample,
    RankState,
    RunEnded,
    RunStarted,
    Step,
    TrainingPlan,
    World,
)

OLD, NEW = 6, 9
"""Last step of the attempt with three ranks, and of the one with two, which repeats steps 5 and 6."""


def step(rank: int, number: int, at: float, **values: Any) -> Step:
    fields: dict[str, Any] = {"loss": 1.0, "step_ms": 100.0, "sync_exposed_ms": 5.0} | values
    return Step(time=BEGIN + at, rank=rank, step=number, epoch=1, steps=1, samples=8, **fields)


def spawned(rank: int, at: float, pid: int) -> RankState:
    return RankState(time=BEGIN + at, rank=rank, state="joining", pid=pid, node=rank, host=f"h{rank + 1}")


CHANGE = World(time=BEGIN + 50, world_size=2, attempt=2)


def attempts() -> dict[str, list[Event]]:
    """Events by file: three ranks, of which the last one is lost, then two."""
    files: dict[str, list[Event]] = {}
    for rank in range(3):
        files[str(rank)] = [spawned(rank, 1, 10 + rank), *(step(rank, n, n) for n in range(1, OLD + 1 - (rank == 2)))]
    for rank in range(2):
        again = [RankState(time=BEGIN + 51, rank=rank, state="spawned", pid=20 + rank)]
        files[str(rank)] += [*again, spawned(rank, 52, 20 + rank), *(step(rank, n, 50 + n) for n in range(5, NEW + 1))]
    files["node-2"] = [NodeSample(time=BEGIN + 2, node=2, host="h3", ranks=[RankSample(rank=2, rss_bytes=9)])]
    files["run"] = [
        RunStarted(time=BEGIN, run="r", recipe="r", world_size=3, run_dir="r"),
        Finding(time=BEGIN + 20, kind="stalled", rank=2, message="rank 2 hangs"),
        CHANGE,
        RunEnded(time=BEGIN + 70, status="finished", exit_code=0),
    ]
    return files


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return such a run as it is after its end: plan and status have the last world."""
    found = synthetic_run(tmp_path, ranks_per_node=2, joined=0, steps=0, status="finished")
    for path in found.dir.events.iterdir():
        path.unlink()
    for name, events in attempts().items():
        write(found.dir.events / f"{name}.ndjson", *events)
    found.status.most_ranks = 3
    write_status(found.dir, found.status)
    return found


def in_time_order() -> list[AnyEvent]:
    return sorted((event for events in attempts().values() for event in events), key=lambda event: event.time)  # type: ignore[arg-type]


def test_ranks_that_are_gone_hold_no_figure_and_keep_their_totals() -> None:
    state = RunState(world_size=3, history=HISTORY)
    state.apply_all(in_time_order()[:-1])
    assert sorted(state.ranks) == [0, 1]
    assert (state.step, state.figures.step, state.world_size) == (NEW, NEW, 2)
    assert state.missing == []
    assert state.findings == {}, "the finding about the rank that is gone has ended"
    assert state.nodes == {}
    assert state.former[2].totals.samples == 8 * (OLD - 1)
    state.apply(RunEnded(time=BEGIN + 70, status="finished", exit_code=0))
    every = 8 * (2 * OLD + OLD - 1 + 2 * (NEW - 4))
    assert f"finished in 1:10, {NEW} steps, {every} samples" in paint(status_line(state), colour=False)
    assert len(closing_table(state, 100)) == 3, "a title and two ranks"


def test_the_failure_of_an_attempt_is_not_that_of_the_run_once_the_next_one_begins() -> None:
    state = RunState(world_size=3)
    state.apply_all([event for event in in_time_order() if event.time < BEGIN + 20])
    state.apply(Failure(time=BEGIN + 21, kind="node_lost", message="h3 with rank 2 lost", rank=2, host="h3"))
    assert state.root_cause is not None
    state.apply(Finding(time=BEGIN + 30, kind=RESTARTED, message="attempt 1 ended: h3 lost; attempt 2 begins"))
    assert state.root_cause is None
    state.apply(CHANGE)
    assert "failed" not in plain_line(state, now=BEGIN + 31)


def test_events_of_a_gone_rank_that_come_late_bring_it_not_back() -> None:
    state = RunState(world_size=3)
    late = [*attempts()["2"], *attempts()["node-2"], Checksum(time=BEGIN, rank=2, step=5, parameters="a", buffers="b")]
    state.apply_all([event for event in in_time_order() if event not in late])
    state.apply_all(late)  # type: ignore[arg-type]
    assert sorted(state.ranks) == [0, 1]
    assert (state.step, state.nodes) == (NEW, {})
    assert state.former[2].last is not None
    for rank in range(2):
        state.apply(Checksum(time=BEGIN + 60, rank=rank, step=5, parameters="a", buffers="b"))
    assert state.desync.equal is True


def test_a_record_read_as_a_whole_keeps_hosts_and_checksums_of_the_last_attempt() -> None:
    """A reader brings the world of an attempt after all that its ranks and nodes have recorded."""
    state = RunState(world_size=3)
    samples = [
        NodeSample(time=BEGIN + at, node=node, host=host, cores=2, ranks=[RankSample(rank=rank, rss_bytes=9)])
        for at, node, host, rank in [
            (2, 0, "h1", 0),
            (3, 1, "h2", 1),
            (3, 2, "h3", 2),
            (60, 0, "h1", 0),
            (61, 1, "h3", 1),
        ]
    ]
    checksums = [
        Checksum(time=BEGIN + at, rank=rank, step=number, parameters=str(at), buffers="b")
        for at, rank, number in [(4, 0, 6), (4, 1, 6), (60, 0, 8), (60, 1, 8), (62, 0, 9), (62, 1, 9)]
    ]
    state.apply_all([*samples, *checksums])
    assert state.desync.equal is None, "of three ranks only two have answered"
    state.apply(CHANGE)
    assert {node: sample.host for node, sample in state.nodes.items()} == {0: "h1", 1: "h3"}
    assert state.desync.equal is True
    state.apply(Checksum(time=BEGIN + 63, rank=0, step=10, parameters="a", buffers="b"))
    state.apply(Checksum(time=BEGIN + 63, rank=1, step=10, parameters="c", buffers="b"))
    assert state.desync.equal is False


def test_a_rank_that_is_gone_is_neither_stalled_nor_does_it_keep_the_diagnosis_from_its_rows() -> None:
    state, diagnosis = RunState(world_size=3, history=HISTORY), Diagnosis()
    for event in in_time_order()[:-1]:
        state.apply(event)
        diagnosis.update(state, event.time)
    found = diagnosis.update(state, BEGIN + 60.5)
    assert not [finding for finding in found if finding.rank == 2]
    assert "stalled" not in {kind for kind, _ in state.findings}


def test_a_world_that_grows_has_the_new_ranks_before_their_first_step() -> None:
    state = RunState(world_size=1)
    state.apply_all([RunStarted(time=BEGIN, run="r", recipe="r", world_size=1, run_dir="r"), step(0, 1, 1)])
    state.apply(World(time=BEGIN + 2, world_size=3))
    assert (sorted(state.ranks), state.world_size, state.missing) == ([0, 1, 2], 3, [1, 2])
    state.apply(World(time=BEGIN + 3, world_size=2))
    state.apply(World(time=BEGIN + 4, world_size=3))
    assert (sorted(state.ranks), state.former) == ([0, 1, 2], {})


def test_the_steps_that_are_left_are_those_of_the_last_world() -> None:
    state = RunState(world_size=3)
    plan = TrainingPlan(time=BEGIN, world_size=3, updates_per_epoch=100, samples_per_epoch=2400, max_epochs=2)
    state.apply(plan)
    assert state.updates_total == 200
    state.apply(replace(plan, world_size=2, updates_per_epoch=150, first_update=50, last_update=275))
    assert state.updates_total == 275


@pytest.mark.parametrize("budget", [1, 8 << 20], ids=["in portions", "at once"])
def test_a_reader_brings_the_record_of_gone_ranks_before_the_world_without_them(run: Run, budget: int) -> None:
    write(run.dir.rank_events(2), *(step(2, n, 20 + n / 1e3) for n in range(7, 40)))
    reader = RunReader(run.dir)
    events = reader.poll(budget)
    while reader.backlog_bytes:
        events += reader.poll(budget)
    events += reader.poll(budget)
    reader.close()
    assert len(events) == sum(map(len, attempts().values())) + 33
    assert [event for event in events if isinstance(event, World | RunEnded)] == events[-2:]
    if budget == 1:
        assert events.index(CHANGE) > max(n for n, e in enumerate(events) if isinstance(e, Step) and e.rank == 2)


def test_the_events_as_json_keep_that_order(run: Run) -> None:
    lines: list[bytes] = []

    class Stream:
        has_room = True

        def write_bytes(self, data: bytes) -> None:
            lines.extend(data.splitlines())

    reader = JsonStream(run, Stream())  # type: ignore[arg-type]
    while reader.poll():
        pass
    reader.close()
    assert [json.loads(line)["type"] for line in lines[-2:]] == ["world", "run_ended"]


def test_files_of_ranks_above_the_plan_are_read_once_an_event_has_them(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path, ranks_per_node=1, joined=0, steps=0)
    write(run.dir.rank_events(2), step(2, 1, 1))
    reader = RunReader(run.dir)
    assert not [event for event in reader.poll() if isinstance(event, Step)]
    write(run.dir.rank_events(0), World(time=BEGIN + 1, world_size=3))
    events = reader.poll() + reader.poll()
    assert [event for event in events if isinstance(event, Step)] == [step(2, 1, 1)]
    reader.close()


def test_ranks_of_attempts_before_are_known_by_the_status(run: Run) -> None:
    known = KnownRanks(run.dir)
    assert known.count == 3
    assert ["2" in known, "3" in known, "node-7" in known, "run" in known] == [True, False, True, True]


def test_the_console_shows_the_last_world_and_the_curves_of_both(run: Run) -> None:
    live = LiveRun(run)
    while live.poll():
        pass
    assert (sorted(live.state.ranks), live.state.step, live.series.world_size) == ([0, 1], NEW, 2)
    assert (live.series.first_step, live.series.last_step) == (1, NEW)
    frames = {frame.last_step: len(frame.values[0] or ()) for frame in live.series.frames(1, NEW, 100)}
    assert [frames[n] for n in range(1, 5)] == [3] * 4, "before the checkpoint"
    assert [frames[n] for n in range(5, NEW + 1)] == [2] * 5
    live.close()


def test_curves_wait_no_longer_for_ranks_that_are_gone() -> None:
    series = Series(3)
    for number in range(1, 4):
        for rank in range(2):
            series.apply(step(rank, number, number))
    assert series.version == 0
    series.change_world(2)
    assert series.last_step == 3
    series.apply(step(2, 1, 9))
    assert (series.world_size, series.last_step) == (2, 3)


def test_a_comparison_is_of_the_ranks_that_are_left() -> None:
    history = CurveHistory(3)
    for event in in_time_order():
        history.apply(event)
    assert (history.last_step, history.loss) == (NEW, 1.0)
    assert history.rates.samples_per_s == pytest.approx(2 * 80)


def test_a_sink_gets_the_steps_of_each_attempt_when_all_its_ranks_have_made_them(run: Run) -> None:
    rows: list[tuple[int, int, int]] = []

    class Sink:
        def rank(self, rank: int, single: object) -> None: ...
        def validation(self, event: object) -> None: ...
        def commit(self) -> None: ...
        def finish(self) -> None: ...
        def over_ranks(self, row: list[Any]) -> None:
            rows.append((row[0].attempt, row[0].step.step, len(row)))

    scalars = LiveScalars(run.dir, 2, Sink())
    while scalars.poll():
        pass
    scalars.close()
    assert rows == [(1, n, 3) for n in range(1, OLD)] + [(1, OLD, 2)] + [(2, n, 2) for n in range(5, NEW + 1)]


def test_an_export_has_the_ranks_of_all_attempts_and_names_no_gap(run: Run) -> None:
    record = RecordedSteps(run, range(run.status.recorded_ranks))
    rows = [(row[0].attempt, row[0].step.step, len(row)) for row in record.over_ranks()]
    assert rows == [(1, n, 3) for n in range(1, OLD)] + [(1, OLD, 2)] + [(2, n, 2) for n in range(5, NEW + 1)]
    assert shortcomings(run, list(record.extents.values())) == []


def test_a_csv_names_the_host_of_each_attempt(run: Run) -> None:
    write(run.dir.rank_events(1), replace(spawned(1, 80, 30), host="h3"), step(1, 7, 81))
    written = io.BytesIO()
    write_csv(RecordedSteps(run, range(run.status.recorded_ranks)), written)
    rows = list(csv.DictReader(io.StringIO(written.getvalue().decode())))
    hosts = {(row["rank"], row["attempt"]): row["host"] for row in rows}
    assert hosts == {("0", "1"): "h1", ("0", "2"): "h1", ("1", "1"): "h2", ("1", "2"): "h2", ("1", "3"): "h3",
                     ("2", "1"): "h3"}  # fmt: skip


def test_a_world_event_is_read_back_as_written() -> None:
    assert msgspec.json.decode(msgspec.json.encode(CHANGE), type=World) == CHANGE
