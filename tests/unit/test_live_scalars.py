"""The streams of a live sink: every step once, and rows of all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from long_record import single
from made_runs import append_events

from gputrain_tui.history.export.live_scalars import LiveScalars
from gputrain_tui.history.export.steps import SingleStep
from gputrain_tui.history.export.tensorboard_folder import over_ranks, rank_scalars
from trainer.contract.record import GroupSync, RankState, RunDir, RunEnded, Validation, encode_event
from trainer.telemetry.step_events import merge


class MemorySink:
    """A sink that keeps what is committed."""

    def __init__(self) -> None:
        self.values: list[tuple[Any, ...]] = []
        self.pending: list[tuple[Any, ...]] = []

    def rank(self, rank: int, single: SingleStep) -> None:
        self.pending.append((f"rank_{rank}", single.step.step, single.attempt))

    def over_ranks(self, row: list[SingleStep]) -> None:
        self.pending.append(("over", row[0].step.step, [each.step.rank for each in row], row[0].attempt))

    def validation(self, event: Validation) -> None:
        self.pending.append(("valid", event.step))

    def commit(self) -> None:
        self.values += self.pending
        self.pending.clear()

    def finish(self) -> None: ...

    def of(self, stream: str) -> list[tuple[Any, ...]]:
        return [value[1:] for value in self.values if value[0] == stream]


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path)
    found.events.mkdir()
    return found


def steps(first: int, last: int, rank: int) -> list[Any]:
    return [single(rank, number) for number in range(first, last + 1)]


def test_every_step_comes_once(run_dir: RunDir) -> None:
    sink = MemorySink()
    scalars = LiveScalars(run_dir, 2, sink)

    def follow() -> None:
        while scalars.poll():
            sink.commit()

    append_events(run_dir, 0, *steps(1, 3, 0))
    follow()
    append_events(run_dir, 1, *steps(1, 2, 1))
    append_events(run_dir, 0, Validation(time=5.0, step=3, epoch=1, split="valid", loss=1.0))
    follow()
    append_events(run_dir, 1, *steps(3, 3, 1), merge(steps(4, 9, 1)))
    append_events(run_dir, 0, merge(steps(4, 9, 0)))
    follow()
    for rank in range(2):
        append_events(run_dir, rank, RankState(time=9.0, rank=rank, state="joining"), *steps(8, 10, rank))
    append_events(run_dir, 0, *steps(11, 11, 0))
    run_dir.run_events.write_bytes(encode_event(RunEnded(time=10.0, status="finished", exit_code=0)))
    follow()
    assert scalars.ended
    scalars.finish()
    sink.commit()
    scalars.close()
    first = [(number, 1) for number in range(1, 10)]
    again = [(8, 2), (9, 2), (10, 2)]
    assert sink.of("rank_0") == [*first, *again, (11, 2)]
    assert sink.of("rank_1") == [*first, *again]
    assert sink.of("over") == [(n, [0, 1], attempt) for n, attempt in [*first, *again]] + [(11, [0], 2)]
    assert sink.of("valid") == [(3,)]


def test_a_step_that_a_rank_has_passed_over_is_written_without_it(run_dir: RunDir) -> None:
    sink = MemorySink()
    append_events(run_dir, 0, *steps(1, 3, 0))
    append_events(run_dir, 1, *steps(1, 1, 1), *steps(3, 3, 1))
    scalars = LiveScalars(run_dir, 2, sink)
    scalars.poll()
    sink.commit()
    scalars.close()
    assert sink.of("over") == [(1, [0, 1], 1), (2, [0], 1), (3, [0, 1], 1)]
    assert not scalars.ended


def test_collectives_have_a_tag_for_each_process_group() -> None:
    rows = []
    for rank, wait_ms in enumerate((2.0, 4.0)):
        step = single(rank, 1)
        step.groups = [GroupSync(group="tp", calls=3.0, exposed_ms=wait_ms), GroupSync(group="dp", calls=1.0)]
        rows.append(SingleStep(1, 1, True, step))
    assert rank_scalars(rows[1])["sync/tp_ms"] == 4.0
    assert not {tag for tag in rank_scalars(rows[0]) if "groups" in tag or "calls" in tag or "dp" in tag}
    means, lows, highs = over_ranks(rows)
    assert (means["sync/tp_ms"], lows["sync/tp_ms"], highs["sync/tp_ms"]) == (3.0, 2.0, 4.0)
