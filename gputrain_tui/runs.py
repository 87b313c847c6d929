"""Run directories as every command and view finds them: create, list, find, and follow what is appended.

Readers only read. What a run is doing comes from ``status.json``, doubted where its supervisor is gone.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Literal

import msgspec

from gputrain_tui import paths
from gputrain_tui.reading.tail import Follower
from gputrain_tui.running.processes import ProcessIdentity, identify, is_alive
from trainer.errors import RequestError, nearest, quoted
from trainer.record import AnyEvent, RunDir, RunEnded, RunStatusName, Step, decode_events, write_atomically

RunStateName = RunStatusName | Literal["lost"]
"""What is shown of a run; ``lost``: it says that it runs, and its supervisor is dead."""

ENDED = ("finished", "failed", "stopped")


class Status(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What ``status.json`` holds; replaced atomically, by the supervisor alone once it has taken over.

    An ended status is written after the ``run_ended`` event, so that whoever sees it can read the whole record.
    """

    run: str
    """Run id."""
    recipe: str
    """Name of the recipe."""
    world_size: int
    status: RunStatusName = "starting"
    supervisor: ProcessIdentity | None = None
    """Who answers for the run: its creator until the supervisor has taken over."""
    started: float = 0.0
    """Unix seconds."""
    ended: float | None = None
    """Unix seconds."""
    exit_code: int | None = None
    restarts: int = 0
    """Attempts that failed and were followed by another."""
    message: str | None = None
    """One line: why it failed, or what was left when it stopped."""
    step: int | None = None
    """Optimizer steps done when this was written."""
    loss: float | None = None
    """Mean over the ranks at that step, in nats."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run as it was found."""

    dir: RunDir
    status: Status
    state: RunStateName

    @property
    def id(self) -> str:
        """The name of its directory."""
        return self.dir.path.name


def create(
    recipe: str,
    *,
    world_size: int,
    recipe_toml: str,
    plan: Callable[[RunDir], bytes],
    root: Path | None = None,
    now: Callable[[], float] = time.time,
) -> Run:
    """Make the directory of a new run, complete or not at all.

    It is filled under a hidden name and renamed, so a reader never finds half of one.

    Args:
        recipe: the recipe's name; the id carries it.
        world_size: ranks on all nodes together.
        recipe_toml: the recipe as it will be kept.
        plan: gives the bytes of ``plan.json``, told the directory's final place.
        root: folder of the runs; by default this person's.
        now: Unix seconds.

    Raises:
        RequestError: the folder cannot be written.
    """
    folder = paths.runs_folder() if root is None else root
    started = now()
    hidden = folder / f".new-{os.urandom(8).hex()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            return _create(folder, hidden, recipe, world_size, recipe_toml, plan, started)
        except BaseException:  # Ctrl-C, too: no half of a run is left behind; it goes on
            shutil.rmtree(hidden, ignore_errors=True)
            raise
    except OSError as error:
        raise RequestError(
            f"cannot make a run directory in {folder}: {error.strerror}; "
            "choose another folder with GPUTRAIN_HOME=FOLDER"
        ) from None


def _create(
    folder: Path,
    hidden: Path,
    recipe: str,
    world_size: int,
    recipe_toml: str,
    plan: Callable[[RunDir], bytes],
    started: float,
) -> Run:
    hidden.mkdir(mode=0o700)
    draft = RunDir(hidden)
    for part in (draft.events, draft.logs, draft.checkpoints, draft.nodes):
        part.mkdir(mode=0o700)
    draft.lock.touch(mode=0o600)  # what every run needs is there from its beginning, however full the disk becomes
    draft.recipe.write_text(recipe_toml, encoding="utf-8")
    base = run_id(recipe, started)
    number = 1
    while True:
        name = base if number == 1 else f"{base}-{number}"
        final = RunDir(folder / name)
        status = Status(run=name, recipe=recipe, world_size=world_size, supervisor=identify(), started=started)
        draft.plan.write_bytes(plan(final))
        write_status(draft, status)
        try:
            # Renaming onto a directory that holds something fails, which makes the id ours alone.
            hidden.rename(final.path)
        except OSError:
            if not final.path.exists():
                raise
            number += 1
            continue
        return Run(dir=final, status=status, state=status.status)


def run_id(recipe: str, started: float) -> str:
    """``20261121-010203-mnist-two-nodes``: UTC, so that ids sort by time in every season."""
    slug = re.sub(r"[^a-z0-9]+", "-", recipe.lower()).strip("-")[:40].strip("-") or "run"
    return time.strftime("%Y%m%d-%H%M%S-", time.gmtime(started)) + slug


_encode = msgspec.json.Encoder()
_decode = msgspec.json.Decoder(Status)


def write_status(run: RunDir, status: Status) -> None:
    """Replace ``status.json``; on a full disk in its place, which takes no more room.

    Raises:
        OSError: it cannot be written at all.
    """
    data = _encode.encode(status) + b"\n"
    try:
        write_atomically(run.status, data)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        with run.status.open("r+b", buffering=0) as file:
            file.write(data)
            file.truncate()


