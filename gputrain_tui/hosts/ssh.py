"""Opens channels to hosts by the system's ``ssh``.

It never asks for a password: a host that needs one is a failure. ``GPUTRAIN_SSH`` is the command, by default ``ssh``,
and may have options such as ``ssh -F lab/ssh_config``, which override ``OPTIONS``.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import stat
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from weakref import WeakSet

from gputrain_tui.hosts.host_channel import HostChannel
from trainer.contract.errors import RequestError

CONNECT_TIMEOUT_S = 5
"""Time limit that includes the server's banner and the key exchange; a host that is up needs less than one second."""
PERSIST_S = 60
"""ControlPersist: the console queries its hosts more often, so one connection serves all queries."""
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


class Ssh:
    """Opens channels to hosts, also from several threads."""

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
        self._channels: WeakSet[HostChannel] = WeakSet()
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

    def channel(self, host: str, *, own: bool = False, here: bool = False) -> HostChannel:
        """Start the program of gputrain on a host.

        Args:
            host: a name, ``user@host`` or ``ssh://user@host:port``.
            own: as for ``command_line``.
            here: whether the host is this machine, so that the program is started without ssh.

        Raises:
            HostError: ``ssh`` cannot be started.
        """

        def command(words: Sequence[str]) -> list[str]:
            return [sys.executable, *words] if here else self.command_line(host, "python3", *words, own=own)

        channel = HostChannel.started(host, command, quoted=not here)
        with self._lock:
            self._channels.add(channel)
            closed = self._closed
        if closed:
            channel.pipes.kill()
        return channel

    def close(self) -> None:
        """Kill the connections of all channels, so that no caller waits for a host that does not answer."""
        with self._lock:
            self._closed = True
            channels = list(self._channels)
        for channel in channels:
            channel.pipes.kill()


def ssh_destination(host: str) -> str:
    """Return a host in ssh's syntax: an IPv6 address has no brackets there."""
    user, at, name = host.rpartition("@")
    return f"{user}{at}{name.strip('[]')}" if not host.startswith("ssh://") else host


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
