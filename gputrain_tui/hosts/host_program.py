"""Runs on another host, at the other end of ssh: answers calls until its input ends; see ``host_frames``.

It and all that it imports use Python 3.10 and the standard library only. A function's module is loaded at its first
call: compiling all of them takes some ten milliseconds.
"""

from __future__ import annotations

import json
import os
import select
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from importlib import import_module
from typing import Any

from gputrain_tui.hosts.host_frames import FrameBuffer, HostFrame, RefusedCallError, frame

MODULES = {
    "inventory": "inventory",
    "node_facts": "facts clock route token listen reach release exists",
    "host_session": "free_port node",
    "push_target": "probe prepare",
}
FUNCTIONS = {name: module for module, names in MODULES.items() for name in names.split()}
"""Module of each function, in this package. A function takes this connection and the call's arguments."""
LIFE_S = 120
"""Time without a frame after which this program ends: its connection is cut, and neither end was told. While a node
runs it stays, so that a run goes on while the machine that launched it sleeps."""


class CallServer:
    """The connection, as the functions see it."""

    def __init__(self, mark: bytes) -> None:
        self._mark = mark
        self._input = FrameBuffer()
        self.call = 0
        self.of_node: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {}
        """Further functions, of the node that this connection serves."""
        self.at_end: Callable[[], None] = lambda: None
        """Called at the end of the input or the output."""
        self.node_runs = False
        self.held = ExitStack()
        """What checks keep open for others: closed when a node is started, and at the end."""

    def send(self, *frames: HostFrame) -> None:
        """Send frames, in one write if the pipe takes them: the other end wakes up once."""
        data = b"".join(each.encoded(self._mark) for each in frames)
        while data:
            data = data[os.write(1, data) :]

    def serve(self, timeout_s: float | None = None) -> None:
        """Answer the calls that are there or arrive within a time limit; EOFError at the end of the input."""
        if self._answer_all() or not select.select([0], [], [], timeout_s)[0]:
            return
        part = os.read(0, 1 << 16)
        if not part:
            raise EOFError
        self._input.add(part)
        self._answer_all()

    def _answer_all(self) -> int:
        count = 0
        for call in self._input.frames():
            count += 1
            self.limit_life()
            self.call = call.call
            try:
                answer = self._answer(call.name, json.loads(call.data))
            except RefusedCallError as refused:
                self.send(frame(call.call, "error", str(refused)))
            except OSError as error:
                where = f"{error.filename}: " if error.filename else ""
                self.send(frame(call.call, "error", f"{where}{error.strerror or error}"))
            else:
                self.send(frame(call.call, "answer", answer))
            self.limit_life()
        return count

    def limit_life(self) -> None:
        """Let this process end ``LIFE_S`` after the last frame, unless a node runs."""
        signal.alarm(0 if self.node_runs else LIFE_S)

    def _answer(self, name: str, arguments: Mapping[str, Any]) -> Any:
        if name in self.of_node:
            return self.of_node[name](arguments)
        if name not in FUNCTIONS:
            raise RefusedCallError("there is no node of this run on this host")
        return getattr(import_module(f"gputrain_tui.hosts.{FUNCTIONS[name]}"), name)(self, arguments)


def main(argv: Sequence[str]) -> None:
    """Answer calls until the input ends; the only word is the mark of the frames."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LIFE_S)
    server = CallServer(argv[0].encode())
    with suppress(BrokenPipeError, EOFError), server.held:
        while True:
            server.serve()
    server.at_end()
