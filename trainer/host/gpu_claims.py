"""Claims of GPUs on this machine: a name that the kernel holds shows runs of all users that the GPU is taken.

A process allocates GPU memory only after its libraries are loaded, so the driver shows a new run up to ten seconds
late. A claim is an abstract Unix socket (unix(7)): it is in no folder, which a cleaner could empty or another user
close, and the kernel releases it when the process that holds it ends, even by a kill. It is seen in the network
namespace of the process.

Standard library only, since this file travels to remote hosts with ``inventory.py``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainer.host.proc_files import PROC, read_text
from trainer.host.processes import user_name

MACHINE = "GPUTRAIN_GPU_CLAIMS"
"""Environment variable: runs with different values have claims of their own, as if on different machines."""


@dataclass(frozen=True, kw_only=True)
class GpuClaim:
    """Run, user and process that have claimed a GPU."""

    run: str = ""
    """Id of the run, shortened if it is long; empty for ranks without a run directory."""
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


class GpuClaimError(Exception):
    """A GPU cannot be claimed on this machine."""

    def __init__(self, uuid: str, reason: str) -> None:
        super().__init__(f"GPU {uuid} cannot be claimed ({reason}), so another run could take it unnoticed")


@contextlib.contextmanager
def claim_gpus(uuids: Sequence[str], run: str, *, shared: bool, environ: Mapping[str, str]) -> Iterator[None]:
    """Claim GPUs for a run, by their UUIDs, while the body runs.

    With ``shared``, other runs are allowed on them, and an exclusive claim of another run is ignored.

    Raises:
        GpuClaimError: the kernel refuses a claim.
        GpuTakenError: another process has claimed one of them.
    """
    max_name_bytes = 107  # maximum length of a socket's name
    with contextlib.ExitStack() as stack:
        for uuid in dict.fromkeys(uuids):
            name = _name(uuid, environ)
            try:
                if not shared:
                    stack.enter_context(_held(name))
                # Who holds it, and that it is shared: the names of all sockets can be read by everybody.
                holder = f"{name}/{'s' if shared else 'a'}/{os.getpid()}/{os.getuid()}/{_plain(run)}"[:max_name_bytes]
                stack.enter_context(_held(holder))
            except OSError as error:
                if error.errno != errno.EADDRINUSE and not shared:
                    raise GpuClaimError(uuid, error.strerror or str(error)) from None
                if not shared:
                    raise GpuTakenError(uuid, claims([uuid], environ).get(uuid, GpuClaim())) from None
            names = [] if shared else [each for each in _socket_names() if each != holder]
            if others := _holders(name, names):
                raise GpuTakenError(uuid, others[0])
        yield


def claims(uuids: Sequence[str], environ: Mapping[str, str] = os.environ) -> dict[str, GpuClaim]:
    """Return the claims on these GPUs, by UUID; of several, the exclusive one."""
    names = _socket_names() if uuids else []
    of_gpu = {}
    for uuid in uuids:
        name = _name(uuid, environ)
        holders = _holders(name, names)
        if holders or name in names:
            of_gpu[uuid] = holders[0] if holders else GpuClaim()
    return of_gpu


@contextlib.contextmanager
def _held(name: str) -> Iterator[None]:
    """Hold an abstract name, which one process has at a time.

    Raises:
        OSError: another process holds it (EADDRINUSE), or the kernel refuses it.
    """
    with socket.socket(socket.AF_UNIX) as holder:
        holder.bind(b"\0" + name.encode())
        yield


def _name(uuid: str, environ: Mapping[str, str]) -> str:
    return f"gputrain/{zlib.crc32(environ.get(MACHINE, '').encode()):x}/{_plain(uuid)}"


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.+-]", "_", text)


def _socket_names() -> list[str]:
    """Return the abstract names of this network namespace."""
    name = 7  # index of the name in a line of ``/proc/net/unix``
    lines = (line.split(None, name) for line in read_text(PROC / "net/unix").splitlines())
    return [fields[name][1:] for fields in lines if len(fields) > name and fields[name][0] == "@"]


def _holders(name: str, names: Sequence[str]) -> list[GpuClaim]:
    """Return the holders of a claim among the names of sockets, exclusive ones (``a``) before shared ones (``s``)."""
    pattern = re.compile(re.escape(name) + r"/([as])/(\d{1,9})/(\d{1,10})/([A-Za-z0-9_.+-]*)", re.ASCII)
    holders = sorted(match.groups() for each in names if (match := pattern.fullmatch(each)))
    return [GpuClaim(run=run, user=user_name(int(uid)), pid=int(pid)) for _, pid, uid, run in holders]
