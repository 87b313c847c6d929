"""Steps per second of the training loop, with recording, compared with a bare DDP loop.

Both train in the same two processes and alternate: the training loop runs a block of steps, and within its next call of
the task's loss the bare loop runs as many steps on the same batches. A machine that becomes slower slows both, and the
training loop is the real one from its first step to its last.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
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
from torch.utils.data import Dataset
from worker_contexts import worker_context

from trainer.contract.options import Training
from trainer.contract.record import EventWriter
from trainer.data.epoch_order import epoch_order
from trainer.engine.loop import Loop
from trainer.engine.optimizers import build_optimizer
from trainer.host.memory import keep_freed_memory
from trainer.tasks.registry import load_task
from trainer.tasks.task import Task

pytestmark = pytest.mark.benchmark

WARM_UP = 20
"""Steps of each loop before the first measured block."""
DATA = Path(__file__).parents[3] / "shared/data"
MLP = f"{Path(__file__)}:Mlp"


@pytest.fixture(scope="module", params=[1, 2], ids=["1_rank", "2_ranks"])
def gang(request: pytest.FixtureRequest) -> Iterator[Gang]:
    gang = Gang(request.param)
    yield gang
    gang.close()


class Points(Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((32,), index / 4096), index % 10


class Mlp(Task):
    """Model whose step takes a fraction of a millisecond."""

    count_per_sample = 1

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))

    def datasets(self) -> dict[str, Dataset[tuple[Tensor, int]]]:
        return {"train": Points()}

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | int]:
        inputs, classes = batch
        return F.cross_entropy(model(inputs), classes, reduction="sum"), len(classes)


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


def classification_loss(model: nn.Module, batch: Any) -> Tensor:
    inputs, classes = batch
    return F.cross_entropy(model(inputs), classes)


def lm_loss(model: nn.Module, batch: Any) -> Tensor:
    text = batch.long()
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def task_loss(name: str, kind: type[Task], task: Task) -> Callable[[nn.Module, Any], Tensor]:
    """Return the loss as one would write it by hand; that of masked_lm, whose masks are long, is the task's own."""

    def mean(model: nn.Module, batch: Any) -> Tensor:
        loss, count, *_ = kind.loss(task, model, batch)  # not TakingTurns.loss
        return loss / count

    return {"docnn": classification_loss, MLP: classification_loss, "lm": lm_loss}.get(name, mean)


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
    keep_freed_memory()  # as every rank does, here for both loops
    kind = load_task(options.task)
    turns: list[Turns] = []

    class TakingTurns(kind):  # type: ignore[misc, valid-type]
        def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | int, Mapping[str, Tensor]]:
            if turns and torch.is_grad_enabled():
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
            lengths=None if lengths is None else torch.as_tensor(lengths),
            chunk=0 if lengths is None else batch_size,
        )
        indices = torch.split(order, batch_size)
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
                task_loss(options.task, kind, task),
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


def settings(task: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the task's options and the training's: shapes and settings of the recipes."""
    adam = {"optimizer": "adam", "lr": (0.001,), "weight_decay": 1e-5}
    adamw = {"optimizer": "adamw", "lr": (0.001,), "weight_decay": 0.01, "clip_norm": 1.0}
    match task:
        case "docnn":
            sst2 = DATA / "sst2/train.tsv"
            rows = sst2 if sst2.exists() else write_rows(folder / "rows.tsv")
            return {"train_path": str(rows), "dropout": 0.4}, adam
        case "lm":
            text = folder / "text.txt"
            text.write_text("".join(f"{n} green bottles hang on the wall, {n} green bottles.\n" for n in range(20_000)))
            return {"data": str(text), "valid_fraction": 0.0, "context": 64, "dim": 128, "layers": 3, "heads": 4}, adamw
        case "masked_lm":
            return {"data": "stdlib", "vocab_size": 4096, "preset": "tiny", "sequence_length": 128}, adamw
        case "mnist":
            if not DATA.exists():
                pytest.skip("needs the data sets")
            return {"data": str(DATA / "mnist")}, {"optimizer": "adadelta", "lr": (1.01,), "clip_norm": 100.0}
        case _:
            return {}, adam


@pytest.mark.parametrize(
    ("task", "block", "blocks", "min_ratio"),
    [
        ("docnn", 8, 30, 0.97),
        ("lm", 5, 20, 0.97),
        ("masked_lm", 4, 15, 0.97),
        ("mnist", 4, 15, 0.97),
        (MLP, 200, 30, 0.85),
    ],
    ids=["docnn", "lm", "masked_lm", "mnist", "mlp"],
)
def test_our_loop_is_as_fast_as_a_bare_one(
    gang: Gang, tmp_path: Path, task: str, block: int, blocks: int, min_ratio: float
) -> None:
    task_options, options = settings(task, tmp_path)
    training = Training(
        task=task, batch_size=(16,), max_updates=WARM_UP + block * blocks + 1, valid_every_epochs=0, **options
    )
    results = gang.run(compare, training, task_options, block, blocks, str(tmp_path))
    for rank, (step_ms, ratios) in enumerate(results):
        quartiles = {kind: statistics.quantiles(values, n=4) for kind, values in ratios.items()}
        shown = ", ".join(
            f"{kind} {middle:.3f} ({low:.3f} to {high:.3f})" for kind, (low, middle, high) in quartiles.items()
        )
        print(f"\n{task} rank {rank} of {len(results)}: {step_ms:.2f} ms a step by hand; our speed over it: {shown}")
    assert statistics.median(results[0][1]["wall"]) >= min_ratio
