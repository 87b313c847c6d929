"""Meter of a rank's training steps: their phases, and the wait for gradient synchronisation.

The loop calls ``lap`` where a phase ends. Nothing here synchronises with a device, and without a record nothing is
measured. The training thread only takes readings; ``StepRecorder`` turns them into events on the writer's thread.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer.contract.record import EventWriter, Finding, Step
from trainer.distributed import flight_recorder
from trainer.host.boot import ClockSet
from trainer.host.cores import core_waits
from trainer.telemetry.clocks import Clock, CudaClock, HostClock, Mark, Scalar
from trainer.telemetry.collectives.collective_meter import CollectiveMeter
from trainer.telemetry.comm_hook import BucketHook, Buckets, CommHook, HookRelay, ddp_of
from trainer.telemetry.long_wait import NEXT_PHASE, LongWait
from trainer.telemetry.step_events import WARM_UP, Phase, StepReading, joined
from trainer.telemetry.step_recorder import StepRecorder
from trainer.telemetry.torch_compile import compiled_ns

__all__ = ["Phase", "StepMeter"]


class StepMeter:
    """Meter of training steps, driven by calls of ``start``, ``lap`` and ``end``.

    Args:
        model: The trained model, wrapped in DistributedDataParallel or not; None where ``follow`` gets it later.
        device: Of this rank.
        writer: If not enabled, every call does nothing.
        rank: In the events.
        detail_every: Measure each bucket and the local gradient norm every so many steps; 0 installs no comm hook, so
            that synchronisation is not measured.
        now: Unix seconds, for the time of events.
        clock: Seconds, for durations on the host.
        comm_hook: State and function of a comm hook to register, also when nothing is measured; None for DDP's own
            averaging.
        wire_ratio: Bytes that ``comm_hook`` sends per byte of gradient; None if unknown.
        sparse: Parameters whose gradients have few rows that are not zero: CPU ranks send only those.
        keeps_steps: Measure every step, also without a record, and keep it for ``take_steps``.
    """

    def __init__(
        self,
        model: nn.Module | None,
        *,
        device: torch.device,
        writer: EventWriter,
        rank: int,
        detail_every: int = 32,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.perf_counter,
        comm_hook: tuple[object, CommHook] | None = None,
        wire_ratio: float | None = 1.0,
        sparse: Sequence[nn.Parameter] = (),
        keeps_steps: bool = False,
    ) -> None:
        self.lap: Callable[[Phase], object] = _no_lap
        """End a phase: the time since the last mark counts to it; micro-steps add up."""
        self.local_norm: Scalar = None
        """Norm [] of this rank's gradient in the last step before the reduction, where it was measured."""
        self._enabled = writer.enabled or keeps_steps
        self._now = now
        self._rank = rank
        self._writer = writer
        self._detail_every = detail_every
        self._collectives: CollectiveMeter | None = None
        self._hooks: list[BucketHook] = []
        ddp = None if model is None else ddp_of(model)
        synchronised = ddp is not None and dist.get_world_size(ddp.process_group) > 1
        if ddp is not None and comm_hook is not None and not (self._enabled and synchronised):
            averaging_state, average = comm_hook
            # A lambda: DDP knows torch's bf16 hook by its name and refuses it on gloo, which adds bf16 as well as NCCL.
            ddp.register_comm_hook(averaging_state, lambda state, bucket: average(state, bucket))
        on_gpu = device.type == "cuda"
        self._clock: Clock = CudaClock(device) if on_gpu else HostClock(clock, core_waits())
        saves_rows = bool(sparse) and not on_gpu and comm_hook is None
        if (
            ddp is not None
            and synchronised
            and (saves_rows or (self._enabled and (detail_every or comm_hook or keeps_steps)))
        ):
            state, inner = comm_hook or (None, None)
            hook = BucketHook(ddp, self._clock, inner=inner, state=state, waits=not on_gpu, sparse=sparse)
            self._hooks.append(hook)
        if not self._enabled:
            return

        self._clock_set = ClockSet()
        self._mark = self._clock.mark
        self._recorder = StepRecorder(
            self._clock, writer, rank=rank, synchronised=synchronised, wire_ratio=wire_ratio, keeps=keeps_steps
        )
        self._held: StepReading | None = None
        """Readings of the last step while it may go on."""
        self._reported_faults: set[str] = set()
        self._faults_lock = threading.Lock()
        self._count = 0
        self._compiled_ns: list[float] = []
        """Time in torch.compile so far, at each mark of the step."""
        self._marks: list[Mark] = []
        self._phases: list[Phase] = []
        self._step = 0
        self._paused = True
        """Whether no step is in progress, so that no phase can be long."""
        self._long_wait = LongWait(writer, rank=rank, hooks=self._hooks, now=now, clock=clock)
        self.part_after: Callable[[Phase | None], str] = NEXT_PHASE.__getitem__
        """Return where the training thread is after the last lap of the step, as ``Doing`` names it."""
        self._thread = threading.get_ident()
        writer.before_each_write(self._process_readings)
        self._gc_started = 0.0
        self._gc_s = 0.0
        self._host_clock = clock
        gc.callbacks.append(self._on_gc)
        self.lap = self._lap
        self._measure_sync()
        self._report_faults()

    def follow(self, ddp: DistributedDataParallel, *, relay: HookRelay | None, own_hook: bool) -> BucketHook | None:
        """Measure the gradient synchronisation of a further model; call it before its first backward pass.

        The measuring hook is put around that of ``relay``, if there is one. With ``own_hook`` the model has a comm hook
        already, or averages in another way than by a hook. Return the measuring hook, if there is one.
        """
        if not self._enabled or dist.get_world_size(ddp.process_group) == 1:
            return None
        self._recorder.synchronised = True
        if relay is None and own_hook:
            return None
        hook = BucketHook(ddp, self._clock, waits=isinstance(self._clock, HostClock), relay=relay)
        self._hooks.append(hook)
        self._measure_sync()
        self._report_faults()
        return hook

    def follow_collectives(self, collectives: CollectiveMeter, in_backward: Callable[[], bool]) -> None:
        """Measure the collectives that this thread calls from here on, other than those of DDP's buckets."""
        if self._enabled:
            flight_recorder.attach_all()
            self._collectives = self._long_wait.collectives = collectives
            collectives.attach(self._clock, in_backward)
            collectives.begin_step(self._phases)

    def start(self) -> None:
        """Start a step: before the first one, and after a validation or a checkpoint; ``end`` starts the next one."""
        if not self._enabled:
            return
        # The old mark is not released: it is also the end of the last step, which the device may not have reached.
        self._marks = [self._mark()]
        self._phases = []
        self._compiled_ns = [compiled_ns()]
        self._gc_s = 0.0
        if self._collectives is not None:
            self._collectives.begin_step(self._phases, detailed=self._detailed())
        self._paused = False
        self._thread = threading.get_ident()

    def end(
        self,
        *,
        step: int,
        epoch: int,
        loss: Scalar = None,
        samples: int | None,
        tokens: int | None = None,
        lr: float | None = None,
        grad_norm: Scalar = None,
        grad_scale: Scalar = 1.0,
        is_local: bool = False,
        steps: int = 1,
        extends: bool = False,
        may_go_on: bool = False,
    ) -> None:
        """End the step and start the next one. Tensors are copied from the device without synchronising.

        Loss, samples and tokens are this rank's, the loss a mean in nats; None: not known. The gradient norm is the
        global one after the reduction, before clipping. ``grad_scale`` is a factor of the gradients during backward
        that is divided out afterwards (a loss scale, a normalisation after the reduction): the local gradient norm is
        divided by it too. With ``is_local`` DDP reduced no gradients in the step. ``steps`` that were seen as one share
        its time evenly. With ``extends`` this is more of the last step, which was said that it ``may_go_on``.
        """
        if not self._enabled:
            return
        syncs = self._take()
        # After a first synchronisation the gradient is no longer this rank's alone.
        self.local_norm = syncs[0].norm() if len(syncs) == 1 else None
        numbers = self._clock.fetch((loss, grad_norm, self.local_norm, grad_scale))
        end = self._mark(waits=False)
        self._marks.append(end)
        compiled = self._compiled_ns
        compiled.append(compiled_ns())
        reading = StepReading(
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
            syncs,
            self._count >= WARM_UP,
            self._clock_set.ms(),
            None if self._collectives is None else self._collectives.take(),
            is_local,
            compiled if compiled[-1] > compiled[0] else (),
            steps,
        )
        if self._held is not None and extends:
            reading = joined(self._held, reading)
        elif self._held is not None:
            self._recorder.add(self._held)
        self._held = reading if may_go_on else None
        if not may_go_on:
            self._recorder.add(reading)
        self._marks, self._phases = [end], []
        self._compiled_ns = compiled[-1:]
        self._count += 1
        self._step = step
        self._gc_s = 0.0
        if self._collectives is not None:
            self._collectives.begin_step(self._phases, detailed=self._detailed())
        self._measure_sync()

    @property
    def nonzero_rows(self) -> Mapping[int, Tensor]:
        """Rows with values [rows] of the reduced gradients for which they are known, by the gradients' addresses."""
        return self._hooks[0].nonzero_rows if len(self._hooks) == 1 else {}

    def discard(self) -> None:
        """Drop the step, because its optimizer step was left out, and start the next one."""
        if not self._enabled:
            return
        for buckets in self._take():
            self._clock.release(buckets.marks())
        self._measure_sync()
        self.start()

    def exclude(self, phases: int) -> None:
        """Exclude the time since the first ``phases`` laps from the step, because it was an evaluation."""
        if not self._enabled:
            return
        # Marks are dropped, not released: the device may not have reached them.
        del self._marks[phases + 1 :]
        del self._phases[phases:]
        del self._compiled_ns[phases + 1 :]
        if not phases:
            self._compiled_ns, self._gc_s = [compiled_ns()], 0.0
        if self._collectives is not None:
            self._collectives.exclude(phases)
        self._lap("excluded")

    @contextmanager
    def excluded(self, part: str) -> Iterator[None]:
        """Count the time in the block to no phase and no step; a long wait there is reported as this part."""
        if not self._enabled:
            yield
            return
        usual, self.part_after = self.part_after, lambda lap: part
        try:
            yield
        finally:
            self.part_after = usual
        self._lap("excluded")

    def keep_steps(self) -> None:
        """Keep the steps from here on for ``take_steps``, as far as they are measured."""
        if self._enabled:
            self._recorder.keeps = True

    def take_steps(self) -> list[Step]:
        """Return the steps that the device has done since the last call, each by itself, if they are kept."""
        if not self._enabled:
            return []
        self._recorder.process()
        return self._recorder.take_kept()

    def pause(self) -> None:
        """Write all complete steps, before a validation or a checkpoint; ``start`` continues."""
        if self._enabled:
            self._paused = True
            self._recorder.process()
            self._recorder.flush()

    def close(self, timeout_s: float = 2.0, *, other_thread: bool = False) -> None:
        """Write the last steps, within the time-out if the device hangs; ``other_thread`` than the training one."""
        if not self._enabled:
            return
        self._paused = True
        deadline = time.monotonic() + timeout_s
        if self._held is not None:
            self._recorder.add(self._held)
        self._recorder.process(other_thread=other_thread)
        while not self._recorder.idle and time.monotonic() < deadline:
            time.sleep(0.001)
            self._recorder.process(other_thread=other_thread)
        self._recorder.flush()
        self._report_faults()
        gc.callbacks.remove(self._on_gc)
        if self._collectives is not None:
            self._collectives.close()
        self._enabled = False
        self.lap = _no_lap

    def _lap(self, phase: Phase) -> None:
        self._phases.append(phase)
        self._marks.append(self._mark())
        self._compiled_ns.append(compiled_ns())

    def _take(self) -> Sequence[Buckets]:
        if len(self._hooks) == 1:
            return self._hooks[0].take()
        return [buckets for hook in self._hooks for buckets in hook.take()]

    def _measure_sync(self) -> None:
        """Set whether the comm hooks measure the next step, and in detail.

        All ranks count steps alike, so buckets are measured at the same steps everywhere.
        """
        for hook in self._hooks:
            hook.measure(detailed=self._detailed())

    def _detailed(self) -> bool:
        every, count = self._detail_every, self._count
        return bool(every) and (count == WARM_UP or (count > WARM_UP and count % every == 0))

    def _process_readings(self, last: bool) -> None:
        """Turn readings into events; called by the writer's thread."""
        self._recorder.process(other_thread=True)
        if last:
            self._recorder.flush()
        else:
            self._recorder.flush_old(self._now())
            phases = self._phases.copy()  # the training thread appends to it
            self._long_wait.check(
                (self._count, len(phases) - phases.count("excluded")),
                self._step + 1,
                self.part_after(phases[-1] if phases else None),
                paused=self._paused,
                longest_s=self._recorder.longest_s,
                thread=self._thread,
            )
        self._report_faults()

    def _on_gc(self, phase: str, info: Any) -> None:
        if phase == "start":
            self._gc_started = self._host_clock()
        else:
            self._gc_s += self._host_clock() - self._gc_started

    def _report_faults(self) -> None:
        sources: list[StepRecorder | BucketHook | CollectiveMeter] = [self._recorder, *self._hooks]
        if self._collectives is not None:
            sources.append(self._collectives)
        for source in sources:
            if source.fault is None:
                continue
            with self._faults_lock:  # also called by close, beside the writer's thread
                is_new = source.fault not in self._reported_faults
                self._reported_faults.add(source.fault)
            if is_new:
                self._writer.write(
                    Finding(
                        time=self._now(), kind="not_measured", severity="info", rank=self._rank, message=source.fault
                    )
                )


def _no_lap(phase: Phase) -> None:
    """Do nothing: ``lap`` where nothing is measured."""
