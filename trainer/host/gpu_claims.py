"""Claims GPUs on this machine: a locked file per GPU, by which runs of all users know that a GPU is taken.

A process gets a GPU's memory only after its libraries are loaded, so that the driver shows a run that was just started
as late as ten seconds later. The kernel ends a claim with the process that holds it, however that ends.

Standard library only, since this file travels to remote hosts with ``inventory.py``.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pwd
import re
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

FOLDER = "GPUTRAIN_GPU_CLAIMS"
"""Environment variable: the folder of the claims."""
DEFAULT_FOLDER = "/tmp/gputrain-gpus"
MAX_CLAIM_BYTES = 1000
"""What is read of a claim, which anybody may write."""
FLOCK = "hhqqi"
"""``struct flock`` of fcntl(2): type, origin, start, length (0: all), pid (0 for locks of an open file)."""


@dataclass(frozen=True, kw_only=True)
class GpuClaim:
    """Who has taken a GPU."""

    run: str = ""
    """Id of the run; empty for ranks without a run directory."""
    user: str = ""
    pid: int = 0
    """Of the node agent, as its own PID namespace counts."""

    @property
    def text(self) -> str:
        """Return who it is in words: ``run NAME (pid 7 of ada)``."""
        who = f"run {self.run}" if self.run else "a training"
        return f"{who} (pid {self.pid}{f' of {self.user}' if self.user else ''})" if self.pid else who


class GpuTakenError(Exception):
    """Another run has taken a GPU."""

    def __init__(self, uuid: str, claim: GpuClaim) -> None:
        super().__init__(f"GPU {uuid} is taken by {claim.text}")


@contextlib.contextmanager
def claim_gpus(uuids: Sequence[str], run: str, *, shared: bool, environ: Mapping[str, str]) -> Iterator[None]:
    """Claim GPUs while the body runs; where there is no place for claims, go on without.

    Args:
        uuids: of the GPUs; those of the CPU have none.
        run: id of the run.
        shared: allow other runs on them, and go on where another run allows none.
        environ: may name the folder.

    Raises:
        GpuTakenError: another process has claimed one of them.
    """
    with contextlib.ExitStack() as stack:
        folder = _open_folder(environ, make=True) if uuids else None
        if folder is not None:
            stack.callback(os.close, folder)
            mine = GpuClaim(run=run, user=_user(), pid=os.getpid())
            for uuid in dict.fromkeys(uuids):
                claim = _open_claim(folder, uuid, make=True)
                if claim is None:
                    continue
                stack.callback(os.close, claim)
                try:
                    fcntl.fcntl(claim, fcntl.F_OFD_SETLK, _flock(fcntl.F_RDLCK if shared else fcntl.F_WRLCK))
                except OSError:
                    if not shared:
                        raise GpuTakenError(uuid, _read(claim)) from None
                    continue
                with contextlib.suppress(OSError):  # a full disk: taken, by nobody knows whom
                    os.ftruncate(claim, 0)
                    os.pwrite(claim, json.dumps(asdict(mine)).encode(), 0)
        yield


def claims(uuids: Sequence[str], environ: Mapping[str, str] = os.environ) -> dict[str, GpuClaim]:
    """Return who has claimed which of these GPUs; nothing is locked for it."""
    folder = _open_folder(environ, make=False)
    if folder is None:
        return {}
    found = {}
    try:
        for uuid in uuids:
            claim = _open_claim(folder, uuid, make=False)
            if claim is None:
                continue
            with contextlib.suppress(OSError):
                lock = fcntl.fcntl(claim, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK))
                if struct.unpack_from("h", lock)[0] != fcntl.F_UNLCK:
                    found[uuid] = _read(claim)
            os.close(claim)
    finally:
        os.close(folder)
    return found


def _flock(kind: int) -> bytes:
    return struct.pack(FLOCK, kind, os.SEEK_SET, 0, 0, 0)


def _open_folder(environ: Mapping[str, str], *, make: bool) -> int | None:
    """Open the folder of the claims, never through a link; None where there is none that can be used."""
    path = environ.get(FOLDER) or DEFAULT_FOLDER
    if make:
        with contextlib.suppress(OSError):  # it is there already
            os.mkdir(path, 0o700)  # noqa: PTH102
            os.chmod(path, 0o1777)  # noqa: PTH101 - as /tmp: all users make files in it, whatever the umask is
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None


def _open_claim(folder: int, uuid: str, *, make: bool) -> int | None:
    """Open the file of a GPU: a regular one with a single name, so that nobody's other file is written."""
    name = re.sub(r"[^\w-]", "_", uuid)
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
    claim = None
    with contextlib.suppress(OSError):
        # Without O_CREAT where it is there: Linux refuses that for another user's file in a folder like /tmp.
        claim = os.open(name, flags, dir_fd=folder)
    if claim is None and make:
        try:
            claim = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
            os.fchmod(claim, 0o666)  # all users lock it, whatever the umask is
        except OSError:
            with contextlib.suppress(OSError):
                claim = os.open(name, flags, dir_fd=folder)  # another process has just made it
    if claim is None:
        return None
    found = os.fstat(claim)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
        os.close(claim)
        return None
    return claim


def _read(claim: int) -> GpuClaim:
    try:
        value = json.loads(os.pread(claim, MAX_CLAIM_BYTES, 0))
        run, user, pid = value["run"], value["user"], value["pid"]
    except (OSError, ValueError, KeyError, TypeError):
        return GpuClaim()
    known = isinstance(run, str) and isinstance(user, str) and type(pid) is int
    return GpuClaim(run=run, user=user, pid=pid) if known else GpuClaim()


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())
