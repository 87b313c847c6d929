"""Writes a run as one portable file: recipe, plan, record and logs, no checkpoints, secrets masked."""

from __future__ import annotations

import gzip
import os
import re
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import tomlkit
from tomlkit.exceptions import TOMLKitError

from gputrain_tui.history.archive_layout import FOLDERS, MAX_FILES, RUN_NAME, is_file_of_run
from gputrain_tui.history.export.masking import SecretMask
from gputrain_tui.history.runs import Run
from gputrain_tui.history.status_file import Status
from gputrain_tui.recipe.source import MAX_RECIPE_BYTES
from gputrain_tui.tables import size
from trainer.contract.errors import RecordError, RequestError
from trainer.contract.record import decode_events
from trainer.contract.record.regular_file import open_regular, read_whole, size_of

READ_BYTES = 1 << 20
"""Bytes read of a file at a time."""
COMPRESSION = 6
"""Level of gzip: higher ones take several times as long for a few percent."""
MAX_BYTES = 256 << 30
"""Maximum size of record and logs: a week of a thousand ranks has less, so that more is damage, as by a sparse file."""
MAX_USTAR_BYTES = 8**11
"""Limit of a file's size in a USTAR header, which has eleven octal digits for it."""
OWNERS_COMMAND = "output of the run's on_end command, which may contain secrets"
_STRING_OR_COMMENT = re.compile(
    r'"""(?:\\.|[^\\])*?"""' r"|'''.*?'''" r'|"(?:\\.|[^"\\\n])*"' r"|'[^'\n]*'|(?P<comment>#[^\n]*)", re.DOTALL
)
"""Strings and comments of TOML; a # in a string begins no comment."""


@dataclass(frozen=True, kw_only=True)
class Archived:
    """Contents of a written archive."""

    files: int
    bytes: int
    """Before compression."""
    masked: list[str]
    """Names of the secrets that were masked."""
    left_out: list[str]
    """A line for each file or setting that was left out."""


