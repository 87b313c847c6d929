"""Keeps a folder of checkpoints to one training at a time: two would delete and replace each other's files."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from pathlib import Path

import msgspec

from trainer.contract.errors import RequestError

LOCK = ".lock"
"""The file in the folder that is locked. It stays: one that is deleted could be locked twice, under two inodes."""
RELEASE_S = 5.0
"""How long to wait for a process of the same run, which leaves: a run that is started again may meet its own past."""
POLL_S = 0.05
"""Time between two attempts to take the lock."""
_WITHOUT_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS})
"""How a file system says that it has no locks, such as NFS without its lock service."""


class Holder(msgspec.Struct, kw_only=True):
    """Who writes into the folder, as the lock's file says."""

    run: str = ""
    """The run's id; empty where it has none."""
    pid: int
    host: str

    def __str__(self) -> str:
        return f"{f'run {self.run}, ' if self.run else ''}process {self.pid} on {self.host}"


class FolderLock:
    """Holds the folder until ``release``; the kernel releases it when the process ends in another way.

    It is ``flock``, which Linux turns into a lock of the server's where the folder is on NFS, so that it also holds
    against other machines; the file is open for writing because NFS asks for that. Processes that the holder forks
    share the lock: a reader of data that outlives its rank keeps it for the moment until it dies too.

    Args:
        folder: what is to be held; it exists and can be written to.
        run_id: of the run that asks, empty where it has none.

    Raises:
        RequestError: another training holds it; one line that names it.
        OSError: the lock's file cannot be opened.
    """

    def __init__(self, folder: Path, *, run_id: str = "") -> None:
        self.why_not = ""
        """Why nothing is locked, where the file system cannot; empty when it is."""
        self._fd: int | None = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._take(self._fd, folder, run_id)
        except BaseException:  # Ctrl-C while it waits, too; it goes on
            self._close()
            raise

    def _take(self, fd: int, folder: Path, run_id: str) -> None:
        deadline = time.monotonic() + RELEASE_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = _holder(fd)
                if holder is not None and run_id and holder.run == run_id and time.monotonic() < deadline:
                    time.sleep(POLL_S)
                    continue
                raise RequestError(
                    f"{folder}: another training writes its checkpoints here ({holder or 'it has not said which'}): "
                    "end it first, or choose another folder"
                ) from None
            except OSError as error:
                if error.errno not in _WITHOUT_LOCKS:
                    raise
                self.why_not = error.strerror or str(error)
                return
            break
        line = msgspec.json.encode(Holder(run=run_id, pid=os.getpid(), host=socket.gethostname()))
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, line, 0)
        except OSError:
            return  # A full disk: the folder is held all the same, only by somebody unnamed.

    def release(self) -> None:
        """Let the next training have the folder."""
        if self._fd is not None and not self.why_not:
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # also for processes that were forked meanwhile
        self._close()

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _holder(fd: int) -> Holder | None:
    """Return who has written down that it holds the folder; None while it is about to."""
    try:
        return msgspec.json.decode(os.pread(fd, 4096, 0), type=Holder)
    except (OSError, msgspec.MsgspecError):
        return None
