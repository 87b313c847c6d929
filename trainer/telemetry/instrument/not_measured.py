"""What the record says of a script whose steps are not seen."""

from __future__ import annotations

import sys
import time
from typing import Literal

from trainer.contract.record import Finding


def what_is_missing(*, optimizer_steps: int, backward: bool) -> tuple[str, str]:
    """Return what was not seen, and what would be; ``backward``: whether a backward pass was seen."""
    if optimizer_steps:
        return "no call of backward() was seen", "seen is loss.backward() outside of torch.compile and CUDA graphs"
    seen = "step() of a torch.optim optimizer outside of torch.compile"
    if not backward:
        return "neither backward() nor an optimizer's step was seen", f"seen are backward() and {seen}"
    return "no optimizer's step was seen", f"seen is {seen}"


def not_measured(rank: int, message: str, *, state: Literal["raised", "cleared"] = "raised") -> Finding:
    """Return the finding that no step of a rank is seen."""
    return Finding(
        time=time.time(),
        kind="not_measured",
        state=state,
        severity="info",
        rank=rank,
        cause="no_steps",
        message=message,
        advice="processes that a script starts are measured if they join a process group of torch.distributed; "
        "set starts_ranks = true in [train] if a launcher in the script is to start the ranks, or call trainer.watch",
    )


def print_line(line: str) -> None:
    """Print a line of ours into the rank's log."""
    print(f"gputrain: {line}", file=sys.stderr)