class Archive:
    """The files of a run that go into its archive, with their sizes when they were listed."""

    def __init__(self, run: Run) -> None:
        """List the files.

        Raises:
            RequestError: the run's folder has a name that no archive can have, or too many files.
        """
        if not RUN_NAME.fullmatch(run.id):
            raise RequestError(
                f"{run.dir.path}: an archive needs a folder named with letters, digits, '.', '_' and '-'"
            )
        self._run = run
        self._sizes: dict[str, int] = {}
        self._left_out: list[str] = []
        for folder in FOLDERS:
            for path in sorted((run.dir.path / folder).glob("*")):
                name = f"{folder}/{path.name}"
                if not is_file_of_run(name) or not path.is_file():
                    continue
                if path == run.dir.on_end_log:
                    self._left_out.append(f"{name}: {OWNERS_COMMAND}")
                elif os.access(path, os.R_OK):
                    self._sizes[name] = size_of(path)
                else:
                    self._left_out.append(f"{name}: no permission to read it")
        if len(self._sizes) > MAX_FILES:
            raise RequestError(f"{run.dir.path} has more than {MAX_FILES:,} files")
        if self.total_bytes > MAX_BYTES:
            excess = f"{size(self.total_bytes)} of record and logs, more than the {size(MAX_BYTES)} of an archive"
            raise RequestError(f"{run.dir.path} has {excess}")

    @property
    def total_bytes(self) -> int:
        """Size of the files."""
        return sum(self._sizes.values())

    def write(
        self, file: BinaryIO, *, environment: Mapping[str, str], advance: Callable[[int], None] = lambda _: None
    ) -> Archived:
        """Write the archive.

        Args:
            file: the archive.
            environment: variables with secrets that the run may have printed.
            advance: called with the number of bytes after each read.

        Raises:
            OSError: it cannot be written, or a file of the run cannot be read.
            RecordError: a file of the run became shorter.
        """
        mask = SecretMask(environment)
        small = {"recipe.toml": self._recipe(mask), "plan.json": self._plan(mask)}
        small |= {"status.json": msgspec.json.encode(self._status()), "slurm.json": self._bytes("slurm.json")}
        small["notes.json"] = self._bytes("notes.json")
        count = total = 0
        with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=COMPRESSION, filename="", mtime=0) as out:
            for name, data in small.items():
                if data:
                    self._member(out, name, len(data), time.time())
                    out.write(mask.mask_bytes(data))
                    out.write(_padding(len(data)))
                    count, total = count + 1, total + len(data)
            for name, length in self._sizes.items():
                path = self._run.dir.path / name
                self._member(out, name, length, path.stat().st_mtime)
                for data in _masked(mask, _read(path, length, advance), by_event=name.startswith("events/")):
                    out.write(data)
                out.write(_padding(length))
                count, total = count + 1, total + length
            out.write(bytes(2 * tarfile.BLOCKSIZE))
        return Archived(files=count, bytes=total, masked=sorted(mask.masked), left_out=self._left_out)

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

    def _recipe(self, mask: SecretMask) -> bytes:
        """Return the masked recipe; only its name if it cannot be parsed, as its secrets cannot be found then."""
        try:
            document = tomlkit.parse(read_whole(self._run.dir.recipe, MAX_RECIPE_BYTES).decode("utf-8"))
        except (OSError, UnicodeDecodeError, TOMLKitError, RecursionError):
            self._left_out.append("recipe.toml: it is missing or not valid TOML")
            document = tomlkit.document()
            document["name"] = self._run.status.recipe
        self._leave_out_command(document, mask)
        mask.mask_values(document)
        # A setting that was commented out may be a secret, too.
        text = _STRING_OR_COMMENT.sub(
            lambda found: found[0] if found["comment"] is None else mask.mask_comment(found[0]),
            tomlkit.dumps(document),
        )
        return text.encode()

    def _leave_out_command(self, document: tomlkit.TOMLDocument, mask: SecretMask) -> None:
        """Remove the command at the end of the run, which may hold secrets of any form and acts for its owner."""
        report = document.get("report")
        if isinstance(report, dict) and "on_end" in report:
            mask.mask_text(str(report["on_end"]))  # secrets found in it are masked in the logs, too
            del report["on_end"]
            self._left_out.append("on_end of recipe.toml: a shell command that may contain secrets")

    def _plan(self, mask: SecretMask) -> bytes:
        """Return the masked plan; nothing if it cannot be parsed, as its secrets cannot be found then."""
        try:
            plan = msgspec.json.decode(self._bytes("plan.json"))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self._left_out.append("plan.json: it is missing or not valid JSON")
            return b""
        mask.mask_values([plan])
        return msgspec.json.encode(plan)

    def _status(self) -> Status:
        """Return the status without its supervisor: on another machine that process id belongs to another process."""
        return msgspec.structs.replace(self._run.status, supervisor=None, archived=time.time())


def _padding(length: int) -> bytes:
    return bytes(-length % tarfile.BLOCKSIZE)


def _read(path: Path, length: int, advance: Callable[[int], None]) -> Iterator[bytes]:
    """Yield the first ``length`` bytes of a file, which may have grown."""
    with os.fdopen(open_regular(path), "rb") as file:
        while length > 0:
            data = file.read(min(length, READ_BYTES))
            if not data:
                raise RecordError(f"{path} became shorter while it was read")
            length -= len(data)
            advance(len(data))
            yield data


def _masked(mask: SecretMask, parts: Iterator[bytes], *, by_event: bool) -> Iterator[bytes]:
    """Yield the bytes with secrets masked, also a secret that spans two parts."""
    keep = mask.longest_bytes - 1
    rest = b""
    for part in parts:
        data = rest + part
        shown = mask.mask_bytes(data)
        if by_event and shown != data:
            shown = _restore_events(data, shown)
        whole_lines = shown.rfind(b"\n") + 1
        cut = whole_lines if by_event and whole_lines else max(len(shown) - keep, 0)
        rest = shown[cut:]
        yield shown[:cut]
    yield rest


def _restore_events(data: bytes, shown: bytes) -> bytes:
    """Return the masked lines, but unmasked where the masked line is no event: the value is a word of the format."""
    lines = []
    for before, after in zip(data.split(b"\n"), shown.split(b"\n"), strict=False):  # no value in JSON has a line feed
        lines.append(before if before != after and decode_events(before) and not decode_events(after) else after)
    return b"\n".join(lines)
