"""Runs commands on hosts by the system's ``ssh``, over one shared connection per host.

It never asks for a password: a host that needs one is a failure. ``GPUTRAIN_SSH`` is the command, by default ``ssh``,
and may have options such as ``ssh -F lab/ssh_config``, which override ``OPTIONS``.
"""

from __future__ import annotations

import hashlib
import os
import select
import shlex
import signal
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from trainer.contract.errors import RequestError

CONNECT_TIMEOUT_S = 5
"""Time limit that includes the server's banner and the key exchange; a host that is up needs less than one second."""
PERSIST_S = 60
"""ControlPersist: the console queries its hosts more often, so one connection serves all queries."""
OUTPUT_CHECK_S = 0.2
"""Interval at which the size of standard error, a file, is checked."""
MAX_FOLDER_BYTES = 40
"""Limit of the path of the sockets' folder: ssh adds up to 66 bytes, and a socket's path has at most 108."""

OPTIONS = (
    "BatchMode=yes",
    f"ConnectTimeout={CONNECT_TIMEOUT_S}",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=3",
    "ControlMaster=auto",
    f"ControlPersist={PERSIST_S}",
    "ClearAllForwardings=yes",
    "RemoteCommand=none",
    "LogLevel=ERROR",
)


@dataclass(frozen=True, kw_only=True)
class CommandResult:
    """Exit code and output of a command on a host."""

    code: int
    """255 if ssh itself failed."""
    stdout: bytes = b""
    stderr: str = ""
    timed_out: bool = False
    """Whether it was killed at the time limit."""
    too_long: bool = False
    """Whether it was killed because its output exceeded the limit."""


class Ssh:
    """Runs commands on hosts, also from several threads."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        """Read ``GPUTRAIN_SSH``, and create the folder of the sockets.

        Raises:
            RequestError: ``GPUTRAIN_SSH`` is no command line, or there is no safe folder for the sockets.
        """
        try:
            self._command = shlex.split(environ.get("GPUTRAIN_SSH", "")) or ["ssh"]
        except ValueError as error:
            raise RequestError(
                f"GPUTRAIN_SSH is {environ['GPUTRAIN_SSH']!r}: {error}; write it as in a shell"
            ) from None
        self._folder = socket_folder(environ)
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._closed = False

    def command_line(self, host: str, *command: str, own: bool = False) -> list[str]:
        """Return the ssh command line that runs a command on a host; the caller starts it.

        Args:
            host: a name, ``user@host`` or ``ssh://user@host:port``.
            command: words that no shell changes.
            own: start no persistent connection, whose process would outlive the command; an open one is still used.
        """
        # ssh takes the first value of an option.
        settings = ["ControlMaster=no"] if own else []
        settings += [*OPTIONS, f"ControlPath={self._socket(host)}"]
        options = [word for setting in settings for word in ("-o", setting)]
        return [*self._command, *options, "-T", "-x", "--", ssh_destination(host), *command]

    def _socket(self, host: str) -> str:
        # The command and the host's name may select another key, so each pair has a connection of its own.
        name = hashlib.sha256("\0".join((*self._command, host)).encode()).hexdigest()[:8]
        return f"{self._folder}/{name}-%C"

    def run(self, host: str, *command: str, stdin: bytes = b"", timeout_s: float, max_bytes: int) -> CommandResult:
        """Run a command on a host; kill it at the time limit, or if it prints more than ``max_bytes``.

        Raises:
            RequestError: ``ssh`` cannot be started.
        """
        # The persistent connection inherits standard error: a pipe would stay open, a file needs no end.
        with os.fdopen(os.memfd_create("ssh-stdin"), "wb") as stdin_file, tempfile.TemporaryFile() as output:
            stdin_file.write(stdin)
            stdin_file.seek(0)
            try:
                process = subprocess.Popen(
                    self.command_line(host, *command),
                    stdin=stdin_file,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    start_new_session=True,  # no terminal to ask for a password, and no Ctrl-C
                )
            except OSError as error:
                raise RequestError(f"{self._command[0]} cannot be run: {error.strerror}") from None
            with self._lock:
                self._running.add(process)
                closed = self._closed
            if closed:
                kill_session(process)
            try:
                stdout, ended = read_output(process, output, timeout_s=timeout_s, max_bytes=max_bytes)
                if process.returncode is None:
                    kill_session(process)
                    process.wait()
            except BaseException:  # also Ctrl-C: no ssh is left behind
                kill_session(process)
                process.wait()
                raise
            finally:
                with self._lock:
                    self._running.discard(process)
            output.seek(0)
            stderr = output.read(1 << 16).decode("utf-8", "replace")
        return CommandResult(
            code=process.returncode,
            stdout=stdout,
            stderr=stderr,
            timed_out=ended == "timed_out",
            too_long=ended == "too_long",
        )

    def close(self) -> None:
        """Kill all running commands, so that no caller waits for a host that does not answer."""
        with self._lock:
            self._closed = True
            running = list(self._running)
        for process in running:
            kill_session(process)


def read_output(
    process: subprocess.Popen[bytes], stderr: IO[bytes], *, timeout_s: float, max_bytes: int
) -> tuple[bytes, Literal["ended", "timed_out", "too_long"]]:
    """Return the standard output of a process, and whether reading ended with the process or at one of the limits.

    Args:
        process: the process; its standard output is a pipe.
        stderr: the file of its standard error.
        timeout_s: time limit.
        max_bytes: limit of standard output and standard error together.
    """
    assert process.stdout is not None
    deadline = time.monotonic() + timeout_s
    output = bytearray()
    with process.stdout as pipe:
        while True:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return bytes(output), "timed_out"
            ready, _, _ = select.select([pipe], [], [], min(remaining_s, OUTPUT_CHECK_S))
            chunk = os.read(pipe.fileno(), 1 << 16) if ready else b""
            output += chunk
            if len(output) + os.fstat(stderr.fileno()).st_size > max_bytes:
                return bytes(output), "too_long"
            if ready and not chunk:
                break
    try:
        process.wait(max(deadline - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        return bytes(output), "timed_out"
    return bytes(output), "ended"


def ssh_destination(host: str) -> str:
    """Return a host in ssh's syntax: an IPv6 address has no brackets there."""
    user, at, name = host.rpartition("@")
    return f"{user}{at}{name.strip('[]')}" if not host.startswith("ssh://") else host


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill ssh and its children, such as a proxy command."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def socket_folder(environ: Mapping[str, str]) -> Path:
    """Return a folder with a short path that only this user can enter; create it if needed.

    Raises:
        RequestError: it cannot be made, belongs to another user, or others can enter it.
    """
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    folder = Path(runtime) / "gputrain-ssh"
    if not runtime or not Path(runtime).is_dir() or len(bytes(folder)) > MAX_FOLDER_BYTES:
        folder = Path(f"/tmp/gputrain-ssh-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise RequestError(f"{folder} cannot be created for ssh's control sockets: {error.strerror}") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise RequestError(f"{folder} must be a folder that only you can enter (mode 0700); remove it")
    return folder
