"""Measure a training script that has its own loop.

    from trainer.watch import watch
    with watch(model, optimizer) as watched:
        for batch in watched.batches(loader): ...      # instead of: for batch in loader

A step ends with the optimizer's step, hooks of the model mark the forward pass, and the time between the two is the
backward pass. Without a run directory in the environment no hook is registered and ``batches`` returns the loader
unchanged.
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

from trainer.agent import end_signal
from trainer.agent.rank_failure import failure_of
from trainer.agent.script_environment import RANK_PID, RUN_DIR
from trainer.contract.record import EventWriter, RankState, RankStateName, RunDir
from trainer.engine.script_shares import ScriptShares
from trainer.telemetry import instrument
from trainer.telemetry.comm_hook import ddp_of
from trainer.telemetry.instrument.fetched_batches import plus, size_of
from trainer.telemetry.instrument.not_measured import not_measured, print_line
from trainer.telemetry.own_metrics import OWN
from trainer.telemetry.step_tracker import StepTracker

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
    model is wrapped and any comm hook of the script is registered. The automatic measurement of scripts ends with this
    call, so that no step counts twice.

    Args:
        model: The model whose forward is called: wrapped in DistributedDataParallel, or alone.
        optimizer: The optimizer whose step ends a training step. One that is no ``torch.optim.Optimizer`` is used as
            without ``watch``; that its steps are not measured is said once, on standard error and in the record.
        detail_every: Steps between two measurements of each gradient bucket and the local gradient norm, by a comm
            hook; 0 installs no hook, and then a GPU's synchronisation is not measured.
        checksum_every: Steps between two checksums of the parameters, which readers of the record compare; 0: none.
            No collective is added to the script. Without DDP over all ranks none is recorded.
        first_step: Steps done before the script was resumed.
        environ: Environment with ``GPUTRAIN_RUN_DIR``, and ``RANK`` and ``LOCAL_RANK`` without a process group.
    """
    run_dir = environ.get(RUN_DIR)
    if run_dir:
        steps_before = instrument.hand_over()
        first_step = first_step or steps_before
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else int(environ.get("RANK", "0"))
    local_rank = environ.get("LOCAL_RANK", "")
    writer = EventWriter(None)
    if run_dir:
        try:
            writer = EventWriter(RunDir(run_dir).rank_events(rank), rank=rank)
            end_signal.write_before_end(writer.write_now)
        except OSError as error:
            print(f"gputrain: not recording, {RUN_DIR}={run_dir}: {error.strerror}", file=sys.stderr)
    parameter = next(model.parameters(), None)
    tracker = StepTracker(
        writer,
        rank=rank,
        device=parameter.device if parameter is not None else torch.device("cpu"),
        model=model,
        detail_every=detail_every,
        checksum_every=checksum_every,
        first_step=first_step,
    )
    return Watched(
        model,
        optimizer,
        tracker,
        writer,
        rank=rank,
        local_rank=int(local_rank) if local_rank.isdigit() else None,
        launched=environ.get(RANK_PID) == str(os.getpid()),
    )


