"""Write a training's checkpoints in the background, and delete all but the newest of them."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.checkpoint.file import (
    EPOCH,
    clear_unfinished,
    copy_for,
    link,
    sequence_of,
    set_aside,
    step_name,
    write_file,
)
from trainer.checkpoint.folder_lock import FolderLock
from trainer.checkpoint.reader import in_order
from trainer.checkpoint.state import HostTensors, copy_to_cpu
from trainer.contract.checkpoint_trailer import MAX_SEQUENCE, owner_of
from trainer.contract.errors import CheckpointError, RequestError, printable
from trainer.contract.record.checkpoints import BEST, foreign_run


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint that is complete on disk."""

    step: int
    path: Path
    bytes: int
    write_ms: float
    """Milliseconds from the start of writing until the file was on disk, without the copy in ``save``."""
    best: bool


@dataclass(frozen=True, kw_only=True)
class NotSaved:
    """A checkpoint that could not be written."""

    step: int
    best: bool
    why: str


@dataclass
class _Job:
    state: dict[str, Any]
    step: int
    sequence: int
    best: bool
    epoch: int | None
    """Epoch that ended at this step, if its checkpoint is to be kept."""
    tensors: HostTensors
    """Copies of the state's tensors; complete after ``wait``."""
    why_not: str = ""
    """Reason why it could not be written; empty before the first attempt."""


@dataclass
class _Queue:
    """Saves that are not on disk yet: at most the newest and the newest best one, besides the one being written."""

    jobs: list[_Job] = field(default_factory=list)
    failed: list[_Job] = field(default_factory=list)
    """Saves that could not be written and are not superseded."""
    busy: bool = False
    closing: bool = False

    def add(self, job: _Job) -> None:
        """Append a save; it supersedes waiting ones, except that an ordinary save does not supersede a best one."""
        self.jobs = [waiting for waiting in self.jobs if (waiting.best and not job.best) or waiting.epoch is not None]
        self.failed = [failed for failed in self.failed if failed.best and not job.best]
        self.jobs.append(job)

    def fail(self, job: _Job) -> None:
        """Keep a save that could not be written, unless a waiting one supersedes it."""
        if not any(newer.best or not job.best for newer in self.jobs):
            self.failed.append(job)


