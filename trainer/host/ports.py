"""Free ports of this machine, the processes that hold busy ones, and the connections of this process."""

from __future__ import annotations

import errno
import os
import random
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from trainer.host.proc_files import PROC, read_text

FIRST_PORT, LAST_PORT = 20_000, 32_767
"""Range of ``free_port``: below the ephemeral ports of Linux, so that no outgoing connection takes the port between
the check and the moment at which rank 0 listens."""


def bind_error(port: int) -> int:
    """Return the errno of binding a port on all addresses of this machine, as rank 0 does; 0 if it works."""
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            # Bound, not listening: an early rank of another node must not connect to this socket.
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignore connections in TIME_WAIT
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, port))
        except OSError as error:
            if family == socket.AF_INET6 and error.errno not in (errno.EACCES, errno.EADDRINUSE):
                continue  # a machine without IPv6
            return error.errno or errno.EADDRINUSE
    return 0


def is_port_free(port: int) -> bool:
    """Whether rank 0 could listen on a port on all addresses of this machine."""
    return not bind_error(port)


def free_port(draw: random.Random | None = None) -> int:
    """Return a free port of this machine, drawn at random so that runs started at the same time differ."""
    # Not from the training's seed: runs that start together must not try the same ports.
    draw = draw or random.SystemRandom()
    attempts = 200  # ports to try before the kernel chooses one; when so many are taken, nearly all are
    for _ in range(attempts):
        port = draw.randint(FIRST_PORT, LAST_PORT)
        if is_port_free(port):
            return port
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def outgoing_ports() -> tuple[int, int]:
    """Return the lowest and the highest ephemeral port of the kernel."""
    low, high = read_text(PROC / "sys/net/ipv4/ip_local_port_range").split() or (1024, 65535)
    return int(low), int(high)


def port_holder(port: int) -> str:
    """Return a description of the process that listens on a port: ``python3 (pid 4711)``, or another user's."""
    import psutil  # only for messages about a busy port

    try:
        listening = [
            entry
            for entry in psutil.net_connections(kind="tcp")
            if entry.laddr and entry.laddr.port == port and entry.status == psutil.CONN_LISTEN
        ]
    except psutil.AccessDenied:
        listening = []
    pid = next((entry.pid for entry in listening if entry.pid is not None), None)
    if pid is None:
        return "a process of another user"
    try:
        return f"{psutil.Process(pid).name()} (pid {pid})"
    except psutil.Error:
        return f"pid {pid}"


def own_connections() -> Iterator[socket.socket]:
    """Yield each IP socket of this process, also of libraries, on a duplicated descriptor that is closed afterwards."""
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    yield connection
