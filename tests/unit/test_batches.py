from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from epoch_batches import batches, read, samples_of
from torch.utils.data import DataLoader

from trainer.contract.balanced_shares import equal_shares
from trainer.contract.errors import RequestError
from trainer.contract.options import Training
from trainer.data.batches import EvalBatches, Position
from trainer.data.epoch_order import epoch_order
from trainer.data.loader import MicroBatch, pinned
from trainer.data.shares import TokenLimit, rank_batch_sizes

# ------------------------------------------------------------------------------------------------------- the shares


@pytest.mark.parametrize(("batch_size", "expected"), [(2, 2), (1, 3), (4, 1)])
def test_an_epoch_of_two_samples_leaves_none_out(batch_size: int, expected: int) -> None:
    source = batches(3, [batch_size], 0)
    assert source.updates_left(1) == expected
    assert sorted(samples_of(read(source, 1))) == [0, 1, 2]


@pytest.mark.parametrize(
    ("samples", "batch_size", "world_size", "steps", "padding"),
    [
        (60_000, 64, 4, 235, 2),
        (60_000, 64, 8, 118, 6),
        (60_000, 64, 16, 59, 6),
        (60_000, 64, 32, 30, 22),
        (6_920, 16, 2, 217, 1),
        (6_920, 16, 3, 145, 2),
        (6_920, 16, 4, 109, 3),
        (6_920, 16, 8, 55, 7),
    ],
)
def test_real_data_gives_every_rank_the_same_number_of_steps(
    samples: int, batch_size: int, world_size: int, steps: int, padding: int
) -> None:
    seen, dummies = [], 0
    for rank in range(world_size):
        updates = read(batches(samples, [batch_size] * world_size, rank), 1)
        assert len(updates) == steps
        seen += samples_of(updates)
        dummies += sum(not micro.samples for update in updates for micro in update)
    assert dummies == padding
    assert sorted(seen) == list(range(samples))


def test_with_equal_sizes_a_rank_reads_every_wth_batch() -> None:
    [alone] = zip(*read(batches(90, [10], 0), 1), strict=True)
    for rank in range(3):
        [shard] = zip(*read(batches(90, [10] * 3, rank), 1), strict=True)
        assert [micro.batch for micro in shard] == [micro.batch for micro in alone[rank::3]]


def test_ranks_times_batch_is_one_rank_with_accumulation() -> None:
    ranks = [read(batches(101, [4] * 3, rank), 2) for rank in range(3)]
    alone = read(batches(101, [4], 0), 6)
    for index, update in enumerate(alone):
        assert sorted(samples_of([update])) == sorted(s for rank in ranks for s in samples_of([rank[index]]))


def test_a_dummy_is_the_first_sample_twice_and_counts_nothing() -> None:
    source = batches([f"sample {index}" for index in range(9)], [2] * 4, 3, shuffle=False)
    assert samples_of(read(source, 1)) == ["sample 6", "sample 7"]
    source.next_epoch()
    [[_], [dummy]] = read(source, 1)
    assert dummy == MicroBatch(["sample 0", "sample 0"], 0)


CASES = [
    (samples, batch_sizes, update_freq)
    for samples in (7, 20, 53, 96)
    for batch_sizes in ([3], [1], [2, 2], [3, 1], [1, 4], [2, 2, 1], [5, 3, 2], [1] * 5)
    for update_freq in (1, 2, 5)
    if samples > sum(batch_sizes) - batch_sizes[-1]
]


@pytest.mark.parametrize("lengths", [None, "random"])
def test_every_sample_is_read_once_in_the_same_number_of_micro_steps(lengths: str | None) -> None:
    for samples, batch_sizes, update_freq in CASES:
        how_long = random.Random(samples).choices(range(40), k=samples) if lengths else None
        seen, shapes = [], set()
        for rank in range(len(batch_sizes)):
            source = batches(samples, batch_sizes, rank, lengths=how_long)
            left = source.updates_left(update_freq)
            updates = read(source, update_freq)
            assert len(updates) == left
            assert all(micro.samples <= batch_sizes[rank] for update in updates for micro in update)
            assert all(len(micro.batch) == (micro.samples or 2) for update in updates for micro in update)
            shapes.add(tuple(len(update) for update in updates))
            seen += samples_of(updates)
        assert sorted(seen) == list(range(samples)), (samples, batch_sizes, update_freq)
        assert len(shapes) == 1


