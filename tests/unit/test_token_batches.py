"""Batches of at most so many tokens, fixed batches and a curriculum: which rank reads which sample, and when."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest

from trainer.contract.errors import RequestError
from trainer.contract.options import Training
from trainer.data.batches import EpochBatches, EvalBatches
from trainer.data.loader import MicroBatch
from trainer.data.shares import TokenLimit
from trainer.engine.preparation import sample_lengths, token_limit
from trainer.tasks.task import Task

SIZES = random.Random(3).choices(range(1, 33), k=401)
LIMIT = TokenLimit(max_tokens=96)


def batches(sizes: Sequence[int], ranks: int, rank: int, **options: Any) -> EpochBatches:
    settings: dict[str, Any] = {"collate": list, "seed": 1, "shuffle": True, "limit": LIMIT, "lengths": sizes} | options
    return EpochBatches(range(len(sizes)), batch_sizes=[1] * ranks, rank=rank, **settings)


def read(source: EpochBatches, update_freq: int = 1, updates: int | None = None) -> list[list[MicroBatch]]:
    return [list(update) for update in itertools.islice(source.updates(update_freq), updates)]


def real(updates: list[list[MicroBatch]]) -> list[list[int]]:
    return [micro.batch for update in updates for micro in update if micro.samples]


def flat(lists: list[list[int]]) -> list[int]:
    return [item for each in lists for item in each]


@pytest.mark.parametrize(
    ("sizes", "limit", "ends"),
    [
        ([], LIMIT, []),
        ([96, 96], LIMIT, [1, 2]),
        ([10] * 5, TokenLimit(max_tokens=20), [2, 4, 5]),
        # The longest sample counts for all of a batch.
        ([1, 1, 1, 7, 1], TokenLimit(max_tokens=8), [3, 4, 5]),
        ([1, 1, 1, 4, 4], TokenLimit(max_tokens=8), [3, 5]),
        ([1] * 7, TokenLimit(max_tokens=100, max_samples=3), [3, 6, 7]),
        ([1] * 23, TokenLimit(max_tokens=10, multiple=4), [8, 16, 23]),
        # Fewer than the multiple stay together, and what is left of a cut may be too much for the next sample.
        ([5, 5, 5, 5, 5], TokenLimit(max_tokens=10, multiple=8), [2, 4, 5]),
        ([1, 1, 1, 9], TokenLimit(max_tokens=10, multiple=2), [2, 3, 4]),
        ([0, 0, 3], TokenLimit(max_tokens=3), [2, 3]),
    ],
)
def test_batches_end_where_one_more_sample_would_be_too_much(
    sizes: list[int], limit: TokenLimit, ends: list[int]
) -> None:
    assert limit.ends(sizes) == ends


OPTIONS: list[dict[str, Any]] = [
    {},
    {"shuffle": False},
    {"limit": TokenLimit(max_tokens=96, max_samples=5, multiple=2)},
    {"fix_batches": True},
    {"curriculum": 1},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("update_freq", [1, 3])
def test_every_sample_is_read_once_in_as_many_steps_on_every_rank(
    options: dict[str, Any], ranks: int, update_freq: int
) -> None:
    limit = options.get("limit", LIMIT)
    seen: list[list[int]] = []
    shapes, counted = set(), []
    for rank in range(ranks):
        source = batches(SIZES, ranks, rank, **options)
        left = source.updates_left(update_freq)
        updates = [(update.micro_steps, update.global_samples, list(update)) for update in source.updates(update_freq)]
        assert len(updates) == left == source.updates_per_epoch(update_freq)
        shapes.add(tuple((micro_steps, samples) for micro_steps, samples, _ in updates))
        counted.append([sum(micro.samples for micro in update) for *_, update in updates])
        seen += real([update for *_, update in updates])
    assert sorted(flat(seen)) == list(range(len(SIZES)))
    assert max(len(batch) * max(SIZES[index] for index in batch) for batch in seen) <= limit.max_tokens
    [steps] = shapes
    assert [samples for _, samples in steps] == [sum(each) for each in zip(*counted, strict=True)]
    if limit.multiple > 1:
        assert sum(len(batch) % limit.multiple != 0 for batch in seen) <= 1 + len(SIZES) // 50


def test_padding_is_little_and_the_order_differs_between_epochs() -> None:
    source = batches(SIZES, 1, 0)
    first = real(read(source))
    padded = sum(len(batch) * max(SIZES[index] for index in batch) for batch in first)
    assert padded < 1.1 * sum(SIZES)
    source.next_epoch()
    second = real(read(source))
    assert {tuple(batch) for batch in first}.isdisjoint(tuple(batch) for batch in second if len(batch) > 3)
    assert real(read(batches(SIZES, 1, 0))) == first


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("stop", [0, 1, 4, 1000])
def test_resuming_continues_the_same_batches(options: dict[str, Any], stop: int) -> None:
    for rank in range(3):
        straight = batches(SIZES, 3, rank, **options)
        first = read(straight, 2)
        straight.next_epoch()
        following = read(straight, 2)
        begun, resumed = batches(SIZES, 3, rank, **options), batches(SIZES, 3, rank, **options)
        before = read(begun, 2, stop)
        resumed.load_state_dict(begun.state_dict())
        assert before + read(resumed, 2) == first + (following if stop == 1000 else [])
        if stop < 1000:
            resumed.next_epoch()
            assert read(resumed, 2) == following


CHANGES: list[dict[str, Any]] = [
    {},
    {"limit": TokenLimit(max_tokens=64, multiple=2), "seed": 9},
    {"limit": None},
    {"limit": None, "fix_batches": True},
    {"fix_batches": True},
]


@pytest.mark.parametrize(("old", "new"), [*itertools.product(CHANGES, CHANGES)])
def test_on_other_ranks_or_with_other_batches_the_rest_of_the_epoch_is_read_once(
    old: dict[str, Any], new: dict[str, Any]
) -> None:
    seen: list[list[int]] = []
    sources = [batches(SIZES, 3, rank, **old) for rank in range(3)]
    for source in sources:
        seen += real(read(source, 1, 5))
    second = [batches(SIZES, 2, rank, **new) for rank in range(2)]
    for source in second:
        source.load_state_dict(sources[0].state_dict())
        seen += real(read(source, 1, 4))
    state = second[0].state_dict()
    counts = set()
    for rank, source in enumerate(second):
        again = batches(SIZES, 2, rank, **new)  # within an epoch that was begun with other batches
        again.load_state_dict(state)
        updates = read(again)
        assert updates == read(source)
        counts.add(len(updates))
        seen += real(updates)
    assert sorted(flat(seen)) == list(range(len(SIZES)))
    assert len(counts) == 1


@pytest.mark.parametrize("limit", [LIMIT, None])
@pytest.mark.parametrize("sizes", [[4, 4], [4, 2]])
def test_fixed_batches_stay_with_their_rank_and_come_in_another_order(
    limit: TokenLimit | None, sizes: list[int]
) -> None:
    for rank in range(2):
        source = EpochBatches(
            range(len(SIZES)), batch_sizes=sizes, rank=rank, collate=list, seed=1, shuffle=True, limit=limit,
            lengths=SIZES, fix_batches=True,
        )  # fmt: skip
        epochs = []
        for _ in range(3):
            epochs.append([tuple(batch) for batch in real(read(source))])
            source.next_epoch()
        assert set(epochs[0]) == set(epochs[1]) == set(epochs[2])
        assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("limit", [LIMIT, None])
def test_a_curriculum_begins_with_the_shortest_samples_and_shuffles_later(limit: TokenLimit | None) -> None:
    source = batches(SIZES, 1, 0, curriculum=2, limit=limit)
    epochs = []
    for _ in range(3):
        epochs.append(flat(real(read(source))))
        source.next_epoch()
    assert epochs[0] == epochs[1] == sorted(range(len(SIZES)), key=lambda index: SIZES[index])
    assert epochs[2] != epochs[0]
    plain = batches(SIZES, 1, 0, curriculum=2, limit=None, lengths=None)
    assert flat(real(read(plain))) == list(range(len(SIZES)))


def test_drop_last_leaves_out_the_batches_that_not_every_rank_has() -> None:
    counts = {len(real(read(batches(SIZES, 3, rank, drop_last=True)))) for rank in range(3)}
    whole = len(real(read(batches(SIZES, 1, 0))))
    assert counts == {whole // 3}
    source = batches(SIZES, 3, 0, drop_last=True)
    read(source)
    assert (source.updates_left(1), source.state_dict()["epoch"]) == (0, 2)


@pytest.mark.parametrize(
    ("sizes", "ranks", "line"),
    [
        ([3, 97, 5], 1, "sample 1 of the train data has 97 tokens, but --max-tokens is 96: raise it, or leave such "),
        ([48] * 4, 3, "the training data makes 2 batches of at most 96 tokens, but 3 ranks need at least 3, or some "),
    ],
)
def test_batches_that_cannot_be_made_are_refused_in_one_line(sizes: list[int], ranks: int, line: str) -> None:
    with pytest.raises(RequestError) as refusal:
        batches(sizes, ranks, 0)
    assert str(refusal.value).startswith(line)


@pytest.mark.parametrize("ranks", [1, 3])
def test_an_evaluation_by_tokens_reads_every_sample_once(ranks: int) -> None:
    seen: list[list[int]] = []
    for rank in range(ranks):
        source = EvalBatches(
            range(len(SIZES)), collate=list, batch_sizes=[1] * ranks, rank=rank, lengths=SIZES, limit=LIMIT
        )
        micro_batches = list(source)
        assert len(micro_batches) == len(source)
        seen += real([micro_batches])
    assert sorted(flat(seen)) == list(range(len(SIZES)))


class DatasetWithSizes:
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index

    def size(self, index: int) -> int:
        return 10 + index


class OwnSizes(Task):
    def sizes(self, split: str) -> list[int]:
        return [1, 2, 3]


def test_sizes_are_the_tasks_or_the_datasets_and_lengths_without_max_tokens() -> None:
    assert sample_lengths(OwnSizes(None), "train", DatasetWithSizes(), LIMIT) == [1, 2, 3]
    assert sample_lengths(Task(None), "train", DatasetWithSizes(), LIMIT) == [10, 11, 12]
    assert sample_lengths(OwnSizes(None), "train", DatasetWithSizes(), None) is None
    with pytest.raises(RequestError) as refusal:
        sample_lengths(Task(None), "train", range(3), LIMIT)
    assert str(refusal.value) == (
        "--max-tokens needs the tokens of each sample of the train data: give Task a sizes(split) that returns them, "
        "or its dataset a size(index)"
    )


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({}, None),
        ({"max_tokens": 8}, TokenLimit(max_tokens=8)),
        (
            {"max_tokens": 8, "batch_size": (4,), "required_batch_size_multiple": 2},
            TokenLimit(max_tokens=8, max_samples=4, multiple=2),
        ),
    ],
)
def test_the_limit_comes_from_the_options(options: dict[str, Any], limit: TokenLimit | None) -> None:
    assert token_limit(Training(**options)) == limit
