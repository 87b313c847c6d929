"""Writes a run as one portable file: recipe, plan, record and on request the logs, without checkpoints.

Of variables and arguments it has the values of an allow-list, and of texts the types of exceptions.
"""

from __future__ import annotations

import gzip
import os
import tarfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from gputrain_tui.history.export.archive_events import EventFilter
from gputrain_tui.history.open_archive import COPY_BYTES, FOLDERS, MAX_FILES, RUN_NAME, is_file_of_run
from gputrain_tui.history.recorded_recipe import recorded_recipe
from gputrain_tui.history.run_folders import Run
from gputrain_tui.history.status_file import Status
from gputrain_tui.plan.planner import Plan
from gputrain_tui.recipe.allow_list import HIDDEN, AllowList
from gputrain_tui.tables import size
from trainer.contract.errors import RecordError, RequestError
from trainer.contract.outcome import NodeOutcome
from trainer.contract.record.json_lines import DECODE_ERRORS
from trainer.contract.record.regular_file import open_regular, read_whole, size_of

MAX_BYTES = 256 << 30
"""Maximum size of record and logs: a week of a thousand ranks has less, so that more is damage, as by a sparse file."""
MAX_USTAR_BYTES = 8**11
"""Limit of a file's size in a USTAR header, which has eleven octal digits for it."""
OWNERS_COMMAND = "output of a command of the recipe's [report]"


@dataclass(frozen=True, kw_only=True)
class Archived:
    """Contents of a written archive."""

    files: int
    bytes: int
    """Before compression."""
    hidden: int
    """Values of the recipe and the plan that were replaced."""
    left_out: list[str]
    """A line for each file or setting that was left out."""


