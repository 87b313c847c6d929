"""A user's own metrics: numbers by name that a script, or the client of an experiment tracker in it, gives.

``OWN`` takes them in any thread; the writer's thread puts them into the record. Nothing here imports torch.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

from trainer.contract.record import EventWriter, Finding, Metrics
from trainer.contract.record.events import MAX_METRIC_CHARS, MAX_METRICS
from trainer.contract.record.numbers import MAX_NUMBER

MAX_WAITING = 10_000
"""Most calls that wait for the writer's thread, which takes them ten times a second; beyond it the oldest are lost."""


class _Given(NamedTuple):
    time: float
    step: int
    copy: Any
    """Numbers on their way to the host, a ``HostCopy``; None if ``metrics`` needs none."""
    metrics: Callable[[Sequence[float]], Mapping[str, float]]
    """Returns the metrics from these numbers."""


class OwnMetrics:
    """Metrics of this process on their way into its record; of each step the last value of a name counts."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self.wanted = False
        """Whether the writer's thread has written what was given before."""
        self._now = now
        self._given: deque[_Given] = deque(maxlen=MAX_WAITING)
        self._names: set[str] = set()
        self._reported: set[str] = set()
        self._writer = EventWriter(None)
        self._rank = 0
        self._step: Callable[[], int] = lambda: 0
        self._begin_copy: Callable[[Any], Any] | None = None

    def record_to(
        self, writer: EventWriter, rank: int, step: Callable[[], int], begin_copy: Callable[[Any], Any]
    ) -> None:
        """Write to this record from here on.

        ``step`` returns the optimizer steps done, ``begin_copy`` the ``HostCopy`` of a tensor that is on a GPU.
        """
        if writer.enabled:
            self._writer, self._rank, self._step, self._begin_copy = writer, rank, step, begin_copy
            self._names.clear()
            self._reported.clear()
            writer.before_each_write(self._write)

    def add(self, metrics: Mapping[Any, Any], *, step: int | None = None) -> None:
        """Take numbers by name; a mapping in it is taken with its names behind its own and a dot.

        A number is one of Python, numpy or torch, also as a tensor of one number; all else is ignored. Nothing waits
        for a GPU: its numbers are copied behind the work that computes them.

        Args:
            metrics: By name.
            step: Optimizer steps done; None: at the moment of the call.
        """
        time, known = self._now(), dict[str, float]()
        step = self._step() if step is None else step
        for name, value in _flat(metrics):
            if isinstance(value, float):
                known[name] = value
            elif self._begin_copy is not None:
                self._given.append(_Given(time, step, self._begin_copy(value), partial(_named, name)))
        if known:
            self._given.append(_Given(time, step, None, lambda numbers: known))

    def add_sums(self, copy: Any, compute: Callable[[Sequence[float]], Mapping[str, float]], *, step: int) -> None:
        """Take numbers on their way to the host, from which ``compute`` makes the metrics on the writer's thread."""
        self.wanted = False
        self._given.append(_Given(self._now(), step, copy, compute))

    def _write(self, last: bool) -> None:
        """Write what has arrived on the host; called by the writer's thread, which must not end."""
        try:
            steps: dict[int, Metrics] = {}
            merge_s = 0.05  # of steps within this time the last one counts, which bounds the record
            while self._given and (last or (copy := self._given[0].copy) is None or copy.arrived()):
                self._collect(self._given.popleft(), steps)
            for event, following in zip_longest(steps.values(), list(steps.values())[1:]):
                replaced = following is not None and following.time - event.time < merge_s
                if not (replaced and _names(event) <= _names(following)):
                    self._writer.write(event)
        except Exception as error:  # noqa: BLE001 - a failed device, or a task's function: the training goes on
            self._given.clear()
            self._report("fault", f"metrics are no longer complete: {type(error).__name__}: {error}")
        self.wanted = True

    def _collect(self, given: _Given, steps: dict[int, Metrics]) -> None:
        metrics = given.metrics(() if given.copy is None else given.copy.numbers())
        event = steps.setdefault(given.step, Metrics(time=given.time, rank=self._rank, step=given.step))
        event.time = given.time
        for name, number in metrics.items():
            if not self._is_recorded(name):
                continue
            if math.isfinite(number) and abs(number) <= MAX_NUMBER:
                event.values[name] = number
                if name in event.non_finite:
                    event.non_finite.remove(name)
            else:
                event.values.pop(name, None)
                event.non_finite = sorted({*event.non_finite, name})

    def _is_recorded(self, name: str) -> bool:
        if name in self._names:
            return True
        if not name or len(name) > MAX_METRIC_CHARS:
            short = name[: MAX_METRIC_CHARS // 2]
            self._report("long", f"the metric {short!r}… has a name of more than {MAX_METRIC_CHARS} characters")
            return False
        if len(self._names) >= MAX_METRICS:
            self._report("many", f"more than {MAX_METRICS} metrics: {name!r} and further ones are not recorded")
            return False
        self._names.add(name)
        return True

    def _report(self, what: str, message: str) -> None:
        """Write a finding, once of each kind."""
        if what not in self._reported:
            self._reported.add(what)
            self._writer.write(
                Finding(
                    time=self._now(), kind="metrics_left_out", severity="info", rank=self._rank, message=message,
                    advice="fewer or shorter names: the record has room for so many of a run",
                )
            )  # fmt: skip


def _names(event: Metrics) -> set[str]:
    return {*event.values, *event.non_finite}


def _named(name: str, numbers: Sequence[float]) -> Mapping[str, float]:
    return {name: float(numbers[0])}


OWN = OwnMetrics()
"""Those of this process."""


def _flat(metrics: Mapping[Any, Any], before: str = "", depth: int = 4) -> Iterator[tuple[str, Any]]:
    """Yield names with a float, or with a tensor of one number that is on a GPU."""
    for key, value in metrics.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping):
            if depth:
                yield from _flat(value, f"{name}.", depth - 1)
        elif (number := _number(value)) is not None:
            yield name, number


def _number(value: Any) -> Any:
    """Return a number as a float, or the tensor that has it on a GPU; None if it is none."""
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        # Reading a number of another class, such as a distributed tensor, may be a collective.
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.numel() != 1 or value.is_complex():
            return None
        if value.is_cpu:
            return float(value.item())  # half of the time of reading a detached one
        return value.detach() if value.is_cuda else None
    if getattr(value, "shape", None) in ((), (1,)) and hasattr(value, "item"):  # numpy
        item = value.item()
        return float(item) if isinstance(item, int | float) else None
    return None
