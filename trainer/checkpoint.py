"""What is saved of a training, atomically and checked, and how it comes back.

A checkpoint is a file that ``torch.load(path, weights_only=True)`` reads anywhere, followed by a trailer with a
checksum. It appears under its name only when all of it is on disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from trainer.errors import RequestError
from trainer.training.folder_lock import FolderLock

BEST = "best.pt"
"""The best checkpoint so far: a further name of the file of its step."""

MAGIC = b"gputrain ckpt 1\n"
_TRAILER = struct.Struct("<16sQQ32s")
"""Magic, size of the payload in bytes, time of writing in Unix nanoseconds, BLAKE2b of all that precedes it."""
_CHUNK = 1 << 22
_TEMPORARY = ".{name}.tmp"


class CheckpointError(RequestError):
    """A checkpoint cannot be used; one line that names the file."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint that is complete on disk."""

    step: int
    """Optimizer steps done."""
    path: Path
    bytes: int
    """Size of the file."""
    write_ms: float
    """From the beginning of writing until it was on disk; the copy in ``save`` comes before."""
    best: bool


# ------------------------------------------------------------------------------------------------------- the state


_PLAIN: tuple[type[Any], ...] = (bool, int, float, str, bytes)


def copy_to_cpu(state: Any) -> Any:
    """Return the state with every tensor copied to the CPU, and everything else as plain lists, tuples and dicts.

    Tensors that share memory entirely, tied weights, still share it in the copy; a view of part of a larger tensor
    is copied alone.

    Raises:
        CheckpointError: the state holds something that cannot come back with ``weights_only=True``.
    """
    return _copy(state, "state", {})


def _copy(state: Any, where: str, seen: dict[tuple[Any, ...], Tensor]) -> Any:
    if state is None:
        return state
    for plain in _PLAIN:
        if isinstance(state, plain):
            return plain(state)  # an enum or a numpy scalar would not come back with weights_only=True
    if isinstance(state, Tensor) and state.layout is torch.strided:
        # Empty tensors all have address 0.
        key = (state.device, state.data_ptr() or id(state), state.dtype, tuple(state.shape), state.stride())
        if key not in seen:
            seen[key] = state.detach().to("cpu", copy=True)
        return seen[key]
    if isinstance(state, Mapping):
        return {_key(key, where): _copy(value, f"{where}[{key!r}]", seen) for key, value in state.items()}
    if isinstance(state, list):
        return [_copy(value, f"{where}[{index}]", seen) for index, value in enumerate(state)]
    if isinstance(state, tuple):
        return tuple(_copy(value, f"{where}[{index}]", seen) for index, value in enumerate(state))
    kind = type(state)
    raise CheckpointError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}: a checkpoint holds dense tensors, numbers, strings, "
        "lists, tuples and dicts"
    )


def _key(key: Any, where: str) -> Any:
    if isinstance(key, str | int | float | bool | tuple):
        return key
    raise CheckpointError(f"{where} has the key {key!r}: a checkpoint's keys are strings, numbers or tuples of them")


def capture_rng(device: torch.device | None = None) -> dict[str, Any]:
    """Return the state of the random numbers of Python, torch's CPU and this rank's GPU.

    Args:
        device: the GPU; default: the current one, where CUDA is in use.
    """
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized() and (  # type: ignore[no-untyped-call]
        device is None or device.type == "cuda"
    ):
        state["cuda"] = torch.cuda.get_rng_state(device if device is not None else "cuda")
    return state