class Archive:
    """The files of a run that go into its archive, with their sizes when they were listed."""

    def __init__(self, run: Run, *, logs: bool = False) -> None:
        """List the files; with what ranks printed, in files and in texts of the record, if ``logs`` is set.

        Raises:
            RequestError: the run's folder has a name that no archive can have, or too many files.
        """
        if not RUN_NAME.fullmatch(run.id):
            raise RequestError(
                f"{run.dir.path}: an archive needs a folder named with letters, digits, '.', '_' and '-'"
            )
        self._run = run
        self._texts = logs
        self._sizes: dict[str, int] = {}
        self._left_out: list[str] = []
        for folder in FOLDERS if logs else [folder for folder in FOLDERS if folder != "logs"]:
            for path in sorted((run.dir.path / folder).glob("*")):
                name = f"{folder}/{path.name}"
                if not is_file_of_run(name) or not path.is_file():
                    continue
                if path in (run.dir.on_end_log, run.dir.on_finding_log):
                    self._left_out.append(f"{name}: {OWNERS_COMMAND}")
                elif os.access(path, os.R_OK):
                    self._sizes[name] = size_of(path)
                else:
                    self._left_out.append(f"{name}: no permission to read it")
        if len(self._sizes) > MAX_FILES:
            raise RequestError(f"{run.dir.path} has more than {MAX_FILES:,} files")
        if (total := sum(self._sizes.values())) > MAX_BYTES:
            excess = f"{size(total)} of record and logs, more than the {size(MAX_BYTES)} of an archive"
            raise RequestError(f"{run.dir.path} has {excess}")

    def write(self, file: BinaryIO, *, environment: Mapping[str, str], project: Path) -> Archived:
        """Write the archive.

        ``environment`` has variables whose values the run may have printed; paths below ``project`` are shown.

        Raises:
            OSError: it cannot be written, or a file of the run cannot be read.
            RecordError: a file of the run became shorter.
        """
        allow = AllowList(environment, project)
        plan = self._plan(allow)  # first, as it adds the run's working folder to the project
        small = {"recipe.toml": self._recipe(allow), "plan.json": plan}
        events = EventFilter(allow, texts=self._texts)
        small |= {"status.json": msgspec.json.encode(self._status(events)), "slurm.json": self._bytes("slurm.json")}
        small["notes.json"] = allow.mask(self._bytes("notes.json"))
        small |= {name: self._node(name, events) for name in self._sizes if name.startswith("nodes/")}
        large = {name: length for name, length in self._sizes.items() if name not in small}
        count = total = 0
        # Higher levels of gzip take several times as long for a few percent.
        with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=6, filename="", mtime=0) as out:
            for name, data in small.items():
                if data:
                    self._member(out, name, len(data), time.time())
                    out.write(data)
                    out.write(_padding(len(data)))
                    count, total = count + 1, total + len(data)
            for name, length in large.items():
                path = self._run.dir.path / name
                self._member(out, name, length, path.stat().st_mtime)
                parts = _read(path, length)
                for data in _masked(allow, parts) if name.startswith("logs/") else events.lines(parts, name):
                    out.write(data)
                out.write(_padding(length))
                count, total = count + 1, total + length
            out.write(bytes(2 * tarfile.BLOCKSIZE))
        if events.left_out:
            self._left_out.append(f"{events.left_out:,} lines of the record that are no events")
        return Archived(files=count, bytes=total, hidden=allow.hidden, left_out=self._left_out)

    def _member(self, out: gzip.GzipFile, name: str, length: int, modified: float) -> None:
        header = tarfile.TarInfo(f"{self._run.id}/{name}")
        header.size, header.mode, header.mtime = length, 0o600, int(modified)
        # No extended headers: a reader would have to keep them in memory whole.
        out.write(header.tobuf(tarfile.USTAR_FORMAT if length < MAX_USTAR_BYTES else tarfile.GNU_FORMAT))

    def _bytes(self, name: str) -> bytes:
        path = self._run.dir.path / name
        try:
            return read_whole(path) if path.exists() else b""
        except OSError as error:
            self._left_out.append(f"{name}: {error.strerror}")
            return b""

    def _recipe(self, allow: AllowList) -> bytes:
        """Return the recipe with the values that are shown, without comments; only its name if it is no TOML."""
        recipe = recorded_recipe(self._run.dir)
        if recipe is None:
            self._left_out.append("recipe.toml: it is missing or not valid TOML")
            recipe = {"name": self._run.status.recipe}
        report = recipe.get("report")
        for name in ("on_end", "on_finding"):
            if isinstance(report, dict) and name in report:
                allow.hide(report.pop(name))
                self._left_out.append(f"{name} of recipe.toml: a shell command")
        import tomlkit  # only an archive needs it, not the completion of a word

        return tomlkit.dumps(allow.recipe(recipe)).encode()

    def _plan(self, allow: AllowList) -> bytes:
        """Return the plan with the values that are shown; nothing if it is damaged."""
        try:
            plan = msgspec.json.decode(self._bytes("plan.json"), type=Plan)
        except DECODE_ERRORS:
            self._left_out.append("plan.json: it is missing or damaged")
            return b""
        for node in plan.nodes:
            allow.add_project(Path(node.workdir))
        for node in plan.nodes:
            node.argv, node.env = allow.command(node.argv), allow.variables(node.env)
            node.workdir, node.setup = HIDDEN if node.workdir else "", allow.hide(node.setup)
        return msgspec.json.encode(plan)

    def _status(self, events: EventFilter) -> Status:
        """Return the status without this machine's processes and folders, which another machine has not."""
        status = msgspec.structs.replace(
            self._run.status, supervisor=None, inode=None, workdir="", archived=time.time()
        )
        return events.status(status)

    def _node(self, name: str, events: EventFilter) -> bytes:
        """Return the outcome of a node; nothing where none has been written."""
        try:
            outcome = msgspec.json.decode(self._bytes(name), type=NodeOutcome)
        except DECODE_ERRORS:
            return b""
        if outcome.failure is not None:
            events.event(outcome.failure)
        return msgspec.json.encode(outcome)


def event_filter(run: Run, *, environment: Mapping[str, str], project: Path) -> EventFilter:
    """Return the filter of a run's events that its archive without logs has; the arguments are those of ``write``."""
    allow, archive = AllowList(environment, project), Archive(run)
    archive._plan(allow)
    archive._recipe(allow)
    return EventFilter(allow, texts=False)


def _padding(length: int) -> bytes:
    return bytes(-length % tarfile.BLOCKSIZE)


def _read(path: Path, length: int) -> Iterator[bytes]:
    """Yield the first ``length`` bytes of a file, which may have grown."""
    with os.fdopen(open_regular(path), "rb") as file:
        while length > 0:
            data = file.read(min(length, COPY_BYTES))
            if not data:
                raise RecordError(f"{path} became shorter while it was read")
            length -= len(data)
            yield data


def _masked(allow: AllowList, parts: Iterator[bytes]) -> Iterator[bytes]:
    """Yield bytes with hidden values masked, also one that spans two parts."""
    keep = allow.longest_bytes - 1
    rest = b""
    for part in parts:
        shown = allow.mask(rest + part)
        cut = max(len(shown) - keep, 0)
        cut = shown.rfind(b"\n", 0, cut) + 1 or cut  # lines are masked whole
        rest = shown[cut:]
        yield shown[:cut]
    yield rest
