"""Iterators with a position."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.data.iterators import CountingIterator, GroupedIterator, ShardedIterator

PAD = -1


def check_counting(source: CountingIterator[Any], reference: list[Any]) -> None:
    assert (source.has_next(), source.n) == (True, 0)
    assert (next(source), source.n) == (reference[0], 1)
    assert (next(source), source.n) == (reference[1], 2)
    source.skip(3)
    assert source.n == 5
    assert next(source) == reference[5]
    source.skip(2)
    assert source.n == 8
    assert list(source) == reference[8:10]
    assert not source.has_next()


def test_a_counting_iterator_knows_how_far_it_is() -> None:
    check_counting(CountingIterator(range(10)), list(range(10)))


def test_a_sharded_iterator_counts_alike() -> None:
    check_counting(ShardedIterator(range(10), 1, 0, fill=PAD), list(range(10)))


def test_a_grouped_iterator_counts_alike() -> None:
    groups = [[3 * i, 3 * i + 1, 3 * i + 2] for i in range(10)]
    check_counting(GroupedIterator(range(30), 3), groups)


def test_a_counting_iterator_stops_at_its_total() -> None:
    assert list(CountingIterator(range(10), total=8)) == list(range(8))


def test_a_counting_iterator_whose_source_ends_early_is_an_error() -> None:
    with pytest.raises(IndexError, match="ended after 10 of 12 items"):
        list(CountingIterator(range(10), total=12))


def test_take_shortens_a_counting_iterator() -> None:
    source = CountingIterator(range(10))
    source.take(5)
    assert len(source) == 5
    source.skip(2)
    assert list(source) == [2, 3, 4]


@pytest.mark.parametrize(
    ("shards", "expected"),
    [
        (1, [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]]),
        (2, [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]),
        (3, [[0, 3, 6, 9], [1, 4, 7, PAD], [2, 5, 8, PAD]]),
    ],
)
def test_shards_are_strides_of_equal_length(shards: int, expected: list[list[int]]) -> None:
    assert [list(ShardedIterator(range(10), shards, shard, fill=PAD)) for shard in range(shards)] == expected


@pytest.mark.parametrize("shard", [-1, 3])
def test_a_shard_that_does_not_exist_is_refused(shard: int) -> None:
    with pytest.raises(ValueError, match="from 0 to 2"):
        ShardedIterator(range(10), 3, shard, fill=PAD)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1, [[0], [1], [2], [3], [4], [5], [6], [7], [8], [9]]),
        (4, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]),
        (5, [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]),
    ],
)
def test_groups_have_the_given_size_but_the_last(size: int, expected: list[list[int]]) -> None:
    assert list(GroupedIterator(range(10), size)) == expected


@pytest.mark.parametrize(
    ("items", "size", "skip_remainder", "groups"),
    [(3, 2, True, 1), (3, 2, False, 2), (2, 2, True, 1), (2, 2, False, 1), (1, 2, True, 0), (1, 2, False, 1)],
)
def test_a_group_that_is_not_full_can_be_left_out(items: int, size: int, skip_remainder: bool, groups: int) -> None:
    assert len(GroupedIterator(range(items), size, skip_remainder=skip_remainder)) == groups
