"""Network interfaces of this machine and their addresses; loopback names and addresses.

Standard library only, since this file travels to remote hosts with ``inventory.py``.
"""

from __future__ import annotations

import array
import fcntl
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from trainer.host.proc_files import read_text

IF_INET6 = Path("/proc/net/if_inet6")
SYS_NET = Path("/sys/class/net")

SIOCGIFCONF, SIOCGIFFLAGS, SIOCGIFNETMASK = 0x8912, 0x8913, 0x891B
"""Ioctl numbers of interfaces, from ``linux/sockios.h``."""
IFREQ_BYTES = 40
"""Size of ``struct ifreq``: a name of 16 bytes, then the requested value, an IPv4 address at byte 20."""
MAX_ADDRESSES = 1024
"""IPv4 addresses for which the kernel's reply has space; container hosts have some hundred."""
LINK_SCOPE = "20"
"""Scope of a link-local address in ``/proc/net/if_inet6``."""
OUTSIDE = "192.0.2.1"
"""Unused address (RFC 5737) whose route is looked up; nothing is sent to it."""


@dataclass(frozen=True, kw_only=True)
class InterfaceAddress:
    """An address of an interface of this machine."""

    interface: str
    text: str
    """In plain notation, without a zone."""
    bits: int
    """Length of the network's prefix."""
    link_only: bool = False
    """Whether it is a link-local IPv6 address."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network interface that is not the loopback."""

    name: str
    addresses: tuple[str, ...] = ()
    """IPv4 and global IPv6."""
    up: bool = True
    speed_mbits: int | None = None


def is_loopback(host: str) -> bool:
    """Whether a host name or address is one of the loopback, or ``0.0.0.0``."""
    host = host.lower()
    return host in ("localhost", "::1", "0.0.0.0") or host.startswith(("127.", "localhost."))


def interface_addresses() -> list[InterfaceAddress]:
    """Return every address of every interface, including the loopback; IPv4 before IPv6."""
    return [*_ipv4_addresses(), *ipv6_addresses(read_text(IF_INET6))]


def own_addresses() -> tuple[str, ...]:
    """Return this machine's addresses: that of the default route first, then IPv4 before IPv6."""
    outward = source_towards(OUTSIDE)
    addresses = {each.text for each in interface_addresses()}
    return tuple(sorted(addresses, key=lambda address: (address != outward, ":" in address, address)))


def source_towards(address: str) -> str | None:
    """Return the source address that the routing table chooses towards another address; nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return plain(str(probe.getsockname()[0]))
    except OSError:
        return None


def plain(address: str) -> str:
    """Return an address without its zone; an IPv4-mapped IPv6 address as IPv4."""
    return address.partition("%")[0].removeprefix("::ffff:")


def is_interface_up(name: str) -> bool:
    """Whether an interface is up and has a carrier."""
    request = struct.pack(f"{IFREQ_BYTES}s", name.encode()[:15])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            (flags,) = struct.unpack_from("H", fcntl.ioctl(probe, SIOCGIFFLAGS, request), 16)
    except OSError:
        return False
    iff_running = 0x40  # flag of an interface that is up and has a carrier, from ``linux/if.h``
    return bool(flags & iff_running)


def networks() -> tuple[Network, ...]:
    """Return the interfaces that have an address or are up, without the loopback."""
    addresses = interface_addresses()
    interfaces = []
    for _, name in sorted(socket.if_nameindex(), key=lambda entry: entry[1]):
        own = tuple(each.text for each in addresses if each.interface == name and not each.link_only)
        up = is_interface_up(name)
        if name == "lo" or not (own or up):
            continue
        speed = read_text(SYS_NET / name / "speed").strip()  # -1, or unreadable, without a cable
        speed_mbits = int(speed) if speed.isdigit() else None
        interfaces.append(Network(name=name, addresses=own, up=up, speed_mbits=speed_mbits))
    return tuple(interfaces)


def _ipv4_addresses() -> list[InterfaceAddress]:
    buffer = array.array("B", bytes(IFREQ_BYTES * MAX_ADDRESSES))
    addresses = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # struct ifconf: size and address of the buffer; the kernel overwrites the size with that of its reply.
            request = struct.pack("iP", len(buffer), buffer.buffer_info()[0])
            filled = struct.unpack_from("i", fcntl.ioctl(probe, SIOCGIFCONF, request))[0]
        except OSError:
            return []
        for start in range(0, filled, IFREQ_BYTES):
            entry = buffer[start : start + IFREQ_BYTES].tobytes()
            try:
                mask = fcntl.ioctl(probe, SIOCGIFNETMASK, entry)[20:24]
            except OSError:
                continue  # the address was removed meanwhile
            label = entry[:16].partition(b"\0")[0].decode("utf-8", "replace")
            addresses.append(
                InterfaceAddress(
                    interface=label.partition(":")[0],  # a second address may be labelled eth0:1
                    text=socket.inet_ntoa(entry[20:24]),
                    bits=int.from_bytes(mask, "big").bit_count(),
                )
            )
    return addresses


def ipv6_addresses(if_inet6: str) -> list[InterfaceAddress]:
    """Parse ``/proc/net/if_inet6``: address, index, length of the prefix, scope, flags, interface; all hexadecimal."""
    entries = (line.split() for line in if_inet6.splitlines())
    return [
        InterfaceAddress(
            interface=fields[5],
            text=socket.inet_ntop(socket.AF_INET6, bytes.fromhex(fields[0])),
            bits=int(fields[2], 16),
            link_only=fields[3] == LINK_SCOPE,
        )
        for fields in entries
        if len(fields) == 6
    ]
