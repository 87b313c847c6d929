"""Follows the events of all ranks and nodes of a run, in the order of their times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import TypeVar

from gputrain_tui.history.follow import Follower
from gputrain_tui.history.known_ranks import KnownRanks
from trainer.contract.record import AnyEvent, RunDir, RunEnded, World

AnyTimed = TypeVar("AnyTimed")


def merged(
    files: Iterable[Sequence[AnyTimed]], time_of: Callable[[AnyTimed], float] = attrgetter("time")
) -> list[AnyTimed]:
    """Return the events of several files by time, those of one file in their order, also where a clock was set back."""
    events: list[AnyTimed] = []
    times: list[float] = []
    for of_file in files:
        events += of_file
        times += accumulate(map(time_of, of_file), max)
    return [events[index] for index in sorted(range(len(events)), key=times.__getitem__)]


def is_boundary(event: AnyEvent) -> bool:
    """Whether an event of the run comes after those of all ranks before it."""
    return isinstance(event, World | RunEnded)


class RunReader:
    """Follows the events of a run, of all ranks and nodes.

    The events of one poll are merged by time, those of one file in the order of its lines, also where its clock was set
    back. ``run_ended`` comes last of all: it is held back while other files have a backlog. So is a ``world`` event of
    the run: the ranks that it ends have their whole record before it.
    """

    budget_bytes = 8 << 20
    """Maximum of one poll, about 20 ms of work; exceeded when very many files have a backlog."""

    def __init__(
        self, run: RunDir, *, begin: Mapping[str, int] | None = None, now: Callable[[], float] = time.time
    ) -> None:
        """Follow a run from ``begin``, bytes by file name without suffix; skip ranks that the run does not have."""
        self._known = KnownRanks(run)
        self._follower = Follower(run.events, ".ndjson", only=self._known, begin=begin, now=now)
        self._held: list[AnyEvent] = []
        """Events of the run that wait for those of other files."""

    def poll(self, budget_bytes: int | None = None) -> list[AnyEvent]:
        files: list[list[AnyEvent]] = []
        for name, lines in self._follower.poll(self.budget_bytes if budget_bytes is None else budget_bytes):
            of_file = self._known.decode(lines)
            if name == "run" and any(map(is_boundary, of_file)):
                self._held += filter(is_boundary, of_file)
                of_file = [event for event in of_file if not is_boundary(event)]
            files.append(of_file)
        events = merged(files)
        if self._held and not self._follower.backlog_bytes:
            events += self._held
            self._held = []
        return events

    def rest(self) -> Iterator[AnyEvent]:
        """Yield the events up to the end of the record."""
        yield from self.poll()
        while self.backlog_bytes:
            yield from self.poll()

    @property
    def backlog_bytes(self) -> int:
        return self._follower.backlog_bytes

    @property
    def damaged_lines(self) -> int:
        """Lines read so far that are no JSON; those of an older part, of which a digest was read, are not known."""
        return self._known.damaged_lines

    @property
    def has_torn_end(self) -> bool:
        """Whether a file ends within a line, as one does that is being written."""
        return self._follower.has_torn_end

    @property
    def unreadable(self) -> dict[str, str]:
        """Reasons by the names of event files that could not be opened."""
        return self._follower.unreadable

    def close(self) -> None:
        self._follower.close()
