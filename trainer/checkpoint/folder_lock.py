"""Lock on a checkpoint folder: two trainings would delete and replace each other's files."""

from __future__ import annotations

import errno
import fcntl
import os
import pwd
import socket
import time
from pathlib import Path

import msgspec

from trainer.contract.errors import RequestError
from trainer.contract.record.checkpoints import LOCK
from trainer.contract.record.regular_file import open_regular

RELEASE_S = 5.0
"""Time-out for a process of the same run to release the lock: a restarted run may overlap with its previous process."""
HOLDER_START = b'{"run":'
"""First bytes of a holder's line in the lock file."""
_WITHOUT_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS})
"""Errors of file systems without locks, such as NFS without its lock service."""


class Holder(msgspec.Struct, kw_only=True):
    """Process that holds the lock, as stored in the lock file."""

    run: str = ""
    pid: int
    host: str

    def __str__(self) -> str:
        return f"{f'run {self.run}, ' if self.run else ''}process {self.pid} on {self.host}"


class FolderLock:
    """Lock on a folder, held until ``release`` or the end of the process.

    The lock is ``flock``, which Linux implements by a lock of the server if the folder is on NFS, so that it excludes
    other machines too; NFS needs the file open for writing. Forked processes share the lock: a data loader worker that
    outlives its rank keeps it until it dies.

    Raises:
        RequestError: another training holds the lock, or something else is in its place; one line that names it.
        OSError: the lock file cannot be made.
    """

    def __init__(self, folder: Path, *, run_id: str = "") -> None:
        self.why_not = ""
        """Reason why the folder is not locked, on a file system without locks; empty if it is."""
        self._fd: int | None = _open_lock(folder / LOCK)
        try:
            _require_lock(self._fd, folder / LOCK)
            self._take(self._fd, folder, run_id)
        except BaseException:  # also Ctrl-C while it waits
            self._close()
            raise

    def _take(self, fd: int, folder: Path, run_id: str) -> None:
        deadline = time.monotonic() + RELEASE_S
        poll_s = 0.05  # time between two attempts to take the lock
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = _holder(fd)
                if holder is not None and run_id and holder.run == run_id and time.monotonic() < deadline:
                    time.sleep(poll_s)
                    continue
                raise RequestError(
                    f"{folder}: another training writes its checkpoints here "
                    f"({holder or 'which one is not recorded'}): end it first, or choose another folder"
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
            return  # a full disk: the folder is locked, but the lock file does not name the holder

    def release(self) -> None:
        if self._fd is not None and not self.why_not:
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # also for processes forked in the meantime
        self._close()

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _open_lock(path: Path) -> int:
    try:
        return open_regular(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        if not os.path.lexists(path):
            raise
        if error.errno in (errno.EACCES, errno.EPERM):
            raise _foreign(path, f"belongs to {_owner(path)} and cannot be written") from None
        raise _foreign(path, "is a link, a folder or a device, and no lock of a training") from None


def _require_lock(fd: int, path: Path) -> None:
    """Refuse a file that no training has made: its content would be lost."""
    content = os.pread(fd, 4096, 0).strip(b"\0")  # zeros after a power failure
    if os.fstat(fd).st_nlink > 1 or (content and not content.startswith(HOLDER_START)):
        raise _foreign(path, "is another file, and no lock of a training")


def _foreign(path: Path, what: str) -> RequestError:
    return RequestError(f"{path} {what}: delete it, or choose another folder")


def _owner(path: Path) -> str:
    uid = path.lstat().st_uid
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _holder(fd: int) -> Holder | None:
    try:
        return msgspec.json.decode(os.pread(fd, 4096, 0), type=Holder)
    except (OSError, msgspec.MsgspecError):
        return None