def restore_rng(state: Mapping[str, Any], device: torch.device | None = None) -> None:
    """Set the random numbers to a captured state; a GPU's state is passed over where CUDA is not in use."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available() and (device is None or device.type == "cuda"):
        torch.cuda.set_rng_state(state["cuda"].cpu(), device if device is not None else "cuda")


# ---------------------------------------------------------------------------------------------------------- writing


@dataclass
class _Job:
    state: dict[str, Any]
    step: int
    best: bool


@dataclass
class _Queue:
    """What waits for the thread: at most the newest save and the newest best one."""

    jobs: list[_Job] = field(default_factory=list)
    busy: bool = False
    closing: bool = False

    def add(self, job: _Job) -> None:
        """Append a save; one that still waits is superseded, unless it is a best one and this is not."""
        self.jobs = [waiting for waiting in self.jobs if waiting.best and not job.best]
        self.jobs.append(job)


class CheckpointWriter:
    """Writes checkpoints in the background; training pauses only for the copy of the state.

    When saves come faster than the disk takes them, one that has not been begun is superseded by the next, so that
    at most three copies of the state are in memory. A save that fails is reported and the training goes on.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        keep_last: int,
        run_id: str = "",
        on_saved: Callable[[Saved], None] | None = None,
        on_failed: Callable[[int, str], None] | None = None,
    ) -> None:
        """Make the folder, hold it against other trainings and clear away what an interrupted save has left in it.

        Args:
            folder: where the files go, ``step_<step>.pt`` and ``best.pt``.
            keep_last: how many of the files written last stay; the best one stays besides.
            run_id: the run's, by which others learn who holds the folder; empty where it has none.
            on_saved: called in the writing thread when a checkpoint is on disk.
            on_failed: called in the writing thread with the step and one line about why it could not be written;
                default: the line goes to stderr.

        Raises:
            CheckpointError: the folder cannot be made or written to.
            RequestError: another training holds the folder.
        """
        assert keep_last >= 1
        self.folder = Path(folder)
        self._keep_last = keep_last
        self._on_saved = on_saved
        self._on_failed = on_failed or (lambda _step, line: _say(line))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Before anything is touched: what looks left over may be the file that another training is writing.
            self._lock = FolderLock(self.folder, run_id=run_id)
            for left in self.folder.glob(_TEMPORARY.format(name="*.pt")):
                left.unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(f"{self.folder}: no folder for checkpoints ({error.strerror})") from None
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise CheckpointError(f"{self.folder}: checkpoints cannot be written here (Permission denied)")
        if self._lock.why_not:
            _say(f"{self.folder}: two trainings are not kept apart here, there are no locks ({self._lock.why_not})")
        self._queue = _Queue()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def save(self, state: Mapping[str, Any], *, step: int, best: bool = False) -> None:
        """Copy the state and have it written.

        Args:
            state: tensors, numbers, strings, and lists, tuples and dicts of them; may change after the call.
            step: optimizer steps done; names the file.
            best: whether this is the best so far and becomes ``best.pt`` as well.

        Raises:
            CheckpointError: the state holds something else.
        """
        job = _Job(copy_to_cpu(state), step, best)
        with self._changed:
            assert not self._queue.closing, "save after close"
            self._queue.add(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="checkpoint-writer", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait(self) -> None:
        """Return when everything saved so far has been written or has failed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queue.jobs and not self._queue.busy)

    def close(self) -> None:
        """Write what is left, end the thread and let go of the folder."""
        with self._changed:
            self._queue.closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._lock.release()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue.jobs or self._queue.closing)
                if not self._queue.jobs:
                    return
                job = self._queue.jobs.pop(0)
                self._queue.busy = True
            try:
                self._write(job)
            except Exception as error:  # noqa: BLE001 - a thread that ended here would keep nothing from then on
                self._on_failed(job.step, f"checkpoint of step {job.step} was not written: {_why(error)}")
            finally:
                del job  # the copy's memory is free while the thread waits
                with self._changed:
                    self._queue.busy = False
                    self._changed.notify_all()

    def _write(self, job: _Job) -> None:
        began = time.perf_counter()
        path = self.folder / f"step_{job.step:08d}.pt"
        size = write_file(path, job.state)
        if job.best:
            _link(path, self.folder / BEST)
        self._prune()
        write_ms = (time.perf_counter() - began) * 1000
        if self._on_saved is not None:
            self._on_saved(Saved(step=job.step, path=path, bytes=size, write_ms=write_ms, best=job.best))

    def _prune(self) -> None:
        """Delete all but the files written last; a file that is not a whole checkpoint of ours is left alone."""
        written = [entry for entry in _by_time(self.folder, lambda _: None) if entry.path.name != BEST]
        for entry in written[self._keep_last :]:
            entry.path.unlink(missing_ok=True)


class _Checked:
    """A file for ``torch.save`` that hashes what passes through it and keeps a failure for later.

    An exception from within torch's C++ writer comes out as another one, and its destructor may abort the process.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.hash = hashlib.blake2b(digest_size=32)
        self.size = 0
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
            self.hash.update(data)
            self.size += len(data)
        return len(data)

    def flush(self) -> None:
        """Nothing: the file is flushed and synced once, at the end."""


def write_file(path: Path, state: Mapping[str, Any]) -> int:
    """Write a checkpoint under a temporary name, sync it and give it its name; return its size in bytes.

    Raises:
        OSError: it could not be written; nothing is left of it, and a file of that name is as it was.
    """
    temporary = path.with_name(_TEMPORARY.format(name=path.name))
    try:
        with temporary.open("wb") as file:
            checked = _Checked(file)
            torch.save(dict(state), checked)  # type: ignore[arg-type]  # it needs write() and flush() only
            if checked.error is not None:
                raise checked.error
            head = MAGIC, checked.size, time.time_ns()
            checked.hash.update(_TRAILER.pack(*head, b"")[:-32])
            file.write(_TRAILER.pack(*head, checked.hash.digest()))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)
    return checked.size + _TRAILER.size


