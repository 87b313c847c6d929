"""Pipes to a program on another host, and the ssh process that carries them.

A process that starts another may pass the descriptors on, and the new process continues the connection.
"""

from __future__ import annotations

import os
import re
import select
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress

from gputrain_tui.tables import cut, printable

MAX_LINE_CELLS = 160
"""Limit of a quoted line of ssh or the host: it shares a table's row with other columns."""

SSH_FAILED = 255
"""Exit code of ssh when the connection fails; any other is the remote command's."""

REASONS = (
    (r"could not resolve hostname (\S+):", "no such host: {0} is not in DNS or ~/.ssh/config"),
    (r"connection refused", "it refuses connections: is sshd running there, and on this port?"),
    (r"no route to host|network is unreachable", "there is no route to it from here"),
    (r"timed out during banner|timed out waiting", "something listens there, but no ssh server answers"),
    (r"timed out", "it does not answer"),
    (r"host key for (\S+) has changed", "its host key has changed: if expected, `ssh-keygen -R {0}`"),
    (r"host key verification failed|host key is known", "its host key is not known yet: run `ssh {host}` once"),
    (r"permission denied", "it refuses the key: `ssh {host} true` must work without a password or passphrase"),
    (r"too many authentication failures", "it refuses the keys: name one with IdentityFile in ~/.ssh/config"),
    (r"bad configuration option|can't open user config", "ssh rejects its configuration: {line}"),
    (r"no such file or directory|not found", "its ProxyCommand fails: {line}"),
    (r"connection (?:closed|reset)|kex_exchange_identification|broken pipe", "it closed the connection"),
)
"""Patterns of ssh's messages, in any case → explanation; the first match counts. A group is the name as ssh has it:
that of a jump host, or of a ``HostName``."""

SILENT = "ssh failed without a message, as where large packets are lost (an MTU on the way), or a link is very slow"
"""Reason where ssh has ended a connection on which no answer to its ``ServerAliveInterval`` came."""
OLD_PYTHON = "its python3 is {version}, but 3.10 or newer is needed"


def explain_failure(host: str, code: int, stderr: str) -> str:
    """Explain in one line why ssh, or the program on the host, has ended with this code and standard error."""
    lines = [" ".join(line.split()) for line in stderr.splitlines() if line.strip()]
    # ssh goes on without a shared connection whose process has ended.
    lines = [line for line in lines if not line.startswith("Control socket connect")]
    last = cut(printable(lines[-1]), MAX_LINE_CELLS) if lines else ""
    if code == SSH_FAILED:
        for pattern, reason in REASONS:
            if found := next(filter(None, (re.search(pattern, line, re.IGNORECASE) for line in lines)), None):
                names = (shlex.quote(printable(name)) for name in found.groups())
                line = cut(printable(found.string), MAX_LINE_CELLS)
                return reason.format(*names, host=printable(host), line=line)
        return last or SILENT
    if code == 127 or "python3: command not found" in stderr:
        return "there is no python3"
    if version := re.search(r"python3 is (3\.\d+|2\.\d+)", stderr):
        return OLD_PYTHON.format(version=version[1])
    return f"it failed: {last}" if last else f"it failed with exit code {code}"


STDERR_BYTES = 1 << 16
"""Part of standard error, from its beginning, that is read to explain a failure."""


class HostPipes:
    """The pipes of a program on another host, and the process of this machine that carries them."""

    def __init__(
        self, stdin: int, stdout: int, stderr: int, pidfd: int, *, process: subprocess.Popen[bytes] | None = None
    ) -> None:
        """Take over open descriptors.

        They are a non-blocking pipe to the program, a pipe from it, a file with its standard error and that of ssh, and
        the pidfd of ssh. ``process`` is ssh, if it is a child of this process.
        """
        for descriptor in (stdin, stdout, stderr, pidfd):
            os.set_inheritable(descriptor, False)
        self.stdin, self.stdout = stdin, stdout
        self._stderr, self._pidfd = stderr, pidfd
        self._process = process

    @classmethod
    def started(cls, argv: Sequence[str]) -> HostPipes:
        """Start ssh, or another program, by its command line; raise OSError if that fails."""
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
        with suppress(ProcessLookupError):
            if self._process is None:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            elif self._process.returncode is None:  # after the wait its pid may be reused
                os.killpg(self._process.pid, signal.SIGKILL)

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
