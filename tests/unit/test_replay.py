from __future__ import annotations

import random
from pathlib import Path

import pytest
import synthetic

from gputrain_tui.history import replay as pasts
from gputrain_tui.history.replay import replay
from gputrain_tui.history.run_folders import Run
from gputrain_tui.history.series import Series
from gputrain_tui.lifecycle.live_run import LiveRun
from trainer.contract.record import EventWriter, Failure, NodeSample, RankSample, RankState, RunDir, Step, Validation
from trainer.contract.record.downsampled import block_file

RANKS = 3
STEPS = 1500


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """These records are long ones."""
    monkeypatch.setattr(pasts, "READ_WHOLE_BYTES", 0)
    monkeypatch.setattr(pasts, "MAX_BYTES_PER_BLOCK_EVENT", 148_000)
    monkeypatch.setattr(pasts, "TAIL_BYTES", 0)


def events(rank: int, first: int = 1, last: int = STEPS) -> list[Step]:
    """A falling loss with one spike."""
    noise = random.Random(rank)
    found = [synthetic.step_of(rank, number, noise) for number in range(1, last + 1)][first - 1 :]
    for event in found:
        if event.step == 700 and rank == 1:
            event.loss = 50.0
    return found


ALL = [events(rank) for rank in range(RANKS)]


def write(run: RunDir, rank: int, steps: list[Step]) -> None:
    writer = EventWriter(run.rank_events(rank), rank=rank)
    for event in steps:
        writer.write(event)
        if rank == 0 and event.step % 500 == 0:
            writer.write(Validation(time=event.time, step=event.step, epoch=1, split="valid", loss=2.0))
    writer.close()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = synthetic.run(tmp_path, ranks_per_node=RANKS, steps=0)
    for rank in range(RANKS):
        write(made.dir, rank, events(rank))
    return made


def replayed(run: Run) -> LiveRun:
    live = LiveRun(run, now=lambda: synthetic.BEGIN)
    while live.poll(60):
        pass
    return live


def test_a_long_past_is_drawn_as_if_every_event_had_been_read(run: Run) -> None:
    found = replay(run.dir)
    assert found is not None
    assert len(found.events) < 300
    short = replayed(run)
    whole = Series(RANKS)
    for number in range(STEPS):
        for rank in range(RANKS):
            whole.apply(ALL[rank][number])
    assert short.state.step == STEPS
    assert short.series.last_step == STEPS
    one, other = short.series.window("loss", 60), whole.window("loss", 60)
    assert max(one.high) == 50.0, "the spike of one rank at one step is there"
    spike = 699 * 60 // STEPS  # its part of the mean is in one column, or in those that its block covers
    middles = [line.middle[: spike - 1] + line.middle[spike + 2 :] for line in (one, other)]
    for mine, exact in ((one.high, other.high), middles, (one.low, other.low)):
        assert beside(mine, exact), "off by no more than a column"
        assert beside(exact, mine)


def beside(line: list[float], other: list[float]) -> bool:
    """Return whether every value lies between those of the other line at that column and its neighbours."""
    near = [other[max(index - 1, 0) : index + 2] for index in range(len(line))]
    return all(min(values) - 0.15 <= value <= max(values) + 0.15 for value, values in zip(line, near, strict=True))


def test_lines_printed_before_the_newest_samples_get_no_time(run: Run) -> None:
    writer = EventWriter(run.dir.node_events(0))
    for second in range(1000):
        ranks = [RankSample(rank=0, log_bytes=10 * (second + 1))]
        writer.write(NodeSample(time=synthetic.BEGIN + second, node=0, host="here", ranks=ranks))
    writer.write(Failure(time=synthetic.BEGIN + 1000, kind="exit", message="an event of which a note is kept"))
    writer.close()
    times = replayed(run).log_times["0"]
    for second in range(1000):
        assert times.at(10 * (second + 1)) in (None, synthetic.BEGIN + second)
    assert times.at(10) is None
    assert times.at(10 * 1000) == synthetic.BEGIN + 999


def test_state_and_totals_are_exact(run: Run) -> None:
    live = replayed(run)
    for rank in range(RANKS):
        view = live.state.ranks[rank]
        assert view.last == ALL[rank][-1]
        assert view.totals.steps == STEPS
        assert view.totals.samples == 16 * STEPS
        assert view.totals.loss == pytest.approx(sum(event.loss or 0 for event in ALL[rank]))
        recent = ALL[rank][-50:]
        assert view.recent.steps == 50
        assert view.recent.loss == pytest.approx(sum(event.loss or 0 for event in recent), rel=1e-6)
    assert [evaluation.step for evaluation in live.state.validations] == [500, 1000, 1500]


def test_events_that_a_killed_writer_left_out_of_the_digest_are_read(run: Run) -> None:
    for rank in range(RANKS):
        with run.dir.rank_events(rank).open("ab") as file:  # as of a writer that was killed
            file.write(b"".join(map(synthetic.encode_event, events(rank, STEPS + 1, STEPS + 40))))
            file.write(synthetic.encode_event(RankState(time=synthetic.BEGIN, rank=rank, state="spawned")))
        write(run.dir, rank, events(rank, STEPS + 41, STEPS + 600))
    live = replayed(run)
    assert live.series.last_step == STEPS + 600
    assert all(view.totals.steps == STEPS + 600 for view in live.state.ranks.values())


def test_steps_after_a_restart_replace_the_repeated_ones(run: Run) -> None:
    for rank in range(RANKS):
        again = events(rank, 1001, 2400)
        for event in again:
            event.time += 1000
            event.loss = 1.0
        write(run.dir, rank, again)
    live = replayed(run)
    assert live.series.last_step == 2400
    window = live.series.window("loss", 24)
    assert max(window.high[12:]) == 1.0
    assert max(window.high) == 50.0


@pytest.mark.parametrize("shift_s", [-3600.0, 3600.0], ids=["set back", "set forward"])
def test_the_events_of_a_file_keep_their_order_where_its_clock_was_set(run: Run, shift_s: float) -> None:
    for rank in range(RANKS):
        for folder in (run.dir.events, run.dir.digest):
            for path in folder.glob(f"{rank}.*ndjson"):
                path.unlink()
        shifted = events(rank)
        for event in shifted[800:]:
            event.time += shift_s
        write(run.dir, rank, shifted)
    found = replay(run.dir)
    assert found is not None
    for rank in range(RANKS):
        steps = [event.step for event in found.events if isinstance(event, Step) and event.rank == rank]
        assert steps == sorted(steps)
    live = replayed(run)
    assert [evaluation.step for evaluation in live.state.validations] == [500, 1000, 1500]
    assert live.state.step == STEPS
    assert all(view.last is not None and view.last.step == STEPS for view in live.state.ranks.values())


def test_damaged_digests_are_passed_over(run: Run) -> None:
    for path in run.dir.digest.iterdir():
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2] + b"\n\xff{not json\n" + data[len(data) // 2 :])
    live = replayed(run)
    assert live.state.step == STEPS
    assert all(view.totals.steps == STEPS for view in live.state.ranks.values())


def test_blocks_that_do_not_fit_the_events_are_not_trusted(run: Run) -> None:
    for level in (16, 64, 256):
        block_file(run.dir.digest, "1", level).unlink()
    assert replay(run.dir) is None
    for level in (16, 64, 256):
        block_file(run.dir.digest, "1", level).write_bytes(block_file(run.dir.digest, "0", level).read_bytes())
    assert replayed(run).state.step == STEPS


def test_a_short_record_is_read_whole(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pasts, "READ_WHOLE_BYTES", 1 << 30)
    assert replay(run.dir) is None
