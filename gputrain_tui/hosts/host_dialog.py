"""Connection to the program ``gputrain_tui.hosts.node_facts`` on a host: requests and answers, a line each."""

from __future__ import annotations

import json
import os
import secrets
import select
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from gputrain_tui.hosts.host_pipes import HostPipes
from gputrain_tui.hosts.inventory_program import MODULES as INVENTORY_MODULES, packed_program
from gputrain_tui.hosts.open_connections import OpenConnection
from gputrain_tui.hosts.ssh_failure import explain_failure
from gputrain_tui.hosts.survey import is_bounded

MODULES = (
    "trainer.contract.errors",
    "trainer.contract.home_folder",
    "trainer.contract.stop_level",
    *INVENTORY_MODULES[:-1],
    "trainer.host.proc_environ",
    "trainer.host.descendants",
    "trainer.host.import_path",
    "trainer.host.prctl",
    "trainer.host.stop_request",
    "trainer.host.temporary_folder",
    "trainer.host.ports",
    "trainer.host.reachability",
    "trainer.host.resource_limits",
    INVENTORY_MODULES[-1],
    "gputrain_tui.hosts.host_names",
    "gputrain_tui.hosts.machine_facts",
    "gputrain_tui.hosts.host_agent",
    "gputrain_tui.hosts.node_facts",
)
"""Modules of the program that runs on the hosts, in import order; they use the standard library only."""

MAX_ANSWER_BYTES = 1 << 22
"""Limit of a host's whole output; an answer has a few KiB."""

END_S = 1.0
"""Time that the program may take to end after its input has ended; then ssh is killed."""
EXIT_S = 10.0
"""Time that ssh may take to end after its output has ended."""

T = TypeVar("T")


class HostError(Exception):
    """A host gives no answer or an invalid one; the message is one line."""


class HostDialog:
    """One connection to a host: requests and answers, a line each."""

    def __init__(self, host: str, words: Callable[[Sequence[str]], list[str]]) -> None:
        """Start the program on the host.

        Args:
            host: its name in messages.
            words: turns arguments of the host's Python into the command line of a process on this machine.

        Raises:
            HostError: that process cannot be started.
        """
        self.host = host
        # Start-up files and login banners may print as well: an answer is a line that begins with this mark.
        self._mark = f"gputrain-{secrets.token_hex(8)}:".encode()
        self._output, self._output_bytes = bytearray(), 0
        program = packed_program(MODULES)
        reader = f"import sys;exec(sys.stdin.buffer.read({len(program)}))"
        try:
            self._pipes = HostPipes.started(words(["-I", "-c", reader, self._mark.decode()]))
        except OSError as error:
            raise HostError(f"{error.filename} cannot be run: {error.strerror}") from None
        self._unsent = program

    def ask(self, question: str, **fields: Any) -> None:
        """Send one request; ``answer`` returns its answers in order."""
        self._unsent += json.dumps({"ask": question, **fields}).encode() + b"\n"
        self._send()

    def answer(self, decoder: msgspec.json.Decoder[T], timeout_s: float) -> T:
        """Return the next answer.

        Make the decoder before any thread: msgspec crashes if several threads decode a type for the first time.

        Raises:
            HostError: none came in time, or the decoder refuses it.
        """
        line = self._line(time.monotonic() + timeout_s, timeout_s)
        try:
            value = decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise HostError("it sent no valid host facts") from None
        if not is_bounded(msgspec.to_builtins(value)):
            raise HostError("it sent no valid host facts")
        return value

    def close(self) -> None:
        """End the program on the host, and the process of this machine that carries the connection."""
        self._pipes.close_stdin()
        self._pipes.exit_code(END_S)
        self._pipes.close()

    def kill(self) -> None:
        """Kill the process of this machine that carries the connection."""
        self._pipes.kill()

    def detach(self) -> None:
        """Close the descriptors in this process only; another process that inherited them goes on."""
        self._pipes.detach()

    @property
    def open_connection(self) -> OpenConnection:
        """The connection for a process that inherits it; this process must send no further request."""
        return OpenConnection(mark=self._mark.decode(), descriptors=self._pipes.descriptors)

    def _send(self) -> None:
        try:
            self._unsent = self._unsent[os.write(self._pipes.stdin, self._unsent) :]
        except BlockingIOError:
            return
        except OSError:  # ssh has ended: ``answer`` raises with the reason
            self._unsent = b""

    def _line(self, deadline: float, timeout_s: float) -> bytes:
        stdin, stdout = self._pipes.stdin, self._pipes.stdout
        while True:
            begin = self._output.find(self._mark)
            end = self._output.find(b"\n", begin) if begin >= 0 else -1
            if end >= 0:
                line = bytes(self._output[begin + len(self._mark) : end])
                del self._output[: end + 1]
                return line
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise HostError(f"it did not answer within {timeout_s:g} s")
            ready, writable, _ = select.select([stdout], [stdin] if self._unsent else [], [], min(remaining_s, 0.2))
            if writable:
                self._send()
            chunk = os.read(stdout, 1 << 16) if ready else b""
            self._output += chunk
            self._output_bytes += len(chunk)
            if self._output_bytes + self._pipes.stderr_bytes() > MAX_ANSWER_BYTES:
                raise HostError(f"it printed more than {MAX_ANSWER_BYTES >> 20} MiB, but no host facts")
            if ready and not chunk:
                code = self._pipes.exit_code(EXIT_S)
                if not code:
                    raise HostError("it sent no valid host facts")
                raise HostError(explain_failure(self.host, code, self._pipes.stderr(), program="it"))
