"""Open the rendezvous store: served by rank 0, a shared file, or torchrun's own.

An init method that cannot work raises a one-line error at once; a server that starts late is waited for.
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

import torch
from torch.distributed import DistError, DistNetworkError, FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from trainer.contract.errors import RequestError, TrainingError
from trainer.contract.rendezvous_url import parse_rendezvous_url, port_in_use, scheme_of, tcp_url
from trainer.host.addresses import is_loopback
from trainer.host.reachability import listen_on_all_addresses

OnWaiting = Callable[[list[int], list[int], float], None]
"""Callback about once a second while ranks are missing: joined ranks, missing ranks, milliseconds waited."""

REPORT_EVERY_S = 1.0
"""Interval of the calls to ``OnWaiting``."""
KEY_PREFIX = "gputrain-join"
"""Prefix of the rendezvous keys; a store file without it was not written by this package."""


ANSWER_TIMEOUTS_S = (10.0, 60.0)
"""Time-outs of two attempts to connect to the store. torch looks up the name of each peer, which takes 10 s with a
nameserver that does not answer; a rank 0 on another machine than the others think has failed after the first.
"""
LOOK_UP = (
    "torch looks up the names of addresses, and a nameserver that does not answer is a common cause; have the one in "
    "/etc/resolv.conf answer, or take it out"
)
FILE_STABLE_S = 2.0
"""Time-out for the first registration in a store file that a peer has just created."""

_open_file_stores: list[Store] = []
"""File stores, kept to the end of the process: a ``FileStore`` writes into its file when it is freed, which would
create the file again after rank 0 has removed it."""


class JoinTimeoutError(TrainingError):
    """Ranks are missing when the time-out ends; the message names them."""


@dataclass(frozen=True)
class RendezvousStore:
    """Store of the rendezvous, its address, and the file to remove at the end."""

    store: Store
    url: str
    file: Path | None = None
    host: str | None = None
    """Host of the store; the network interface is chosen on the route to it."""
    port: int | None = None
    """Port of the store; distinguishes its connection from those of the group."""


class Wait:
    """Time-out of the rendezvous, with polling pauses that grow and a report about once a second."""

    def __init__(self, timeout_s: float, on_waiting: OnWaiting | None) -> None:
        self.started = time.monotonic()
        self.timeout_s = timeout_s
        self._on_waiting = on_waiting
        self._reported = self.started

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self.started

    @property
    def left_s(self) -> float:
        """Seconds until the time-out; negative after it."""
        return self.timeout_s - self.waited_s

    def pause(self, members: Callable[[], tuple[list[int], list[int]]]) -> None:
        """Report members once a second, and sleep: 1 ms at first, then 2 % of the wait, at most 100 ms."""
        now = time.monotonic()
        if self._on_waiting is not None and now - self._reported >= REPORT_EVERY_S:
            self._reported = now
            joined, missing = members()
            self._on_waiting(joined, missing, self.waited_s * 1000)
        time.sleep(min(max(self.waited_s / 50, 0.001), 0.1, max(self.left_s, 0.001)))


def open_store(url: str, *, rank: int, world_size: int, wait: Wait, environ: Mapping[str, str]) -> RendezvousStore:
    """Open the store that the init method names; rank 0 serves a ``tcp://`` one.

    Raises:
        RequestError: the init method cannot be used, its port is in use or its file is from an earlier run.
        JoinTimeoutError: the server did not answer in time.
    """
    scheme, address = scheme_of(url), url
    if scheme is None:
        raise RequestError(f"init method {url!r}: allowed are tcp://HOST:PORT, file:///PATH and env://")
    if scheme == "file":
        return _open_file(url)
    serve = rank == 0
    if scheme == "env":
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
        if missing:
            raise RequestError(f"env:// needs {' and '.join(missing)} in the environment")
        address = tcp_url(environ["MASTER_ADDR"], environ["MASTER_PORT"])
        # torchrun's agent serves the store itself, and keeps it over restarts.
        serve = serve and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    host, port = _address(url, address)
    store = _serve(url, host, port) if serve else None
    if store is None:
        store = _connect(url, host, port, rank=rank, world_size=world_size, wait=wait)
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return RendezvousStore(PrefixStore(f"attempt-{attempt}", store), url, host=host, port=port)


def _address(url: str, address: str) -> tuple[str, int]:
    method = parse_rendezvous_url(address)
    if method is None or not method.has_port:
        named = address.removeprefix("tcp://")
        raise RequestError(f"init method {url!r} ({named}): expected HOST:PORT with a port from 1 to 65535")
    host, port = method.host, method.port
    # One address family for the server and its clients, whatever the resolver prefers.
    host = "127.0.0.1" if host == "localhost" else host
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise RequestError(f"init method {url!r}: host {host!r} cannot be resolved here ({error.strerror})") from None
    return host, port


def _serve(url: str, host: str, port: int) -> Store:
    """Listen on the port and return the store; for a loopback host only on the loopback interface."""
    # The default server of torch 2.6 cannot take a socket that listens already.
    libuv = not torch.__version__.startswith("2.6.")
    for seconds in ANSWER_TIMEOUTS_S:
        try:
            server = _listen(host, port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise RequestError(f"init method {url!r}: {port_in_use(port)}; choose another") from None
            raise RequestError(f"init method {url!r}: rank 0 cannot listen on port {port} ({error.strerror})") from None
        try:
            # Connect through the address that the other ranks use, so that a rank 0 on the wrong machine fails here.
            return TCPStore(
                host,
                port,
                None,
                True,
                timedelta(seconds=seconds),
                wait_for_workers=False,
                master_listen_fd=server.detach(),
                use_libuv=libuv,
            )
        except DistNetworkError:
            here = socket.gethostname()
            if not _reaches_itself(host, port):
                raise RequestError(
                    f"init method {url!r}: rank 0 runs on {here} and cannot reach itself at {host}:{port}; "
                    "the host must be the machine of rank 0"
                ) from None
    raise TrainingError(
        f"{host}:{port} is {here}, but torch's store there did not answer within {seconds:g} s: {LOOK_UP}"
    )


def _listen(host: str, port: int) -> socket.socket:
    if is_loopback(host):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    return listen_on_all_addresses(port)


def _reaches_itself(host: str, port: int) -> bool:
    """Whether a connection to an address arrives in this process."""
    try:
        with _listen(host, port) as server:
            server.settimeout(3.0)
            with socket.create_connection((host, port), timeout=3.0) as mine:
                while True:  # other ranks may connect first
                    accepted, peer = server.accept()
                    accepted.close()
                    if peer[1] == mine.getsockname()[1]:
                        return True
    except OSError:
        return False


def _connect(url: str, host: str, port: int, *, rank: int, world_size: int, wait: Wait) -> Store:
    """Connect to rank 0's store, which may open minutes after this rank has started."""
    others = [other for other in range(world_size) if other != rank]
    reason = "no attempt was made"
    no_route_since: float | None = None
    # Time-out while there is no route to rank 0's host: a machine that boots gets its network within seconds.
    no_route_s = 10.0
    answer_s, longest_s = ANSWER_TIMEOUTS_S
    while True:
        no_route = False
        try:
            # TCPStore's own retries are slow and log each attempt, so a plain socket checks first whether it listens.
            socket.create_connection((host, port), timeout=max(min(5.0, wait.left_s), 0.1)).close()
            seconds = timedelta(seconds=max(min(answer_s, wait.left_s), 1.0))
            return TCPStore(host, port, None, False, seconds, wait_for_workers=False)
        except OSError as error:
            reason = error.strerror or str(error)
            no_route = error.errno in (errno.ENETUNREACH, errno.EADDRNOTAVAIL)
        except DistError:
            reason = f"what listens there did not answer as the store of a process group; {LOOK_UP}"
            answer_s = longest_s
        no_route_since = (no_route_since or time.monotonic()) if no_route else None
        if no_route_since is not None and time.monotonic() - no_route_since >= min(no_route_s, wait.timeout_s):
            raise JoinTimeoutError(
                f"there is no route from {socket.gethostname()} to rank 0 at {host}:{port} ({reason}): "
                "use an address of rank 0's machine to which this machine has a route"
            )
        if wait.left_s <= 0:
            raise JoinTimeoutError(
                f"rank {rank} waited {wait.timeout_s:g} s for rank 0 at {host}:{port} ({reason}); "
                f"missing: rank 0, which serves {url}"
            )
        wait.pause(lambda: ([rank], others))


