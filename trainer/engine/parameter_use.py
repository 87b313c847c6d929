"""Check that every parameter that is trained takes part in a step."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import Tensor, nn

from trainer.contract.errors import RequestError
from trainer.engine import reports
from trainer.engine.ddp_model import Strategy, coalesce, gradients, with_sparse_gradient
from trainer.engine.loss_check import listed, require_same_parameters
from trainer.engine.worker_context import WorkerContext

_UNFINISHED = "Expected to have finished reduction in the prior iteration"
"""Part of DDP's message where the step before left out a parameter."""
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
        self._first = True

    def gradients(self, *, step: int) -> list[Tensor]:
        """Return the gradients of a step, of sparse ones the values; report or refuse parameters without one."""
        if self._sparse:
            coalesce(self._parameters)
        present = gradients(self._parameters)
        if self._first:
            require_same_parameters(self._model, self._names)
        if len(present) < len(self._parameters) and (self._first or self._all_reduced):
            self._report([self._name(each) for each in self._parameters if each.grad is None], step)
        self._first = False
        return present

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
