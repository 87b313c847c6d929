"""Makes a decided init method usable: a free port, a fresh file, the counts of uneven nodes.

The acting side of ``trainer.environments.dispatch``: sockets and files, but no torch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from trainer.contract.errors import RequestError
from trainer.environments.decision import Decision

FIRST_FREE, LAST_FREE = 10_000, 29_999
"""Where free ports are looked for: below the range that outgoing connections take theirs from, so that none takes
the port in the seconds between the test and rank 0's listening."""


@contextlib.contextmanager
def usable_init_method(decision: Decision) -> Iterator[str | None]:
    """Yield the init method, checked, with a free port for port 0; a file is deleted by the last node.

    Raises:
        RequestError: the port is in use, or the file is left from an earlier run or cannot be written.
    """
    url = decision.init_method
    scheme = "" if url is None else url.partition("://")[0]
    if url is not None and scheme == "tcp":
        yield _check_tcp(decision, url)
    elif url is not None and scheme == "file":
        with _rendezvous_file(Path(unquote(urlsplit(url).path)), all_here=len(decision.ranks) == decision.world_size):
            yield url
    else:
        yield url


def _check_tcp(decision: Decision, url: str) -> str:
    parts = urlsplit(url)
    assert parts.hostname is not None
    if parts.port == 0:
        return f"tcp://{parts.hostname}:{free_port()}"
    assert parts.port is not None
    try:
        socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise RequestError(f"{url}: the host {parts.hostname!r} cannot be resolved here ({error.strerror})") from None
    if decision.first_rank == 0 and not can_bind(parts.port):
        raise RequestError(f"{url}: port {parts.port} is in use on this machine: choose another one")
    return url


def can_bind(port: int) -> bool:
    """Whether rank 0's store, which listens on all addresses, could listen on the port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("", port))
        except PermissionError:
            raise RequestError(f"port {port} needs root: choose one above 1023") from None
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
    return True


def free_port() -> int:
    """Return a port that can be bound now."""
    # Not the training's random numbers: runs that start together must not try the same ports.
    source = random.SystemRandom()
    for _ in range(200):
        port = source.randint(FIRST_FREE, LAST_FREE)
        if can_bind(port):
            return port
    raise RequestError(f"no port from {FIRST_FREE} to {LAST_FREE} is free: give one with --distributed-port")


@contextlib.contextmanager
def _rendezvous_file(path: Path, *, all_here: bool) -> Iterator[None]:
    """Hold a rendezvous file, once it is known not to be left from an earlier run.

    The file is never empty once a rank has registered, so its content alone does not distinguish a run that is starting
    from one that failed. Every node holds a shared lock beside it: one that can lock it exclusively is alone.
    """
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
