"""Preparation of the decided init method: a free port, or a fresh file.

Does the I/O for ``trainer.environments.dispatch``: sockets and files, but no torch.
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
from trainer.contract.rendezvous_url import RendezvousUrl, parse_rendezvous_url, port_in_use, tcp_url
from trainer.environments.decision import Decision
from trainer.host.ports import bind_error, free_port


@contextlib.contextmanager
def usable_init_method(decision: Decision) -> Iterator[str | None]:
    """Check the init method and yield it, with a free port instead of port 0; the last node deletes its file.

    Raises:
        RequestError: the port is in use, or the file is from an earlier run or cannot be written.
    """
    url = decision.init_method
    method = None if url is None else parse_rendezvous_url(url)
    if url is not None and method is not None and method.scheme == "tcp":
        yield _check_tcp(decision, url, method)
    elif method is not None and method.scheme == "file":
        with _rendezvous_file(method.path, single_node=len(decision.ranks) == decision.world_size):
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
        why = f"the host {host!r} cannot be resolved here ({error.strerror})"
        raise RequestError(f"{url}: {why}; name an address of the first node that all others reach") from None
    error_number = bind_error(port) if decision.first_rank == 0 else 0
    if error_number == errno.EACCES:
        raise RequestError(f"port {port} needs root: choose one above 1023")
    if error_number:
        raise RequestError(f"{url}: {port_in_use(port)}: choose another one")
    return url


@contextlib.contextmanager
def _rendezvous_file(path: Path, *, single_node: bool) -> Iterator[None]:
    """Check that a rendezvous file is not from an earlier run, and hold a shared lock beside it in the body.

    The file is not empty once a rank has registered, so its content alone does not distinguish a run that is starting
    from one that failed. A node that can take the lock exclusively is the only one that holds it.
    """
    if path.exists() and not path.is_file():  # the last node deletes the path: as root even a device
        raise RequestError(f"file://{path} is not a regular file: choose an unused name (a new one for every run)")
    lock_path = path.with_name(path.name + ".lock")
    try:
        lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise RequestError(
            f"file://{path}: cannot be written ({error.strerror}): every node must be able to write to this folder"
        ) from None
    try:
        is_first = single_node or _lock_exclusively(lock)
        if is_first and path.exists() and path.stat().st_size > 0:
            lock_path.unlink(missing_ok=True)
            raise RequestError(
                f"file://{path} is left from an earlier run: "
                "delete it, or choose another name (a new one for every run)"
            )
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_SH)
        yield
        if _lock_exclusively(lock):
            path.unlink(missing_ok=True)
            lock_path.unlink(missing_ok=True)
    finally:
        os.close(lock)


def _lock_exclusively(lock: int) -> bool:
    """Try to lock exclusively; return False if another node holds the lock or the file system has no locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
