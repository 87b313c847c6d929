"""A training's model under torch.compile: its first compilation, and those after it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from trainer import distributed
from trainer.contract.errors import MachineNotReadyError, TrainingError
from trainer.contract.options import Training
from trainer.contract.record import Doing
from trainer.data.seeds import keep_random_state
from trainer.engine import reports
from trainer.engine.ddp_model import keep_buffers, trainable, unwrap
from trainer.engine.worker_context import WorkerContext
from trainer.tasks.task import Task, summed_loss
from trainer.telemetry.torch_compile import RecompileCount

_NO_COMPILER = ("C++ compiler", "C compiler", "working triton")
"""Parts of the messages of torch and Triton where the machine lacks what they compile with."""
_SHAPES = ("size mismatch", "stride mismatch", ".size()", "rank mismatch")
"""Parts of torch's reasons to compile again where a tensor has another shape."""


class Compilation:
    """The compilations of a training; with ``--compile off`` there are none."""

    def __init__(
        self, task: Task, model: nn.Module, options: Training, ctx: WorkerContext, autocast: AbstractContextManager[Any]
    ) -> None:
        self.on = self.due = options.compile != "off"
        """Whether the model is compiled, and whether that is still to be done."""
        self._task, self._model, self._ctx, self._autocast = task, model, ctx, autocast
        self._required = options.compile == "on"
        self._count: RecompileCount | None = None
        self._reported = self._reported_end = False

    def begin(self, batch: Any, *, step: int) -> None:
        """Compile forward and backward pass with a batch, before the first step; every rank calls this.

        Nothing changes: gradients, buffers and random numbers are as before. Where a rank fails to compile, all of them
        go on without torch.compile, or end the training if it was required.

        Raises:
            MachineNotReadyError: a machine lacks a compiler.
            TrainingError: torch.compile fails for another reason.
        """
        self.due = False
        ctx = self._ctx
        ctx.writer.write(Doing(time=time.time(), rank=ctx.rank, step=step, part="compile", parts_done=2, waited_ms=0.0))
        problem = self._problem_of(batch)
        ctx.before_wait()
        problems = distributed.all_gather_list(problem)
        self._count = RecompileCount()
        rank = next((rank for rank, each in enumerate(problems) if each), None)
        if rank is None:
            return
        where = f" on rank {rank}" if ctx.world_size > 1 else ""
        failed = f"torch.compile fails{where}: {problems[rank]}"
        lacks_compiler = any(part in problems[rank] for part in _NO_COMPILER)
        advice = "install one (g++, on GPUs Triton)" if lacks_compiler else "see the rank's log"
        if self._required:
            error = MachineNotReadyError if lacks_compiler else TrainingError
            raise error(f"--compile on: {failed}: {advice}, or give --compile auto or off")
        self._count = None
        torch.compiler.set_stance("force_eager")
        reports.finding(
            ctx, "not_compiled", f"the model trains without torch.compile: {failed}", severity="warning", advice=advice
        )

    def _problem_of(self, batch: Any) -> str:
        """Compile; return why torch.compile fails, empty where it does not.

        An error that has nothing to do with it is left to the step, which raises it again.
        """
        try:
            self._pass(batch)
        except Exception as error:  # noqa: BLE001 - torch.compile is at fault if the same pass succeeds without it
            torch.compiler.set_stance("force_eager")
            with suppress(Exception):
                self._pass(batch)
                # A Ctrl-C in a terminal ends the compiler too.
                return "" if self._ctx.stop_requested() else _first_line(error)
        return ""

    def _pass(self, batch: Any) -> None:
        model = self._model.module if isinstance(self._model, DDP) else self._model
        # DDP has torch compile a graph for each bucket, so that it is reduced while the next one is computed.
        as_in_ddp = self._model._inside_ddp_forward() if isinstance(self._model, DDP) else nullcontext()
        with as_in_ddp:
            self._run(model, batch)

    def _run(self, model: nn.Module, batch: Any, before_backward: Callable[[], object] = lambda: None) -> None:
        """Run a forward and a backward pass that change nothing."""
        with keep_random_state(), keep_buffers(unwrap(self._model)):
            with self._autocast:
                loss, _, _ = summed_loss(self._task, model, batch)
            before_backward()
            torch.autograd.grad(loss, trainable(model), allow_unused=True)

    def run_uncompiled(self, batch: Any, before_backward: Callable[[], object]) -> None:
        """Run a forward and a backward pass without torch.compile that change nothing, by this rank alone.

        Raises:
            TrainingError: the model has ranks wait for each other in its forward pass.
        """
        model = unwrap(self._model)
        if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
            raise TrainingError("SyncBatchNorm waits for the other ranks")
        with torch.compiler.set_stance("force_eager"):
            self._run(model, batch, before_backward)

    def after_step(self, step: int) -> None:
        """Report once that the model is compiled again and again, and once that torch has given that up."""
        if self._count is None or not self._count.grew():
            return
        count = self._count
        # The first batch of another shape has torch compile for all sizes, and a size of 1 is a case of its own.
        many = 3
        if self._reported_end or not (count.gave_up or (count.times >= many and not self._reported)):
            return
        self._reported, self._reported_end = True, count.gave_up
        because, advice = _cause(count.reasons)
        ends = "; torch compiles no more, and runs what is new without" if count.gave_up else ""
        text = f"recompiled {count.times} times by step {step}: {because}{ends}"
        reports.finding(self._ctx, "recompiled", text, severity="warning", step=step, advice=advice)


def _cause(reasons: Sequence[str]) -> tuple[str, str]:
    """Return why the model was compiled again, by torch's reasons, and what to do about it."""
    if any(part in reason for reason in reasons for part in _SHAPES):
        return "the shapes of its batches vary", "pad samples to few lengths, give --max-tokens, or give --compile off"
    last = reasons[-1] if reasons else "torch gives no reason"
    return last, "keep what changes out of the model's forward(), or give --compile off"


def _first_line(error: BaseException) -> str:
    """Return the first line of torch's message that has a cause."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in lines if line and not line.endswith(" raised:")), type(error).__name__)
