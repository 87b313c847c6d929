"""What the record says of a script whose steps are not seen."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Literal

import torch

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
        self._has_reported_thread = False
        self._rank = rank
        self._write = write

    def report_thread(self) -> None:
        """An optimizer steps in another thread than the training's; in a backward pass on a GPU that is autograd's."""
        if self._has_reported_thread or torch._C._current_graph_task_id() != -1:
            return
        self._has_reported_thread = True
        message = "an optimizer steps in another thread than the first, whose training alone is measured"
        advice = "train in one thread of each rank: start a rank for each training"
        self._write(not_measured(self._rank, message, advice, severity="warning", cause="other_thread"))

    def report(self, optimizer_steps: int, *, backward: bool | None, earlier: bool, at_end: bool) -> None:
        found = unseen_steps(self._rank, optimizer_steps, backward=backward, earlier=earlier, at_end=at_end)
        if not self.are_reported:
            print_line("; ".join(filter(None, (found.message, found.advice))))
        self.are_reported = True
        self._write(found)

    def end_step(self) -> None:
        """A step was measured."""
        self.optimizer_steps = 0
        if self.are_reported:
            self.are_reported = False
            self._write(not_measured(self._rank, "", state="cleared"))


def unseen_steps(rank: int, optimizer_steps: int, *, backward: bool | None, earlier: bool, at_end: bool) -> Finding:
    """Return the finding that no step is seen: a warning if it is certain that the script has trained so.

    ``backward``: whether a backward pass was seen, None if an optimizer was made and no model called; ``earlier``:
    whether steps were measured before.
    """
    if backward is None and not optimizer_steps:
        return not_measured(rank, "the script ended before its first step: it made an optimizer and called no model")
    missing, advice = _what_is_missing(optimizer_steps=optimizer_steps, backward=bool(backward))
    message = f"{missing}, so {'no further step' if earlier else 'nothing of this training'} is measured"
    certain = at_end and (bool(backward) or optimizer_steps > 0)
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
    cause: str = "no_steps",
) -> Finding:
    """Return the finding that steps of a rank are not seen; a warning is the run's, and rank 0 gives it for all."""
    return Finding(
        time=time.time(),
        kind="not_measured",
        state=state,
        severity="info" if rank else severity,
        rank=rank,
        cause=cause,
        message=message,
        advice=advice,
    )


def print_line(line: str) -> None:
    """Print a line of ours into the rank's log."""
    print(f"gputrain: {line}", file=sys.stderr)
