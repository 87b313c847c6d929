"""Check that every parameter that is trained takes part in a step."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainer.contract.errors import RequestError, listed
from trainer.distributed.host_copies import HostCopy, begin_copy, host_copies
from trainer.engine import reports
from trainer.engine.ddp_model import Strategy, coalesce, gradients, values_of, with_sparse_gradient
from trainer.engine.loss_check import require_same_parameters
from trainer.engine.worker_context import WorkerContext

_UNFINISHED = "Expected to have finished reduction in the prior iteration"
"""Part of DDP's message where the step before left out a parameter."""
OBSERVED_STEPS = 20
"""Steps after which a parameter whose gradient was always zero is reported: a layer that begins with zeros holds back
the gradients behind it for a step or two."""
_INDICES = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")


class ParameterUse:
    """Check of the gradients of each step, which costs nothing: they are listed for their norm anyway."""

    def __init__(self, strategy: Strategy, *, parameters: Sequence[nn.Parameter], ctx: WorkerContext) -> None:
        self._ctx = ctx
        self._model = strategy.module
        self._parameters = parameters
        self._names = {name for name, _ in self._model.named_parameters()}
        self._all_reduced = strategy.needs_all_gradients
        self._cure = "" if strategy.sharded else "give --find-unused-parameters, or "
        self._sparse = bool(with_sparse_gradient(self._model))
        self._whole = not (self._sparse or strategy.sharded)
        """Whether each gradient is a tensor of all its values."""
        self._first = True
        self._known: set[str] = set()
        """Parameters that were reported already."""
        # The reduced gradients are the same on all ranks; of sharded ones each rank has a part.
        observes = ctx.rank == 0 and not strategy.sharded
        self._observed = 0 if observes else OBSERVED_STEPS
        self._moved: Tensor | None = None
        """Whether each parameter has had a gradient other than zero, ``[parameters]``, on the device."""
        self._copy: HostCopy | None = None

    def gradients(self, *, step: int) -> list[Tensor]:
        """Return the gradients of a step, of sparse ones the values; report or refuse parameters without one."""
        if self._sparse:
            coalesce(self._parameters)
        if self._whole:
            present = [each.grad for each in self._parameters if each.grad is not None]
        else:
            present = gradients(self._parameters)
        if self._first:
            require_same_parameters(self._model, self._names)
        if len(present) < len(self._parameters) and (self._first or self._all_reduced):
            self._report([self._name(each) for each in self._parameters if each.grad is None], step)
        self._first = False
        if self._observed < OBSERVED_STEPS:
            self._observe()
        elif self._copy is not None and self._copy.arrived():
            moved, self._copy = self._copy.numbers(), None
            idle = [each for each, is_moved in zip(self._parameters, moved, strict=True) if not is_moved]
            self._report_idle([self._name(each) for each in idle], step - 1)
        return present

    def _observe(self) -> None:
        """Note which parameters have a gradient other than zero, without waiting for the device."""
        zero = torch.zeros((), dtype=torch.bool, device=self._ctx.device)
        moved = torch.stack([zero if each.grad is None else values_of(each.grad).any() for each in self._parameters])
        self._moved = moved if self._moved is None else self._moved | moved
        self._observed += 1
        if self._observed == OBSERVED_STEPS:
            self._copy = begin_copy(self._moved, self._ctx.copies or host_copies(self._ctx.device))
            self._moved = None

    def _report_idle(self, names: list[str], step: int) -> None:
        if new := [name for name in names if name not in self._known]:
            reports.finding(
                self._ctx,
                "no_gradient",
                f"the gradient of {listed(new)} was zero or absent in {OBSERVED_STEPS} steps: nothing trains it",
                step=step,
                severity="warning",
                advice="have the loss depend on it (look for detach(), no_grad() and branches that never run), leave "
                "it out of the model, or freeze it with requires_grad_(False)",
            )

    def raise_unused(self, error: Exception) -> None:
        """Raise an error that names the parameters in place of DDP's about unused ones; ignore another error."""
        if _UNFINISHED in str(error):
            matched = _INDICES.search(str(error))
            indices = [int(index) for index in matched[1].split()] if matched else []
            known = [self._name(self._parameters[index]) for index in indices if index < len(self._parameters)]
            raise RequestError(self._refusal(known, "the step before")) from error

    def _report(self, names: list[str], step: int) -> None:
        if self._all_reduced:
            raise RequestError(self._refusal(names, f"step {step}"))
        if self._ctx.world_size == 1:
            self._known.update(names)
            reports.finding(
                self._ctx,
                "unused_parameters",
                f"step {step} does not use {listed(names)}: without a gradient a parameter is not trained",
                severity="warning",
                advice="leave it out of the model or freeze it with requires_grad_(False); if other steps use it, "
                "several ranks need --find-unused-parameters",
            )

    def _name(self, parameter: nn.Parameter) -> str:
        return next((name for name, each in self._model.named_parameters() if each is parameter), "a parameter")

    def _refusal(self, names: list[str], step: str) -> str:
        return (
            f"{step} does not use {listed(names) or 'a parameter'}, whose gradient the ranks wait for: {self._cure}"
            "freeze it with requires_grad_(False)"
        )
