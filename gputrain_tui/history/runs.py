"""Run directories as every command and view finds them: create, list, find, and follow what is appended.

Readers only read. What a run is doing comes from ``status.json``, doubted where its supervisor is gone.
"""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Literal

import msgspec

from gputrain_tui import paths
from gputrain_tui.history.follow import Follower
from gputrain_tui.plan.planner import Plan, stop_grace
from trainer.contract.errors import RecordError, RequestError, nearest, quoted
from trainer.contract.record import (
    MOST_RANKS,
    AnyEvent,
    RunDir,
    RunEnded,
    RunStatusName,
    Step,
    decode_events,
    write_atomically,
)
from trainer.contract.record.events import Count, ExitStatus, Figure, UnixSeconds, WorldSize
from trainer.contract.record.regular_file import open_regular, read_json, read_tail
from trainer.host.process_identity import ProcessIdentity, identify, is_alive

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
    world_size: WorldSize
    status: RunStatusName = "starting"
    supervisor: ProcessIdentity | None = None
    """Who answers for the run: its creator until the supervisor has taken over."""
    started: UnixSeconds = 0.0
    """Unix seconds."""
    ended: UnixSeconds | None = None
    """Unix seconds."""
    exit_code: ExitStatus | None = None
    restarts: Count = 0
    """Attempts that failed and were followed by another."""
    message: str | None = None
    """One line: why it failed, or what was left when it stopped."""
    step: Count | None = None
    """Optimizer steps done when this was written."""
    loss: Figure | None = None
    """Mean over the ranks at that step, in nats."""


@dataclass(frozen=True, kw_only=True)
class UnreadableRun:
    """A folder that a run was recorded in, of which nothing can be told."""

    dir: RunDir
    problem: str
    """One line."""

    @property
    def id(self) -> str:
        """The name of its directory."""
        return self.dir.path.name


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
_status = msgspec.json.Decoder(Status)
_plan = msgspec.json.Decoder(Plan)
STATUS_BYTES = 1 << 20
"""What ``status.json`` has at most; it has some hundred bytes, and a message."""
RUN_ID = re.compile(r"\d{8}-\d{6}-.")


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
        with os.fdopen(open_regular(run.status, os.O_RDWR), "r+b", buffering=0) as file:
            file.write(data)
            file.truncate()


def read_status(run: RunDir) -> Status | None:
    """Read ``status.json``; None when there is none that can be understood."""
    try:
        return read_json(run.status, _status, STATUS_BYTES)
    except RecordError:
        return None


def read_plan(run: RunDir) -> Plan:
    """Read ``plan.json``: whose ranks are those from 0 to its world size, each on one node.

    Raises:
        RecordError: it cannot be read, or is no such plan.
    """
    plan = read_json(run.plan, _plan)
    if [rank for node in plan.nodes for rank in node.ranks] != list(range(plan.world_size)):
        raise RecordError(f"{run.plan} is damaged: its nodes do not have the ranks 0 to {plan.world_size - 1}")
    for index, node in enumerate(plan.nodes):
        if node.node != index or not node.argv or not 0 <= _stop_grace(node.argv) < math.inf:
            raise RecordError(f"{run.plan} is damaged: node {index} has no command that can be run")
    return plan


def _stop_grace(argv: Sequence[str]) -> float:
    try:
        return stop_grace(argv)
    except (ValueError, IndexError):
        return math.nan


def ranks_of(run: RunDir) -> int:
    """How many ranks a run has by its plan; as many as any may have where none can be read."""
    try:
        return read_plan(run).world_size
    except RecordError:
        return MOST_RANKS


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
    """All runs that can be read, newest first; folders that are none are passed over."""
    return list_all(root)[0]


def list_all(root: Path | None = None) -> tuple[list[Run], list[UnreadableRun]]:
    """All runs, newest first, and the folders named like runs of which nothing can be told, by name."""
    folder = paths.runs_folder() if root is None else root
    runs, unreadable = [], []
    for name in _folders(folder):
        directory = RunDir(folder / name)
        try:
            status = read_json(directory.status, _status, STATUS_BYTES)
        except RecordError as error:
            if RUN_ID.match(name):
                problem = str(error).replace(str(directory.status), "status.json", 1)
                unreadable.append(UnreadableRun(dir=directory, problem=problem))
        else:
            runs.append(Run(dir=directory, status=status, state=state_of(status)))
    runs.sort(key=lambda run: (run.status.started, run.id), reverse=True)
    unreadable.sort(key=lambda run: run.id, reverse=True)
    return runs, unreadable


def _folders(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RequestError(f"cannot read the runs in {folder}: {error.strerror}") from None


def find(wanted: str, root: Path | None = None) -> Run:
    """The run of an id, a unique prefix of one, or ``last``.

    Raises:
        RequestError: none or several fit; the message names them.
    """
    folder = paths.runs_folder() if root is None else root
    runs, unreadable = list_all(folder)
    if wanted == "last" and runs:
        return runs[0]
    fitting = [run for run in runs if run.id == wanted] or [run for run in runs if wanted and run.id.startswith(wanted)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        names = ", ".join(run.id for run in fitting[:4]) + (", …" if len(fitting) > 4 else "")
        raise RequestError(f"{quoted(wanted)} fits {len(fitting)} runs: {names}")
    for broken in unreadable:
        if wanted == "last" or (wanted and broken.id.startswith(wanted)):
            raise RequestError(f"run {broken.id} cannot be read: {broken.problem}")
    if not runs:
        raise RequestError(f"there is no run in {folder} yet; start one with `gputrain run RECIPE`")
    guess = nearest(wanted, [run.id for run in runs]) or f"; the last one is {runs[0].id!r}"
    raise RequestError(f"no run is called {quoted(wanted)}{guess}")


def last_step(run: RunDir, rank: int = 0, *, tail_bytes: int = 16_384) -> Step | None:
    """The newest step that a rank recorded, read from the end of its file."""
    try:
        data = read_tail(run.rank_events(rank), tail_bytes)
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
        begin: Mapping[str, int] | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Follow a run; what is told of ranks that its plan does not have is passed over.

        Args:
            run: its directory.
            begin: bytes of the files at which to begin, by their names without suffix.
            now: Unix seconds.
        """
        self._follower = Follower(run.events, ".ndjson", begin=begin, now=now)
        self._world_size = ranks_of(run)
        self._ended: RunEnded | None = None

    def poll(self, budget_bytes: int | None = None) -> list[AnyEvent]:
        """Return the new events; an empty list when nothing was appended."""
        events: list[AnyEvent] = []
        for name, lines in self._follower.poll(self.budget_bytes if budget_bytes is None else budget_bytes):
            found = decode_events(lines, self._world_size)
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
