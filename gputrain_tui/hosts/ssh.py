"""One connection per host over the system's ``ssh``, kept open for a minute and shared by all that is asked there.

It never asks for a password: what needs one fails with a line that says so. ``GPUTRAIN_SSH`` is the command, ``ssh``
where it is not set, with options of its own such as ``ssh -F lab/ssh_config``; these win over the options here.
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

CONNECT_S = 5
"""For the connection, the server's greeting and the exchange of keys."""
PERSIST_S = 60
"""How long a connection waits for the next question."""
LOOK_S = 0.2
"""Time between two looks at how much a host has said as errors."""
LONGEST_FOLDER = 40
"""Bytes of the folder of the sockets: ssh adds up to 66, and a socket's path ends at 108."""

OPTIONS = (
    "BatchMode=yes",
    f"ConnectTimeout={CONNECT_S}",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=3",
    "ControlMaster=auto",
    f"ControlPersist={PERSIST_S}",
    "ClearAllForwardings=yes",
    "RemoteCommand=none",
    "LogLevel=ERROR",
)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a command on a host said."""

    code: int
    """255 where ssh itself failed."""
    stdout: bytes = b""
    stderr: str = ""
    late: bool = False
    """Whether it was ended because its time was over."""
    flooded: bool = False
    """Whether it was ended because it said more than somebody listens to."""


class Ssh:
    """Runs commands on hosts."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        """Take the command of the environment.

        Raises:
            RequestError: ``GPUTRAIN_SSH`` is no command, or there is no safe place for the sockets.
        """
        try:
            self._command = shlex.split(environ.get("GPUTRAIN_SSH", "")) or ["ssh"]
        except ValueError as error:
            raise RequestError(
                f"GPUTRAIN_SSH is {environ['GPUTRAIN_SSH']!r}: {error}; write it as in a shell"
            ) from None
        self._folder = socket_folder(environ)
        self._going: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._closed = False

    def words(self, host: str, *command: str) -> list[str]:
        """Return the command line that runs a command on a host, for a process that its caller keeps.

        Args:
            host: a name, ``user@host`` or ``ssh://user@host:port``.
            command: words that mean the same in every shell.
        """
        options = [word for option in (*OPTIONS, f"ControlPath={self._socket(host)}") for word in ("-o", option)]
        return [*self._command, *options, "-T", "-x", "--", bare(host), *command]

    def _socket(self, host: str) -> str:
        # Another command, or another name of one machine, may mean another key: it gets a connection of its own.
        name = hashlib.sha256("\0".join((*self._command, host)).encode()).hexdigest()[:8]
        return f"{self._folder}/{name}-%C"

    def call(self, host: str, *command: str, stdin: bytes = b"", limit_s: float, most_bytes: int) -> Answer:
        """Run a command on a host to its end, or for so many seconds, or bytes of what it says.

        Raises:
            RequestError: there is no such program as ``ssh`` here.
        """
        # The connection that stays may hold standard error open, so it is a file and nobody waits for its end.
        with os.fdopen(os.memfd_create("question"), "wb") as asked, tempfile.TemporaryFile() as said:
            asked.write(stdin)
            asked.seek(0)
            try:
                process = subprocess.Popen(
                    self.words(host, *command),
                    stdin=asked,
                    stdout=subprocess.PIPE,
                    stderr=said,
                    start_new_session=True,  # no terminal to ask a password at, and no Ctrl-C either
                )
            except OSError as error:
                raise RequestError(f"{self._command[0]} cannot be run: {error.strerror}") from None
            with self._lock:
                self._going.add(process)
                closed = self._closed
            if closed:
                end(process)
            try:
                stdout, ended = listen(process, said, limit_s=limit_s, most_bytes=most_bytes)
                if process.returncode is None:
                    end(process)
                    process.wait()
            except BaseException:  # Ctrl-C, too: no ssh is left behind; it goes on
                end(process)
                process.wait()
                raise
            finally:
                with self._lock:
                    self._going.discard(process)
            said.seek(0)
            stderr = said.read(1 << 16).decode("utf-8", "replace")
        return Answer(
            code=process.returncode,
            stdout=stdout,
            stderr=stderr,
            late=ended == "late",
            flooded=ended == "flooded",
        )

    @property
    def going(self) -> int:
        """How many hosts are being asked."""
        return len(self._going)

    def close(self) -> None:
        """End what is being asked; nobody waits for a host that does not answer."""
        with self._lock:
            self._closed = True
            going = list(self._going)
        for process in going:
            end(process)

    def hang_up(self, host: str) -> None:
        """Close the connection to a host now, instead of after its minute."""
        subprocess.run(
            [*self._command, "-o", f"ControlPath={self._socket(host)}", "-O", "exit", "--", bare(host)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=CONNECT_S,
            check=False,  # there may be none
        )


def listen(
    process: subprocess.Popen[bytes], stderr: IO[bytes], *, limit_s: float, most_bytes: int
) -> tuple[bytes, Literal["over", "late", "flooded"]]:
    """Return what a process says, and why nobody listens any longer: it has ended, or said too much, or took too long.

    Args:
        process: its standard output is a pipe.
        stderr: the file that is its standard error.
        limit_s: how long to listen.
        most_bytes: how much it may say.
    """
    assert process.stdout is not None
    until = time.monotonic() + limit_s
    said = bytearray()
    with process.stdout as pipe:
        while True:
            left = until - time.monotonic()
            if left <= 0:
                return bytes(said), "late"
            ready, _, _ = select.select([pipe], [], [], min(left, LOOK_S))
            part = os.read(pipe.fileno(), 1 << 16) if ready else b""
            said += part
            if len(said) + os.fstat(stderr.fileno()).st_size > most_bytes:
                return bytes(said), "flooded"
            if ready and not part:
                break
    try:
        process.wait(max(until - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        return bytes(said), "late"
    return bytes(said), "over"


def bare(host: str) -> str:
    """Return a host as ssh takes it: an address of version 6 without the brackets that it has elsewhere."""
    user, at, name = host.rpartition("@")
    return f"{user}{at}{name.strip('[]')}" if not host.startswith("ssh://") else host


def end(process: subprocess.Popen[bytes]) -> None:
    """End ssh and what it started to connect, such as a proxy command."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def socket_folder(environ: Mapping[str, str]) -> Path:
    """Return a folder that only this person can enter, with a short name.

    Raises:
        RequestError: it cannot be made, or somebody else holds the place.
    """
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    folder = Path(runtime) / "gputrain-ssh"
    if not Path(runtime).is_dir() or not runtime or len(bytes(folder)) > LONGEST_FOLDER:
        folder = Path(f"/tmp/gputrain-ssh-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise RequestError(f"{folder} cannot be made for connections of ssh: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise RequestError(f"{folder} must be a folder that only you can enter (mode 0700); remove it")
    return folder