def test_an_update_counts_the_samples_of_all_ranks() -> None:
    source = batches(23, [3, 2], 1)
    counted = [
        (update.micro_steps, update.global_samples, update.consumed, len(list(update))) for update in source.updates(2)
    ]
    assert counted == [(2, 10, 10, 2), (2, 10, 20, 2), (1, 3, 23, 1)]


def test_an_update_that_was_not_read_to_its_end_is_a_defect() -> None:
    updates = batches(23, [3], 0).updates(2)
    next(updates)
    with pytest.raises(AssertionError, match="not read to its end"):
        next(updates)


# -------------------------------------------------------------------------------------------------------- the order


def test_the_order_depends_on_seed_and_epoch_only() -> None:
    def epochs(rank: int, seed: int) -> list[list[int]]:
        source = batches(40, [5, 5], rank, seed=seed)
        orders = []
        for _ in range(3):
            orders.append(samples_of(read(source, 1)))
            source.next_epoch()
        return orders

    first = epochs(0, 1)
    assert first == epochs(0, 1)
    assert len({tuple(order) for order in first}) == 3
    assert epochs(0, 2)[0] == first[1]  # seed + epoch
    for mine, other in zip(first, epochs(1, 1), strict=True):
        assert sorted(mine + other) == list(range(40))


def test_without_shuffling_the_order_is_the_datasets() -> None:
    assert samples_of(read(batches(10, [4], 0, shuffle=False), 1)) == list(range(10))


def test_samples_of_alike_length_come_together() -> None:
    lengths = torch.tensor(random.Random(7).choices(range(100), k=1003))
    order = epoch_order(1003, seed=3, lengths=lengths, chunk=10)
    assert isinstance(order, torch.Tensor)
    assert sorted(order.tolist()) == list(range(1003))
    chunks = lengths[order[:1000]].view(100, 10)
    assert (chunks.amax(1) - chunks.amin(1)).max() <= 5
    assert chunks[:, 0].tolist() != sorted(chunks[:, 0].tolist())  # but the chunks are shuffled
    assert len(order[1000:]) == 3


def test_lengths_are_sorted_within_pools_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.data.epoch_order.POOL_BATCHES", 5)
    lengths = torch.arange(100)
    pooled = epoch_order(100, seed=3, lengths=lengths, chunk=2)
    plain = epoch_order(100, seed=3)
    assert isinstance(pooled, torch.Tensor)
    assert isinstance(plain, torch.Tensor)
    expected = sorted(tuple(sorted(pool)[i : i + 2]) for pool in plain.view(10, 10).tolist() for i in range(0, 10, 2))
    assert sorted(map(tuple, pooled.view(50, 2).tolist())) == expected


# ------------------------------------------------------------------------------------------------ position and resume


@pytest.mark.parametrize(
    ("consumed", "position"),
    [(50, Position(2, 50)), (150, Position(3, 0)), (0, Position(2, 0))],
)
def test_a_checkpoint_resumes_where_it_was(consumed: int, position: Position) -> None:
    source = batches(150, [1], 0, shuffle=False)
    source.load_state_dict(source.state_dict() | {"epoch": 2, "consumed": consumed})
    assert source.position == position
    assert samples_of(read(source, 1, 1)) == [position.consumed]


def test_without_a_checkpoint_it_starts_at_epoch_one() -> None:
    assert batches(150, [1], 0).position == Position(1, 0)


def test_the_end_of_an_epoch_is_saved_as_the_start_of_the_next() -> None:
    source = batches(150, [8], 0)
    read(source, 1)
    assert source.position == Position(1, 150)
    assert source.updates_left(1) == 0
    assert (source.state_dict()["epoch"], source.state_dict()["consumed"]) == (2, 0)
    source.next_epoch()
    assert source.position == Position(2, 0)


def test_the_position_moves_with_the_last_micro_step_of_an_update() -> None:
    source = batches(20, [2, 2], 0)
    update = next(source.updates(3))
    positions = [source.position.consumed for _ in update]
    assert positions == [0, 0, 12]
    assert update.consumed == 12


