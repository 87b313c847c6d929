"""Training loops for a built-in task as a user of DDP, accelerate or Lightning would write them; torchrun starts it.

Model, data, order of the batches, threads and optimizer settings are those of gputrain's run; all other settings are
the framework's defaults. Rank 0 prints the samples per second of all ranks after a warm-up.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from trainer.data.epoch_order import epoch_order
from trainer.tasks.registry import load_task
from trainer.tasks.task import Task

OPTIMIZERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "adadelta": torch.optim.Adadelta}


class EndlessBatches:
    """Endless batches of one rank, in the order of gputrain's loop."""

    def __init__(self, task: Task, batch_size: int, rank: int, world_size: int) -> None:
        self.dataset, self.collate = task.datasets()["train"], task.collate
        self.lengths = task.lengths("train")
        self.batch_size, self.rank, self.world_size = batch_size, rank, world_size

    def __iter__(self) -> Iterator[Any]:
        size, number = self.batch_size, 0
        while True:
            number += 1
            order = epoch_order(
                len(self.dataset),
                seed=1 + number,
                lengths=None if self.lengths is None else torch.as_tensor(self.lengths),
                chunk=0 if self.lengths is None else size,
            )
            whole = len(self.dataset) // (size * self.world_size)
            batches = torch.split(order, size)[self.rank : whole * self.world_size : self.world_size]
            yield from DataLoader(
                self.dataset, batch_sampler=[batch.tolist() for batch in batches], collate_fn=self.collate
            )


class Stopwatch:
    """Counter of steps that measures their time after the warm-up."""

    def __init__(self, warm_up: int, steps: int) -> None:
        self.warm_up, self.steps, self.done, self.since = warm_up, steps, 0, 0.0

    def step(self) -> bool:
        """Count a step; return whether it was the last."""
        self.done += 1
        if self.done == self.warm_up:
            self.since = time.perf_counter()
        return self.done == self.warm_up + self.steps

    def samples_per_s(self, samples: int) -> float:
        return self.steps * samples / (time.perf_counter() - self.since)


def mean_loss(task: Task, model: nn.Module, batch: Any) -> Tensor:
    loss, count, *_ = task.loss(model, batch)
    return loss / count


def run_ddp(task: Task, batches: EndlessBatches, optimizer: dict[str, Any], clip: float, watch: Stopwatch) -> None:
    model = DistributedDataParallel(task.model())
    optim = OPTIMIZERS[optimizer["name"]](model.parameters(), **optimizer["settings"])
    for batch in batches:
        optim.zero_grad()
        mean_loss(task, model, batch).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optim.step()
        if watch.step():
            return


def run_accelerate(
    task: Task, batches: EndlessBatches, optimizer: dict[str, Any], clip: float, watch: Stopwatch
) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net = task.model()
    optim = OPTIMIZERS[optimizer["name"]](net.parameters(), **optimizer["settings"])
    model, optim = accelerator.prepare(net, optim)
    for batch in batches:
        optim.zero_grad()
        accelerator.backward(mean_loss(task, model, batch))
        if clip:
            accelerator.clip_grad_norm_(model.parameters(), clip)
        optim.step()
        if watch.step():
            return


def run_lightning(
    task: Task, batches: EndlessBatches, optimizer: dict[str, Any], clip: float, watch: Stopwatch
) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = task.model()

        def training_step(self, batch: Any, _: int) -> Tensor:
            return mean_loss(task, self.net, batch)

        def on_train_batch_end(self, *_: Any) -> None:
            watch.step()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return OPTIMIZERS[optimizer["name"]](self.parameters(), **optimizer["settings"])

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size() if dist.is_initialized() else 2,
        strategy="ddp",
        max_steps=watch.warm_up + watch.steps,
        gradient_clip_val=clip or None,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        barebones=False,
    )

    class BatchStream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(batches)

    trainer.fit(Module(), DataLoader(BatchStream(), batch_size=None))


LOOPS = {"ddp": run_ddp, "accelerate": run_accelerate, "lightning": run_lightning}


def main() -> None:
    warnings.simplefilter("ignore")
    request = json.loads(sys.argv[2])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    torch.manual_seed(1)
    if sys.argv[1] == "ddp":
        dist.init_process_group("gloo")
    kind = load_task(request["task"])
    task = kind(kind.Options(**request["task_options"]))
    batches = EndlessBatches(task, request["batch_size"], rank, world_size)
    watch = Stopwatch(request["warm_up"], request["steps"])
    LOOPS[sys.argv[1]](task, batches, request["optimizer"], request["clip_norm"], watch)
    if rank == 0:
        print(json.dumps({"samples_per_s": watch.samples_per_s(request["batch_size"] * world_size)}), flush=True)
    dist.barrier()
    os._exit(0)  # torch's gloo may abort a process that takes its group down (pytorch issue 190489)


if __name__ == "__main__":
    main()
