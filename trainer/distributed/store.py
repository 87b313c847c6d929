"""Opens the rendezvous store: served by rank 0, a shared file, or torchrun's own.

What cannot work is refused at once and in one line; a server that is late is waited for.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from urllib.parse import unquote, urlsplit

from torch.distributed import DistError, DistNetworkError, FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from trainer.contract.errors import RequestError, TrainingError

Waiting = Callable[[list[int], list[int], float], None]
"""Called about once a second while ranks are missing: joined ranks, missing ranks, milliseconds waited."""

REPORT_EVERY_S = 1.0
KEY_PREFIX = "gputrain-join"
"""Prefix of the keys with which ranks join; a file without it is none of ours."""

NO_ROUTE_S = 10.0
"""How long a machine that has no way to the host may take to get its network; waiting for rank 0 itself is longer."""

SETTLING_S = 2.0
"""Within this a rank that has just created a file has written its registration into it."""

_kept: list[Store] = []
"""File stores, to the end of the process: when one is freed it writes into its file, and makes it anew if rank 0 has
just removed it."""


class JoinTimeoutError(TrainingError):
    """Not all ranks came in time; the message names the missing ones."""


@dataclass(frozen=True)
class RendezvousStore:
    """Where the ranks meet: the store, and what must be cleared away at the end."""

    store: Store
    url: str
    file: Path | None = None
    """The store's file, which rank 0 removes."""
    host: str | None = None
    """Host of the store, for choosing the network interface."""
    port: int | None = None
    """Port of the store, which tells its connection from those of the group."""


class Wait:
    """A time-out, a pause that grows with the time already waited, and a report about once a second."""

    def __init__(self, timeout_s: float, on_waiting: Waiting | None) -> None:
        self.started = time.monotonic()
        self.timeout_s = timeout_s
        self._on_waiting = on_waiting
        self._reported = self.started

    @property
    def waited_s(self) -> float:
        """Seconds since joining began."""
        return time.monotonic() - self.started

    @property
    def left_s(self) -> float:
        """Seconds until the time-out; negative after it."""
        return self.timeout_s - self.waited_s

    def pause(self, who: Callable[[], tuple[list[int], list[int]]]) -> None:
        """Report who is there, if it is time, and sleep: 1 ms at first, a fiftieth of the wait later on."""
        now = time.monotonic()
        if self._on_waiting is not None and now - self._reported >= REPORT_EVERY_S:
            self._reported = now
            joined, missing = who()
            self._on_waiting(joined, missing, self.waited_s * 1000)
        time.sleep(min(max(self.waited_s / 50, 0.001), 0.1, max(self.left_s, 0.001)))


def open_store(url: str, *, rank: int, world_size: int, wait: Wait, environ: Mapping[str, str]) -> RendezvousStore:
    """Open the store that the init method names; rank 0 serves a ``tcp://`` one.

    Raises:
        RequestError: the init method cannot be used here, its port is in use or its file is from an earlier run.
        JoinTimeoutError: nobody answered in time.
    """
    scheme, _, rest = url.partition("://")
    if scheme == "file":
        return _open_file(url)
    serve = rank == 0
    if scheme == "env":
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
        if missing:
            raise RequestError(f"env:// needs {' and '.join(missing)} in the environment")
        rest = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
        # torchrun's agent serves the store itself, and keeps it over restarts.
        serve = serve and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    elif scheme != "tcp":
        raise RequestError(f"init method {url!r}: allowed are tcp://HOST:PORT, file:///PATH and env://")
    host, port = _address(url, rest)
    store = _serve(url, host, port) if serve else None
    if store is None:
        store = _connect(url, host, port, rank=rank, world_size=world_size, wait=wait)
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return RendezvousStore(PrefixStore(f"attempt-{attempt}", store), url, host=host, port=port)


