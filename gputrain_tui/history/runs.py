"""Creates, lists, finds and reads run directories.

The state of a run is that of ``status.json``, unless its supervisor is dead.
"""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Literal

import msgspec

from gputrain_tui import paths
from gputrain_tui.history.follow import Follower
from gputrain_tui.plan.planner import Plan, stop_grace
from gputrain_tui.state.step_losses import newest_loss
from trainer.contract.errors import ExitCode, RecordError, RequestError, nearest, quoted
from trainer.contract.outcome import exit_code_of, node_outcome, root_cause
from trainer.contract.record import (
    MAX_RANKS,
    AnyEvent,
    RunDir,
    RunEnded,
    RunStatusName,
    Step,
    Validation,
    decode_events,
    write_atomically,
)
from trainer.contract.record.events import Count, ExitStatus, FiniteFloat, UnixSeconds, WorldSize
from trainer.contract.record.regular_file import open_regular, read_json, read_tail
from trainer.host.process_identity import ProcessIdentity, identify, is_alive

RunStateName = RunStatusName | Literal["lost"]
"""``lost``: by its status it runs, but its supervisor is dead."""

ENDED = ("finished", "failed", "stopped")
ARCHIVES = (".tar.gz", ".tgz")
"""Ends of the names of archives."""


class Status(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Contents of ``status.json``: replaced atomically, by the supervisor alone once it has taken over.

    An ended status is written after the ``run_ended`` event: a reader that sees it can read the whole record.
    """

    run: str
    """Run id."""
    recipe: str
    """Name of the recipe."""
    world_size: WorldSize
    status: RunStatusName = "starting"
    by_hand: bool = False
    """Whether its commands were typed by a person: nobody writes its end, which is read from its record."""
    supervisor: ProcessIdentity | None = None
    """Process responsible for the run: its creator until the supervisor has taken over."""
    started: UnixSeconds = 0.0
    """Unix seconds."""
    ended: UnixSeconds | None = None
    """Unix seconds."""
    exit_code: ExitStatus | None = None
    restarts: Count = 0
    """Attempts that failed and were followed by another."""
    message: str | None = None
    """One line: why it failed, or which processes were left when it stopped."""
    step: Count | None = None
    """Optimizer steps done when this was written."""
    loss: FiniteFloat | None = None
    """Mean over the ranks at that step, in nats."""
    valid: FiniteFloat | None = None
    """The newest validation loss, in nats."""
    lr: FiniteFloat | None = None
    """Learning rate of the last step; written at the end."""
    tokens: Count | None = None
    """Tokens that all ranks read; None where the task counts none; written at the end."""
    samples_per_s: FiniteFloat | None = None
    """Of all ranks together over the whole run; written at the end."""
    tokens_per_s: FiniteFloat | None = None
    """Likewise; None where the task counts none."""
    mfu: FiniteFloat | None = None
    """Model FLOPs utilization since the ranks were last started, 0 to 1; None where it is not known."""
    tested: Validation | None = None
    """The last test, or what an evaluation found; written at the end."""
    archived: UnixSeconds | None = None
    """When this copy of the run was made for an archive, Unix seconds; nothing goes on in it."""


class SlurmJob(msgspec.Struct, kw_only=True):
    """Contents of ``slurm.json``: the job that a run is in."""

    number: Count
    partition: str = ""
    nodes: list[str] = []
    """Its hosts in the order of the plan; empty before Slurm has chosen them."""
    batch: bool = False
    """Whether the run's supervisor is the job's script."""


@dataclass(frozen=True, kw_only=True)
class UnreadableRun:
    """A run directory whose status cannot be read."""

    dir: RunDir
    problem: str
    """One line."""

    @property
    def id(self) -> str:
        """The name of its directory."""
        return self.dir.path.name


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run directory with its status."""

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
    """Create the directory of a new run atomically: it is filled under a hidden name and renamed.

    Args:
        recipe: the recipe's name; the id carries it.
        world_size: ranks on all nodes together.
        recipe_toml: text of ``recipe.toml``.
        plan: returns the bytes of ``plan.json`` for the directory's final path.
        root: folder of the runs; by default this user's.
        now: Unix seconds.

    Raises:
        RequestError: the folder cannot be written.
    """
    folder = paths.runs_folder() if root is None else root
    started = now()
    draft = RunDir(folder / f".new-{os.urandom(8).hex()}")
    base, number = run_id(recipe, started), 1
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            for part in (draft.path, draft.events, draft.logs, draft.checkpoints, draft.nodes):
                part.mkdir(mode=0o700)
            draft.lock.touch(mode=0o600)  # now, because the disk may be full later
            draft.recipe.write_text(recipe_toml, encoding="utf-8")
            while True:
                name = base if number == 1 else f"{base}-{number}"
                final = RunDir(folder / name)
                status = Status(run=name, recipe=recipe, world_size=world_size, supervisor=identify(), started=started)
                draft.plan.write_bytes(plan(final))
                write_status(draft, status)
                try:
                    # Renaming onto a non-empty directory fails, which makes the id unique.
                    draft.path.rename(final.path)
                except OSError:
                    if not final.path.exists():
                        raise
                    number += 1
                else:
                    return Run(dir=final, status=status, state=status.status)
        except BaseException:  # also Ctrl-C: no incomplete run is left behind
            shutil.rmtree(draft.path, ignore_errors=True)
            raise
    except OSError as error:
        raise RequestError(
            f"cannot make a run directory in {folder}: {error.strerror}; "
            "choose another folder with GPUTRAIN_HOME=FOLDER"
        ) from None


def run_id(recipe: str, started: float) -> str:
    """Return an id such as ``20261121-010203-mnist-two-nodes``; in UTC, so that ids sort by time."""
    slug = re.sub(r"[^a-z0-9]+", "-", recipe.lower()).strip("-")[:40].strip("-") or "run"
    return time.strftime("%Y%m%d-%H%M%S-", time.gmtime(started)) + slug


_encode = msgspec.json.Encoder()
_status = msgspec.json.Decoder(Status)
_plan = msgspec.json.Decoder(Plan)
_job = msgspec.json.Decoder(SlurmJob)

RUN_ID = re.compile(r"\d{8}-\d{6}-.")


def write_status(run: RunDir, status: Status) -> None:
    """Replace ``status.json`` atomically; on a full disk overwrite it, which needs no more space.

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
    """Read ``status.json``; None when it is missing or damaged."""
    try:
        return _read_status(run)
    except RecordError:
        return None


def _read_status(run: RunDir) -> Status:
    status = read_json(run.status, _status)
    return _as_recorded(run, status) if status.by_hand else status


def _as_recorded(run: RunDir, status: Status) -> Status:
    """Return the status of a run without a supervisor as its nodes have recorded their ends."""
    numbers = [int(path.stem) for path in run.nodes.glob("*.json") if path.stem.isdecimal()]
    try:
        count = len(read_plan(run).nodes)
    except RecordError:
        count = len(numbers)
    ends = [end for number in sorted(numbers) if (end := node_outcome(run, number)) is not None]
    if not ends or len(ends) < count:
        began = any(run.events.glob("[0-9]*.ndjson"))
        return msgspec.structs.replace(status, status="running" if began else "starting")
    failure = root_cause((int(end.failure.time * 1e9), end.failure) for end in ends if end.failure is not None)
    code = exit_code_of(failure) if failure is not None else max(end.exit_code for end in ends)
    step, loss = newest_loss_of(run, status.world_size)
    how: RunStatusName = "finished" if code == 0 else "stopped" if code == ExitCode.STOPPED else "failed"
    return msgspec.structs.replace(
        status,
        status=how,
        exit_code=int(code),
        ended=max(run.node_result(end.node).stat().st_mtime for end in ends),
        message=None if failure is None else failure.message,
        step=step,
        loss=loss,
    )


def read_job(run: RunDir) -> SlurmJob | None:
    """Read the job of Slurm that a run is in; None where it is in none."""
    try:
        return read_json(run.slurm, _job)
    except RecordError:
        return None


def read_plan(run: RunDir) -> Plan:
    """Read ``plan.json`` and check that its nodes have all ranks from 0 to its world size in order.

    Raises:
        RecordError: it cannot be read, or is damaged.
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


def planned_world_size(run: RunDir) -> int:
    """Return the world size by a run's plan; the maximum where that cannot be read."""
    try:
        return read_plan(run).world_size
    except RecordError:
        return MAX_RANKS


def open_run(path: Path) -> Run | None:
    """Return the run of a directory; None when that is no run directory."""
    directory = RunDir(path)
    status = read_status(directory)
    return None if status is None else Run(dir=directory, status=status, state=state_of(status))


def state_of(status: Status) -> RunStateName:
    """Return the state by a run's status; ``lost`` where it runs without a supervisor, as in an archive of before."""
    if status.archived is not None and status.status not in ENDED:
        return "lost"
    if status.status in ENDED or status.supervisor is None or is_alive(status.supervisor) is not False:
        return status.status
    return "lost"


def list_runs(root: Path | None = None) -> list[Run]:
    """Return all readable runs, newest first."""
    return list_all(root)[0]


def list_all(root: Path | None = None) -> tuple[list[Run], list[UnreadableRun]]:
    """Return all readable runs, newest first, and the unreadable folders that are named like runs."""
    folder = paths.runs_folder() if root is None else root
    runs, unreadable = [], []
    for name in _folder_names(folder):
        directory = RunDir(folder / name)
        try:
            status = _read_status(directory)
        except RecordError as error:
            if RUN_ID.match(name):
                problem = str(error).replace(str(directory.status), "status.json", 1)
                unreadable.append(UnreadableRun(dir=directory, problem=problem))
        else:
            runs.append(Run(dir=directory, status=status, state=state_of(status)))
    runs.sort(key=lambda run: (run.status.started, run.id), reverse=True)
    unreadable.sort(key=lambda run: run.id, reverse=True)
    return runs, unreadable


def _folder_names(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RequestError(f"cannot read the runs in {folder}: {error.strerror}") from None


def describe_by_hand(run: RunDir, plan: Plan, *, recipe: str, recipe_toml: str, runs: Path, now: float) -> None:
    """Make the directory of a run whose commands a person will type, and list it among the runs.

    Args:
        run: its directory; one that has a record already is left as it is.
        plan: its commands.
        recipe: name of the recipe.
        recipe_toml: text of ``recipe.toml``.
        runs: folder of the runs, which gets a link to a directory elsewhere.
        now: Unix seconds.

    Raises:
        RequestError: it cannot be written.
    """
    try:
        if any(run.events.glob("*.ndjson")):
            return
        for part in (run.path, run.events, run.logs, run.checkpoints, run.nodes):
            part.mkdir(mode=0o700, parents=True, exist_ok=True)
        run.recipe.write_text(recipe_toml, encoding="utf-8")
        write_atomically(run.plan, msgspec.json.encode(plan))
        status = Status(run=run.path.name, recipe=recipe, world_size=plan.world_size, by_hand=True, started=now)
        write_status(run, status)
        if run.path.parent != runs and not any(path.resolve() == run.path.resolve() for path in runs.glob("2*")):
            runs.mkdir(mode=0o700, parents=True, exist_ok=True)
            (runs / run_id(recipe, now)).symlink_to(run.path.resolve())
    except OSError as error:
        raise RequestError(f"--run-dir {run.path} cannot be written: {error.strerror}") from None


def open_directory(path: Path) -> Run:
    """Return the run of any run directory, also of one that ``python -m trainer`` has made alone.

    Raises:
        RequestError: it is none.
    """
    path = path.absolute()
    if (found := open_run(path)) is not None:
        return found
    directory = RunDir(path)
    files = [file for file in directory.events.glob("*.ndjson") if file.stem.isdecimal()]
    if not files:
        raise RequestError(f"{path} is no run directory: it has no events of ranks")
    ranks = max(int(file.stem) for file in files) + 1
    began = min(file.stat().st_ctime for file in files)
    status = Status(run=path.name, recipe=path.name, world_size=ranks, by_hand=True, started=began)
    status = _as_recorded(directory, status)
    return Run(dir=directory, status=status, state=status.status)


def find(wanted: str, root: Path | None = None) -> Run:
    """Return the run of an id, a unique prefix of one, ``last``, a run directory's path, or an archive of a run.

    Raises:
        RequestError: no run or several match, or it is no archive of a run.
    """
    if "/" in wanted and Path(wanted).is_dir():
        return open_directory(Path(wanted))
    if wanted.endswith(ARCHIVES) or ("/" in wanted and Path(wanted).exists()):
        from gputrain_tui.history.open_archive import unpack

        return open_directory(unpack(Path(wanted)))
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


def last_steps(run: RunDir, rank: int = 0, *, tail_bytes: int = 16_384) -> list[Step]:
    """Return the newest steps that a rank recorded, read from the end of its file, in order."""
    try:
        data = read_tail(run.rank_events(rank), tail_bytes)
    except OSError:
        return []
    return [event for event in decode_events(data[: data.rfind(b"\n") + 1]) if isinstance(event, Step)]


def last_step(run: RunDir, rank: int = 0, *, tail_bytes: int = 16_384) -> Step | None:
    """Return the newest step that a rank recorded."""
    steps = last_steps(run, rank, tail_bytes=tail_bytes)
    return steps[-1] if steps else None


def newest_loss_of(run: RunDir, world_size: int) -> tuple[int | None, float | None]:
    """Return the newest step that all ranks recorded, None for none, and the mean of their losses at that step."""
    step, loss = newest_loss(list(reversed(last_steps(run, rank)[-2:])) for rank in range(world_size))
    return step or None, loss


def last_test(run: RunDir, *, tail_bytes: int = 16_384) -> Validation | None:
    """Return the newest evaluation of weights that need not be the last ones, from the end of the record of rank 0."""
    try:
        data = read_tail(run.rank_events(0), tail_bytes)
    except OSError:
        return None
    events = decode_events(data[: data.rfind(b"\n") + 1])
    return next(
        (event for event in reversed(events) if isinstance(event, Validation) and event.weights_step is not None), None
    )


class RunReader:
    """Follows the events of a run, of all ranks and nodes.

    The events of one poll are sorted by time. ``run_ended`` comes last of all: it is held back while other files have a
    backlog.
    """

    budget_bytes = 8 << 20
    """Maximum of one poll, about 20 ms of work; exceeded when very many files have a backlog."""

    def __init__(
        self,
        run: RunDir,
        *,
        begin: Mapping[str, int] | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Follow a run from ``begin``, bytes by file name without suffix; skip ranks that its plan does not have."""
        self._follower = Follower(run.events, ".ndjson", begin=begin, now=now)
        self._world_size = planned_world_size(run)
        self._ended: RunEnded | None = None

    def poll(self, budget_bytes: int | None = None) -> list[AnyEvent]:
        """Return the events appended since the last poll."""
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
        """Bytes that the last poll left for the next."""
        return self._follower.backlog_bytes

    def close(self) -> None:
        """Close the files."""
        self._follower.close()


def is_over(run: RunDir) -> bool:
    """Whether the run's record is complete: it has ended, or its supervisor is dead."""
    status = read_status(run)
    return status is not None and (status.status in ENDED or state_of(status) == "lost")
