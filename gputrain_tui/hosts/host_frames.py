"""The frames between this machine and the program on another host; both ends use this file.

Each host has one connection: ssh, and at its other end ``host_program``, whose source is the first thing that ssh
sends. Afterwards both directions consist of frames::

    here -> host:          HEADER newline DATA
    host -> here:   MARK   HEADER newline DATA

    HEADER   {"call": 3, "kind": "call", "name": "facts", "offset": 0, "bytes": 512}
    DATA     as many bytes as the header says: JSON of a call or an answer, or a part of a file
    MARK     a random word that this machine chooses; what is printed between two frames, as by start-up files of a
             login, is skipped

A *call* names a function of the host and carries its arguments. Its number comes back with every frame that belongs to
it, and its last frame is its ``answer``, or its ``error``: one line for people. Calls are answered in order, so several
may be on their way. ``node`` is a *stream*: ``started``, then ``file`` (a part at an offset) and ``whole`` (a replaced
file) as the record grows, and the node's exit code as the answer; the other calls are answered meanwhile.

    inventory                        of the machine
    facts, clock, route, token       checks before a run
    listen, reach, release           connections between hosts, before a run and when its ranks lose each other
    exists                           of a file, for a spare host
    node; beat, stop, stacks         start or rejoin a node, and what concerns it
    probe, prepare                   for ``gputrain push``

*Heartbeat*: the launching side calls ``beat`` once a second. The answers prove that the host lives, and the calls that
the launching side does. The program ends with its standard input and, unless it serves a node, after ``LIFE_S`` without
a frame: a cut connection leaves nothing behind. A node outlives it: its agent is a process of its own.

*One connection*: an idle one serves the next user in its process (``Ssh``), and a process that starts a supervisor
passes on mark and descriptors. Thus the checks use the connections of the inventories, and the launch those of the
checks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

MAX_DATA_BYTES = 1 << 24
"""Limit of a frame's data. A larger replaced file, such as a collectives dump with a huge buffer, stays on the host."""
MAX_HEADER_BYTES = 1 << 16
"""Limit of a header, with its mark; it has some hundred bytes."""


class FrameError(Exception):
    """The other end has sent something that is no frame."""


class RefusedCallError(Exception):
    """A call cannot be answered; the message is one line."""


class HostFrame(NamedTuple):
    """One frame."""

    call: int
    kind: str
    """``call``, ``answer``, ``error``, ``started``, ``file`` or ``whole``."""
    name: str
    """Function of a call, or path of a file below the run directory."""
    offset: int
    """Of a part of a file, bytes."""
    data: bytes

    def encoded(self, mark: bytes = b"") -> bytes:
        header = {"call": self.call, "kind": self.kind, "name": self.name, "offset": self.offset}
        return mark + json.dumps({**header, "bytes": len(self.data)}).encode() + b"\n" + self.data


def frame(call: int, kind: str, data: bytes | Any = b"", *, name: str = "", offset: int = 0) -> HostFrame:
    """Return a frame; data other than bytes becomes JSON."""
    return HostFrame(call, kind, name, offset, data if isinstance(data, bytes) else json.dumps(data).encode())


class FrameBuffer:
    """What has arrived from the other end, and the frames in it."""

    def __init__(self, mark: bytes = b"") -> None:
        self._mark = mark
        self._bytes = bytearray()
        self.skipped_bytes = 0
        """What was printed between frames, or before the first one."""

    def add(self, part: bytes) -> None:
        self._bytes += part

    def frames(self) -> Iterator[HostFrame]:
        """Remove the complete frames, and yield them; FrameError for an invalid header."""
        while (found := self._next()) is not None:
            yield found

    def _next(self) -> HostFrame | None:
        begin = self._bytes.find(self._mark)
        skipped = begin if begin >= 0 else max(len(self._bytes) - len(self._mark), 0)  # the mark may be incomplete
        del self._bytes[:skipped]
        self.skipped_bytes += skipped
        end = self._bytes.find(b"\n", 0, MAX_HEADER_BYTES) if begin >= 0 else -1
        if end < 0:
            if len(self._bytes) >= MAX_HEADER_BYTES:
                raise FrameError
            return None
        try:
            header = json.loads(self._bytes[len(self._mark) : end])
            call, offset, size = (int(header[key]) for key in ("call", "offset", "bytes"))
            kind, name = (str(header[key]) for key in ("kind", "name"))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            raise FrameError from None
        if not 0 <= size <= MAX_DATA_BYTES:
            raise FrameError
        if len(self._bytes) < end + 1 + size:
            return None
        data = bytes(self._bytes[end + 1 : end + 1 + size])
        del self._bytes[: end + 1 + size]
        return HostFrame(call, kind, name, offset, data)
