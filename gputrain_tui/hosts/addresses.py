"""Reads addresses, names and ports of this machine."""

from __future__ import annotations

import errno
import os
import random
import socket
import sys
from collections.abc import Iterable

from gputrain_tui.hosts.host_names import LocalFacts, is_loopback

FIRST_PORT, LAST_PORT = 20000, 32767
"""Where free ports are looked for: below those that Linux gives to outgoing connections, so that none of these takes
the port between the test and the ranks' listening."""


def local_facts(hosts: Iterable[str | None]) -> LocalFacts:
    """Collect the facts of this machine that a plan for these hosts needs."""
    named = any(host is not None and not is_loopback(host) for host in hosts)
    addresses = own_addresses() if named else ()
    name = socket.gethostname().lower()
    return LocalFacts(
        names=frozenset({name, name.split(".")[0], *addresses}),
        addresses=tuple(address for address in addresses if not is_loopback(address)),
        free_port=free_port(),
        python=sys.executable,
        cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        slurm="SLURM_JOB_ID" in os.environ,
    )


def own_addresses() -> tuple[str, ...]:
    """Return this machine's addresses: the one that reaches other networks first, IPv4 before IPv6."""
    import psutil  # a plan for this machine alone does without

    found = {
        entry.address.partition("%")[0].lower()
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }
    outward = _outward_address()
    return tuple(sorted(found, key=lambda address: (address != outward, ":" in address, address)))


def _outward_address() -> str | None:
    """The address that the routing table picks for the outside; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation (RFC 5737)
            return str(probe.getsockname()[0])
        except OSError:
            return None


def is_port_free(port: int) -> bool:
    """Whether rank 0 could listen on a port of this machine, on all its addresses."""
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections do not count
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, port))
                probe.listen(1)
        except OSError as error:
            if family == socket.AF_INET6 and error.errno not in (errno.EACCES, errno.EADDRINUSE):
                continue  # a machine without IPv6
            return False
    return True


def free_port(draw: random.Random | None = None) -> int:
    """Return a port on which this machine can listen now, drawn so that runs at the same time differ."""
    draw = draw or random.SystemRandom()
    for _ in range(64):
        port = draw.randint(FIRST_PORT, LAST_PORT)
        if is_port_free(port):
            return port
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:  # nearly all are taken: let the kernel choose
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def port_holder(port: int) -> str:
    """Name who listens on a port of this machine: ``python3 (pid 4711)``, or another user's process."""
    import psutil  # only for messages about a busy port

    try:
        listening = [
            entry
            for entry in psutil.net_connections(kind="tcp")
            if entry.laddr and entry.laddr.port == port and entry.status == psutil.CONN_LISTEN
        ]
    except psutil.AccessDenied:
        listening = []
    for entry in listening:
        if entry.pid is not None:
            try:
                return f"{psutil.Process(entry.pid).name()} (pid {entry.pid})"
            except psutil.Error:
                return f"pid {entry.pid}"
    return "a process of another user"
