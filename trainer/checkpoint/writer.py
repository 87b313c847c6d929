"""Writes a training's checkpoints in the background, and keeps as many of them as are wanted."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.checkpoint.file import BEST, EPOCH, LAST_PLACE, clear_unfinished, link, place_of, step_name, write_file
from trainer.checkpoint.folder_lock import FolderLock
from trainer.checkpoint.reader import in_order, tell
from trainer.checkpoint.state import HostTensors, copy_to_cpu
from trainer.contract.errors import CheckpointError


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


@dataclass(frozen=True, kw_only=True)
class NotSaved:
    """A checkpoint that could not be written."""

    step: int
    best: bool
    why: str
    """In one line."""


@dataclass
class _Job:
    state: dict[str, Any]
    step: int
    place: int
    best: bool
    epoch: int | None
    """The epoch that ended here, if its checkpoint is kept."""
    tensors: HostTensors
    """Completes the copies in the state."""
    why_not: str = ""
    """Why it could not be written; empty while that was not tried."""


@dataclass
class _Queue:
    """What is not on disk yet: at most the newest save and the newest best one, besides the one being written."""

    jobs: list[_Job] = field(default_factory=list)
    """What waits for the thread."""
    failed: list[_Job] = field(default_factory=list)
    """What could not be written, and has not been superseded since."""
    busy: bool = False
    closing: bool = False

    def add(self, job: _Job) -> None:
        """Append a save; one that still waits is superseded, unless it is a best one and this is not."""
        self.jobs = [waiting for waiting in self.jobs if (waiting.best and not job.best) or waiting.epoch is not None]
        self.failed = [failed for failed in self.failed if failed.best and not job.best]
        self.jobs.append(job)

    def fail(self, job: _Job) -> None:
        """Keep a save that could not be written, unless one that waits supersedes it."""
        if not any(newer.best or not job.best for newer in self.jobs):
            self.failed.append(job)


class CheckpointWriter:
    """Writes checkpoints in the background; training pauses only for the copy of the state.

    When saves come faster than the disk takes them, one that has not been begun is superseded by the next, so that
    at most three copies of the state are in memory. A save that fails is reported and the training goes on; unless a
    newer one supersedes it, it is tried again when the writer is closed.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        keep_last: int,
        keep_last_epochs: int = 0,
        run_id: str = "",
        on_saved: Callable[[Saved], None] | None = None,
        on_failed: Callable[[int, str], None] | None = None,
        host_tensors: Callable[[], HostTensors] = HostTensors,
    ) -> None:
        """Make the folder, hold it against other trainings and clear away what an interrupted save has left in it.

        Args:
            folder: where the files go, ``step_<step>.pt`` and ``best.pt``.
            keep_last: how many of the files written last stay; the best one stays besides.
            keep_last_epochs: how many of those of epoch ends stay too, as ``epoch_<epoch>.pt``; -1 for all.
            run_id: the run's, by which others learn who holds the folder; empty where it has none.
            on_saved: called in the writing thread when a checkpoint is on disk.
            on_failed: called in the writing thread with the step and one line about why it could not be written, or
                that the folder with the ones before had been deleted; default: the line goes to stderr.
            host_tensors: makes what copies the tensors of one save.

        Raises:
            CheckpointError: the folder cannot be made or written to.
            RequestError: another training holds the folder.
        """
        assert keep_last >= 1
        self.folder = Path(folder)
        self._run_id = run_id
        self._keep_last = keep_last
        self._keep_last_epochs = keep_last_epochs
        self._on_saved = on_saved
        self._host_tensors = host_tensors
        self._on_failed = on_failed or (lambda _step, line: tell(line))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Before anything is touched: what looks left over may be the file that another training is writing.
            self._lock = FolderLock(self.folder, run_id=run_id)
            clear_unfinished(self.folder)
        except OSError as error:
            raise CheckpointError(f"{self.folder}: no folder for checkpoints ({error.strerror})") from None
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise CheckpointError(f"{self.folder}: checkpoints cannot be written here (Permission denied)")
        if self._lock.why_not:
            tell(f"{self.folder}: two trainings are not kept apart here, there are no locks ({self._lock.why_not})")
        self._place = max((place_of(path) for path in in_order(self.folder, lambda _: None)), default=0)
        """Of the save that was begun last: the folder is held, so nobody else counts on."""
        self._inherited: tuple[Path, int] | None = None
        self._queue = _Queue()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def inherit_best(self, path: Path, *, step: int) -> None:
        """Keep the best checkpoint of the training that goes on here, which lies elsewhere, as the best of this folder.

        It gets its name here once a checkpoint of this folder is on disk: alone, it would be the newest one.

        Args:
            path: the file.
            step: its optimizer steps.

        Raises:
            CheckpointError: it is torn.
            OSError: it cannot be read.
        """
        if path.parent.resolve() == self.folder.resolve():
            return
        self._place = max(self._place, place_of(path))
        self._inherited = path, step

    def save(self, state: Mapping[str, Any], *, step: int, best: bool = False, epoch: int | None = None) -> None:
        """Begin to copy the state and have it written; it may be changed by what is queued on its GPU from here on.

        Args:
            state: tensors, numbers, strings, and lists, tuples and dicts of them; may change after the call.
            step: optimizer steps done; names the file.
            best: whether this is the best so far and becomes ``best.pt`` as well.
            epoch: the epoch that ends here.

        Raises:
            CheckpointError: the state holds something else.
        """
        self._place = min(self._place + 1, LAST_PLACE)
        epoch = epoch if self._keep_last_epochs else None
        if epoch is not None:
            self.wait()  # each is kept, so that none may be superseded
        tensors = self._host_tensors()
        job = _Job(copy_to_cpu(state, tensors), step, self._place, best, epoch, tensors)
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

    def close(self) -> list[NotSaved]:
        """Write what is left, try once more what could not be written, and let go of the folder.

        Returns:
            What is not on disk all the same: at most the newest save and the newest best one.
        """
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
            except Exception as error:  # noqa: BLE001 - a thread that ended here would keep nothing from then on
                job.why_not = _why(error)
                self._on_failed(job.step, f"checkpoint of step {job.step} was not written: {job.why_not}")
            finally:
                with self._changed:
                    if job.why_not:
                        self._queue.fail(job)
                    del job  # the copy's memory is free while the thread waits
                    self._queue.busy = False
                    self._changed.notify_all()

    def _write(self, job: _Job) -> None:
        began = time.perf_counter()
        job.tensors.wait()
        self._require_folder(job.step)
        path = self.folder / step_name(job.step)
        size = write_file(path, job.state, place=job.place)
        inherited, self._inherited = self._inherited, None
        if job.best:
            link(path, self.folder / BEST)
        elif inherited is not None:
            self._link_inherited(*inherited)
        if job.epoch is not None:
            link(path, self.folder / EPOCH.format(job.epoch))
        self._prune(path)
        write_ms = (time.perf_counter() - began) * 1000
        if self._on_saved is not None:
            self._on_saved(Saved(step=job.step, path=path, bytes=size, write_ms=write_ms, best=job.best))

    def _link_inherited(self, path: Path, step: int) -> None:
        began = time.perf_counter()
        best = self.folder / BEST
        try:
            link(path, best)
            size = best.stat().st_size
        except OSError as error:
            self._on_failed(step, f"the best checkpoint of before, {path}, was not kept here: {_why(error)}")
            return
        if self._on_saved is not None:
            write_ms = (time.perf_counter() - began) * 1000
            self._on_saved(Saved(step=step, path=best, bytes=size, write_ms=write_ms, best=True))

    def _require_folder(self, step: int) -> None:
        """Make the folder again if somebody has deleted it; a deleted run directory stays deleted."""
        if self.folder.is_dir():
            return
        self.folder.mkdir()
        self._lock.release()
        self._lock = FolderLock(self.folder, run_id=self._run_id)
        self._on_failed(step, f"{self.folder} was deleted, and the checkpoints in it; it is made again")

    def _prune(self, written: Path) -> None:
        """Delete all but the newest files and the one just written; what is no whole checkpoint of ours is left."""
        found = in_order(self.folder, lambda _: None)
        epochs = [path for path in found if path.match(EPOCH.format("*"))] if self._keep_last_epochs > 0 else []
        for path in [path for path in found if path.match("step_*")][self._keep_last :]:
            if path != written:
                path.unlink(missing_ok=True)
        for path in epochs[self._keep_last_epochs :]:
            path.unlink(missing_ok=True)


def _why(error: Exception) -> str:
    """Say in one line what went wrong; the number of a system's error says less than its text."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).splitlines()[0]
