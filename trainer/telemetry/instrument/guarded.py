"""Guard of the recording's methods, which torch and the script call: a fault in them is no fault of the training."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from trainer.telemetry.clocks import is_capturing
from trainer.telemetry.instrument.not_measured import UnseenSteps

R = TypeVar("R")


class Measuring(Protocol):
    """The recording, as far as the guard knows it."""

    on: bool
    thread: int | None
    """The one that trains; None before it has begun."""
    unseen: UnseenSteps

    def fail(self, error: Exception) -> None: ...


def guarded(method: Callable[..., R]) -> Callable[..., R | None]:
    """Call a method only in the thread that trains; the first fault in it ends the measuring, not the training.

    While a GPU's work is captured into a graph nothing is measured: what is recorded then becomes a part of the graph.
    """

    @functools.wraps(method)
    def call(self: Measuring, *arguments: Any, **named: Any) -> R | None:
        if not self.on:
            return None
        if self.thread is not None and self.thread != threading.get_ident():
            if method.__name__ == "begin_optimizer":
                self.unseen.report_thread()
            return None
        try:
            return None if is_capturing() else method(self, *arguments, **named)
        except Exception as error:  # noqa: BLE001 - whatever it is, the script's training goes on
            self.fail(error)
            return None

    # torch.compile calls it instead of tracing into it; torch.compiler.disable would import the compiler for that.
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call
