"""Makes a decided init method usable: a free port, a fresh file, the counts of uneven nodes.

The acting side of ``trainer.environments.dispatch``: sockets and files, but no torch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from trainer.contract.errors import RequestError
from trainer.contract.rendezvous_url import RendezvousUrl, parse_rendezvous_url, tcp_url
from trainer.environments.decision import Decision
from trainer.host.ports import bind_error, free_port


@contextlib.contextmanager
def usable_init_method(decision: Decision) -> Iterator[str | None]:
    """Yield the init method, checked, with a free port for port 0; a file is deleted by the last node.

    Raises:
        RequestError: the port is in use, or the file is left from an earlier run or cannot be written.
    """
    url = decision.init_method
    method = None if url is None else parse_rendezvous_url(url)
    if url is not None and method is not None and method.scheme == "tcp":
        yield _check_tcp(decision, url, method)
    elif method is not None and method.scheme == "file":
        with _rendezvous_file(method.path, all_here=len(decision.ranks) == decision.world_size):
            yield url
    else:
        yield url


def _check_tcp(decision: Decision, url: str, method: RendezvousUrl) -> str:
    host, port = method.host, method.port
    if port == 0:
        return tcp_url(host, free_port())
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise RequestError(f"{url}: the host {host!r} cannot be resolved here ({error.strerror})") from None
    taken = bind_error(port) if decision.first_rank == 0 else 0
    if taken == errno.EACCES:
        raise RequestError(f"port {port} needs root: choose one above 1023")
    if taken:
        raise RequestError(f"{url}: port {port} is in use on this machine: choose another one")
    return url


@contextlib.contextmanager
def _rendezvous_file(path: Path, *, all_here: bool) -> Iterator[None]:
    """Hold a rendezvous file, once it is known not to be left from an earlier run.

    The file is never empty once a rank has registered, so its content alone does not distinguish a run that is starting
    from one that failed. Every node holds a shared lock beside it: one that can lock it exclusively is alone.
    """
    if path.exists() and not path.is_file():  # the last node deletes it, and as root also a device
        raise RequestError(f"file://{path} is no regular file: choose a name that is free (one for every run)")
    lock_path = path.with_name(path.name + ".lock")
    try:
        lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise RequestError(
            f"file://{path}: cannot be written ({error.strerror}): every node needs the folder"
        ) from None
    try:
        alone = all_here or _lock_alone(lock)
        if alone and path.exists() and path.stat().st_size > 0:
            lock_path.unlink(missing_ok=True)
            raise RequestError(
                f"file://{path} is left from an earlier run: delete it, or choose another name (one for every run)"
            )
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_SH)
        yield
        if _lock_alone(lock):
            path.unlink(missing_ok=True)
            lock_path.unlink(missing_ok=True)
    finally:
        os.close(lock)


def _lock_alone(lock: int) -> bool:
    """Whether no other node holds the lock; assumed not so on a file system without locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
