"""Holds a program that runs on another host over ssh: its pipes, and the ssh that carries them.

A process may hand it to one that it starts, which goes on with the connection where this one left off.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress

from gputrain_tui.hosts.ssh import kill_session
from gputrain_tui.hosts.ssh_failure import SSH_FAILED

STDERR_BYTES = 1 << 16
"""Read of standard error to explain a failure."""


class HostPipes:
    """The pipes of a program on another host, and the process here that carries them."""

    def __init__(
        self, stdin: int, stdout: int, stderr: int, ended: int, *, process: subprocess.Popen[bytes] | None = None
    ) -> None:
        """Take over open descriptors.

        Args:
            stdin: pipe to the program, does not block.
            stdout: pipe from it.
            stderr: file with its standard error and that of ssh.
            ended: pidfd of ssh.
            process: ssh, where it is a child of this process.
        """
        for descriptor in (stdin, stdout, stderr, ended):
            os.set_inheritable(descriptor, False)
        self.stdin, self.stdout = stdin, stdout
        self._stderr, self._ended = stderr, ended
        self._process = process

    @classmethod
    def started(cls, words: Sequence[str]) -> HostPipes:
        """Start ssh, or another program, by its command line.

        Raises:
            OSError: there is no such program.
        """
        with tempfile.TemporaryFile() as stderr:
            process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,  # no terminal to ask for a password, and no Ctrl-C
            )
            kept = os.dup(stderr.fileno())
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = os.dup(process.stdin.fileno()), os.dup(process.stdout.fileno())
        process.stdin.close()
        process.stdout.close()
        os.set_blocking(stdin, False)  # ssh reads nothing before it is connected
        return cls(stdin, stdout, kept, os.pidfd_open(process.pid), process=process)

    @property
    def descriptors(self) -> tuple[int, int, int, int]:
        """What a process needs to hold the program: the arguments of this class, in order."""
        return self.stdin, self.stdout, self._stderr, self._ended

    def stderr_bytes(self) -> int:
        """Return how much was printed on standard error."""
        return os.fstat(self._stderr).st_size

    def stderr(self) -> str:
        """Return the begin of what was printed on standard error."""
        return os.pread(self._stderr, STDERR_BYTES, 0).decode("utf-8", "replace")

    def exit_code(self, timeout_s: float) -> int | None:
        """Wait for ssh to end; return its exit code, that of a failed connection where only its parent knows it."""
        if not select.select([self._ended], [], [], timeout_s)[0]:
            return None
        return SSH_FAILED if self._process is None else self._process.wait()

    def kill(self) -> None:
        """Kill ssh and, where it is a child of this process, what it has started, such as a proxy command."""
        if self._process is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._ended, signal.SIGKILL)
        elif self._process.returncode is None:  # once it was waited for, its number may be another's
            kill_session(self._process)

    def close_stdin(self) -> None:
        """Let the program read the end of its input."""
        if self.stdin >= 0:
            os.close(self.stdin)
            self.stdin = -1

    def close(self) -> None:
        """Kill ssh, if it runs, and close everything."""
        self.kill()
        if self._process is not None:
            self._process.wait()
        self.leave()

    def leave(self) -> None:
        """Close this process's descriptors; another one that has them goes on."""
        self.close_stdin()
        for descriptor in (self.stdout, self._stderr, self._ended):
            os.close(descriptor)