def _open_file(url: str) -> RendezvousStore:
    method = parse_rendezvous_url(url)
    if method is None:
        raise RequestError(f"init method {url!r}: expected file:///PATH with an absolute path")
    path = method.path
    if not path.parent.is_dir():
        raise RequestError(f"init method {url!r}: the folder {path.parent} does not exist on {socket.gethostname()}")
    if path.is_dir():
        raise RequestError(f"init method {url!r}: {path} is a folder, expected a file that does not exist yet")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise RequestError(f"init method {url!r}: {path} cannot be written on {socket.gethostname()}")
    _refuse_foreign_file(path)
    store = FileStore(str(path), -1)
    _open_file_stores.append(store)
    return RendezvousStore(store, url, file=path)


def _refuse_foreign_file(path: Path) -> None:
    """Require that the file is missing, empty, or holds a registration.

    A peer creates the file a moment before it registers, so a file without a registration is read again for a while.
    """
    deadline = time.monotonic() + FILE_STABLE_S
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


def wait_for_keys(keys: Store, names: list[str], limit_s: float) -> None:
    """Wait until all keys are set, or the limit; this process keeps the store open for the ranks that set them."""
    deadline = time.monotonic() + limit_s
    while not keys.check(names) and time.monotonic() < deadline:
        time.sleep(0.005)


def lost_store(rdzv: RendezvousStore, rank: int, error: RuntimeError) -> TrainingError:
    """Return the error for a store that went away while a rank joined."""
    return TrainingError(f"rank {rank} lost the store at {rdzv.url} while joining: {str(error).splitlines()[0]}")


def remove_store_file(rdzv: RendezvousStore) -> None:
    """Remove the store's file, so that its name can be used again."""
    if rdzv.file is not None:
        with contextlib.suppress(OSError):
            rdzv.file.unlink(missing_ok=True)
