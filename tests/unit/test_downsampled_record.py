from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from trainer.contract.record import EventWriter, NodeSample, RankState, RunDir, Step
from trainer.contract.record.downsampled import LEVELS, DownsampledBlock, DownsampledNote, block_file, note_file


def step(number: int, *, steps: int = 1, loss: float = 1.0, exposed: float | None = None) -> Step:
    return Step(
        time=100.0 + number, rank=3, step=number, epoch=1, steps=steps, samples=4 * steps, loss=loss,
        sync_exposed_ms=exposed,
    )  # fmt: skip


def blocks(run: RunDir, level: int) -> list[DownsampledBlock]:
    return msgspec.json.Decoder(DownsampledBlock).decode_lines(block_file(run.digest, "3", level).read_bytes())


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.events.mkdir(parents=True)
    return run


def test_blocks_stand_for_every_byte_of_the_events(run: RunDir) -> None:
    writer = EventWriter(run.rank_events(3), rank=3)
    for number in range(1, 601):
        writer.write(step(number))
    writer.close()
    data = run.rank_events(3).read_bytes()
    for level in LEVELS[:3]:
        found = blocks(run, level)
        assert [block.step for block in found] == [*range(level, 601, level), *([600] if 600 % level else [])]
        assert sum(block.steps for block in found) == 600
        assert found[0].begin == 0
        assert [block.begin for block in found[1:]] == [block.end for block in found[:-1]]
        assert all(data[block.end - 1] == ord("\n") for block in found)
        assert found[-1].end == len(data)


def test_a_block_has_means_and_extremes_of_the_measurements(run: RunDir) -> None:
    writer = EventWriter(run.rank_events(3), rank=3)
    for number in range(1, 257):
        writer.write(step(number, loss=9.0 if number == 100 else 1.0, exposed=6.0 if number % 2 else None))
    writer.close()
    (block,) = blocks(run, 256)
    assert block.loss == pytest.approx(1 + 8 / 256)
    assert (block.loss_low, block.loss_high) == (1.0, 9.0)
    assert block.sync_exposed_ms == 6.0
    assert block.step_ms is None
    assert block.samples == 4 * 256


def test_the_extremes_of_a_block_are_those_of_single_steps(run: RunDir) -> None:
    writer = EventWriter(run.rank_events(3), rank=3)
    for number in range(4, 257, 4):
        each = [1.0, 1.0, 9.0 if number == 100 else 1.0, None]
        writer.write(
            structs.replace(step(number, steps=4), step_ms=1.5, losses=each, step_ms_each=[1.0, 1.0, 1.0, 3.0])
        )
    writer.close()
    (block,) = blocks(run, 64)
    assert (block.steps, block.loss_low, block.loss_high) == (256, 1.0, 9.0)
    assert (block.step_ms, block.step_ms_low, block.step_ms_high) == (1.5, 1.0, 3.0)
    assert block.losses is block.step_ms_each is None


def test_a_loss_that_is_no_number_does_not_spoil_the_mean(run: RunDir) -> None:
    writer = EventWriter(run.rank_events(3), rank=3)
    for number in range(1, 17):
        writer.write(step(number, loss=float("nan") if number == 5 else 2.0))
    writer.close()
    assert blocks(run, 16)[0].loss == 2.0


def test_steps_that_are_merged_make_wider_blocks(run: RunDir) -> None:
    writer = EventWriter(run.rank_events(3), rank=3)
    for number in range(1, 65):
        writer.write(step(7 * number, steps=7))
    writer.close()
    assert sum(block.steps for block in blocks(run, 16)) == 448
    assert len(blocks(run, 16)) == 4, "sixteen times eight steps each, and the rest"


def test_events_other_than_steps_are_noted_but_for_samples_of_the_machine(run: RunDir) -> None:
    writer = EventWriter(run.rank_events(3), rank=3)
    state = RankState(time=1.0, rank=3, state="ready")
    writer.write(step(1))
    writer.write(state)
    writer.write(NodeSample(time=2.0, node=0, host="a"))
    writer.close()
    (note,) = msgspec.json.Decoder(DownsampledNote).decode_lines(note_file(run.digest, "3").read_bytes())
    assert note.event == state
    assert run.rank_events(3).read_bytes()[note.begin :].startswith(b'{"type":"rank_state"')


def test_a_restarted_rank_goes_on_where_the_file_ends(run: RunDir) -> None:
    for first in (1, 17):
        writer = EventWriter(run.rank_events(3), rank=3)
        for number in range(first, first + 20):
            writer.write(step(number))
        writer.close()
        with run.rank_events(3).open("ab") as file:
            file.write(b'{"torn')
    found = [block for block in blocks(run, 16) if block is not None]
    assert found[0].begin == 0
    assert found[2].begin > found[1].end, "the torn line belongs to no block"
    assert run.rank_events(3).read_bytes()[: found[2].begin].endswith(b'{"torn\n')


def test_a_digest_that_cannot_be_written_costs_no_event(run: RunDir) -> None:
    run.digest.write_text("in the way")
    writer = EventWriter(run.rank_events(3), rank=3)
    for number in range(1, 41):
        writer.write(step(number))
    writer.close()
    assert len(run.rank_events(3).read_bytes().splitlines()) == 40


def test_events_outside_a_run_directory_have_no_digest(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "0.ndjson", rank=0)
    writer.write(step(1))
    writer.close()
    assert [path.name for path in tmp_path.iterdir()] == ["0.ndjson"]


def test_a_file_with_several_writers_has_no_digest_that_would_count_bytes_wrong(run: RunDir) -> None:
    one, other = (EventWriter(run.node_events(0), shared=True) for _ in range(2))
    for number in range(1, 41):
        one.write(step(number))
        other.write(step(number))
    one.close()
    other.close()
    assert len(run.node_events(0).read_bytes().splitlines()) == 80
    assert not run.digest.exists()