def test_resuming_continues_the_same_batches() -> None:
    for samples, batch_sizes, update_freq in CASES:
        straight = read(batches(samples, batch_sizes, 0), update_freq)
        for stop in range(len(straight) + 1):
            first = batches(samples, batch_sizes, 0)
            before = read(first, update_freq, stop)
            second = batches(samples, batch_sizes, 0)
            second.load_state_dict(first.state_dict())
            if stop < len(straight):
                assert before + read(second, update_freq) == straight


def test_resuming_on_another_world_size_reads_every_remaining_sample_once() -> None:
    lengths = random.Random(1).choices(range(30), k=96)
    for old, new in itertools.permutations(([3], [2, 2], [3, 1, 5], [1] * 7), 2):
        for update_freq, how_long in itertools.product((1, 3), (None, lengths)):
            stop = 96 // (sum(old) * update_freq) // 2
            sources = [batches(96, old, rank, lengths=how_long) for rank in range(len(old))]
            seen = [s for source in sources for s in samples_of(read(source, update_freq, stop))]
            assert len(seen) == stop * update_freq * sum(old)
            counts = set()
            for rank in range(len(new)):
                # Another seed as well: the begun epoch goes on in the order in which it was begun.
                resumed = batches(96, new, rank, lengths=how_long, seed=5)
                resumed.load_state_dict(sources[0].state_dict())
                updates = read(resumed, 2)
                counts.add(tuple(map(len, updates)))
                seen += samples_of(updates)
                resumed.next_epoch()
                fresh = batches(96, new, rank, lengths=how_long, seed=5)
                fresh.next_epoch()
                assert read(resumed, 2) == read(fresh, 2)
            assert sorted(seen) == list(range(96)), (old, new, update_freq)
            assert len(counts) == 1


def test_a_position_saved_in_a_resumed_epoch_resumes_again() -> None:
    seen = []
    state = None
    for batch_sizes, seed in (([2, 2], 1), ([3], 2), ([1, 1, 1], 3), ([4], 4)):
        ranks = [batches(60, batch_sizes, rank, seed=seed, lengths=list(range(60))) for rank in range(len(batch_sizes))]
        for source in ranks:
            if state:
                source.load_state_dict(state)
            seen += samples_of(read(source, 1, None if batch_sizes == [4] else 3))
        state = ranks[0].state_dict()
    assert sorted(seen) == list(range(60))
    assert state is not None
    assert (state["epoch"], state["seed"]) == (2, 4)


# --------------------------------------------------------------------------------------------------------- refusals


def test_data_of_another_size_is_refused_within_an_epoch() -> None:
    source = batches(100, [4], 0)
    read(source, 1, 3)
    other = batches(90, [4], 0)
    with pytest.raises(RequestError) as refusal:
        other.load_state_dict(source.state_dict())
    assert str(refusal.value) == (
        "the checkpoint is at sample 12 of 100 of epoch 1, but the training data has 90 samples now; "
        "resume with the same data"
    )


def test_an_order_by_length_is_not_resumed_without_lengths() -> None:
    source = batches(100, [4], 0, lengths=list(range(100)))
    read(source, 1, 3)
    with pytest.raises(RequestError, match="grouped by length"):
        batches(100, [4], 0).load_state_dict(source.state_dict())


@pytest.mark.parametrize(
    ("samples", "batch_sizes", "enough"),
    [(4, [2, 2, 2], False), (5, [2, 2, 2], True), (3, [1] * 4, False), (4, [1] * 4, True), (64, [32, 32, 8], False)],
)
def test_fewer_batches_than_ranks_are_refused(samples: int, batch_sizes: list[int], enough: bool) -> None:
    if enough:
        assert all(read(batches(samples, batch_sizes, rank), 1)[0][0].samples for rank in range(len(batch_sizes)))
    else:
        with pytest.raises(
            RequestError, match=rf"^the training data has {samples} samples, but {len(batch_sizes)} ranks"
        ):
            batches(samples, batch_sizes, 0)


