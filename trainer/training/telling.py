"""What a training tells on its way, to the record and to people."""

from __future__ import annotations

import time
from typing import Any, Literal

from msgspec import structs
from torch import Tensor, nn

from trainer import record
from trainer.measure import desync
from trainer.options import Training
from trainer.training.evaluate import Evaluation
from trainer.training.surroundings import Surroundings

SAY_EVERY_S = 2.0
"""Seconds between two lines about the loss: rare enough that fetching it from a GPU costs nothing."""


def announce(
    here: Surroundings, options: Training, *, samples: int, samples_per_update: int, first_update: int, parameters: int
) -> None:
    """Record what lies ahead; rank 0 only.

    Args:
        here: whom to tell.
        options: where training ends.
        samples: of an epoch.
        samples_per_update: of all ranks.
        first_update: updates done already.
        parameters: numbers that are trained.
    """
    if here.rank != 0:
        return
    here.writer.write(
        record.TrainingPlan(
            time=time.time(),
            world_size=here.world_size,
            updates_per_epoch=-(-samples // samples_per_update),
            samples_per_epoch=samples,
            max_updates=options.max_updates,
            max_epochs=options.max_epochs,
            first_update=first_update,
            parameters=parameters,
        )
    )


def report(here: Surroundings, split: Any, result: Evaluation, *, step: int, epoch: int) -> None:
    """Tell the result of an evaluation; rank 0 only."""
    if here.rank != 0:
        return
    here.writer.write(
        record.Validation(
            time=time.time(), step=step, epoch=epoch, split=split, loss=result.loss, metrics=result.metrics
        )
    )
    metrics = "".join(f", {name} {value:.4f}" for name, value in result.metrics.items())
    here.say(f"{split} at step {step}: loss {result.loss:.4f} nats{metrics}")


def show(here: Surroundings, text: str, *, step: int) -> None:
    """Tell a sample of what the model makes."""
    here.writer.write(record.Sample(time=time.time(), step=step, text=text))
    here.say(text)


def remark(
    here: Surroundings, kind: str, text: str, *, severity: Literal["info", "warning"] = "info", advice: str = ""
) -> None:
    """Tell what a person did not expect of a training that goes on; rank 0 only, nothing for an empty text."""
    if here.rank != 0 or not text:
        return
    text = text.encode(errors="backslashreplace").decode()  # it may hold a path
    here.say(text)
    here.writer.write(
        record.Finding(time=time.time(), kind=kind, severity=severity, rank=0, message=text, advice=advice)
    )


class Replicas:
    """Records whether all ranks hold the same model: each difference once, and when it is over."""

    def __init__(self, here: Surroundings, model: nn.Module) -> None:
        self._here = here
        self._replica = desync.Replica(model)
        self._pending: desync.Check | None = None
        self._told: dict[str | None, record.Finding] = {}
        """By what differs; on the rank that tells it."""

    def begin(self, *, step: int) -> None:
        """Begin to compare the parameters of all ranks; all of them call this after the same step."""
        self._pending = desync.Check(self._replica, step=step, rank=self._here.rank, device=self._here.device)
        self._here.writer.write(self._pending.checksum)

    def finish(self) -> None:
        """Tell what was found, if something was begun; all ranks call this at the same place too."""
        if self._pending is None:
            return
        writer, step = self._here.writer, self._pending.checksum.step
        found = {finding.cause: finding for finding in self._pending.findings()}
        self._pending = None
        for what, finding in self._told.items():
            if what not in found or found[what].rank != finding.rank:
                writer.write(structs.replace(finding, time=time.time(), state="cleared", step=step))
        for what, finding in found.items():
            if what not in self._told or self._told[what].message != finding.message:
                writer.write(finding)
        self._told = found


class Progress:
    """Says now and then where training is."""

    def __init__(self, here: Surroundings) -> None:
        self._here = here
        self._last = 0.0

    def __call__(self, *, epoch: int, step: int, loss: Tensor | float | None, lr: float) -> None:
        """Say it if the last time is long ago; the loss [] is in nats and is fetched only then."""
        now = time.monotonic()
        if loss is None or now - self._last < SAY_EVERY_S:
            return
        self._last = now
        self._here.say(f"epoch {epoch} step {step}: loss {float(loss):.4f} nats, lr {lr:.3g}")
