"""Turns a signal that a whole job gets into a stop request for the rank."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType

from trainer.agent.assignment import ReportSink
from trainer.contract.outcome import RankReport


class StopRequest:
    """SIGTERM and a lost terminal as a stop request, once the rank can keep its work.

    A scheduler that ends a job may signal every process of it, and a terminal its whole foreground group: a rank that
    died of that would have lost what the node agent is about to ask it to keep. The parent itself ends ranks by
    other signals.
    """

    def __init__(self, sink: ReportSink, asked: Callable[[], bool]) -> None:
        """Stand between the rank and its parent.

        Args:
            sink: Takes the rank's reports.
            asked: Whether the parent wants the rank to stop.
        """
        self._sink = sink
        self._asked = asked
        self._heard = False

    def report(self, report: RankReport) -> None:
        """Pass a report on; from the one that it listens, the rank hears signals. On the main thread."""
        if report.listens:
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:  # as under ``nohup``
                    signal.signal(number, self._hear)
        self._sink(report)

    def asked(self) -> bool:
        """Whether the rank is to stop at the next occasion."""
        return self._heard or self._asked()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._heard = True
