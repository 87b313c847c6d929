"""Creates, lists, finds and opens run directories."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gputrain_tui import paths
from gputrain_tui.history.status_file import (
    RunStateName,
    Status,
    as_recorded,
    read_status,
    require_status,
    state_of,
    write_status,
)
from gputrain_tui.plan.planner import Plan
from trainer.contract.errors import RecordError, RequestError, nearest, quoted
from trainer.contract.record import RunDir, write_atomically
from trainer.host.process_identity import identify

ARCHIVES = (".tar.gz", ".tgz")
"""Suffixes of archives."""

RUN_ID = re.compile(r"\d{8}-\d{6}-.")


@dataclass(frozen=True, kw_only=True)
class UnreadableRun:
    """A run directory with a missing or damaged ``status.json``."""

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
            draft.lock.touch(mode=0o600)  # early, because the disk may be full later
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


def create_by_hand(run: RunDir, plan: Plan, *, recipe: str, recipe_toml: str, runs: Path, now: float) -> None:
    """Create the directory of a run with commands for the user to type, and list it among the runs.

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


def run_id(recipe: str, started: float) -> str:
    """Return an id such as ``20261121-010203-mnist-two-nodes``; in UTC, so that ids sort by time."""
    slug = re.sub(r"[^a-z0-9]+", "-", recipe.lower()).strip("-")[:40].strip("-") or "run"
    return time.strftime("%Y%m%d-%H%M%S-", time.gmtime(started)) + slug


def open_run(path: Path) -> Run | None:
    """Return the run of a directory; None when that is no run directory."""
    directory = RunDir(path)
    status = read_status(directory)
    return None if status is None else Run(dir=directory, status=status, state=state_of(status))


def open_directory(path: Path) -> Run:
    """Return the run of any run directory, also of one that ``python -m trainer`` made without a supervisor.

    Raises:
        RequestError: it is no run directory.
    """
    path = path.absolute()
    if (found := open_run(path)) is not None:
        return found
    directory = RunDir(path)
    files = [file for file in directory.events.glob("*.ndjson") if file.stem.isdecimal()]
    if not files:
        raise RequestError(f"{path} is not a run directory: it has no rank events")
    ranks = max(int(file.stem) for file in files) + 1
    began = min(file.stat().st_ctime for file in files)
    status = Status(run=path.name, recipe=path.name, world_size=ranks, by_hand=True, started=began)
    status = as_recorded(directory, status)
    return Run(dir=directory, status=status, state=status.status)


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
            status = require_status(directory)
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
        raise RequestError(f"{quoted(wanted)} matches {len(fitting)} runs: {names}")
    for broken in unreadable:
        if wanted == "last" or (wanted and broken.id.startswith(wanted)):
            raise RequestError(f"run {broken.id} cannot be read: {broken.problem}")
    if not runs:
        raise RequestError(f"there is no run in {folder} yet; start one with `gputrain run RECIPE`")
    guess = nearest(wanted, [run.id for run in runs]) or f"; the last one is {runs[0].id!r}"
    raise RequestError(f"no run is called {quoted(wanted)}{guess}")