def test_the_refusal_of_too_few_samples_names_the_numbers() -> None:
    with pytest.raises(RequestError) as refusal:
        batches(20, [16, 16, 8], 0)
    assert str(refusal.value) == (
        "the training data has 20 samples, but 3 ranks with a batch size of 8 or 16 need at least 33, or some rank "
        "never gets a batch: use fewer ranks or a smaller --batch-size"
    )


def test_lengths_that_do_not_fit_the_data_are_refused() -> None:
    with pytest.raises(RequestError, match=r"^the task gives 3 lengths for 4 samples; it must give one each$"):
        batches(4, [1], 0, lengths=[1, 2, 3])


def test_empty_splits_are_named() -> None:
    with pytest.raises(RequestError, match=r"^the training data is empty$"):
        batches(0, [2], 0)
    with pytest.raises(RequestError, match=r"^the test data is empty$"):
        EvalBatches([], collate=list, batch_sizes=[2], rank=0, split="test")


@pytest.mark.parametrize(
    ("given", "world_size", "expected"), [([8], 3, (8, 8, 8)), ([32, 32, 8], 3, (32, 32, 8)), ([4], 1, (4,))]
)
def test_batch_sizes_are_one_for_all_or_one_per_rank(
    given: list[int], world_size: int, expected: tuple[int, ...]
) -> None:
    assert rank_batch_sizes(Training(task="a:B", batch_size=tuple(given)), world_size) == expected


def test_balanced_shares_begin_as_equal_as_they_can() -> None:
    options = Training(task="a:B", batch_size="balanced", global_batch_size=32)
    assert rank_batch_sizes(options, 3) == (11, 11, 10)


def test_a_wrong_number_of_batch_sizes_is_refused() -> None:
    with pytest.raises(
        RequestError, match=r"^--batch-size has 3 values, but there are 2 ranks; give one, or one per rank$"
    ):
        rank_batch_sizes(Training(task="a:B", batch_size=(32, 32, 8)), 2)


def test_a_global_batch_below_one_sample_per_rank_is_refused() -> None:
    with pytest.raises(
        RequestError,
        match=r"^--global-batch-size is 2, but there are 3 ranks, each with at least 1 sample: give 3 or more$",
    ):
        rank_batch_sizes(Training(task="a:B", batch_size="balanced", global_batch_size=2), 3)


# ------------------------------------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize("lengths", [None, "reversed"])
@pytest.mark.parametrize(
    ("samples", "batch_sizes"), [(1, [4] * 4), (872, [16] * 2), (1_821, [16] * 3), (21, [1] * 8), (10, [3, 2])]
)
def test_evaluation_reads_every_sample_once(samples: int, batch_sizes: list[int], lengths: str | None) -> None:
    how_long = list(range(samples))[::-1] if lengths else None
    seen, counts = [], set()
    for rank in range(len(batch_sizes)):
        source = EvalBatches(range(samples), collate=list, batch_sizes=batch_sizes, rank=rank, lengths=how_long)
        micro_batches = list(source)
        counts.add((len(source), len(micro_batches)))
        assert list(source) == micro_batches  # and again at the next evaluation
        seen += samples_of([micro_batches])
    assert sorted(seen) == list(range(samples))
    [(warnings, was)] = counts
    assert warnings == was == -(-samples // sum(batch_sizes))


def test_evaluation_reads_by_length() -> None:
    source = EvalBatches("dacb", collate=list, batch_sizes=[1], rank=0, lengths=[4, 1, 3, 2])
    assert [micro.batch for micro in source] == [["a"], ["b"], ["c"], ["d"]]


class PinnableTensor:
    """What memory is pinned of: answers as a tensor does."""

    def __init__(self, locked: bool = False) -> None:
        self.locked = locked

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PinnableTensor) and other.locked == self.locked

    def __hash__(self) -> int:
        return hash(self.locked)

    def pin_memory(self) -> PinnableTensor:
        return PinnableTensor(locked=True)


class Pair(NamedTuple):
    tokens: Any
    labels: Any


def test_every_tensor_of_a_batch_is_pinned() -> None:
    batch = {
        "x": PinnableTensor(),
        "y": [PinnableTensor(), "text", 3],
        "z": (PinnableTensor(), None),
        "pair": Pair(PinnableTensor(), [PinnableTensor()]),
    }
    locked = PinnableTensor(locked=True)
    assert pinned(batch) == {
        "x": locked,
        "y": [locked, "text", 3],
        "z": (locked, None),
        "pair": Pair(locked, [locked]),
    }