def _address(url: str, rest: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{rest}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port:
        raise RequestError(f"init method {url!r} ({rest}): expected HOST:PORT with a port from 1 to 65535")
    # One address family for the server and its clients, whatever the resolver prefers.
    host = "127.0.0.1" if host == "localhost" else host
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise RequestError(f"init method {url!r}: host {host!r} cannot be resolved here ({error.strerror})") from None
    return host, port


def is_loopback(host: str) -> bool:
    """Whether the host names this machine only."""
    return host in ("localhost", "::1") or host.startswith("127.")


def _serve(url: str, host: str, port: int) -> Store:
    """Listen and return the store; on a loopback host nobody outside this machine can reach it."""
    try:
        if is_loopback(host):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            server = socket.create_server((host, port), family=family, backlog=2048)
        elif socket.has_dualstack_ipv6():
            server = socket.create_server(("", port), family=socket.AF_INET6, backlog=2048, dualstack_ipv6=True)
        else:
            server = socket.create_server(("", port), backlog=2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise RequestError(f"init method {url!r}: port {port} is in use on this machine; choose another") from None
        raise RequestError(f"init method {url!r}: rank 0 cannot listen on port {port} ({error.strerror})") from None
    seconds = timedelta(seconds=10)
    try:
        # Through the address that the others use: a rank 0 on the wrong machine then meets the right one.
        return TCPStore(host, port, None, True, seconds, wait_for_workers=False, master_listen_fd=server.detach())
    except DistNetworkError:
        raise RequestError(
            f"init method {url!r}: rank 0 runs on {socket.gethostname()} and cannot reach itself at {host}:{port}; "
            "the host must be the machine of rank 0"
        ) from None


def _connect(url: str, host: str, port: int, *, rank: int, world_size: int, wait: Wait) -> Store:
    """Connect to rank 0's store, which may open minutes after this rank has started."""
    others = [other for other in range(world_size) if other != rank]
    reason = "no attempt was made"
    no_route_since: float | None = None
    while True:
        no_route = False
        try:
            # A bare connection tells whether anybody listens; the store's own attempts are slow and noisy.
            socket.create_connection((host, port), timeout=max(min(5.0, wait.left_s), 0.1)).close()
            seconds = timedelta(seconds=max(min(10.0, wait.left_s), 1.0))
            return TCPStore(host, port, None, False, seconds, wait_for_workers=False)
        except OSError as error:
            reason = error.strerror or str(error)
            no_route = error.errno in (errno.ENETUNREACH, errno.EADDRNOTAVAIL)
        except DistError:
            reason = "what listens there is no store of a process group"
        no_route_since = (no_route_since or time.monotonic()) if no_route else None
        if no_route_since is not None and time.monotonic() - no_route_since >= min(NO_ROUTE_S, wait.timeout_s):
            raise JoinTimeoutError(
                f"there is no way from {socket.gethostname()} to rank 0 at {host}:{port} ({reason}): "
                "name an address of rank 0's machine in a network that this machine is in"
            )
        if wait.left_s <= 0:
            raise JoinTimeoutError(
                f"rank {rank} waited {wait.timeout_s:g} s for rank 0 at {host}:{port} ({reason}); "
                f"missing: rank 0, which serves {url}"
            )
        wait.pause(lambda: ([rank], others))


def _open_file(url: str) -> RendezvousStore:
    parts = urlsplit(url)
    path = Path(unquote(parts.path))
    if parts.netloc or not path.is_absolute() or path == Path("/"):
        raise RequestError(f"init method {url!r}: expected file:///PATH with an absolute path")
    if not path.parent.is_dir():
        raise RequestError(f"init method {url!r}: the folder {path.parent} does not exist on {socket.gethostname()}")
    if path.is_dir():
        raise RequestError(f"init method {url!r}: {path} is a folder, expected a file that does not exist yet")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise RequestError(f"init method {url!r}: {path} cannot be written on {socket.gethostname()}")
    _refuse_foreign_file(path)
    store = FileStore(str(path), -1)
    _kept.append(store)
    return RendezvousStore(store, url, file=path)


def _refuse_foreign_file(path: Path) -> None:
    """Accept no file, an empty one, and one in which a rank has claimed its number.

    A peer creates the file a moment before its registration is in it, therefore a file without one gets that moment.
    """
    deadline = time.monotonic() + SETTLING_S
    while True:
        try:
            with path.open("rb") as file:
                head = file.read(4096)
        except FileNotFoundError:
            return
        if not head or KEY_PREFIX.encode() in head:
            return
        if time.monotonic() > deadline:
            raise RequestError(f"{path} exists and is not empty: delete it, or name a file that does not exist yet")
        time.sleep(0.02)


def remove_store_file(rdzv: RendezvousStore) -> None:
    """Remove the store's file, so that its name can be used again."""
    if rdzv.file is not None:
        with contextlib.suppress(OSError):
            rdzv.file.unlink(missing_ok=True)