class CheckpointWriter:
    """Background writer of checkpoints; training pauses only for the copy of the state.

    If saves come faster than the disk writes them, the next save supersedes one whose writing has not begun, so that at
    most three copies of the state are in memory. A save that fails is reported and the training continues; unless a
    newer one supersedes it, it is tried again when the writer is closed.

    The files belong to the run: only its own are deleted, and a file of another run whose name it needs is renamed.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        keep_last: int,
        keep_last_epochs: int = 0,
        run_id: str = "",
        continues: bool = False,
        on_saved: Callable[[Saved], None] | None = None,
        on_failed: Callable[[int, str], None] | None = None,
        host_tensors: Callable[[], HostTensors] = HostTensors,
    ) -> None:
        """Create the folder, lock it against other trainings and delete the temporary files of interrupted saves.

        The newest ``keep_last`` files are kept besides the best one, and ``keep_last_epochs`` newest epoch ends, -1 for
        all. With ``continues`` the folder, from a checkpoint of which the run continues, may hold those of other runs.
        ``on_saved`` and ``on_failed`` are called in the writing thread; the latter with the step and one line, why its
        checkpoint could not be written, or that the folder had been deleted with the earlier ones; by default the line
        goes to stderr.

        Raises:
            CheckpointError: the folder cannot be created or written to.
            RequestError: another training holds the folder, or it holds checkpoints of another run.
        """
        assert keep_last >= 1
        self.folder = Path(folder)
        self._run_id = run_id
        self._keep_last = keep_last
        self._keep_last_epochs = keep_last_epochs
        self._on_saved = on_saved or (lambda _saved: None)
        self._host_tensors = host_tensors
        self._on_failed = on_failed or (lambda _step, line: _print(line))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Locked before the cleanup: a temporary file may be the one that another training is writing.
            self._lock = FolderLock(self.folder, run_id=run_id)
            clear_unfinished(self.folder)
        except OSError as error:
            raise CheckpointError(
                f"{self.folder}: cannot be used as the folder for checkpoints ({error.strerror})"
            ) from None
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise CheckpointError(f"{self.folder}: checkpoints cannot be written here (Permission denied)")
        if not continues:
            try:
                self._require_own()
            except BaseException:
                self._lock.release()
                raise
        if self._lock.why_not:
            _print(
                f"{self.folder}: cannot be locked ({self._lock.why_not}); another training could write here unnoticed"
            )
        self._sequence = max((sequence_of(path) for path in in_order(self.folder, lambda _: None)), default=0)
        """Sequence number of the last save; only this writer increments it, because it holds the folder."""
        self._inherited: tuple[Path, int] | None = None
        """Path and step of the best checkpoint in another folder, until it is linked here."""
        self._queue = _Queue()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def inherit_best(self, path: Path, *, step: int) -> None:
        """Keep the best checkpoint of the resumed training, which is in another folder, as the best of this one.

        It is copied here once a checkpoint of this folder is on disk: before, it would be the newest one here. A copy,
        because the file of the other run stays that run's.

        Raises:
            CheckpointError: the file is torn.
            OSError: the file cannot be read.
        """
        if path.parent.resolve() == self.folder.resolve():
            if owner_of(path) == self._run_id:
                return
            path = self.folder / path.name
        self._sequence = max(self._sequence, sequence_of(path))
        self._inherited = path, step

    def save(self, state: Mapping[str, Any], *, step: int, best: bool = False, epoch: int | None = None) -> None:
        """Begin to copy the state and queue it for writing; the caller may queue work that changes it after the call.

        ``best`` links it as ``best.pt``; ``epoch`` is the one that ends at this step, None within an epoch.

        Raises:
            CheckpointError: the state has a value of another type.
        """
        self._sequence = min(self._sequence + 1, MAX_SEQUENCE)
        epoch = epoch if self._keep_last_epochs else None
        if epoch is not None:
            self.wait()  # every epoch end is kept, so no save may supersede it
        tensors = self._host_tensors()
        job = _Job(copy_to_cpu(state, tensors), step, self._sequence, best, epoch, tensors)
        with self._changed:
            assert not self._queue.closing, "save after close"
            self._queue.add(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="checkpoint-writer", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the saves are on disk or have failed, or for ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queue.jobs and not self._queue.busy, timeout_s)

    def close(self) -> list[NotSaved]:
        """Write the waiting saves, retry the failed ones once, and release the folder."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queue.jobs and not self._queue.busy)
            self._queue.jobs, self._queue.failed = self._queue.failed, []
            self._queue.closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._lock.release()
        return [NotSaved(step=job.step, best=job.best, why=job.why_not) for job in self._queue.failed]

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue.jobs or self._queue.closing)
                if not self._queue.jobs:
                    return
                job = self._queue.jobs.pop(0)
                job.why_not = ""
                self._queue.busy = True
            try:
                self._write(job)
            except Exception as error:  # noqa: BLE001 - if the thread ended here, no later checkpoint would be written
                job.why_not = _why(error)
                self._on_failed(job.step, f"checkpoint of step {job.step} was not written: {job.why_not}")
            finally:
                with self._changed:
                    if job.why_not:
                        self._queue.fail(job)
                    del job  # frees the copy's memory while the thread waits
                    self._queue.busy = False
                    self._changed.notify_all()

    def _write(self, job: _Job) -> None:
        began = time.perf_counter()
        job.tensors.wait()
        self._require_folder(job.step)
        path = self.folder / step_name(job.step)
        self._free(path)
        size = write_file(path, job.state, sequence=job.sequence, run=self._run_id)
        if job.best or self._inherited is not None:
            self._free(self.folder / BEST)
        if job.best:
            link(path, self.folder / BEST)
        elif self._inherited is not None:
            self._copy_inherited(*self._inherited)
        self._inherited = None
        if job.epoch is not None:
            self._free(self.folder / EPOCH.format(job.epoch))
            link(path, self.folder / EPOCH.format(job.epoch))
        self._prune(path)
        write_ms = (time.perf_counter() - began) * 1000
        self._on_saved(Saved(step=job.step, path=path, bytes=size, write_ms=write_ms, best=job.best))

    def _require_own(self) -> None:
        """Require that the folder holds no checkpoint of another run."""
        other, names = foreign_run(self.folder, self._run_id) if self._run_id else ("", [])
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise RequestError(
                f"{self.folder}: holds checkpoints of {f'run {other}' if other else 'another run'} ({names[0]}{more}), "
                "which this run does not continue: name another folder with --save-dir, "
                f"or continue that run with --resume {self.folder}"
            )

    def _free(self, path: Path) -> None:
        """Free a name that this run needs: a file of another run gets another one."""
        moved = set_aside(path, run=self._run_id)
        if self._inherited is not None and self._inherited[0].absolute() == path.absolute():
            self._inherited = moved, self._inherited[1]

    def _copy_inherited(self, path: Path, step: int) -> None:
        began = time.perf_counter()
        best = self.folder / BEST
        try:
            copy_for(self._run_id, path, best)
            size = best.stat().st_size
        except (OSError, CheckpointError) as error:
            self._on_failed(step, f"the earlier best checkpoint, {path}, was not copied to this folder: {_why(error)}")
            return
        write_ms = (time.perf_counter() - began) * 1000
        self._on_saved(Saved(step=step, path=best, bytes=size, write_ms=write_ms, best=True))

    def _require_folder(self, step: int) -> None:
        """Create the folder again if it was deleted, unless its run directory was deleted too."""
        if self.folder.is_dir():
            return
        self.folder.mkdir()
        self._lock.release()
        self._lock = FolderLock(self.folder, run_id=self._run_id)
        self._on_failed(step, f"{self.folder} and its checkpoints were deleted; the folder was created again")

    def _prune(self, written: Path) -> None:
        """Delete this run's checkpoints but the newest and the one just written; torn and foreign files stay."""
        own = [path for path in in_order(self.folder, lambda _: None) if owner_of(path) == self._run_id]
        steps = [path for path in own if path.match("step_*")][self._keep_last :]
        epochs = [path for path in own if path.match(EPOCH.format("*"))][self._keep_last_epochs :]
        for path in (*steps, *(epochs if self._keep_last_epochs > 0 else ())):
            if path != written:
                path.unlink(missing_ok=True)


def _why(error: Exception) -> str:
    """Return the error in one line; of an ``OSError`` the text without number and path."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).splitlines()[0]


def _print(line: str) -> None:
    print(printable(line), file=sys.stderr, flush=True)