def _why(error: Exception) -> str:
    """Say in one line what went wrong; the number of a system's error says less than its text."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).splitlines()[0]


def _link(path: Path, name: Path) -> None:
    """Give the file a second name, atomically; where a file system has no links, a copy."""
    temporary = name.with_name(_TEMPORARY.format(name=name.name))
    temporary.unlink(missing_ok=True)
    try:
        os.link(path, temporary)
    except OSError:
        with path.open("rb") as source, temporary.open("wb") as target:
            shutil.copyfileobj(source, target, _CHUNK)
            target.flush()
            os.fsync(target.fileno())
    temporary.replace(name)
    # Replacing one name of a file by another name of the same file leaves both.
    temporary.unlink(missing_ok=True)
    _sync_folder(name.parent)


def _sync_folder(folder: Path) -> None:
    """Make the names in the folder last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Some network file systems cannot sync a folder.
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------------------------------------------------- reading


def load(path: Path | str) -> dict[str, Any]:
    """Return the state of a checkpoint, its tensors on the CPU.

    Raises:
        CheckpointError: the file is missing, torn, altered, of another program or not a checkpoint at all.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            _check(path, file)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except (UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: cannot be loaded: {str(error).splitlines()[0]}") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: holds a {type(state).__name__}, not a training's state")
    return state


def newest(
    folder: Path | str, *, on_skipped: Callable[[str], None] | None = None
) -> tuple[Path, dict[str, Any]] | None:
    """Return the good checkpoint of a folder that was written last, and its state; None where there is none.

    Args:
        folder: where a ``CheckpointWriter`` has written; may be missing.
        on_skipped: told about each file that cannot be used, in one line; default: the line goes to stderr.
    """
    say = on_skipped or _say
    for entry in _by_time(Path(folder), say):
        try:
            return entry.path, load(entry.path)
        except CheckpointError as error:
            say(f"passed over: {error}")
    return None


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class _Entry(NamedTuple):
    written_ns: int
    path: Path


def _by_time(folder: Path, on_skipped: Callable[[str], None]) -> list[_Entry]:
    """Return the folder's checkpoints, newest first; a step's own name comes before the name of the best."""
    entries = []
    for path in sorted((*folder.glob("step_*.pt"), *folder.glob(BEST)), reverse=True):
        try:
            with path.open("rb") as file:
                entries.append(_Entry(_trailer(path, file)[2], path))
        except OSError as error:
            on_skipped(f"passed over: {path}: cannot be read ({error.strerror})")
        except CheckpointError as error:
            on_skipped(f"passed over: {error}")
    # Not by step: a run continued from an earlier step writes lower numbers than the branch that it left.
    return sorted(entries, key=lambda entry: entry.written_ns, reverse=True)


def _trailer(path: Path, file: BinaryIO) -> tuple[bytes, int, int, bytes]:
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        raise CheckpointError(f"{path}: is empty")
    file.seek(max(size - _TRAILER.size, 0))
    tail = file.read(_TRAILER.size)
    if len(tail) == _TRAILER.size and tail.startswith(MAGIC):
        magic, payload, written_ns, digest = _TRAILER.unpack(tail)
        if payload + _TRAILER.size == size:
            return magic, payload, written_ns, digest
    file.seek(0)
    if file.read(4) != b"PK\x03\x04":
        raise CheckpointError(f"{path}: is not a checkpoint")
    raise CheckpointError(f"{path}: is torn, or a checkpoint of another program: its checksum is missing")


def _check(path: Path, file: BinaryIO) -> None:
    magic, payload, written_ns, digest = _trailer(path, file)
    found = hashlib.blake2b(digest_size=32)
    file.seek(0)
    left = payload
    while left and (chunk := file.read(min(_CHUNK, left))):
        found.update(chunk)
        left -= len(chunk)
    found.update(_TRAILER.pack(magic, payload, written_ns, b"")[:-32])
    if found.digest() != digest:
        raise CheckpointError(f"{path}: is damaged: its checksum does not match")
