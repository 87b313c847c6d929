"""One ssh connection to a session of the host agent; the agent's frames are picked out of the host's output."""

from __future__ import annotations

import json
import os
import secrets
import select
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from gputrain_tui.hosts.host_agent import MAX_DATA_BYTES
from gputrain_tui.hosts.host_pipes import HostPipes
from gputrain_tui.hosts.inventory_program import packed_program
from gputrain_tui.hosts.open_connections import OpenConnection
from gputrain_tui.hosts.ssh import Ssh
from gputrain_tui.hosts.ssh_failure import SSH_FAILED, explain_failure

MODULES = (
    "trainer.contract.home_folder",
    "trainer.contract.stop_level",
    "trainer.host.proc_files",
    "trainer.host.boot",
    "trainer.host.processes",
    "trainer.host.proc_environ",
    "trainer.host.descendants",
    "trainer.host.import_path",
    "trainer.host.prctl",
    "trainer.host.stop_request",
    "trainer.host.temporary_folder",
    "gputrain_tui.hosts.host_agent",
)
"""Modules of the program that runs on the host, in import order; they use the standard library only."""
READER = "'import os;exec(b\"\".join(iter(lambda:os.read(0,1)or bytes(1),bytes(1))))'"
"""Python program that executes the source on its standard input up to a zero byte and leaves the rest of the input to
that source. Every shell takes it as one word: it is quoted, and no shell changes a character of it."""
HELLO_S = 30.0
"""Time limit from the start of ssh to the session's first frame, start-up files of the host included."""
EXIT_S = 2.0
"""Time that ssh may take to end after its output has ended."""
MAX_NOISE_BYTES = 1 << 20
"""Limit of the output of a host's start-up files, on each of both streams."""
MAX_LINE_BYTES = 1 << 16
"""Limit of the line of JSON before a frame's data; the agent writes some hundred bytes."""


class RefusedError(Exception):
    """The node cannot be started on its host, and another connection would not change that."""


class Connection:
    """One ssh process with a session of the host agent at its other end."""

    def __init__(self, host: str, ssh: Ssh, request: Mapping[str, Any], opened: OpenConnection | None = None) -> None:
        """Start ssh, or take over a connection that the preflight has opened.

        Raises:
            ConnectionError: there is no program ``ssh``.
        """
        self.answered = False
        """Whether the session has sent its first frame."""
        self.ended = False
        self._host = host
        self._hello_deadline = time.monotonic() + HELLO_S
        self._buffer = bytearray()
        if opened is not None:
            self._mark = opened.mark.encode()
            self._pipes = HostPipes(*opened.descriptors)
            self._unsent = json.dumps({"ask": "serve", "request": request}).encode() + b"\n"
            return
        self._mark = f"gputrain-{secrets.token_hex(8)}:".encode()
        words = ssh.command_line(host, "python3", "-I", "-c", READER, self._mark.decode(), own=True)
        try:
            self._pipes = HostPipes.started(words)
        except OSError as error:
            raise ConnectionError(f"ssh cannot be run: {error.strerror}") from None
        self._unsent = packed_program(MODULES) + b"\0" + json.dumps(request).encode() + b"\n"

    def send(self, **fields: Any) -> None:
        """Send one message without waiting: ``frames`` sends the part that the pipe does not take at once."""
        self._unsent += json.dumps(fields).encode() + b"\n"
        self._write()

    def _write(self) -> None:
        with suppress(BlockingIOError, BrokenPipeError):
            written = os.write(self._pipes.stdin, self._unsent)
            self._unsent = self._unsent[written:]

    def frames(self, wake_fd: int | None, timeout_s: float) -> list[tuple[dict[str, Any], bytes]]:
        """Return the frames that have arrived, after waiting for output of the host or for ``wake_fd`` to be readable.

        Raises:
            ConnectionError: the connection failed, or its output is no frame; a new connection may work.
            RefusedError: there is no session, for a reason that stays.
        """
        stdin, stdout = self._pipes.stdin, self._pipes.stdout
        watched = [stdout] if wake_fd is None else [stdout, wake_fd]
        readable, writable, _ = select.select(watched, [stdin] if self._unsent else [], [], timeout_s)
        if writable:
            self._write()
        if self._pipes.stderr_bytes() > MAX_NOISE_BYTES:
            raise RefusedError(f"it printed more than {MAX_NOISE_BYTES >> 20} MiB on its standard error")
        if stdout in readable:
            part = os.read(stdout, 1 << 18)
            self._buffer += part
            self.ended = not part
        found = list(self._parsed_frames())
        if not self.answered and (self.ended or time.monotonic() > self._hello_deadline):
            raise self._failure()
        return found

    def _parsed_frames(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Remove the complete frames from the buffer, and yield them."""
        while True:
            begin = self._buffer.find(self._mark)
            if begin < 0:
                if len(self._buffer) > MAX_NOISE_BYTES:
                    raise RefusedError(f"it printed more than {MAX_NOISE_BYTES >> 20} MiB, but nothing from the agent")
                return
            del self._buffer[:begin]
            end = self._buffer.find(b"\n", 0, MAX_LINE_BYTES)
            if end < 0:
                if len(self._buffer) >= MAX_LINE_BYTES:
                    raise ConnectionError("it sent an invalid frame")
                return
            try:
                frame = json.loads(self._buffer[len(self._mark) : end])
                size = int(frame["bytes"])
                frame["word"]
            except (ValueError, TypeError, KeyError):
                raise ConnectionError("it sent an invalid frame") from None
            if not 0 <= size <= MAX_DATA_BYTES:
                raise ConnectionError("it sent an invalid frame")
            if len(self._buffer) < end + 1 + size:
                return
            data = bytes(self._buffer[end + 1 : end + 1 + size])
            del self._buffer[: end + 1 + size]
            self.answered = True
            yield frame, data

    def _failure(self) -> Exception:
        """Return the reason why there is no session: ``RefusedError`` for one that stays, else ``ConnectionError``."""
        if not self.ended:
            return ConnectionError(f"it did not answer within {HELLO_S:g} s")
        code = self._pipes.exit_code(EXIT_S)
        if code is None:
            return RefusedError("it closed its standard output before the agent answered")
        why = explain_failure(self._host, code, self._pipes.stderr(), program="it")
        return ConnectionError(why) if code == SSH_FAILED else RefusedError(why)

    def close(self) -> None:
        """End ssh; the session on the host ends with it."""
        self._pipes.close()
