"""Reports of a training's progress: events in the record, and lines for the user."""

from __future__ import annotations

import time
from typing import Any, Literal

import torch
from msgspec import structs
from torch import Tensor, nn

from trainer.contract import record
from trainer.contract.options import Training
from trainer.distributed.host_copies import HostCopy, begin_copy, host_copies
from trainer.engine.end_conditions import Best
from trainer.engine.evaluation import Evaluation
from trainer.engine.worker_context import WorkerContext
from trainer.telemetry import desync

REPORT_EVERY_S = 2.0


def announce(
    ctx: WorkerContext,
    options: Training,
    *,
    samples: int,
    updates_per_epoch: int,
    first_update: int,
    last_update: int,
    parameters: int,
    best: Best,
) -> None:
    """Record the training plan; rank 0 only."""
    if ctx.rank != 0:
        return
    ctx.writer.write(
        record.TrainingPlan(
            time=time.time(),
            world_size=ctx.world_size,
            updates_per_epoch=updates_per_epoch,
            samples_per_epoch=samples,
            max_updates=options.max_updates,
            max_epochs=options.max_epochs,
            first_update=first_update,
            last_update=last_update,
            parameters=parameters,
            loss_unit=ctx.loss_unit,
            best_metric=best.metric,
            best_is_highest=best.maximize,
            best_value=best.value,
            best_step=best.step,
            tf32=ctx.tf32,
        )
    )


def report_validation(
    ctx: WorkerContext, split: Any, result: Evaluation, *, step: int, epoch: int, weights_step: int | None = None
) -> None:
    """Report the result of an evaluation; rank 0 only."""
    if ctx.rank != 0:
        return
    ctx.writer.write(
        record.Validation(
            time=time.time(),
            step=step,
            epoch=epoch,
            split=split,
            loss=result.loss,
            metrics=result.metrics,
            weights_step=weights_step,
        )
    )
    metrics = "".join(f", {name} {value:.4f}" for name, value in result.metrics.items())
    which = f"at step {step}" if weights_step is None else f"(weights of step {weights_step})"
    unit = f" {ctx.loss_unit}" if ctx.loss_unit else ""
    ctx.print_line(f"{split} {which}: loss {result.loss:.4f}{unit}{metrics}")


def non_finite_validation(
    ctx: WorkerContext, raised: record.Finding | None, result: Evaluation, *, step: int
) -> record.Finding | None:
    """Raise a finding about a result that is NaN or infinite once, and clear it at a finite one; return it if raised.

    Rank 0 only.
    """
    if ctx.rank != 0 or bool(result.non_finite) == (raised is not None):
        return raised
    if raised is not None:
        ctx.writer.write(structs.replace(raised, time=time.time(), state="cleared", step=step))
        return None
    raised = record.Finding(
        time=time.time(),
        kind="non_finite_validation",
        severity="critical",
        step=step,
        message=f"no validation has had finite results since step {step}: valid {result.non_finite}",
        advice=ctx.in_recipe_terms(
            "look in that data for a number that is not finite, and in the task for a division by 0 or a logarithm "
            "of 0; such a validation is neither better nor worse for --best-metric and --patience"
        ),
    )
    ctx.writer.write(raised)
    ctx.print_line(f"{raised.message}; {raised.advice}")
    return raised


def report_sample(ctx: WorkerContext, text: str, *, step: int) -> None:
    """Report a sample of the model's output."""
    ctx.writer.write(record.Sample(time=time.time(), step=step, text=text))
    ctx.print_line(text)


def finding(
    ctx: WorkerContext,
    kind: str,
    text: str,
    *,
    severity: Literal["info", "warning", "critical"] = "info",
    rank: int | None = None,
    step: int | None = None,
    advice: str = "",
) -> None:
    """Report a finding about the run, or about a ``rank``, that does not end the training; nothing for an empty text.

    Rank 0 writes it for all.
    """
    if ctx.rank != 0 or not text:
        return
    text = ctx.in_recipe_terms(text.encode(errors="backslashreplace").decode())  # it may hold a path
    advice = ctx.in_recipe_terms(advice)
    ctx.print_line(text)
    ctx.writer.write(
        record.Finding(
            time=time.time(), kind=kind, severity=severity, rank=rank, step=step, message=text, advice=advice
        )
    )


class DesyncReports:
    """Reports of differences between the models of the ranks: each once, and its end."""

    def __init__(self, ctx: WorkerContext, model: nn.Module) -> None:
        self._ctx = ctx
        self._replica = desync.ReplicatedTensors(model)
        self._pending: desync.DesyncCheck | None = None
        self._reported: dict[str | None, record.Finding] = {}
        """Unresolved findings by cause; only rank 0 has any."""

    def begin(self, *, step: int) -> None:
        ctx = self._ctx
        self._pending = desync.DesyncCheck(
            self._replica, step=step, rank=ctx.rank, device=ctx.device, copies=ctx.copies
        )

    @property
    def unresolved(self) -> str:
        """Message about parameters that differ now; empty without one, and on ranks other than 0."""
        return next((finding.message for finding in self._reported.values() if finding.severity == "critical"), "")

    def finish(self) -> None:
        """Report the result of a check, if one was started; all ranks call this after the same step."""
        if self._pending is None:
            return
        writer, step = self._ctx.writer, self._pending.step
        checksum, findings = self._pending.result()
        writer.write(checksum)
        current = {finding.cause: finding for finding in findings}
        self._pending = None
        for cause, finding in self._reported.items():
            if cause not in current or current[cause].rank != finding.rank:
                writer.write(structs.replace(finding, time=time.time(), state="cleared", step=step))
                self._ctx.print_line(f"desync is over at step {step}: {finding.message}")
        for cause, finding in current.items():
            if cause not in self._reported or self._reported[cause].message != finding.message:
                writer.write(finding)
                self._ctx.print_line(f"desync at step {step}: {finding.message}; {finding.advice}")
        self._reported = current


class Progress:
    """Progress line with epoch, step, loss and learning rate, printed at intervals."""

    def __init__(self, ctx: WorkerContext, *, every: int = 0) -> None:
        self._ctx = ctx
        self._unit = f" {ctx.loss_unit}" if ctx.loss_unit else ""
        self._every = every
        self._last = 0.0
        self._pending: tuple[str, str, HostCopy] | None = None
        """Text before the loss and after it, and the loss on its way to the host."""

    def __call__(self, *, epoch: int, step: int, loss: Tensor | float | None, lr: float) -> None:
        """Print a line if one is due, as soon as its loss [] is on the host; rank 0 only."""
        now, ctx = time.monotonic(), self._ctx
        due = step % self._every == 0 if self._every else now - self._last >= REPORT_EVERY_S
        if ctx.rank == 0 and self._pending is None and loss is not None and due:
            self._last = now
            value = loss if isinstance(loss, Tensor) else torch.tensor(loss, dtype=torch.float64)
            copies = ctx.copies or host_copies(value.device)
            self._pending = f"epoch {epoch} step {step}: loss", f"{self._unit}, lr {lr:.3g}", begin_copy(value, copies)
        if self._pending is not None and self._pending[2].arrived():
            before, after, copy = self._pending
            self._pending = None
            ctx.print_line(f"{before} {copy.numbers()[0]:.4f}{after}")
