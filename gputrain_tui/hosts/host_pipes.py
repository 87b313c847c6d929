"""Pipes to a program on another host, and the ssh process that carries them.

A process that starts another may pass the descriptors on, and the new process continues the connection.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress

from gputrain_tui.hosts.ssh_failure import SSH_FAILED

STDERR_BYTES = 1 << 16
"""Part of standard error, from its beginning, that is read to explain a failure."""


class HostPipes:
    """The pipes of a program on another host, and the process of this machine that carries them."""

    def __init__(
        self, stdin: int, stdout: int, stderr: int, pidfd: int, *, process: subprocess.Popen[bytes] | None = None
    ) -> None:
        """Take over open descriptors.

        Args:
            stdin: non-blocking pipe to the program.
            stdout: pipe from it.
            stderr: file with its standard error and that of ssh.
            pidfd: of ssh.
            process: ssh, if it is a child of this process.
        """
        for descriptor in (stdin, stdout, stderr, pidfd):
            os.set_inheritable(descriptor, False)
        self.stdin, self.stdout = stdin, stdout
        self._stderr, self._pidfd = stderr, pidfd
        self._process = process

    @classmethod
    def started(cls, argv: Sequence[str]) -> HostPipes:
        """Start ssh, or another program, by its command line.

        Raises:
            OSError: the program cannot be started.
        """
        with tempfile.TemporaryFile() as stderr:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,  # no terminal to ask for a password, and no Ctrl-C
            )
            stderr_fd = os.dup(stderr.fileno())
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = os.dup(process.stdin.fileno()), os.dup(process.stdout.fileno())
        process.stdin.close()
        process.stdout.close()
        os.set_blocking(stdin, False)  # ssh reads nothing until it is connected
        return cls(stdin, stdout, stderr_fd, os.pidfd_open(process.pid), process=process)

    @property
    def descriptors(self) -> tuple[int, int, int, int]:
        return self.stdin, self.stdout, self._stderr, self._pidfd

    def stderr_bytes(self) -> int:
        return os.fstat(self._stderr).st_size

    def stderr(self) -> str:
        return os.pread(self._stderr, STDERR_BYTES, 0).decode("utf-8", "replace")

    def exit_code(self, timeout_s: float) -> int | None:
        """Wait for ssh to end; return its exit code, None after the time limit.

        If ssh is not a child of this process, its code is unknown, and that of a failed connection is returned.
        """
        if not select.select([self._pidfd], [], [], timeout_s)[0]:
            return None
        return SSH_FAILED if self._process is None else self._process.wait()

    def kill(self) -> None:
        """Kill ssh and, if it is a child of this process, its own children, such as a proxy command."""
        if self._process is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        elif self._process.returncode is None:  # after the wait its pid may be reused
            kill_session(self._process)

    def close_stdin(self) -> None:
        if self.stdin >= 0:
            os.close(self.stdin)
            self.stdin = -1

    def close(self) -> None:
        """Kill ssh if it runs, and close all descriptors."""
        self.kill()
        if self._process is not None:
            self._process.wait()
        self.detach()

    def detach(self) -> None:
        """Close the descriptors in this process only; another process that inherited them goes on."""
        self.close_stdin()
        for descriptor in (self.stdout, self._stderr, self._pidfd):
            os.close(descriptor)


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill ssh and its children, such as a proxy command."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
