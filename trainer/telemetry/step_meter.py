"""Measures each training step of one rank: its phases, and what gradient synchronisation makes it wait.

The loop calls ``lap`` where a phase ends; everything else (clocks, DDP's logger, the comm hook, the record) is here and
in the modules this one wires. Nothing here waits for a device, and with no record nothing is measured. The training
thread only takes readings; ``StepRecorder`` makes events of them on the writer's thread.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.contract.record import Doing, EventWriter, Finding, Step
from trainer.host.core_waits import core_waits
from trainer.telemetry.clocks import Clock, CudaClock, HostClock, Mark, Scalar
from trainer.telemetry.comm_hook import BucketHook, CommHook
from trainer.telemetry.ddp_log import DdpLog
from trainer.telemetry.step_events import WARM_UP, Phase, StepReading
from trainer.telemetry.step_recorder import StepRecorder

__all__ = ["Phase", "StepMeter", "ddp_of"]

NEXT: dict[Phase | None, Phase] = {
    None: "data",
    "data": "h2d",
    "h2d": "forward",
    "forward": "backward",
    "backward": "optimizer",
    "optimizer": "other",
    "other": "data",
}
"""The phase after each phase; None: the beginning of a step."""
LONG_S = 5.0
"""A phase that does not end is reported after this time, and after so many times the longest step of late."""
LONG_STEPS = 4.0


class StepMeter:
    """Measures steps; see ``start``, ``lap`` and ``end`` for what belongs to a step.

    Args:
        model: The model that is trained, wrapped in DistributedDataParallel or not.
        device: Where this rank computes; decides between the host's clock and CUDA events.
        writer: Where events go. When it is not enabled, nothing is measured and every call returns at once.
        rank: For the events.
        detail_every: Measure each bucket and the local gradient norm every so many steps; 0 installs no comm hook.
            On a GPU the comm hook is what measures synchronisation at all, so with 0 it is absent there.
        now: Unix seconds, for the events.
        clock: Seconds, for durations on the host.
        comm_hook: A hook that reduces the gradients, and its state, to be registered in any case and measured when
            measuring; None for DDP's own averaging.
        wire_ratio: Bytes that ``comm_hook`` sends per byte of gradient; None where it cannot be told.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        device: torch.device,
        writer: EventWriter,
        rank: int,
        detail_every: int = 32,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.perf_counter,
        comm_hook: tuple[object, CommHook] | None = None,
        wire_ratio: float | None = 1.0,
    ) -> None:
        self.lap: Callable[[Phase], object] = _ignore
        """End a phase: the time since the last mark belongs to it; micro-steps add up."""
        self._on = writer.enabled
        self._now = now
        self._rank = rank
        self._writer = writer
        self._detail_every = detail_every
        self._hook: BucketHook | None = None
        self._log: DdpLog | None = None
        ddp = ddp_of(model)
        synchronised = ddp is not None and dist.get_world_size(ddp.process_group) > 1
        if ddp is not None and comm_hook is not None and not (self._on and synchronised):
            averaging_state, average = comm_hook
            # A lambda: DDP knows torch's bf16 hook by its name and refuses it on gloo, which adds bf16 as well as NCCL.
            ddp.register_comm_hook(averaging_state, lambda state, bucket: average(state, bucket))
        if not self._on:
            return

        on_gpu = device.type == "cuda"
        self._clock: Clock = CudaClock(device) if on_gpu else HostClock(clock, core_waits())
        self._mark = self._clock.mark
        self._recorder = StepRecorder(self._clock, writer, rank=rank, synchronised=synchronised, wire_ratio=wire_ratio)
        if ddp is not None and synchronised:
            if detail_every or comm_hook:
                state, inner = comm_hook or (None, None)
                self._hook = BucketHook(ddp, self._clock, inner=inner, state=state, waits=not on_gpu)
            # On CPU ranks our own hook measures all there is; without it, or around another one, DDP's logger does.
            if not on_gpu and (self._hook is None or self._hook.fault is not None or comm_hook is not None):
                self._log = DdpLog(ddp)
        self._reported: set[str] = set()
        """Faults that were recorded."""
        self._reporting = threading.Lock()
        self._count = 0
        """Steps measured so far."""
        self._marks: list[Mark] = []
        self._phases: list[Phase] = []
        self._step = 0
        self._paused = True
        """Whether what takes long is no step."""
        self._progress = (0, 0)
        """Steps, and phases of the next one, that were done at the writer's thread's last check."""
        self._moved: float | None = None
        """When it saw them change, by the host's clock; None once a wait was reported."""
        writer.before_each_write(self._hand_over)
        self._gc_started = 0.0
        self._gc_s = 0.0
        self._host_clock = clock
        gc.callbacks.append(self._on_gc)
        self.lap = self._lap
        self._measure_sync()
        self._report_faults()

    def start(self) -> None:
        """The next step begins now.

        ``end`` starts the next step by itself, so this is called once before the first step and again after
        whatever must not count as a step's time: a validation, a checkpoint.
        """
        if not self._on:
            return
        # The old mark is not released: it is also the end of the last step, which may still be under way.
        self._marks = [self._mark()]
        self._phases = []
        self._gc_s = 0.0
        self._paused = False

    def end(
        self,
        *,
        step: int,
        epoch: int,
        loss: Scalar = None,
        samples: int,
        tokens: int | None = None,
        lr: float | None = None,
        grad_norm: Scalar = None,
        grad_scale: float = 1.0,
    ) -> None:
        """The step is over, and the next one begins.

        Args:
            step: Optimizer steps done, from 1.
            epoch: From 1.
            loss: This rank's mean loss in nats; a tensor on the device is fetched without waiting for it.
            samples: Samples that this rank read in the step.
            tokens: Tokens that this rank read in the step.
            lr: Learning rate of the step.
            grad_norm: Global norm of the gradient after the reduction, before clipping.
            grad_scale: What the gradients were multiplied with during backward and are not afterwards (a loss scale,
                a normalisation after the reduction); the local gradient norm is divided by it.
        """
        if not self._on:
            return
        log = self._log.read() if self._log is not None else None
        syncs = self._hook.take() if self._hook is not None else ()
        # After a first synchronisation the gradient is not this rank's alone any more.
        local = syncs[0].norm() if len(syncs) == 1 else None
        numbers = self._clock.fetch((loss, grad_norm, local))
        end = self._mark(waits=False)
        self._marks.append(end)
        self._recorder.add(
            StepReading(
                self._now(),
                step,
                epoch,
                samples,
                tokens,
                lr,
                self._gc_s * 1e3,
                self._marks,
                self._phases,
                numbers,
                grad_scale,
                log,
                syncs,
                self._count >= WARM_UP,
            )
        )
        self._marks, self._phases = [end], []
        self._count += 1
        self._step = step
        self._gc_s = 0.0
        self._measure_sync()

    def discard(self) -> None:
        """The step is over and is none, because its optimizer step was left out; the next one begins."""
        if not self._on:
            return
        if self._log is not None:
            self._log.read()
        if self._hook is not None:
            for buckets in self._hook.take():
                self._clock.release(buckets.marks())
        self._measure_sync()
        self.start()

    @property
    def latest(self) -> Step | None:
        """The last step that the device has done too; None while there is none, and without a record."""
        if not self._on:
            return None
        self._recorder.process()
        return self._recorder.latest

    def pause(self) -> None:
        """Write what is measured but not yet written, before something that may take long; ``start`` goes on."""
        if self._on:
            self._paused = True
            self._recorder.process()
            self._recorder.flush()

    def close(self, timeout_s: float = 2.0) -> None:
        """Write the last steps; a device that hangs cannot hold the caller longer than the time-out."""
        if not self._on:
            return
        self._paused = True
        deadline = time.monotonic() + timeout_s
        self._recorder.process()
        while not self._recorder.idle and time.monotonic() < deadline:
            time.sleep(0.001)
            self._recorder.process()
        self._recorder.flush()
        self._report_faults()
        gc.callbacks.remove(self._on_gc)
        self._on = False
        self.lap = _ignore

    def _lap(self, phase: Phase) -> None:
        self._phases.append(phase)
        self._marks.append(self._mark())

    def _measure_sync(self) -> None:
        """Have the comm hook measure the next step's synchronisation.

        All ranks count alike, so they agree on the steps whose buckets are measured too.
        """
        if self._hook is None:
            return
        every, count = self._detail_every, self._count
        detailed = bool(every) and (count == WARM_UP or (count > WARM_UP and count % every == 0))
        if detailed or self._log is None:
            self._hook.measure(detailed=detailed)
        else:
            self._hook.rest()

    def _hand_over(self, last: bool) -> None:
        """Make events of what has gathered; the writer's thread calls this."""
        self._recorder.process()
        if last:
            self._recorder.flush()
        else:
            self._recorder.flush_old(self._now())
            self._report_long_wait()
        self._report_faults()

    def _report_long_wait(self) -> None:
        """Record which phase a step that does not go on is in; called by the writer's thread."""
        now, progress = self._host_clock(), (self._count, len(self._phases))
        if self._paused or progress != self._progress:
            self._progress, self._moved = progress, now
        if self._moved is None or (waited_s := now - self._moved) < max(LONG_S, LONG_STEPS * self._recorder.longest_s):
            return
        self._moved = None
        phases = self._phases.copy()  # which the training goes on with
        phase: Any = NEXT[phases[-1] if phases else None]
        if phase == "backward" and self._hook is not None and self._hook.waiting:
            phase = "sync"
        self._writer.write(
            Doing(
                time=self._now(),
                rank=self._rank,
                step=self._step + 1,
                part=phase,
                parts_done=len(phases) + (phase == "sync"),
                waited_ms=round(waited_s * 1e3, 1),
            )
        )

    def _on_gc(self, phase: str, info: Any) -> None:
        if phase == "start":
            self._gc_started = self._host_clock()
        else:
            self._gc_s += self._host_clock() - self._gc_started

    def _report_faults(self) -> None:
        """Record once why something is not measured."""
        for source in (self._recorder, self._log, self._hook):
            if source is None or source.fault is None:
                continue
            with self._reporting:  # the writer's thread and a meter that closes may both be here
                news = source.fault not in self._reported
                self._reported.add(source.fault)
            if news:
                self._writer.write(
                    Finding(
                        time=self._now(),
                        kind="not_measured",
                        severity="info",
                        rank=self._rank,
                        message=source.fault,
                    )
                )


def _ignore(phase: Phase) -> None:
    """Stand in for ``lap`` where nothing is measured."""


def ddp_of(model: nn.Module) -> DistributedDataParallel | None:
    """Return the DDP wrapper inside a model that may be compiled around it, or None."""
    while not isinstance(model, DistributedDataParallel):
        inner = getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return None
        model = inner
    return model
