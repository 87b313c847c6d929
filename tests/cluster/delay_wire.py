"""Carries frames between two interfaces and holds each for a while, where the kernel has no netem.

``delay_wire.py --plain INTERFACE`` sets what an interface must have whose frames are carried: whole frames with their
checksums, as a raw socket sends them on as they are. ``delay_wire.py ONE OTHER SECONDS`` prints ``up`` and carries
them, each way with the delay, until it is ended.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import select
import socket
import struct
import sys
import time

SIOCETHTOOL = 0x8946
OFFLOADS = (0x17, 0x1F, 0x24, 0x2C)
"""ETHTOOL_STXCSUM, ETHTOOL_STSO, ETHTOOL_SGSO and ETHTOOL_SGRO: checksums, segmentation, and its generic forms."""
BUFFER_BYTES = 8 << 20


def set_plain(interface: str) -> None:
    """Have the kernel make checksums and frames of an interface itself."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for command in OFFLOADS:
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            request = struct.pack("16sP", interface.encode(), ctypes.addressof(value))
            fcntl.ioctl(any_socket, SIOCETHTOOL, request)


def opened(interface: str) -> socket.socket:
    """Return a socket that has all frames of an interface."""
    wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))  # ETH_P_ALL
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    wire.bind((interface, 0))
    wire.setblocking(False)
    return wire


def carry(wires: tuple[socket.socket, socket.socket], delay_s: float) -> None:
    """Carry frames from each end to the other, for ever."""
    held: list[tuple[float, int, int, bytes]] = []
    count = 0
    while True:
        wait_s = max(0.0, held[0][0] - time.monotonic()) if held else None
        for wire in select.select(wires, [], [], wait_s)[0]:
            try:
                frame, source = wire.recvfrom(1 << 16)
            except BlockingIOError:
                continue
            if source[2] != socket.PACKET_OUTGOING:  # those that are sent on here come by as well
                count += 1
                heapq.heappush(held, (time.monotonic() + delay_s, count, 1 - wires.index(wire), frame))
        while held and held[0][0] <= time.monotonic():
            _, _, end, frame = heapq.heappop(held)
            wires[end].send(frame)


if __name__ == "__main__":
    if sys.argv[1] == "--plain":
        set_plain(sys.argv[2])
    else:
        ends = (opened(sys.argv[1]), opened(sys.argv[2]))
        print("up", flush=True)
        carry(ends, float(sys.argv[3]))