def read_status(run: RunDir) -> Status | None:
    """Read ``status.json``; None when there is none that can be understood."""
    try:
        return _decode.decode(run.status.read_bytes())
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def open_run(path: Path) -> Run | None:
    """The run of a directory, or None when that is not a run directory."""
    directory = RunDir(path)
    status = read_status(directory)
    return None if status is None else Run(dir=directory, status=status, state=state_of(status))


def state_of(status: Status) -> RunStateName:
    """What a run is doing, which a dead supervisor can no longer correct."""
    if status.status in ENDED or status.supervisor is None or is_alive(status.supervisor) is not False:
        return status.status
    return "lost"


def list_runs(root: Path | None = None) -> list[Run]:
    """All runs, newest first; folders that are none are passed over."""
    folder = paths.runs_folder() if root is None else root
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RequestError(f"cannot read the runs in {folder}: {error.strerror}") from None
    runs = [run for name in names if (run := open_run(folder / name)) is not None]
    return sorted(runs, key=lambda run: (run.status.started, run.id), reverse=True)


def find(wanted: str, root: Path | None = None) -> Run:
    """The run of an id, a unique prefix of one, or ``last``.

    Raises:
        RequestError: none or several fit; the message names them.
    """
    folder = paths.runs_folder() if root is None else root
    runs = list_runs(folder)
    if not runs:
        raise RequestError(f"there is no run in {folder} yet; start one with `gputrain run RECIPE`")
    if wanted == "last":
        return runs[0]
    fitting = [run for run in runs if run.id == wanted] or [run for run in runs if wanted and run.id.startswith(wanted)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        names = ", ".join(run.id for run in fitting[:4]) + (", …" if len(fitting) > 4 else "")
        raise RequestError(f"{quoted(wanted)} fits {len(fitting)} runs: {names}")
    guess = nearest(wanted, [run.id for run in runs]) or f"; the last one is {runs[0].id!r}"
    raise RequestError(f"no run is called {quoted(wanted)}{guess}")


def last_step(run: RunDir, rank: int = 0, *, tail_bytes: int = 16_384) -> Step | None:
    """The newest step that a rank recorded, read from the end of its file."""
    try:
        with run.rank_events(rank).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - tail_bytes))
            data = file.read()
    except OSError:
        return None
    steps = [event for event in decode_events(data[: data.rfind(b"\n") + 1]) if isinstance(event, Step)]
    return steps[-1] if steps else None


class RunReader:
    """Follows the events of a run: all that was appended since the last poll, whoever wrote it.

    The events of one poll are in the order of their times. ``run_ended`` comes last of all: it is held back while
    other files have a backlog.
    """

    budget_bytes = 8 << 20
    """What one poll reads at most, about 20 ms of work; more when very many files have a backlog."""

    def __init__(
        self,
        run: RunDir,
        *,
        last_bytes: int | None = None,
        begin: Mapping[str, int] | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Follow a run.

        Args:
            run: its directory.
            last_bytes: begin so near the end of the ranks' files, all together; by default at the beginning.
            begin: bytes of the files at which to begin, by their names without suffix.
            now: Unix seconds.
        """
        self._follower = Follower(run.events, ".ndjson", last_bytes=last_bytes, whole=("run",), begin=begin, now=now)
        self._ended: RunEnded | None = None

    def poll(self, budget_bytes: int | None = None) -> list[AnyEvent]:
        """Return the new events; an empty list when nothing was appended."""
        events: list[AnyEvent] = []
        for name, lines in self._follower.poll(self.budget_bytes if budget_bytes is None else budget_bytes):
            found = list(decode_events(lines))
            if name == "run" and found and isinstance(last := found[-1], RunEnded):
                self._ended = last
                found.pop()
            events += found
        events.sort(key=attrgetter("time"))
        if self._ended is not None and not self._follower.backlog_bytes:
            events.append(self._ended)
            self._ended = None
        return events

    @property
    def backlog_bytes(self) -> int:
        """Bytes that are there and that the last poll left for the next."""
        return self._follower.backlog_bytes

    def close(self) -> None:
        """Let go of the files."""
        self._follower.close()


def follow(
    run: RunDir,
    *,
    interval_s: float = 0.1,
    sleep: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.time,
) -> Iterator[list[AnyEvent]]:
    """Yield a run's events from the first to the last, in batches, until the run has ended.

    A batch may be empty, so that the caller can show the time passing. A run whose supervisor is dead ends when
    nothing more is there to read.
    """
    reader = RunReader(run, now=now)
    try:
        while True:
            over = is_over(run)  # asked before reading: what was written until then is read
            events = reader.poll()
            yield events
            if reader.backlog_bytes:
                continue
            if over or (events and isinstance(events[-1], RunEnded)):
                return
            sleep(interval_s)
    finally:
        reader.close()


def is_over(run: RunDir) -> bool:
    """Whether nothing will be appended to this run's record any more."""
    status = read_status(run)
    return status is not None and (status.status in ENDED or state_of(status) == "lost")
