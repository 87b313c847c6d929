"""Measure a training script that has its own loop.

    from trainer.watch import watch
    with watch(model, optimizer) as watched:
        for batch in watched.batches(loader): ...      # instead of: for batch in loader

A step ends with the optimizer's step, hooks of the model mark the forward pass, and the time between the two is the
backward pass. Without a run directory in the environment no hook is registered and ``batches`` returns the loader.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.agent.exception_failure import failure_of
from trainer.agent.script_environment import RANK_PID, RUN_DIR
from trainer.contract.record import Checksum, EventWriter, RankState, RankStateName, RunDir
from trainer.distributed.host_copies import HostCopy, NumbersHere, begin_copy, host_copies
from trainer.telemetry.desync import ReplicatedTensors
from trainer.telemetry.step_meter import Phase, StepMeter, ddp_of

Batch = TypeVar("Batch")


def watch(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    detail_every: int = 32,
    checksum_every: int = 100,
    first_step: int = 0,
    environ: Mapping[str, str] = os.environ,
) -> Watched:
    """Record the training of ``model`` until the ``with`` block ends.

    Works under torchrun, under ``mp.spawn`` and in one process. Call it after the process group is initialised, the
    model is wrapped and any comm hook of the script's own is registered.

    Args:
        model: The model whose forward is called: wrapped in DistributedDataParallel, or alone.
        optimizer: The optimizer whose step ends a training step.
        detail_every: Measure each gradient bucket and the local gradient norm every so many steps, by a comm hook;
            0 installs no hook, and then a GPU's synchronisation is not measured.
        checksum_every: Record a checksum of the parameters every so many steps, for readers to compare; 0: never.
            No collective is added to the script. Without DDP over all ranks none is recorded.
        first_step: Steps done before this start, when the script resumes.
        environ: Environment with ``GPUTRAIN_RUN_DIR``, and ``RANK`` and ``LOCAL_RANK`` without a process group.
    """
    run_dir = environ.get(RUN_DIR)
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else int(environ.get("RANK", "0"))
    writer = EventWriter(None)
    if run_dir:
        try:
            writer = EventWriter(RunDir(run_dir).rank_events(rank), rank=rank)
        except OSError as error:
            print(f"gputrain: not recording, {RUN_DIR}={run_dir}: {error.strerror}", file=sys.stderr)
    return Watched(
        model,
        optimizer,
        writer=writer,
        rank=rank,
        local_rank=int(environ["LOCAL_RANK"]) if environ.get("LOCAL_RANK", "").isdigit() else None,
        detail_every=detail_every,
        checksum_every=checksum_every,
        first_step=first_step,
        launched=environ.get(RANK_PID) == str(os.getpid()),
    )


class Watched:
    """Recorder of a script's training; created by ``watch``."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        writer: EventWriter,
        rank: int,
        local_rank: int | None,
        detail_every: int,
        checksum_every: int,
        first_step: int,
        launched: bool = False,
    ) -> None:
        self.step = first_step
        """Optimizer steps done."""
        self.epoch = 0
        """Epoch, from 1, counted by ``batches``."""
        self._model = model
        self._optimizer = optimizer
        self._writer = writer
        self._rank = rank
        self._local_rank = local_rank
        self._checksum_every = checksum_every if _is_replicated(model) else 0
        ddp = ddp_of(model)
        self._replica = ReplicatedTensors(model if ddp is None else ddp.module)
        parameter = next(model.parameters(), None)
        self._device = parameter.device if parameter is not None else torch.device("cpu")
        self._meter = StepMeter(model, device=self._device, writer=writer, rank=rank, detail_every=detail_every)
        self._handles: list[Any] = []
        self._checksums: tuple[int, float, HostCopy | NumbersHere] | None = None
        """Step and time of a checksum, and the checksum on its way to the host."""
        self._open_phase: Phase = "other"
        """Phase of the time since the last mark."""
        self._evaluated = False
        self._samples = 0
        self._loss: Tensor | float | None = None
        self._tokens: int | None = None
        self._records_states = not launched
        """Whether to record the rank's states and its failure, which a node agent would otherwise."""

    def __enter__(self) -> Watched:
        if self._writer.enabled:
            model, optimizer = self._model, self._optimizer
            self._handles = [
                model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
                model.register_forward_hook(self._after_forward),
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
            ]
            self._set_state("training")
            self._meter.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._writer.enabled:
            return
        for handle in self._handles:
            handle.remove()
        if error is None:
            self._write_checksum()
        self._meter.close()
        ended_well = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
        if error is not None and not ended_well and self._records_states:
            failure = failure_of(error, kind="exception", rank=self._rank, host=socket.gethostname(), step=self.step)
            self._set_state("failed", message=failure.message)
            self._writer.write(failure)
        else:
            self._set_state("finished")
        self._writer.close()

    def batches(self, loader: Iterable[Batch]) -> Iterable[Batch]:
        """Return the loader with the wait for each batch timed; each iteration over it is an epoch."""
        return _TimedLoader(self, loader) if self._writer.enabled else loader

    def report(self, *, loss: Tensor | float | None = None, tokens: int | None = None) -> None:
        """Set the loss in nats, or the tokens, of the step; call it before the optimizer's step."""
        self._loss = loss
        self._tokens = tokens

    # --------------------------------------------------------------------------------------------- hooks

    def _mark(self, phase: Phase | None = None) -> None:
        """Count the time since the last mark to ``phase``, or else to the open phase."""
        if self._evaluated:  # an evaluation between two steps counts to neither
            self._evaluated = False
            self._meter.start()
        else:
            self._meter.lap(phase or self._open_phase)
        self._open_phase = "other"

    def _before_forward(self, model: nn.Module, arguments: Any, named: Any) -> None:
        if not (model.training and torch.is_grad_enabled()):
            self._evaluated = True
            return
        self._mark()
        self._samples += _batch_size(arguments, named)

    def _after_forward(self, model: nn.Module, arguments: Any, output: Any) -> None:
        if model.training and torch.is_grad_enabled():
            self._mark("forward")
            self._open_phase = "backward"

    def _before_step(self, optimizer: Optimizer, arguments: Any, named: Any) -> None:
        self._mark()

    def _after_step(self, optimizer: Optimizer, arguments: Any, named: Any) -> None:
        self._mark("optimizer")
        self.step += 1
        lr = optimizer.param_groups[0]["lr"]
        self._meter.end(
            step=self.step,
            epoch=max(1, self.epoch),
            loss=self._loss,
            samples=self._samples,
            tokens=self._tokens,
            lr=None if isinstance(lr, Tensor) and lr.device.type != "cpu" else float(lr),
        )
        self._samples, self._loss, self._tokens = 0, None, None
        self._write_checksum()
        if self._checksum_every and self.step % self._checksum_every == 0:
            copy = begin_copy(self._replica.checksums(), host_copies(self._device))
            self._checksums = self.step, time.time(), copy
            self._meter.start()

    def _write_checksum(self) -> None:
        """Write the checksum that was begun after an earlier step."""
        if self._checksums is None:
            return
        step, at, copy = self._checksums
        self._checksums = None
        parameters, buffers = self._replica.fingerprint(copy.numbers()).texts
        self._writer.write(Checksum(time=at, rank=self._rank, step=step, parameters=parameters, buffers=buffers))

    def _set_state(self, state: RankStateName, message: str | None = None) -> None:
        if not self._records_states:
            return
        self._writer.write(
            RankState(
                time=time.time(),
                rank=self._rank,
                state=state,
                local_rank=self._local_rank,
                host=socket.gethostname(),
                device=str(self._device),
                pid=os.getpid(),
                message=message,
            )
        )


class _TimedLoader(Iterable[Batch]):
    """Data loader whose waits are timed."""

    def __init__(self, watched: Watched, loader: Iterable[Batch]) -> None:
        self._watched = watched
        self._loader = loader

    def __iter__(self) -> Iterator[Batch]:
        watched = self._watched
        watched.epoch += 1
        watched._mark()
        for batch in self._loader:
            watched._mark("data")
            yield batch
            watched._mark()

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # like the loader's: a TypeError where it has none


def _is_replicated(model: nn.Module) -> bool:
    """Return whether all ranks should hold equal parameters."""
    if not (dist.is_available() and dist.is_initialized()):
        return True
    ddp = ddp_of(model)
    holders = 1 if ddp is None else dist.get_world_size(ddp.process_group)
    return holders == dist.get_world_size()


def _batch_size(arguments: tuple[Any, ...], named: Mapping[str, Any]) -> int:
    """Return the first dimension of the first tensor argument of the model."""
    for value in (*arguments, *named.values()):
        if isinstance(value, Tensor) and value.dim():
            return value.shape[0]
    return 0