def test_reading_in_the_rank_costs_no_more_than_twice_that_of_torchs_loader() -> None:
    samples = list(range(100_000))
    updates = batches(samples, [1], 0, collate=lambda samples: samples).updates(1)
    list(next(updates))
    loader = iter(DataLoader(samples, batch_size=1, shuffle=True, collate_fn=lambda samples: samples))  # type: ignore[arg-type]
    next(loader)

    def ours() -> None:
        for update in itertools.islice(updates, 1000):
            for _ in update:
                pass

    def theirs() -> None:
        for _ in itertools.islice(loader, 1000):
            pass

    def seconds(read: Callable[[], None]) -> float:
        started = time.perf_counter()
        read()
        return time.perf_counter() - started

    # The best of several, because another process on the machine can only make one of them worse.
    pairs = [(seconds(ours), seconds(theirs)) for _ in range(20)]
    assert min(own for own, _ in pairs) < 2 * min(other for _, other in pairs)


# ----------------------------------------------------------------------------------------------- shares that change


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_each_sample_is_read_once_however_often_the_shares_change(seed: int, drop_last: bool, num_workers: int) -> None:
    source = random.Random(seed)
    ranks, total, samples = 3, 10, source.randint(60, 90)
    options: dict[str, Any] = {"balanced": True, "drop_last": drop_last, "num_workers": num_workers}
    readers = [batches(samples, equal_shares(total, ranks), rank, **options) for rank in range(ranks)]
    for _ in range(2):
        seen: list[int] = []
        for updates in zip(*(reader.updates(2) for reader in readers), strict=True):
            sizes = readers[0].batch_sizes
            read = [list(update) for update in updates]
            seen += [sample for micros in read for micro in micros if micro.samples for sample in micro.batch]
            if updates[0].global_samples == 2 * total:
                assert [sum(micro.samples for micro in micros) for micros in read] == [2 * size for size in sizes]
            if source.random() < 0.5:
                cut = sorted(source.sample(range(1, total), 2))
                for reader in readers:
                    reader.set_batch_sizes([cut[0], cut[1] - cut[0], total - cut[1]])
        assert len(set(seen)) == len(seen) == (samples - samples % total if drop_last else samples)
        for reader in readers:
            reader.next_epoch()
    for reader in readers:
        reader.close()


def test_the_order_of_balanced_batches_does_not_depend_on_the_shares() -> None:
    lengths = [(7 * index) % 13 + 1 for index in range(60)]
    orders = []
    for sizes in ([6, 6], [9, 3]):
        readers = [batches(60, sizes, rank, lengths=lengths, balanced=True) for rank in range(2)]
        orders.append([samples_of(update) for update in zip(*(read(reader, 1) for reader in readers), strict=True)])
    assert orders[0] == orders[1]


@pytest.mark.parametrize("seed", range(6))
def test_shares_of_tokens_divide_each_batch_and_keep_to_the_ranks_limit(seed: int) -> None:
    source = random.Random(seed)
    lengths = [source.randint(1, 20) for _ in range(200)]
    ranks, total, most = 3, 150, 90
    options: dict[str, Any] = {"lengths": lengths, "limit": TokenLimit(max_tokens=total), "balanced": True}
    readers = [batches(200, equal_shares(total, ranks), rank, **options) for rank in range(ranks)]
    seen: list[int] = []
    for updates in zip(*(reader.updates(1) for reader in readers), strict=True):
        sizes = readers[0].batch_sizes
        micros = [next(iter(update)) for update in updates]
        whole = [sample for micro in micros if micro.samples for sample in micro.batch]
        longest = max(lengths[sample] for sample in whole)
        assert len(whole) * longest <= total
        for share, micro in zip(sizes, micros, strict=True):
            assert micro.samples * longest < share + longest
            assert micro.samples * longest <= most
        seen += whole
        first = source.randint(20, most - 20)
        second = source.randint(max(20, total - first - most + 20), min(most - 20, total - first - 20))
        for reader in readers:
            reader.set_batch_sizes([first, second, total - first - second])
    assert sorted(seen) == list(range(200))
