"""Steps per second of the training loop, with recording, compared with a bare DDP loop.

Both train in the same two processes and alternate: the training loop runs a block of steps, and within its next call of
the task's loss the bare loop runs as many steps on the same batches. A machine that becomes slower slows both, and the
training loop is the real one from its first step to its last.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from bare_loop import BareLoop, endless
from rank_group import Gang
from torch import Tensor, nn
from worker_contexts import worker_context

from trainer.contract.options import Training
from trainer.contract.record import EventWriter
from trainer.data.epoch_order import epoch_order
from trainer.engine.loop import Loop
from trainer.engine.optimizers import build_optimizer
from trainer.tasks.registry import load_task
from trainer.tasks.task import Task

pytestmark = pytest.mark.benchmark

MIN_RATIO = 0.97
"""Minimum speed of the training loop over that of the bare loop."""
WARM_UP = 20
"""Steps of each loop before the first measured block."""
SST2 = Path(__file__).parents[3] / "shared/data/sst2/train.tsv"


@pytest.fixture(scope="module")
def gang() -> Iterator[Gang]:
    gang = Gang(2)
    yield gang
    gang.close()


@dataclass
class Times:
    """Seconds per step of the blocks, in order."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    """CPU time of the whole process, including the threads of gloo and of the record."""

    def add(self, since: tuple[float, float], steps: int) -> None:
        wall, cpu = now()
        self.wall.append((wall - since[0]) / steps)
        self.cpu.append((cpu - since[1]) / steps)


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


class Turns:
    """Alternation of the loops: the bare loop runs while the training loop is inside the task's loss."""

    def __init__(self, bare: BareLoop, block: int) -> None:
        self.bare = bare
        self.block = block
        self.calls = 0
        self.bare_times, self.our_times = Times(), Times()
        self._ours_since: tuple[float, float] | None = None

    def take(self) -> None:
        """Run the bare loop at the end of a block; called at the start of each step of the training loop."""
        self.calls += 1
        if self.calls == 1:
            self.bare.run(WARM_UP)
        if self.calls <= WARM_UP or (self.calls - WARM_UP - 1) % self.block:
            return
        if self._ours_since is not None:
            self.our_times.add(self._ours_since, self.block)
        dist.barrier()
        since = now()
        self.bare.run(self.block)
        self.bare_times.add(since, self.block)
        dist.barrier()
        self._ours_since = now()

    def ratios(self) -> dict[str, list[float]]:
        """Return bare time over loop time for each block; the bare time is the mean of the blocks before and after."""
        return {
            kind: [(before + after) / 2 / ours for before, after, ours in zip(bare, bare[1:], mine, strict=False)]
            for kind, bare, mine in (
                ("wall", self.bare_times.wall, self.our_times.wall),
                ("cpu", self.bare_times.cpu, self.our_times.cpu),
            )
        }


def docnn_loss(model: nn.Module, batch: Any) -> Tensor:
    words, classes = batch
    return F.cross_entropy(model(words), classes)


def lm_loss(model: nn.Module, batch: Any) -> Tensor:
    text = batch.long()
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


LOSSES = {"docnn": docnn_loss, "lm": lm_loss}


def compare(
    rank: int,
    world_size: int,
    options: Training,
    task_options: dict[str, Any],
    block: int,
    blocks: int,
    record: str,
) -> tuple[float, dict[str, list[float]]]:
    """Train on one rank; return the bare loop's milliseconds per step, and the ratios of speed."""
    kind = load_task(options.task)
    turns: list[Turns] = []

    class TakingTurns(kind):  # type: ignore[misc, valid-type]
        def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | int, Mapping[str, Tensor]]:
            if turns:
                turns[0].take()
            found: tuple[Tensor, Tensor | int, Mapping[str, Tensor]] = super().loss(model, batch)
            return found

    task: Task = TakingTurns(kind.Options(**task_options))
    writer = EventWriter(Path(record) / f"{rank}.ndjson", rank=rank)
    loop = Loop(
        task,
        options,
        worker_context(rank, world_size, writer=writer),
    )
    dataset = loop.data.splits["train"]
    lengths = task.lengths("train")
    (batch_size,) = options.batch_size

    def epoch(number: int) -> list[list[int]]:
        order = epoch_order(
            len(dataset),
            seed=options.seed + number,
            shuffle=True,
            lengths=None if lengths is None else torch.as_tensor(lengths),
            chunk=0 if lengths is None else batch_size,
        )
        indices = torch.split(torch.as_tensor(order), batch_size)
        whole = len(dataset) // (batch_size * world_size)
        return [part.tolist() for part in indices[rank : whole * world_size : world_size]]

    net = task.model()
    net.load_state_dict(loop.raw_model.state_dict())
    turns.append(
        Turns(
            BareLoop(
                net,
                lambda parameters: build_optimizer(options, parameters),
                endless(dataset, task.collate, epoch),
                LOSSES[options.task],
                clip_norm=options.clip_norm,
            ),
            block,
        )
    )
    loop.run()
    writer.close()
    assert len(turns[0].our_times.wall) == blocks
    return statistics.median(turns[0].bare_times.wall) * 1e3, turns[0].ratios()


def write_rows(path: Path) -> Path:
    """Write a file with as many sentences as SST-2, of similar lengths."""
    generator = torch.Generator().manual_seed(1)
    with path.open("w") as file:
        for row in range(6920):
            length = int(torch.randint(2, 37, (), generator=generator))
            words = (torch.rand(length, generator=generator).square() * 13_000).long().tolist()
            file.write(" ".join(f"w{word}" for word in words) + f"\t{row % 2}\n")
    return path


@pytest.mark.parametrize(("task", "block", "blocks"), [("docnn", 8, 30), ("lm", 5, 20)])
def test_our_loop_is_as_fast_as_a_bare_one(gang: Gang, tmp_path: Path, task: str, block: int, blocks: int) -> None:
    # Settings and shapes are those of the recipes.
    if task == "docnn":
        rows = SST2 if SST2.exists() else write_rows(tmp_path / "rows.tsv")
        task_options: dict[str, Any] = {"train_path": str(rows), "dropout": 0.4}
        options: dict[str, Any] = {"optimizer": "adam", "lr": (0.001,), "weight_decay": 1e-5}
    else:
        text = tmp_path / "text.txt"
        text.write_text("".join(f"{n} green bottles hang on the wall, {n} green bottles.\n" for n in range(20_000)))
        task_options = {"data": str(text), "valid_fraction": 0.0, "context": 64, "dim": 128, "layers": 3, "heads": 4}
        options = {"optimizer": "adamw", "lr": (0.001,), "weight_decay": 0.01, "clip_norm": 1.0}
    training = Training(
        task=task, batch_size=(16,), max_updates=WARM_UP + block * blocks + 1, valid_every_epochs=0, **options
    )
    results = gang.run(compare, training, task_options, block, blocks, str(tmp_path))
    for rank, (step_ms, ratios) in enumerate(results):
        medians = ", ".join(f"{kind} {statistics.median(values):.4f}" for kind, values in ratios.items())
        print(f"\n{task} rank {rank}: {step_ms:.1f} ms a step by hand; our speed over it, {blocks} blocks: {medians}")
    assert statistics.median(results[0][1]["wall"]) >= MIN_RATIO
