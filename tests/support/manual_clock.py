"""Clock that advances only when the test moves it."""

from __future__ import annotations


class ManualClock:
    def __init__(self, seconds: float = 1000.0, *, tick: float = 0.0) -> None:
        self.seconds, self.tick = seconds, tick

    def __call__(self) -> float:
        self.seconds += self.tick
        return self.seconds

    def advance(self, milliseconds: float) -> None:
        self.seconds += milliseconds / 1e3
