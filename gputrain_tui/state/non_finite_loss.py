"""Since which step the loss of a run is NaN or infinite. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from trainer.contract.record import Failure, Finding


def nan_since(root_cause: Failure | None, findings: Iterable[Finding]) -> int | None:
    """Return the step from which no loss of a run is a number; None where all are, as far as the record tells.

    A task fails at that step; a script goes on, with a finding that stands: also one about the gradient norm, as the
    weights are NaN once such a step is applied. ``findings`` are those that stand.
    """
    if root_cause is not None and root_cause.kind == "non_finite":
        return root_cause.step
    return min((each.step for each in findings if each.kind == "non_finite" and each.step is not None), default=None)
