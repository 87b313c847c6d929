"""The list of all runs, read in parts, so that the newest are shown at once however many there are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gputrain_tui import paths
from gputrain_tui.history.run_folders import RECENT_RUNS, UnreadableRun, names_by_second, read_run
from gputrain_tui.history.status_file import ENDED
from gputrain_tui.history.summary import UNREADABLE, summarize, summarize_unreadable

Summary = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ListedRuns:
    """The runs that have been read so far."""

    entries: list[Summary]
    """Summaries, newest first, unreadable ones last."""
    unread: int
    """Older folders that are not read yet."""


class RunListing:
    """Summaries of all runs; an ended run is read again only when its folder has changed."""

    def __init__(self, root: Path | None = None) -> None:
        self._root = root
        self._ended: dict[str, tuple[int, Summary]] = {}
        """By name: modification time of the folder in ns, which replacing a file in it changes, and the summary."""

    def read(self, *, now: float) -> Iterator[ListedRuns]:
        """Yield the newest runs, then again whenever twice as many are read, at last all of them.

        Raises:
            RequestError: the folder of the runs cannot be read.
        """
        folder = paths.runs_folder() if self._root is None else self._root
        seconds = names_by_second(folder)
        unread, shown = sum(map(len, seconds)), RECENT_RUNS
        readable: list[Summary] = []
        unreadable: list[Summary] = []
        ended: dict[str, tuple[int, Summary]] = {}
        for names in seconds:
            summaries = [summary for name in names if (summary := self._summary(folder, name, ended, now)) is not None]
            summaries.sort(key=lambda summary: (summary["started"] or 0.0, summary["id"]), reverse=True)
            for summary in summaries:
                (unreadable if summary["state"] == UNREADABLE else readable).append(summary)
            unread -= len(names)
            if len(readable) >= shown and unread:
                yield ListedRuns(entries=[*readable, *unreadable], unread=unread)
                shown *= 2
        self._ended = ended
        yield ListedRuns(entries=[*readable, *unreadable], unread=0)

    def _summary(self, folder: Path, name: str, ended: dict[str, tuple[int, Summary]], now: float) -> Summary | None:
        try:
            changed = os.stat(f"{folder}/{name}").st_mtime_ns  # noqa: PTH116 - no Path per run and listing
        except OSError:  # deleted meanwhile
            return None
        known = self._ended.get(name)
        if known is None or known[0] != changed:
            run = read_run(folder / name)
            if run is None:
                return None
            if isinstance(run, UnreadableRun):
                return summarize_unreadable(run)
            known = (changed, summarize(run, now=now))
            if run.state not in ENDED or run.status.by_hand:  # whose end is read from its record
                return known[1]
        ended[name] = known
        return known[1]
