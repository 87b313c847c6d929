"""Creates, lists, finds and opens run directories."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path

import msgspec

from gputrain_tui import paths
from gputrain_tui.history.recorded_recipe import recorded_table
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

RUN_ID = re.compile(r"\d{8}-\d{6}-.")
SECOND_CHARS = len("20261121-010203")
"""Leading characters of a run id: the second in which it started."""
RECENT_RUNS = 200
"""Runs that are read where a command or screen needs the newest ones; a list of all reads these first."""


@dataclass(frozen=True, kw_only=True)
class UnreadableRun:
    """A run directory with a missing or damaged ``status.json``."""

    dir: RunDir
    problem: str

    @property
    def id(self) -> str:
        return self.dir.path.name


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run directory with its status."""

    dir: RunDir
    status: Status
    state: RunStateName

    @property
    def id(self) -> str:
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

    ``recipe`` is the recipe's name, which the id carries; ``plan`` returns the bytes of ``plan.json`` for the
    directory's final path; ``root`` is the folder of the runs, by default this user's.

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
                status = Status(
                    run=name,
                    recipe=recipe,
                    world_size=world_size,
                    supervisor=identify(),
                    started=started,
                    workdir=working_directory(),
                    inode=draft.path.stat().st_ino,
                )
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

    A directory that has a record already is left as it is; ``runs``, the folder of the runs, gets a link to one
    elsewhere.

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
        status = Status(
            run=run.path.name,
            recipe=recipe,
            world_size=plan.world_size,
            by_hand=True,
            workdir=working_directory(),
            started=now,
        )
        write_status(run, status)
        if run.path.parent != runs and not _is_linked(runs, run.path):
            runs.mkdir(mode=0o700, parents=True, exist_ok=True)
            (runs / run_id(recipe, now)).symlink_to(run.path.resolve())
    except OSError as error:
        raise RequestError(f"--run-dir {run.path} cannot be written: {error.strerror}") from None


def _is_linked(runs: Path, path: Path) -> bool:
    try:
        with os.scandir(runs) as entries:
            return any(Path(entry.path).resolve() == path.resolve() for entry in entries if entry.is_symlink())
    except FileNotFoundError:
        return False


def working_directory() -> str:
    """Return the working directory; empty where it is gone, or its name is not UTF-8, which JSON cannot hold."""
    try:
        folder = os.getcwd()  # noqa: PTH109 - a name, not a path
        folder.encode()
    except (OSError, UnicodeEncodeError):
        return ""
    return folder


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
    if (run := open_run(path)) is not None:
        return run
    directory = RunDir(path)
    files = [file for file in directory.events.glob("*.ndjson") if file.stem.isdecimal()]
    if not files:
        raise RequestError(f"{path} is not a run directory: it has no rank events")
    ranks = max(int(file.stem) for file in files) + 1
    status = Status(run=path.name, recipe=path.name, world_size=ranks, by_hand=True)
    status = as_recorded(directory, status)
    return Run(dir=directory, status=status, state=state_of(status))


def list_runs(root: Path | None = None, *, limit: int = RECENT_RUNS) -> list[Run]:
    """Return the newest readable runs, newest first."""
    return list(islice((run for run in newest_runs(root) if isinstance(run, Run)), limit))


def newest_runs(root: Path | None = None) -> Iterator[Run | UnreadableRun]:
    """Return all runs, newest first, each read when it is asked for; unreadable ones have their place by their id.

    Raises:
        RequestError: the folder of the runs cannot be read.
    """
    folder = paths.runs_folder() if root is None else root
    return (run for names in names_by_second(folder) for run in _read_group(folder, names))


def names_by_second(folder: Path) -> list[list[str]]:
    """Return the names of the folders that may be runs, those of one second together, latest second first.

    Raises:
        RequestError: the folder cannot be read.
    """
    return _by_second(folder, _folder_names(folder))


