"""Measures each training step of one rank: its parts, and what gradient synchronisation makes it wait.

The loop says where a part ends; everything else (clocks, DDP's logger, the bucket hook, merging, the record) is
here and in the modules this one wires. Nothing here waits for a device, and with no record nothing is measured.
The training thread only takes readings; ``StepMaker`` makes events of them elsewhere.
"""

from __future__ import annotations

import gc
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.measure.bucket_hook import BucketHook, CommHook
from trainer.measure.clocks import FALLS, RISES, START, Clock, CudaClock, HostClock, Mark, Scalar, core_waits
from trainer.measure.ddp_log import DdpLog
from trainer.measure.step_events import Measured, Part
from trainer.measure.step_maker import WARM_UP, Readings, StepMaker
from trainer.record import Doing, EventWriter, Finding

__all__ = ["Part", "StepMeter", "ddp_of"]

NEXT: dict[Part | None, Part] = {
    None: "data",
    "data": "h2d",
    "h2d": "forward",
    "forward": "backward",
    "backward": "optimizer",
    "optimizer": "other",
    "other": "data",
}
"""What a step is at after each part; None: at its beginning."""
IN_ALL = 3.0
"""What measuring a step in parts takes, in times of what its end takes (measured on CPU ranks: 146 and 45 µs)."""
SPARSE, SPARSEST = 8, 32
"""At least one step of so many is measured in parts."""
PATIENCE_S, LONG_PATIENCE_S = 0.045, 0.1
"""And at least one in this time, since each event of the record is to cover some."""
NEWS = 8
"""The longer time holds, and steps are sparser than ``SPARSE``, only once so many could be measured in parts at that
stride: at first everything is news."""
SLOWER = 2.0
"""A step that takes so many times what the last plan was made for makes a new one: what it is at is to be known.

For the next ``SPARSE`` steps it takes two in a row, since a busy machine has many a moment without a core.
"""
LONG_S = 5.0
"""From when on a part that does not end is told: this, and so many times the longest step of late."""
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
        share: Of the time, what measuring steps in parts may take. On CPU ranks whose steps are so fast that it would
            take more, only every second, fourth or eighth one is; of the others only their length, loss and norm are
            told.
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
        share: float = 0.005,
    ) -> None:
        self.lap: Callable[[Part], object] = _ignore
        """The time since the last mark belongs to this part; micro-steps add up.

        Called several times a step, between computations that leave nothing of it in the caches: what it does is
        bound here for the step under way, so that it is one call and asks nothing.
        """
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
            ddp.register_comm_hook(*comm_hook)
        if not self._on:
            return

        on_gpu = device.type == "cuda"
        self._share = math.inf if on_gpu else share
        self._clock: Clock = CudaClock(device) if on_gpu else HostClock(clock, core_waits())
        self._mark = self._clock.mark
        self._maker = StepMaker(self._clock, writer, rank=rank, synchronised=synchronised, wire_ratio=wire_ratio)
        self._add = self._maker.add
        if ddp is not None and synchronised:
            if detail_every or comm_hook:
                state, inner = comm_hook or (None, None)
                self._hook = BucketHook(ddp, self._clock, inner=inner, state=state, waits=not on_gpu)
            # On CPU ranks our own hook measures all there is; without it, or around another one, DDP's logger does.
            if not on_gpu and (self._hook is None or self._hook.fault is not None or comm_hook is not None):
                self._log = DdpLog(ddp)
        self._told: set[str] = set()
        """Faults that were recorded."""
        self._telling = threading.Lock()
        self._count = 0
        self._full = True
        """Whether the step under way is measured in parts."""
        self._due = 0
        """Steps to be done before the next one that is."""
        self._slow_s = math.inf
        """A step longer than this is not one of those that ``_due`` was made for."""
        self._took = math.inf
        """What the last step took."""
        self._calm_until = 0
        """Steps to be done before a single slow one makes a plan again."""
        self._began = 0.0
        """When the step under way began, by the host's clock."""
        self._end_s = 0.0
        """What ``end`` takes of late."""
        self._marks: list[Mark] = []
        self._parts: list[Part] = []
        self._step = 0
        self._paused = True
        """Whether what takes long is no step."""
        self._progress = (0, 0)
        """Steps and parts of the next one that were done when the writer's thread looked last."""
        self._moved: float | None = None
        """When it saw them change, by the host's clock; None once a wait was told."""
        writer.before_each_write(self._hand_over)
        self._gc_started = 0.0
        self._gc_s = 0.0
        self._host_clock = clock
        gc.callbacks.append(self._on_gc)
        self._arm(math.inf)
        self._tell()

    def start(self) -> None:
        """The next step begins now.

        ``end`` starts the next step by itself, so this is called once before the first step and again after
        whatever must not count as a step's time: a validation, a checkpoint.
        """
        if not self._on:
            return
        # The old mark is not released: it is also the end of the last step, which may still be under way.
        self._marks = [self._mark(START)]
        self._gc_s = 0.0
        self._paused = False
        self._began = self._host_clock()
        self._took = math.inf
        self._arm(math.inf)

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
        entered = self._host_clock()
        took = entered - self._began
        self._began = entered
        if self._full:
            self._end_full(entered, took, step, epoch, samples, tokens, lr, loss, grad_norm, grad_scale)
        else:
            # As little as can be: this is for steps that are so fast that measuring them would slow them down.
            if type(loss) is not float or type(grad_norm) is not float:
                loss, grad_norm = self._clock.fetch((loss, grad_norm))()
            gc_ms = self._gc_s * 1e3
            self._add((self._now(), step, epoch, samples, tokens, lr, gc_ms, took * 1e3, loss, grad_norm, None))
            self._count += 1
            if self._count >= self._due or took > self._slow_s:
                self._arm(self._expected_s(took))
                if self._full:
                    self._marks = [self._mark(START)]
            else:
                self._parts.clear()
        self._took = took
        self._step = step
        self._gc_s = 0.0

    def _end_full(
        self,
        entered: float,
        took: float,
        step: int,
        epoch: int,
        samples: int,
        tokens: int | None,
        lr: float | None,
        loss: Scalar,
        grad_norm: Scalar,
        grad_scale: float,
    ) -> None:
        """End a step that was measured in parts."""
        log = self._log.read() if self._log is not None else None
        syncs = self._hook.take() if self._hook is not None else ()
        # After a first synchronisation the gradient is not this rank's alone any more.
        local = syncs[0].norm() if len(syncs) == 1 else None
        numbers = self._clock.fetch((loss, grad_norm, local))
        end = self._mark("end")
        self._marks.append(end)
        self._add(
            Readings(
                self._now(),
                step,
                epoch,
                samples,
                tokens,
                lr,
                gc_s=self._gc_s,
                marks=self._marks,
                parts=self._parts,
                waits_ms=self._clock.take_waits_ms(),
                numbers=numbers,
                grad_scale=grad_scale,
                log=log,
                syncs=syncs,
                before=self._count,
            )
        )
        self._marks = [end]
        self._count += 1
        self._arm(self._expected_s(took))
        change = self._host_clock() - entered - self._end_s
        if self._end_s == 0.0 or change < 0.0:
            self._end_s += FALLS * change
        else:  # a moment without a core says nothing about what it takes
            self._end_s += RISES * min(change, self._end_s)

    @property
    def latest(self) -> Measured | None:
        """The last step that the device has done too; None while there is none, and without a record."""
        if not self._on:
            return None
        self._maker.make_all()
        return self._maker.latest

    def pause(self) -> None:
        """Write what is measured but not yet written, before something that may take long; ``start`` goes on."""
        if self._on:
            self._paused = True
            self._maker.make_all()
            self._maker.flush()

    def close(self, timeout_s: float = 2.0) -> None:
        """Write the last steps; a device that hangs cannot hold the caller longer than the time-out."""
        if not self._on:
            return
        self._paused = True
        deadline = time.monotonic() + timeout_s
        self._maker.make_all()
        while not self._maker.idle and time.monotonic() < deadline:
            time.sleep(0.001)
            self._maker.make_all()
        self._maker.flush()
        self._tell()
        gc.callbacks.remove(self._on_gc)
        self._on = False
        self.lap = _ignore

    def _expected_s(self, took: float) -> float:
        """Return what the next step is expected to take, after one that took so many seconds."""
        if took > self._slow_s and self._count >= self._calm_until:
            self._calm_until = self._count + SPARSE
            return took
        return min(took, self._took)

    def _arm(self, step_s: float) -> None:
        """Decide what the next step measures, and which one is in parts again, after one of ``step_s`` seconds.

        All ranks count alike, so they measure the same steps in detail, and mostly the same ones in parts.
        """
        count, detail_every = self._count, self._detail_every
        due = count + -count % stride(self._end_s, step_s, self._share, count)
        detailed = False
        if detail_every:
            next_detailed = WARM_UP if count <= WARM_UP else count + -count % detail_every
            due = min(due, next_detailed)
            detailed = count == next_detailed
        self._due, self._slow_s = due, SLOWER * step_s
        self._full = full = count == due
        self._parts = []
        self.lap = self._lap if full else self._parts.append
        if self._hook is None or not detail_every:
            return
        # Where the hook is the only source of synchronisation times, it measures those of every full step.
        if detailed or (full and self._log is None):
            self._hook.measure(detailed=detailed)
        else:
            self._hook.rest()

    def _lap(self, part: Part) -> None:
        """What ``lap`` is in a step that is measured in parts."""
        self._parts.append(part)
        self._marks.append(self._mark(part))

    def _hand_over(self, last: bool) -> None:
        """Make events of what has gathered; the writer's thread calls this."""
        self._maker.make_all()
        if last:
            self._maker.flush()
        else:
            self._maker.flush_old(self._now())
            self._tell_long_wait()
        self._tell()

    def _tell_long_wait(self) -> None:
        """Say what a step that does not go on is at; called by the writer's thread."""
        now, progress = self._host_clock(), (self._count, len(self._parts))
        if self._paused or progress != self._progress:
            self._progress, self._moved = progress, now
        if self._moved is None or (waited_s := now - self._moved) < max(LONG_S, LONG_STEPS * self._maker.longest_s):
            return
        self._moved = None
        parts = self._parts.copy()  # which the training goes on with
        part: Any = NEXT[parts[-1] if parts else None]
        if part == "backward" and self._hook is not None and self._hook.waiting:
            part = "sync"
        self._writer.write(
            Doing(
                time=self._now(),
                rank=self._rank,
                step=self._step + 1,
                part=part,
                parts_done=len(parts) + (part == "sync"),
                waited_ms=round(waited_s * 1e3, 1),
            )
        )

    def _on_gc(self, phase: str, info: Any) -> None:
        if phase == "start":
            self._gc_started = self._host_clock()
        else:
            self._gc_s += self._host_clock() - self._gc_started

    def _tell(self) -> None:
        """Say once why something is not measured."""
        for source in (self._maker, self._log, self._hook):
            if source is None or source.fault is None:
                continue
            with self._telling:  # the writer's thread and a meter that closes may both be here
                news = source.fault not in self._told
                self._told.add(source.fault)
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


def _ignore(part: Part) -> None:
    """What ``lap`` is where nothing is measured."""


def stride(end_s: float, step_s: float, share: float, count: int) -> int:
    """Return how many steps there should be to one that is measured in parts: a power of two, so that ranks agree.

    Args:
        end_s: What the end of such a step takes, in seconds.
        step_s: What a step takes.
        share: Of the time, what measuring may take.
        count: Steps measured so far.
    """
    every = 1
    sparsest = max(SPARSE, min(SPARSEST, count // NEWS))
    patience_s = LONG_PATIENCE_S if count >= NEWS * SPARSE else PATIENCE_S
    while IN_ALL * end_s > share * every * step_s and 2 * every <= sparsest and 2 * every * step_s <= patience_s:
        every *= 2
    return every


def ddp_of(model: nn.Module) -> DistributedDataParallel | None:
    """Return the DDP wrapper inside a model that may be compiled around it, or None."""
    while not isinstance(model, DistributedDataParallel):
        inner = getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return None
        model = inner
    return model
