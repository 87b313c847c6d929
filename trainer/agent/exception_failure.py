"""Conversion of the exception that ended a rank into a failure of the record."""

from __future__ import annotations

import time
import traceback

from trainer.agent.log_tail import error_line
from trainer.contract.record import Failure


def failure_of(
    error: BaseException,
    *,
    kind: str,
    rank: int,
    host: str,
    step: int | None = None,
    message: str = "",
    defect: bool = True,
) -> Failure:
    """Return an exception as a failure.

    Args:
        error: the exception.
        kind: one of ``Failure.kind``.
        rank: rank that raised it.
        host: the rank's machine.
        step: optimizer steps done.
        message: one line; by default the exception's class and the first line of its message.
        defect: whether to keep the traceback; not for an error that a person can act on.
    """
    return Failure(
        time=time.time(),
        kind=kind,
        message=message or error_line(error),
        rank=rank,
        host=host,
        step=step,
        traceback="".join(traceback.format_exception(error)) if defect else None,
    )
