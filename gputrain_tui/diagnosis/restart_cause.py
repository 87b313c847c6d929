"""Pure: decides by the cause of a failed attempt whether another attempt may succeed."""

from __future__ import annotations

import re
from typing import Final, Literal

from trainer.contract.record import Failure

MAY_HEAL: Final = "may_heal"
ONCE: Final = "once"
WILL_NOT_HEAL: Final = "will_not_heal"
CauseClass = Literal["may_heal", "once", "will_not_heal"]
"""``may_heal``: another attempt follows; ``once``: it follows unless the same failure came before."""
LOSSES_AND_ENDS = ("node_lost", "launch", "lost_peer", "silent", "network", "join_timeout", "stalled", "signal", "exit")
CLASSES: dict[str, CauseClass] = {
    **dict.fromkeys((*LOSSES_AND_ENDS, "out_of_memory"), MAY_HEAL),
    **dict.fromkeys(("exception", "training", "non_finite", "checkpoint_lost", "left_early"), ONCE),
    **dict.fromkeys(("request", "refused", "run_directory"), WILL_NOT_HEAL),
}
"""By kind of failure; an error of a device may heal, one of an import will not, whatever their kind is."""
_IMPORT = re.compile(r"(?:^|: )(?:ImportError|ModuleNotFoundError|SyntaxError|IndentationError): ")
# A failed assertion on a device is an error of the program, such as an index out of range.
_DEVICE = re.compile(
    r"^(?!.*device-side assert).*(?:(?:CUDA|HIP|CUDA driver|NCCL) error|DistBackendError|AcceleratorError|"
    r"\bnccl[A-Z]\w*Error|CUBLAS_STATUS|CUDNN_STATUS|unspecified launch failure)"
)
_FRAME = re.compile(r'^[\s|]*File "([^"\n]+)", line (\d+)', re.MULTILINE)
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python3[^/]*/|^<frozen ")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def class_of(failure: Failure) -> CauseClass:
    """Return the class of a failure's cause."""
    if failure.kind in ("exception", "exit") and _IMPORT.search(failure.message):
        return WILL_NOT_HEAL
    if failure.kind == "exception" and _DEVICE.search(failure.message):
        return MAY_HEAL
    if failure.kind == "out_of_memory" and failure.traceback:  # of a device or an allocation, not of the kernel
        return ONCE
    return CLASSES.get(failure.kind, ONCE)


def code_line(failure: Failure) -> str:
    """Return the innermost line of the user's code in a failure's traceback, ``FILE:LINE``; empty without one.

    Of an exception that a data loading process has raised, it is the line there.
    """
    frames = _FRAME.findall(failure.traceback or "")
    own = [frame for frame in frames if not _LIBRARY.search(frame[0])]
    file, line = next(reversed(own or frames), ("", ""))
    return f"{file}:{line}" if file else ""


def place_of(failure: Failure) -> str:
    """Return what equal failures have in common: line and type of an exception, else the message without its numbers.

    Rank, host and step do not count, nor does the message of an exception.
    """
    if line := code_line(failure):
        return f"{failure.message.partition(':')[0]} at {line}"
    return f"{failure.kind}: {_NUMBER.sub('#', failure.message)}"
