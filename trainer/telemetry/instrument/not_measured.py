"""What the record says of a script whose steps are not seen."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Literal

from trainer.contract.record import Finding

UNSEEN_AFTER = 100
"""Backward passes without any optimizer's step, or such steps without a backward pass, after which the record says so;
a script that accumulates over more of them is measured from its first step on."""
OF_TORCH = "let an optimizer of your own inherit from torch.optim.Optimizer"


class UnseenSteps:
    """Reports once that no step is seen, and that one is after all.

    Args:
        rank: In the findings.
        write: Writes an event into the rank's record.
    """

    def __init__(self, rank: int, write: Callable[[Finding], object]) -> None:
        self.optimizer_steps = 0
        """Since the last step that was measured."""
        self.are_reported = False
        self._rank = rank
        self._write = write

    def report(self, optimizer_steps: int, *, backward: bool, earlier: bool, at_end: bool) -> None:
        found = unseen_steps(self._rank, optimizer_steps, backward=backward, earlier=earlier, at_end=at_end)
        if not self.are_reported:
            print_line(f"{found.message}; {found.advice}")
        self.are_reported = True
        self._write(found)

    def end_step(self) -> None:
        """A step was measured."""
        self.optimizer_steps = 0
        if self.are_reported:
            self.are_reported = False
            self._write(not_measured(self._rank, "", state="cleared"))


def unseen_steps(rank: int, optimizer_steps: int, *, backward: bool, earlier: bool, at_end: bool) -> Finding:
    """Return the finding that no step is seen: a warning if it is certain that the script has trained so.

    ``backward``: whether a backward pass was seen; ``earlier``: whether steps were measured before.
    """
    missing, advice = _what_is_missing(optimizer_steps=optimizer_steps, backward=backward)
    message = f"{missing}, so {'no further step' if earlier else 'nothing of this training'} is measured"
    certain = at_end and (backward or optimizer_steps > 0)
    return not_measured(rank, message, advice, severity="warning" if certain else "info")


def _what_is_missing(*, optimizer_steps: int, backward: bool) -> tuple[str, str]:
    if optimizer_steps:
        return "no call of backward() was seen", "call loss.backward() outside of torch.compile and CUDA graphs"
    step = f"{OF_TORCH} and call its step() outside of torch.compile"
    if backward:
        return "no optimizer's step was seen", step
    return (
        "neither backward() nor an optimizer's step was seen",
        f"{step}, as loss.backward(); if the script starts the processes that train, set starts_ranks = true in "
        "[train] or call trainer.watch in them",
    )


def not_measured(
    rank: int,
    message: str,
    advice: str = "",
    *,
    severity: Literal["warning", "info"] = "info",
    state: Literal["raised", "cleared"] = "raised",
) -> Finding:
    """Return the finding that no step of a rank is seen; a warning is the run's, and rank 0 gives it for all."""
    return Finding(
        time=time.time(),
        kind="not_measured",
        state=state,
        severity="info" if rank else severity,
        rank=rank,
        cause="no_steps",
        message=message,
        advice=advice,
    )


def print_line(line: str) -> None:
    """Print a line of ours into the rank's log."""
    print(f"gputrain: {line}", file=sys.stderr)
