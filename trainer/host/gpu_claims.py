"""Claims of GPUs on this machine: a locked file per GPU shows runs of all users that the GPU is taken.

A process allocates GPU memory only after its libraries are loaded, so the driver shows a new run up to ten seconds
late. The kernel releases a claim's lock when the process that holds it ends, even by a kill.

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
"""Environment variable with the folder of the claims."""
DEFAULT_FOLDER = "/tmp/gputrain-gpus"
MAX_CLAIM_BYTES = 1000
"""Maximum bytes read of a claim, a file that all users can write."""
FLOCK = "hhqqi"
"""``struct flock`` of fcntl(2): type, origin, start, length (0: all), pid (0 for locks of an open file)."""


@dataclass(frozen=True, kw_only=True)
class GpuClaim:
    """Run, user and process that have claimed a GPU."""

    run: str = ""
    """Id of the run; empty for ranks without a run directory."""
    user: str = ""
    pid: int = 0
    """Pid of the node agent in its own PID namespace."""

    @property
    def text(self) -> str:
        """Description for messages: ``run NAME (pid 7 of ada)``."""
        holder = f"run {self.run}" if self.run else "a training"
        return f"{holder} (pid {self.pid}{f' of {self.user}' if self.user else ''})" if self.pid else holder


class GpuTakenError(Exception):
    """Another run has taken a GPU."""

    def __init__(self, uuid: str, claim: GpuClaim) -> None:
        super().__init__(f"GPU {uuid} is taken by {claim.text}")


@contextlib.contextmanager
def claim_gpus(uuids: Sequence[str], run: str, *, shared: bool, environ: Mapping[str, str]) -> Iterator[None]:
    """Claim GPUs while the body runs; without a usable folder for claims, claim nothing.

    Args:
        uuids: of the GPUs; empty for CPU ranks.
        run: id of the run.
        shared: allow other runs on them, and ignore an exclusive claim of another run.
        environ: may set the folder.

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
                with contextlib.suppress(OSError):  # on a full disk the lock remains, without the holder's name
                    os.ftruncate(claim, 0)
                    os.pwrite(claim, json.dumps(asdict(mine)).encode(), 0)
        yield


def claims(uuids: Sequence[str], environ: Mapping[str, str] = os.environ) -> dict[str, GpuClaim]:
    """Return the claims on these GPUs, by UUID, without locking anything."""
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
    """Open the folder of the claims, never through a link; None if it cannot be opened."""
    path = environ.get(FOLDER) or DEFAULT_FOLDER
    if make:
        with contextlib.suppress(OSError):  # it exists already
            os.mkdir(path, 0o700)  # noqa: PTH102
            os.chmod(path, 0o1777)  # noqa: PTH101 - as /tmp: all users create files in it, whatever the umask is
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None


def _open_claim(folder: int, uuid: str, *, make: bool) -> int | None:
    """Open the claim of a GPU; None if it is no regular file, or has hard links and may be another file of a user."""
    name = re.sub(r"[^\w-]", "_", uuid)
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
    claim = None
    with contextlib.suppress(OSError):
        # First without O_CREAT, which Linux refuses for another user's existing file in a sticky folder such as /tmp.
        claim = os.open(name, flags, dir_fd=folder)
    if claim is None and make:
        try:
            claim = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
            os.fchmod(claim, 0o666)  # all users lock it, whatever the umask is
        except OSError:
            with contextlib.suppress(OSError):
                claim = os.open(name, flags, dir_fd=folder)  # another process has just created it
    if claim is None:
        return None
    status = os.fstat(claim)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        os.close(claim)
        return None
    return claim


def _read(claim: int) -> GpuClaim:
    try:
        value = json.loads(os.pread(claim, MAX_CLAIM_BYTES, 0))
        run, user, pid = value["run"], value["user"], value["pid"]
    except (OSError, ValueError, KeyError, TypeError):
        return GpuClaim()
    valid = isinstance(run, str) and isinstance(user, str) and type(pid) is int
    return GpuClaim(run=run, user=user, pid=pid) if valid else GpuClaim()


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())
