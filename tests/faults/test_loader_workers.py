from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from epoch_batches import batches, read, samples_of
from torch.utils.data import DataLoader
from waiting import LIMIT_S

from trainer.agent.rank_failure import error_line
from trainer.contract.errors import RequestError

# ---------------------------------------------------------------------------------------------------------- workers


class Noisy:
    """Samples that carry a random number, and a malformed one."""

    def __init__(self, samples: int, malformed: int = -1) -> None:
        self.samples = samples
        self.malformed = malformed

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int, /) -> tuple[int, float, float]:
        if index == self.malformed:
            raise RequestError("train.tsv, line 13: the label is missing")
        return index, random.random(), float(torch.rand(()))


class Whole:
    """A dataset that fetches a batch at once."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int, /) -> int:
        raise AssertionError("asked one by one")

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [index * 10 for index in indices]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataset_may_fetch_a_whole_batch(num_workers: int) -> None:
    source = batches(Whole(), [8], 0, num_workers=num_workers, shuffle=False)  # type: ignore[arg-type]
    assert [micro.batch for [micro] in read(source, 1)] == [
        [0, 10, 20, 30, 40, 50, 60, 70],
        [80, 90, 100, 110, 120, 130, 140, 150],
        [160, 170, 180, 190],
    ]
    source.close()


def test_workers_read_the_same_over_epochs_resumes_and_world_sizes() -> None:
    state = torch.get_rng_state()
    one = batches(Noisy(50), [4], 0, num_workers=1)  # type: ignore[arg-type]
    two = batches(Noisy(50), [4], 0, num_workers=2)  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), state)
    epochs = [read(one, 2)]
    one.next_epoch()
    epochs.append(read(one, 2))
    assert samples_of(epochs[0]) != samples_of(epochs[1])
    assert torch.equal(torch.get_rng_state(), state), "reading must not move the numbers that dropout draws"

    before = read(two, 2, 3)  # abandoned with batches read ahead
    two.load_state_dict(two.state_dict())
    assert before + read(two, 2) == epochs[0]
    two.next_epoch()
    assert read(two, 2) == epochs[1]

    ranks = [batches(Noisy(50), [4, 4], rank, num_workers=1) for rank in range(2)]  # type: ignore[arg-type]
    both = [s for rank in ranks for s in samples_of(read(rank, 1))]
    assert sorted(both) == sorted(samples_of(epochs[0]))
    for source in (one, two, *ranks):
        source.close()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_for_a_person_leaves_a_worker_as_it_is(num_workers: int) -> None:
    source = batches(Noisy(20, malformed=9), [4], 0, num_workers=num_workers, shuffle=False)  # type: ignore[arg-type]
    with pytest.raises(RequestError) as refusal:
        read(source, 1)
    assert str(refusal.value) == "train.tsv, line 13: the label is missing"
    source.close()


class Broken:
    """A file that cannot be read at its third sample."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int, /) -> float:
        if index == 2:
            try:
                return float("x")
            except ValueError as error:
                raise OSError(5, "Input/output error", "shard-7.bin\nand more") from error
        return 0.0


def test_an_error_of_a_loader_worker_keeps_its_message() -> None:
    messages = []
    for num_workers in (0, 1):
        with pytest.raises(OSError, match="Input/output error") as raised:
            list(DataLoader(Broken(), num_workers=num_workers))
        messages.append(error_line(raised.value))
        del raised  # its traceback has the loader, and that its process
        gc.collect()
    here, there = messages
    assert here.startswith("OSError: [Errno 5] Input/output error: 'shard-7.bin")
    assert there == f"{here} (in DataLoader worker process 0)"


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_closing_ends_the_workers() -> None:
    before = children()
    source = batches(20, [4], 0, num_workers=2)
    updates = source.updates(1)  # alive beyond the end, as after an error in the loop
    list(next(updates))
    assert len(children() - before) == 2
    source.close()
    assert children() <= before


RANK = """
import sys, time
from trainer.data.batches import EpochBatches

class Slow:
    def __len__(self): return 1000
    def __getitem__(self, index):
        if index > 20: time.sleep(600)
        return index

source = EpochBatches(Slow(), collate=list, batch_sizes=[4], rank=0, seed=1, shuffle=False, num_workers=2)
updates = source.updates(1)
list(next(updates))
import psutil
print(*(child.pid for child in psutil.Process().children()), flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="workers are bound to their rank by Linux's PDEATHSIG")
def test_workers_die_with_a_rank_that_is_killed() -> None:
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", RANK], stdout=subprocess.PIPE, text=True, cwd=root) as rank:
        assert rank.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in rank.stdout.readline().split()]
        assert len(workers) == 2
        os.kill(rank.pid, signal.SIGKILL)
        rank.wait()
        _, alive = psutil.wait_procs(workers, timeout=LIMIT_S)  # they would sleep for longer
        assert not alive
