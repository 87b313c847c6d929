"""Reachability between machines, checked before ranks wait for a connection that never comes.

Standard library only, since this file travels to remote hosts.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import ipaddress
import os
import selectors
import socket
import termios
import time
from collections.abc import Mapping, Sequence

from trainer.host.addresses import (
    OUTSIDE,
    InterfaceAddress,
    interface_addresses,
    is_interface_up,
    is_loopback,
    plain,
    source_towards,
)

CONNECT_TIMEOUT_S = 3.0
"""Time-out of a connection to one of several addresses; enough for one retransmission of TCP's first packet."""


def listen_on_all_addresses(port: int = 0) -> socket.socket:
    """Return a socket that listens on all addresses of this machine, on a port, or one that the kernel chooses."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=2048, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=2048)


def outward_addresses() -> list[InterfaceAddress]:
    """Return the addresses at which others may reach this machine: no loopback, no link-local, interface up.

    That of the default route comes first, then IPv4 before IPv6.
    """
    addresses = [
        each
        for each in interface_addresses()
        if is_interface_up(each.interface)
        and not is_loopback(each.text)
        and not ipaddress.ip_address(each.text).is_link_local
    ]
    outward = source_towards(OUTSIDE)
    return sorted(addresses, key=lambda each: (each.text != outward, ":" in each.text, each.interface))


def look_up(host: str) -> tuple[bool, str | None]:
    """Return whether a host name has an address here, and that address; None if it has none or one of the loopback."""
    try:
        address = plain(str(socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0][4][0]))
    except OSError:
        return False, None
    return True, None if is_loopback(address) else address


def resolve(host: str) -> str | None:
    """Return the address of a host name; None if it is a loopback address or the name cannot be resolved."""
    return look_up(host)[1]


def find_route(
    candidates: Sequence[str], port: int, own: Sequence[InterfaceAddress], timeout_s: float
) -> tuple[str, str] | None:
    """Connect to another machine at one of its addresses; return that address and the local one of the connection.

    Candidates that this machine has too, such as the address of Docker's bridge, lead back to it and are skipped. The
    time-out is for all addresses of this machine's networks, which are preferred, and again for all others.
    """
    local = {each.text for each in own}
    remote = [text for text in candidates if text not in local]
    same_network = [text for text in remote if any(_is_in_network(text, each) for each in own)]
    for texts in (same_network, [text for text in remote if text not in same_network]):
        failed = unreachable({index: (text, port) for index, text in enumerate(texts)}, timeout_s, any_suffices=True)
        for text in (text for index, text in enumerate(texts) if index not in failed):
            with contextlib.suppress(OSError), socket.create_connection((text, port), timeout=timeout_s) as connection:
                return text, plain(str(connection.getsockname()[0]))
    return None


def unreachable(
    endpoints: Mapping[int, tuple[str, int]], timeout_s: float, *, any_suffices: bool = False
) -> dict[int, str]:
    """Connect to all addresses and ports at once, and send what fills large packets, which an MTU on the way may stop.

    Return the error of each that failed, by its key. What is sent is acknowledged by the other machine's kernel, before
    anybody accepts the connection.

    ``any_suffices``: return as soon as one is connected, without sending; the others count as failed.
    """
    large = bytes(10_000)  # more than the largest packet of Ethernet
    failed: dict[int, str] = {}
    pending: dict[socket.socket, int] = {}
    sent: dict[socket.socket, int] = {}
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        for index, (address, port) in endpoints.items():
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            attempt = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            attempt.setblocking(False)
            error = attempt.connect_ex((address, port))
            if error == errno.EINPROGRESS:
                pending[attempt] = index
                selector.register(attempt, selectors.EVENT_WRITE)
            elif error:
                failed[index] = os.strerror(error)
        while (pending or sent) and time.monotonic() < deadline:
            if any_suffices and len(failed) + len(pending) < len(endpoints):
                break
            # No event tells that all is acknowledged.
            left_s = max(deadline - time.monotonic(), 0.0)
            for key, _ in selector.select(min(left_s, 0.005) if sent else left_s):
                attempt = key.fileobj  # type: ignore[assignment]
                selector.unregister(attempt)
                error = attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                index = pending.pop(attempt)
                if error:
                    failed[index] = os.strerror(error)
                elif not any_suffices:
                    with contextlib.suppress(OSError):
                        attempt.send(large)
                    sent[attempt] = index
            sent = {attempt: index for attempt, index in sent.items() if _unacknowledged(attempt)}
    late = f"within {timeout_s:g} s"
    lost = f"connected, but large packets did not arrive {late}: an MTU on the way is too small"
    failed |= dict.fromkeys(sent.values(), lost)
    return failed | dict.fromkeys(pending.values(), f"no answer {late}")


def _unacknowledged(connection: socket.socket) -> int:
    """Return how many sent bytes the other machine has not acknowledged."""
    count = array.array("i", [0])
    fcntl.ioctl(connection, termios.TIOCOUTQ, count)
    return count[0]


def _is_in_network(text: str, own: InterfaceAddress) -> bool:
    return ipaddress.ip_address(text) in ipaddress.ip_network(f"{own.text}/{own.bits}", strict=False)
