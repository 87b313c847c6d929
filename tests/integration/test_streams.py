"""Training data that can only be iterated: every sample once, epochs that all ranks end together, exact resuming."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_on_ranks import train_on
from rank_group import Gang
from test_loop import TASK as TINY, train
from torch.utils.data import IterableDataset

from trainer.checkpoint import load
from trainer.contract.errors import RequestError, TrainingError
from trainer.data.stream_batches import StreamBatches, StreamEvalBatches
from trainer.distributed import all_gather_list, get_rank, get_world_size


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[Gang]:
    gang = Gang(3)
    yield gang
    gang.close()


class Count(IterableDataset[int]):
    """Numbers."""

    def __init__(self, stop: int, start: int = 0) -> None:
        self.samples = range(start, stop)

    def __iter__(self) -> Iterator[int]:
        return iter(self.samples)


class CountInParts(Count):
    """Each rank has so many of the numbers."""

    def __init__(self, parts: tuple[int, ...]) -> None:
        super().__init__(sum(parts))
        self.parts = parts

    def shard(self, count: int, index: int) -> Count:
        assert count == len(self.parts)
        return Count(sum(self.parts[: index + 1]), sum(self.parts[:index]))


def numbers(samples: int, parts: tuple[int, ...]) -> Count:
    return CountInParts(parts) if parts else Count(samples)


def batches(dataset: Any, sizes: list[int], **options: Any) -> StreamBatches:
    settings: dict[str, Any] = {"seed": 1, "collate": list, "warn": print, "exchange": all_gather_list} | options
    return StreamBatches(dataset, batch_sizes=sizes, rank=get_rank(), **settings)


Epoch = list[tuple[int, int, list[tuple[list[int], int]]]]


def read(source: StreamBatches, update_freq: int, updates: int = 10**6) -> Epoch:
    lines: Epoch = []
    for update in source.updates(update_freq):
        lines.append((update.micro_steps, update.global_samples, [(m.batch, m.samples) for m in update]))
        if len(lines) == updates:
            break
    return lines


def samples_of(ranks: list[Epoch]) -> list[int]:
    return sorted(
        sample for rank in ranks for *_, micros in rank for batch, samples in micros if samples for sample in batch
    )


def an_epoch(
    _rank: int, _world_size: int, dataset: Any, sizes: list[int], options: dict[str, Any], update_freq: int
) -> dict[str, Any]:
    source = batches(dataset, sizes, **options)
    first = read(source, update_freq)
    ended, state = source.updates_left(1), source.state_dict()
    source.next_epoch()
    return {"first": first, "ended": ended, "state": state, "second": read(source, update_freq)}


CASES = [
    (samples, parts, sizes)
    for samples, parts in [(30, ()), (31, ()), (7, ()), (2, ()), (31, (20, 1, 10)), (9, (1, 7, 1))]
    for sizes in ([2, 2, 2], [3, 1, 2])
]


@pytest.mark.parametrize(("workers", "update_freq"), [(0, 1), (0, 2), (2, 2)])
def test_every_sample_is_read_once_and_all_ranks_end_the_epoch_together(
    three_ranks: Gang, workers: int, update_freq: int
) -> None:
    for samples, parts, sizes in CASES if not workers else CASES[1::6]:
        ranks = three_ranks.run(an_epoch, numbers(samples, parts), sizes, {"num_workers": workers}, update_freq)
        firsts = [rank["first"] for rank in ranks]
        assert samples_of(firsts) == list(range(samples)), (samples, parts, sizes)
        shapes = {tuple(update[:2] for update in first) for first in firsts}
        assert len(shapes) == 1, "every rank makes the same micro-steps and knows what all of them read"
        assert sum(lines for _, lines in next(iter(shapes))) == samples
        assert all(rank["second"] == rank["first"] for rank in ranks)
        assert {(rank["ended"], rank["state"]["epoch"], rank["state"]["consumed"]) for rank in ranks} == {(0, 2, 0)}


def test_drop_last_leaves_out_the_samples_that_do_not_fill_the_batch_of_every_rank(three_ranks: Gang) -> None:
    ranks = three_ranks.run(an_epoch, Count(31), [3, 1, 2], {"drop_last": True}, 2)
    assert samples_of([rank["first"] for rank in ranks]) == list(range(30))
    assert [[update[:2] for update in rank["first"]] for rank in ranks] == [[(2, 12), (2, 12), (1, 6)]] * 3


class StatefulCount(Count):
    """Numbers that go on from a state; ``read`` has those that were read."""

    def __init__(self, stop: int) -> None:
        super().__init__(stop)
        self.place = 0
        self.read: list[int] = []

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]

    def __iter__(self) -> Iterator[int]:
        while self.place < len(self.samples):
            self.place += 1
            self.read.append(self.place - 1)
            yield self.place - 1
        self.place = 0


def continued(
    _rank: int, _world_size: int, sizes: list[int], workers: int, stop: int
) -> tuple[Epoch, Epoch, dict[str, Any], list[int]]:
    begun = batches(StatefulCount(31), sizes, num_workers=workers)
    before = read(begun, 2, stop)
    dataset = StatefulCount(31)
    resumed = batches(dataset, sizes, num_workers=workers)
    resumed.load_state_dict(begun.state_dict())
    rest = read(resumed, 2)
    resumed.next_epoch()
    return before + rest, read(resumed, 2), begun.state_dict(), dataset.read


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_stream_reads_on_from_its_state_and_begins_the_next_epoch_at_its_start(
    three_ranks: Gang, workers: int
) -> None:
    straight = [each["first"] for each in three_ranks.run(an_epoch, Count(31), [3, 1, 2], {}, 2)]
    for stop in (1, 2) if not workers else (1,):
        ranks = three_ranks.run(continued, [3, 1, 2], workers, stop)
        for (both, again, state, lines), wanted in zip(ranks, straight, strict=True):
            assert both == again == wanted
            assert state["stream_state"]["dataset"] == {"place": 12 * stop}
            if not workers:  # else in other processes
                assert lines == [*range(12 * stop, 31), *range(31)], "no sample is read again"


def test_the_state_of_a_stream_is_used_on_another_world_size_and_left_out_without_the_methods(
    three_ranks: Gang,
) -> None:
    (_, _, state, _), *_ = three_ranks.run(continued, [3, 1, 2], 0, 1)
    for dataset in (StatefulCount(31), Count(31)):
        alone = batches(dataset, [4], exchange=lambda lines: [lines])
        alone.load_state_dict(state)
        assert samples_of([read(alone, 1)]) == list(range(12, 31))


def broken_off(
    _rank: int, _world_size: int, dataset: Any, sizes: list[int], options: dict[str, Any], stop: int
) -> tuple[Epoch, Epoch]:
    straight = read(batches(dataset, sizes, **options), 2)
    begun, resumed = batches(dataset, sizes, **options), batches(dataset, sizes, **options)
    before = read(begun, 2, stop)
    resumed.load_state_dict(begun.state_dict())
    return straight, before + (read(resumed, 2) if stop < len(straight) else [])


@pytest.mark.parametrize("parts", [(), (20, 1, 10)])
def test_resuming_skips_the_consumed_samples(three_ranks: Gang, parts: tuple[int, ...]) -> None:
    for stop in (1, 2, 3):
        for straight, resumed in three_ranks.run(broken_off, numbers(31, parts), [3, 1, 2], {"num_workers": 0}, stop):
            assert resumed == straight


def in_the_middle(_rank: int, _world_size: int, dataset: Any, sizes: list[int]) -> tuple[Epoch, dict[str, Any]]:
    source = batches(dataset, sizes)
    return read(source, 1, 2), source.state_dict()


def test_on_another_world_size_the_rest_of_a_stream_is_read_once(three_ranks: Gang) -> None:
    ranks = three_ranks.run(in_the_middle, Count(31), [3, 1, 2])
    alone = batches(Count(31), [4], exchange=lambda lines: [lines])
    alone.load_state_dict(ranks[0][1])
    assert samples_of([*(epoch for epoch, _ in ranks), read(alone, 1)]) == list(range(31))


@pytest.mark.parametrize(
    ("state", "line"),
    [
        ({"stream": 0}, "the checkpoint is inside epoch 1 of data with samples by index, but the training data is a "),
        (
            {"shards": 3},
            "the checkpoint is inside epoch 1 of a stream in 3 parts with batches of 4 samples in all, but ",
        ),
        (
            {"consumed": 99},
            "the checkpoint is at sample 99 of epoch 1, but the stream ended after 31; resume with the ",
        ),
        ({"head": "other"}, "the stream of epoch 1 does not begin with the sample that it began with when the check"),
    ],
)
def test_a_stream_that_cannot_be_skipped_is_reported_in_one_line(state: dict[str, Any], line: str) -> None:
    source = batches(Count(31), [4], exchange=lambda lines: [lines])
    read(source, 1, 2)
    other = batches(Count(31), [4], exchange=lambda lines: [lines])
    with pytest.raises(RequestError) as refusal:  # noqa: PT012 - at the latest when it is read
        other.load_state_dict(source.state_dict() | state)
        read(other, 1)
    assert str(refusal.value).startswith(line)


def evaluated(_rank: int, _world_size: int, dataset: Any) -> list[tuple[list[int], int]]:
    split = StreamEvalBatches(
        dataset, collate=list, batch_sizes=[2] * get_world_size(), rank=get_rank(), exchange=all_gather_list
    )
    assert [micro.samples for micro in split] == [micro.samples for micro in split], "again at the next evaluation"
    return [(micro.batch, micro.samples) for micro in split]


def test_an_evaluation_of_a_stream_reads_every_sample_once(three_ranks: Gang) -> None:
    ranks = three_ranks.run(evaluated, Count(13))
    assert samples_of([[(1, 1, micros)] for micros in ranks]) == list(range(13))
    assert len({len(micros) for micros in ranks}) == 1


def uneven_evaluation(rank: int, world_size: int) -> str:
    split = StreamEvalBatches(
        Count(13 - rank), collate=list, batch_sizes=[2] * world_size, rank=rank, exchange=all_gather_list
    )
    list(split)
    try:
        split.require_same()
    except TrainingError as error:
        return str(error)
    return ""


def test_an_evaluation_in_which_the_ranks_read_other_numbers_of_samples_fails(three_ranks: Gang) -> None:
    line = "the ranks read different streams of the valid data: rank 0 has 13 samples, rank 1 12"
    assert three_ranks.run(uneven_evaluation) == [line] * 3


# ------------------------------------------------------------------------------------------------- whole trainings

TASK = "stream_tasks:StreamTask"


def trained(gang: Gang, folder: Path | None, stream: str, **options: Any) -> dict[str, Any]:
    task_options = {"stream": stream, "dropout": 0.3, **options.pop("task_options", {})}
    given = {"batch_size": (4,), "task_options": task_options, **options}
    first, *others = gang.run(train_on, TASK, None if folder is None else str(folder), given)
    assert all(other["error"] == first["error"] for other in others)
    return first


@pytest.mark.parametrize(
    ("stream", "workers"),
    [
        ("ShuffledStream", 0),
        ("SizedStream", 0),
        ("ShardedStream", 0),
        ("SplitByWorker", 2),
        ("StatefulStream", 0),
        ("StatefulStream", 2),
        ("UnsavedStream", 0),
    ],
)
def test_a_resumed_stream_is_equal_to_one_without_a_stop_bit_for_bit(
    three_ranks: Gang, tmp_path: Path, stream: str, workers: int
) -> None:
    options = {"num_workers": workers, "max_epochs": 0}
    straight = trained(three_ranks, None, stream, **options, max_updates=8)
    assert trained(three_ranks, tmp_path, stream, **options, max_updates=6)["error"] == ""
    second = trained(three_ranks, None, stream, **options, max_updates=8, resume=str(tmp_path))
    assert straight["error"] == second["error"] == ""
    assert all(torch.equal(second["model"][name], weight) for name, weight in straight["model"].items())


@pytest.mark.parametrize(("stream", "updates"), [("SizedStream", 5), ("ShardedStream", 6), ("WrongLengthStream", 5)])
def test_epochs_of_a_stream_with_a_length_end_where_it_ends(three_ranks: Gang, stream: str, updates: int) -> None:
    done = trained(three_ranks, None, stream, max_epochs=2, task_options={"valid_stream": True})
    assert (done["error"], done["updates"]) == ("", 2 * updates)
    assert done["best"][0] is not None
    lines = [line for line in done["narration"] if "its length is" in line]
    warning = "an epoch of the training data has 50 samples, but its length is 57"
    assert lines == ([warning, warning] if stream == "WrongLengthStream" else [])


@pytest.mark.parametrize(
    ("stream", "options", "line"),
    [
        ("ShuffledStream", {"max_epochs": 2}, "the training data is a stream without a length, whose epochs may"),
        (
            "SizedStream",
            {"max_tokens": 9, "batch_size": None},
            "--max-tokens needs samples by index, but the training data",
        ),
        (
            "SizedStream",
            {"curriculum": 1},
            "--curriculum needs samples by index, but the training data is a stream, which",
        ),
        ("SplitByRank", {"max_updates": 20}, "the ranks read different streams: every rank must read"),
        (
            "UnevenStream",
            {"max_updates": 20},
            "the ranks read different streams in epoch 1, after sample 0: rank 0 has 12",
        ),
        (
            "OneShotStream",
            {"max_epochs": 2},
            "the training data is empty in epoch 2: its __iter__ must start from the beginning each time",
        ),
        ("SizedStream", {"max_epochs": 1, "task_options": {"samples": 0}}, "the training data is empty"),
    ],
)  # fmt: skip
def test_a_stream_that_cannot_be_trained_on_is_one_line(
    three_ranks: Gang, stream: str, options: dict[str, Any], line: str
) -> None:
    assert trained(three_ranks, None, stream, **options)["error"].startswith(line)


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (
            {"dataset": {}},
            "the stream's load_state_dict() cannot restore the state of the checkpoint: KeyError: 'place",
        ),
        (
            {"dataset": {"place": 3}},
            "after load_state_dict() the stream does not go on with sample 9 of epoch 1: its s",
        ),
    ],
)
def test_a_state_that_does_not_continue_a_stream_is_one_line(damage: dict[str, Any], line: str) -> None:
    source = batches(StatefulCount(31), [4], exchange=lambda lines: [lines])
    read(source, 1, 2)
    state = source.state_dict()
    state["stream_state"] = {**state["stream_state"], **damage}
    other = batches(StatefulCount(31), [4], exchange=lambda lines: [lines])
    other.load_state_dict(state)
    with pytest.raises(RequestError) as refusal:
        read(other, 1)
    assert str(refusal.value).startswith(line)


def test_a_state_without_the_order_of_the_stream_is_refused(three_ranks: Gang, tmp_path: Path) -> None:
    options = {"max_epochs": 0, "max_updates": 3}
    assert trained(three_ranks, tmp_path, "ForgetfulStream", **options)["error"] == ""
    done = trained(three_ranks, None, "ForgetfulStream", **{**options, "max_updates": 4}, resume=str(tmp_path))
    assert done["error"].startswith("after load_state_dict() the stream does not go on with sample 37 of epoch 1")


def test_a_stream_that_is_never_the_same_is_not_resumed_in_an_epoch(tmp_path: Path) -> None:
    """As a whole command: a refusal within the training is one line too."""
    task = TINY.replace("tiny_task.py:TinyTask", "stream_tasks.py:StreamTask")
    flags = ("--task", task, "--stream", "UnrepeatableStream", "--batch-size", 4)
    assert train(tmp_path / "first", *flags, "--max-updates", 5).code == 0
    resume = ("--max-updates", 8, "--resume", tmp_path / "first" / "checkpoints")
    done = train(tmp_path / "second", *flags, *resume)
    assert done.code == 2, done.output
    assert "does not begin with the sample that it began with" in done.output.splitlines()[-1]
    assert "Traceback" not in done.output


def test_a_stateful_stream_whose_process_is_killed_gives_each_sample_once(tmp_path: Path) -> None:
    task = TINY.replace("tiny_task.py:TinyTask", "stream_tasks.py:StreamTask")
    flags = ("--task", task, "--stream", "StatefulStream", "--batch-size", 4, "--samples", 50, "--max-updates", 13)
    logs = [tmp_path / "before.log", tmp_path / "after.log"]
    killed = train(tmp_path / "first", *flags, "--save-every-updates", 2, "--log", logs[0], "--kill-at", 45)
    assert killed.code != 0
    saved = max((tmp_path / "first" / "checkpoints").glob("step_*.pt"))
    consumed = load(saved)["position"]["consumed"]
    assert 8 <= consumed <= 40
    done = train(tmp_path / "second", *flags, "--log", logs[1], "--resume", saved)
    assert done.code == 0, done.output
    before, after = ([int(line) for line in log.read_text().split()] for log in logs)
    assert len(before) == 46, "it was killed as it read on"
    epoch = before[:consumed] + after[: 50 - consumed]
    assert sorted(epoch) == list(range(50)), "each sample once; none of them was read again"
    assert after[: 46 - consumed] == before[consumed:]
