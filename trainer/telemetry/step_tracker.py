"""Steps of a script's own training loop, followed by calls of its model, data loader and optimizer.

``trainer.watch`` observes them by hooks that the script installs, ``trainer.telemetry.instrument`` by wrappers around
torch's functions. Both call the same methods here, in the order of the calls.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from trainer.contract.record import EventWriter, Finding
from trainer.distributed.host_copies import HostCopy, begin_copy, host_copies
from trainer.telemetry.clocks import Scalar
from trainer.telemetry.comm_hook import ddp_of
from trainer.telemetry.desync import ReplicatedTensors
from trainer.telemetry.own_metrics import OWN
from trainer.telemetry.step_meter import Phase, StepMeter

NESTING = 4
"""Maximum depth of nested lists and dictionaries in which a batch's tensors are searched for."""


class StepTracker:
    """Steps of one rank: forward and backward passes, as many as there are, up to the optimizer's step.

    Args:
        writer: Of the events.
        rank: In the events.
        device: Of the rank.
        model: The trained model; None where it is not known yet.
        detail_every: Measure each gradient bucket every so many steps; 0 installs no comm hook.
        checksum_every: Record a checksum of the parameters every so many steps; 0: never.
        first_step: Steps done before.
    """

    def __init__(
        self,
        writer: EventWriter,
        *,
        rank: int,
        device: torch.device,
        model: nn.Module | None = None,
        detail_every: int = 32,
        checksum_every: int = 100,
        first_step: int = 0,
    ) -> None:
        self.step = first_step
        self.epoch = 0
        """From 1; 0 before the first."""
        self.samples: int | None = 0
        self.tokens: int | None = None
        """Of the step so far; None where they are not known."""
        self._counted = 0
        """Steps that had samples: before the first of them they are not known."""
        self.loss: Scalar = None
        self._has_loss = False
        """Whether the loss of a step was known."""
        self.grad_scale: Scalar = 1.0
        """Factor of the gradients in the backward pass."""
        self.laps = 0
        self.open_phase: Phase = "other"
        """Phase of the time since the last mark."""
        self.stepping = False
        self.meter = StepMeter(model, device=device, writer=writer, rank=rank, detail_every=detail_every)
        self._writer = writer
        self._rank = rank
        self.device = device
        self._checksum_every = checksum_every
        self._replica: ReplicatedTensors | None = None
        """The model whose checksums are recorded; None without one."""
        self._ddp: DistributedDataParallel | None = None
        self.synchronises = False
        """Whether a forward pass of the step was one whose gradients DDP synchronises."""
        self._first_step = first_step
        self._version = -1
        """Version counter of the model's first parameter at the end of the last step."""
        self._checksums: tuple[int, float, HostCopy] | None = None
        """Step and time of a checksum, and the checksum on its way to the host."""
        self.evaluated = False
        """Whether the time up to the next mark is an evaluation."""
        self.forward_done = False
        """Whether a forward pass has ended since the last mark: an evaluation from here on leaves it in the step."""
        self._training_laps = 0
        """Laps up to the last one in which the model was trained."""
        OWN.record_to(writer, rank, lambda: self.step, lambda value: begin_copy(value, host_copies(value.device)))
        self.meter.part_after = self._part_after
        if model is not None:
            self.replicate(model)

    @property
    def size(self) -> tuple[int | None, int | None]:
        """Samples and tokens of the step so far."""
        return self.samples, self.tokens

    @size.setter
    def size(self, size: tuple[int | None, int | None]) -> None:
        self.samples, self.tokens = size

    def replicate(self, model: nn.Module | None) -> None:
        """Record the checksums of this model, if all ranks should hold equal parameters; of no model if it is None."""
        if model is None or not _is_replicated(model):
            self._replica = None
            return
        self._ddp = ddp = ddp_of(model)
        self._replica = ReplicatedTensors(model if ddp is None else ddp.module)

    def mark(self, phase: Phase | None = None, *, then: Phase = "other", trained: bool = False) -> None:
        """Count the time since the last mark to ``phase``, or else to the open phase; that is ``then`` from here on.

        If the time up to here was ``trained``, an evaluation later in the step leaves it in.
        """
        if self.evaluated:  # an evaluation between two steps, or within one, counts to none
            self.evaluated = False
            self.meter.exclude(self._training_laps)
            self.laps = self._training_laps + 1
        else:
            phase = phase or self.open_phase
            self.meter.lap(phase)
            self.laps += 1
        self.open_phase = then
        self.forward_done = False
        if trained or phase == "backward":
            self._training_laps = self.laps

    def mark_evaluation(self) -> None:
        """Count the time from the model's last training up to the next mark as an evaluation."""
        if self.open_phase == "backward" or self.forward_done:
            self.mark(trained=True)
        self.evaluated = True

    def _part_after(self, lap: Phase | None) -> str:
        """Return where a script is after a lap of the step, by what has been seen of it; called by another thread."""
        phase = self.open_phase
        if self.evaluated or (phase == "other" and lap != "data"):
            return "other"
        if phase == "forward" and (self.forward_done or lap == "data"):
            return "loss"
        if phase == "optimizer" and not self.stepping:
            return "gradients"
        return "batch" if phase == "other" else phase

    def start(self) -> None:
        """Start a step; the time since the last one counts to none."""
        self._begin_step()
        self.meter.start()

    def end(self, optimizer: Optimizer, steps: int = 1, *, extends: bool = False, may_go_on: bool = False) -> None:
        """End the step, or several that were seen as one, and start the next one; with ``extends`` go on with the last.

        ``may_go_on``: whether more of this step may follow after its end.
        """
        self.step += 0 if extends else steps
        lr = optimizer.param_groups[0].get("lr")  # an optimizer of the script's own need not keep one there
        self._counted += 0 if extends or not self.samples else steps
        self._has_loss |= self.loss is not None
        self.meter.end(
            step=self.step,
            epoch=max(1, self.epoch),
            loss=self.loss,
            samples=self.samples if self._counted else None,
            tokens=self.tokens,
            lr=None if lr is None or (isinstance(lr, Tensor) and lr.device.type != "cpu") else float(lr),
            grad_scale=self.grad_scale,
            is_local=self._ddp is not None and not self.synchronises,
            steps=steps,
            extends=extends,
            may_go_on=may_go_on,
        )
        if self._ddp is not None and self._replica is not None:
            if not self.synchronises:
                self._stop_comparing("without synchronising gradients (no_sync)")
            elif self._ddp._join_config.enable:
                self._stop_comparing("within join(), where a rank may run out of data before others")
        self._begin_step()
        self.write_checksum()
        if self._replica is not None:
            self._version = self._replica.version
            if not extends and _is_checked(self.step, self._checksum_every):
                self._begin_checksum()
                self.meter.start()
        group_steps = 3  # steps after which the ranks of a script must have a process group
        if self.step == self._first_step + group_steps and self._rank == 0 and not extends:
            self._check_process_group()

    def check_last_step(self) -> None:
        """Start the checksum of the last step, after which the training has ended.

        Not after a change of the parameters outside the optimizer: a rank may load the best weights to evaluate them.
        """
        replica = self._replica
        if replica is None or not self._checksum_every or self.step == self._first_step:
            return
        is_done = self._checksums is not None and self._checksums[0] == self.step
        if not is_done and not _is_checked(self.step, self._checksum_every) and replica.version == self._version:
            self._begin_checksum()

    def _begin_checksum(self) -> None:
        assert self._replica is not None
        copy = begin_copy(self._replica.checksums(), host_copies(self.device))
        self._checksums = self.step, time.time(), copy

    def _stop_comparing(self, how: str) -> None:
        """Record no more checksums: ranks that step with their own gradients, as in local SGD, differ on purpose.

        With uneven inputs a rank's step has another number than that of the others from the next epoch on.
        """
        self._replica = None
        text = f"step {self.step} was made {how}, so the ranks' parameters are not compared from there on"
        self._writer.write(
            Finding(time=time.time(), kind="not_compared", severity="info", step=self.step, message=text)
        )

    def _check_process_group(self) -> None:
        """Record a finding where several ranks train and none of them can know of the others."""
        ranks = os.environ.get("WORLD_SIZE", "")
        if not ranks.isdecimal() or int(ranks) < 2 or (dist.is_available() and dist.is_initialized()):
            return
        self._writer.write(
            Finding(
                time=time.time(),
                kind="no_process_group",
                severity="warning",
                message=f"the {ranks} ranks never meet: no process group is made, so each trains a copy of its own, "
                f"and samples count {ranks} times",
                advice="call torch.distributed.init_process_group(), wrap the model in DistributedDataParallel and "
                "give each rank its share of the data (DistributedSampler); or start one rank",
            )
        )

    def report_unseen(self, *, loss: str, samples: str = "") -> None:
        """Record, after the last step, why no loss or the samples of few steps are known; nothing without a reason."""
        for cause, name, why, is_known in (
            ("no_loss", "the loss", loss, self._has_loss),
            ("no_samples", "samples", samples, 2 * self._counted >= self.step - self._first_step),
        ):
            if why and not is_known and self.step > self._first_step:
                self._writer.write(
                    Finding(
                        time=time.time(),
                        kind="not_measured",
                        severity="info",
                        rank=self._rank,
                        cause=cause,
                        message=f"{name}: {why}",
                    )
                )

    def discard(self) -> None:
        """Drop the step, because its optimizer step was left out, and start the next one."""
        self._begin_step()
        self.meter.discard()

    def _begin_step(self) -> None:
        self.samples, self.tokens, self.loss, self.grad_scale = 0, None, None, 1.0
        self.laps = self._training_laps = 0
        self.evaluated = self.forward_done = self.synchronises = False

    def write_checksum(self) -> None:
        """Write the checksum that was started after an earlier step, if any."""
        if self._checksums is None or self._replica is None:
            return
        step, at, copy = self._checksums
        self._checksums = None
        fingerprint = self._replica.fingerprint(copy.numbers())
        self._writer.write(fingerprint.event(time=at, rank=self._rank, step=step))


def _is_checked(step: int, every: int) -> bool:
    """Whether parameters are compared after a step: each ``every`` steps, and in a short training ever less often."""
    return bool(every) and step % (every if step >= every else 10 ** (len(str(step)) - 1)) == 0


def _is_replicated(model: nn.Module) -> bool:
    """Return whether all ranks should hold equal parameters."""
    if not (dist.is_available() and dist.is_initialized()):
        return True
    ddp = ddp_of(model)
    hooks: list[Any] = getattr(ddp, "_comm_hooks", [])
    if any(type(state).__name__ == "PostLocalSGDState" for _, state in hooks):
        return False  # by its name: importing it would load torch's other hooks
    holders = 1 if ddp is None else dist.get_world_size(ddp.process_group)
    return holders == dist.get_world_size()


def tensors_of(values: Any, depth: int = NESTING) -> Iterator[Tensor]:
    """Yield the tensors with dimensions among a model's arguments, also in lists and dictionaries."""
    if isinstance(values, Tensor):
        if values.dim():
            yield values
        return
    if isinstance(values, Mapping):
        values = values.values()
    elif not isinstance(values, Sequence) or isinstance(values, str | bytes):
        return
    if depth:
        for value in values:
            yield from tensors_of(value, depth - 1)