def _by_second(folder: Path, names: Iterable[str]) -> list[list[str]]:

    def second(name: str) -> str:
        if RUN_ID.match(name):
            return name[:SECOND_CHARS]
        run = open_run(folder / name)  # a copied or renamed folder
        return "" if run is None else run_id("", run.status.started)[:SECOND_CHARS]

    seconds = sorted(((second(name), name) for name in names), reverse=True)
    return [[name for _, name in group] for _, group in groupby(seconds, key=lambda pair: pair[0])]


def _read_group(folder: Path, names: Sequence[str]) -> list[Run | UnreadableRun]:
    runs = [run for name in names if (run := read_run(folder / name)) is not None]
    return sorted(runs, key=lambda run: (run.status.started if isinstance(run, Run) else 0.0, run.id), reverse=True)


def read_run(path: Path) -> Run | UnreadableRun | None:
    """Return the run of a folder; None where it has no readable status and is not named like a run."""
    directory = RunDir(path)
    try:
        status = require_status(directory)
    except RecordError as error:
        if not RUN_ID.match(path.name):
            return None
        problem = str(error).replace(str(directory.status), "status.json", 1)
        if directory.agents.is_dir() and not directory.recipe.exists():
            problem = "only the part of this host is here; the record is on the machine that started it"
        return UnreadableRun(dir=directory, problem=problem)
    return Run(dir=directory, status=status, state=state_of(status))


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
    if wanted == "last":
        fitting = newest_runs(folder)
    else:
        names = _folder_names(folder)
        chosen = [wanted] if wanted in names else [name for name in names if wanted and name.startswith(wanted)]
        fitting = (run for each in _by_second(folder, chosen) for run in _read_group(folder, each))
    broken: UnreadableRun | None = None
    matches: list[Run] = []
    shown_matches = 4  # runs that a message names at most
    enough = 1 if wanted == "last" else shown_matches + 1
    for run in fitting:
        if isinstance(run, UnreadableRun):
            broken = broken or run
        else:
            matches.append(run)
        if len(matches) == enough:
            break
    if len(matches) == 1:
        return matches[0]
    if matches:
        shown = ", ".join(run.id for run in matches[:shown_matches])
        count, more = (len(matches), "") if len(matches) <= shown_matches else (f"more than {shown_matches}", ", …")
        raise RequestError(f"{quoted(wanted)} matches {count} runs: {shown}{more}")
    if broken is not None:
        raise RequestError(f"run {broken.id} cannot be read: {broken.problem}")
    raise RequestError(_no_run(wanted, folder))


def _no_run(wanted: str, folder: Path) -> str:
    """Return that there is no such run, and what may have been meant."""
    if os.path.isdir(wanted):  # noqa: PTH112 - of a name that is too long, a path's method raises
        return f"no run is called {quoted(wanted)}; did you mean the folder {quoted(f'./{wanted}')}?"
    recent = list_runs(folder)
    if not recent:
        return f"there is no run in {folder} yet; start one with `gputrain run RECIPE`"
    of_recipe = [run.id for run in recent if run.status.recipe == wanted]
    if of_recipe:
        return f"{quoted(wanted)} is a recipe; its newest run is {of_recipe[0]!r}"
    guess = nearest(wanted, [*(run.id for run in recent), "last"]) or f"; the last one is {recent[0].id!r}"
    return f"no run is called {quoted(wanted)}{guess}"


def parent_of(run: Run) -> Run | None:
    """Return the run of the checkpoint that ``run`` resumed by its recipe; None if it resumed none, or that is gone."""
    checkpoint = Path(str(recorded_table(run.dir, "train").get("resume", "")))
    folder = checkpoint if checkpoint.name == "checkpoints" else checkpoint.parent
    if folder.name != "checkpoints" or folder.parent == run.dir.path:
        return None
    try:
        return open_run(folder.parent)
    except (OSError, ValueError):
        return None


def ancestors_of(run: Run) -> list[Run]:
    """Return the parent of ``run``, the parent's parent and so on, each once."""
    ancestors: list[Run] = []
    while (parent := parent_of(ancestors[-1] if ancestors else run)) is not None:
        if parent.id == run.id or any(parent.id == known.id for known in ancestors):
            break  # a copied folder
        ancestors.append(parent)
    return ancestors