class Watched:
    """Recorder of a script's training; created by ``watch``."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        tracker: StepTracker,
        writer: EventWriter,
        *,
        rank: int,
        local_rank: int | None,
        launched: bool,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._tracker = tracker
        self._writer = writer
        self._rank = rank
        self._local_rank = local_rank
        self._handles: list[Any] = []
        self._shares: ScriptShares | None = None
        self._records_states = not launched
        """Whether to record the rank's states and its failure; if launched by a node agent, the agent does."""

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self._tracker.step

    @property
    def epoch(self) -> int:
        """Epoch, from 1, counted by ``batches``."""
        return self._tracker.epoch

    def __enter__(self) -> Watched:
        if self._writer.enabled:
            model, optimizer = self._model, self._optimizer
            self._set_state("training")
            try:
                self._handles = [
                    optimizer.register_step_pre_hook(self._before_step),
                    optimizer.register_step_post_hook(self._after_step),
                    model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
                    model.register_forward_hook(self._after_forward),
                ]
            except AttributeError:
                self._report_unmeasured()
                return self
            collectives, tracker = instrument.collective_meter(), self._tracker
            if not collectives.on:  # else another ``watch`` follows them
                tracker.meter.follow_collectives(collectives, lambda: tracker.open_phase == "backward")
            tracker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._writer.enabled:
            return
        for handle in self._handles:
            handle.remove()
        if error is None:
            self._tracker.check_last_step()
            self._tracker.write_checksum()
        self._tracker.report_unseen(loss="none was given to watched.report (loss=…, before the optimizer's step)")
        self._tracker.meter.close()
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
        return _TimedLoader(self._tracker, loader) if self._handles else loader

    def shares(self, global_batch_size: int) -> tuple[int, ...]:
        """Return how many samples of a global batch each rank is to take, in proportion to the measured speeds.

        A collective: all ranks call it at the same place, between two steps, now and then. They are equal until each
        rank has measured eight steps since the last call, and stay so without a run directory; they change only if
        the slowest rank then computes 5 % faster.

        Args:
            global_batch_size: Samples of all ranks together, at least one per rank.

        Raises:
            ValueError: there are fewer samples than ranks, or the ranks give different numbers.
        """
        if self._shares is None:
            self._shares = ScriptShares(self._tracker, self._writer)
        return self._shares.next(global_batch_size)

    def report(
        self, *, loss: Tensor | float | None = None, tokens: int | None = None, **metrics: Tensor | float
    ) -> None:
        """Set loss and tokens of the step, and any other numbers by name; call it before the optimizer's step.

        Without a loss and tokens only the other numbers are set. Tensors of one number are read without waiting for a
        GPU.
        """
        if loss is not None or tokens is not None or not metrics:
            self._tracker.loss = loss
            self._tracker.tokens = tokens
        if metrics and self._writer.enabled:
            OWN.add(metrics, step=self.step + 1)

    # --------------------------------------------------------------------------------------------- hooks

    def _before_forward(self, model: nn.Module, arguments: Any, named: Any) -> None:
        if not (model.training and torch.is_grad_enabled()):
            self._tracker.mark_evaluation()
            return
        self._tracker.mark(then="forward")
        samples, _ = size_of([arguments, named])
        self._tracker.samples, _ = plus((self._tracker.samples, None), (samples, None))

    def _after_forward(self, model: nn.Module, arguments: Any, output: Any) -> None:
        if model.training and torch.is_grad_enabled():
            self._tracker.mark("forward", then="backward", trained=True)
            ddp = ddp_of(model)
            self._tracker.synchronises |= ddp is not None and bool(ddp.require_backward_grad_sync)

    def _before_step(self, optimizer: Optimizer, arguments: Any, named: Any) -> None:
        self._tracker.mark(then="optimizer")
        self._tracker.stepping = True

    def _after_step(self, optimizer: Optimizer, arguments: Any, named: Any) -> None:
        self._tracker.stepping = False
        self._tracker.mark("optimizer")
        self._tracker.end(optimizer)

    def _report_unmeasured(self) -> None:
        """Record and print that the optimizer takes no hooks, by which steps are seen: the script goes on."""
        message = "the optimizer given to watch() is no torch.optim.Optimizer, so nothing of this training is measured"
        advice = f"let {type(self._optimizer).__name__} inherit from it, with super().__init__(parameters, defaults)"
        self._writer.write(not_measured(self._rank, message, advice, severity="warning"))
        if self._rank == 0:
            print_line(f"{message}; {advice}")

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
                device=str(self._tracker.device),
                pid=os.getpid(),
                threads=torch.get_num_threads(),
                message=message,
            )
        )


class _TimedLoader(Iterable[Batch]):
    """Data loader whose waits are timed."""

    def __init__(self, tracker: StepTracker, loader: Iterable[Batch]) -> None:
        self._tracker = tracker
        self._loader = loader

    def __iter__(self) -> Iterator[Batch]:
        tracker = self._tracker
        tracker.epoch += 1
        tracker.mark(then="data")
        for batch in self._loader:
            tracker.mark("data")
            yield batch
            tracker.mark(then="data")
        tracker.open_phase = "other"

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # raises TypeError like the loader
