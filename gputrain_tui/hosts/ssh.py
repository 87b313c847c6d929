"""Opens channels to hosts by the system's ``ssh``.

It never asks for a password: a host that needs one is a failure. ``GPUTRAIN_SSH`` is the command, by default ``ssh``,
and may have options such as ``ssh -F lab/ssh_config``, which override ``OPTIONS``.
"""

from __future__ import annotations

import os
import shlex
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from weakref import WeakSet

from gputrain_tui.hosts.host_channel import HostChannel
from trainer.contract.errors import RequestError

CONNECT_TIMEOUT_S = 5
"""Time limit that includes the server's banner and the key exchange; a host that is up needs less than one second."""

OPTIONS = (
    "BatchMode=yes",
    f"ConnectTimeout={CONNECT_TIMEOUT_S}",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=3",
    "ControlMaster=no",  # a shared connection of the user is used, but none outlives its command
    "ClearAllForwardings=yes",
    "RemoteCommand=none",
    "LogLevel=ERROR",
)

_IDLE: dict[tuple[str, ...], HostChannel] = {}
"""Open channels that nobody uses, by ssh's command and host: the inventory's serves the checks and then the launch."""
_LOCK = threading.Lock()


class Ssh:
    """Opens channels to hosts, also from several threads."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        """Read ``GPUTRAIN_SSH``.

        Raises:
            RequestError: it is no command line.
        """
        try:
            self._command = shlex.split(environ.get("GPUTRAIN_SSH", "")) or ["ssh"]
        except ValueError as error:
            raise RequestError(
                f"GPUTRAIN_SSH is {environ['GPUTRAIN_SSH']!r}: {error}; write it as in a shell"
            ) from None
        self._channels: WeakSet[HostChannel] = WeakSet()
        self._closed = False

    def command_line(self, host: str, *command: str) -> list[str]:
        """Return the ssh command line that runs a command on a host; the caller starts it.

        Args:
            host: a name, ``user@host`` or ``ssh://user@host:port``.
            command: words that no shell changes.
        """
        options = [word for setting in OPTIONS for word in ("-o", setting)]
        return [*self._command, *options, "-T", "-x", "--", ssh_destination(host), *command]

    def channel(self, host: str, *, here: bool = False) -> HostChannel:
        """Return a channel to a host, an idle one if there is one; the caller closes it.

        Args:
            host: a name, ``user@host`` or ``ssh://user@host:port``.
            here: whether the host is this machine, so that the program is started without ssh.

        Raises:
            HostError: ``ssh`` cannot be started.
        """

        def command(argv: Sequence[str]) -> list[str]:
            return [sys.executable, *argv] if here else self.command_line(host, "python3", *argv)

        with _LOCK:
            channel = None if here else _IDLE.pop((*self._command, host), None)
        if channel is not None and channel.pipes.exit_code(0) is not None:  # the connection has ended meanwhile
            channel.close(at_once=True)
            channel = None
        channel = channel or HostChannel.started(host, command, quoted=not here)
        with _LOCK:
            self._channels.add(channel)
            closed = self._closed
        if closed:
            channel.pipes.kill()
        return channel

    @contextmanager
    def shared_channel(self, host: str) -> Iterator[HostChannel]:
        """Yield a channel that stays open for the next user in this process unless the body fails.

        Raises:
            HostError: ``ssh`` cannot be started.
        """
        channel = self.channel(host)
        try:
            yield channel
        except BaseException:  # also Ctrl-C: the channel may be in the middle of a call
            channel.close(at_once=True)
            raise
        with _LOCK:
            second = _IDLE.pop((*self._command, host), None)
            _IDLE[(*self._command, host)] = channel
        if second is not None:
            second.close()

    def close(self) -> None:
        """Kill the connections of all channels, so that no caller waits for a host that does not answer."""
        with _LOCK:
            self._closed = True
            channels = list(self._channels)
            idle = [key for key, channel in _IDLE.items() if channel in channels]
            ended = [_IDLE.pop(key) for key in idle]
        for channel in channels:
            channel.pipes.kill()
        for channel in ended:
            channel.close(at_once=True)


def ssh_destination(host: str) -> str:
    """Return a host in ssh's syntax: an IPv6 address has no brackets there."""
    user, at, name = host.rpartition("@")
    return f"{user}{at}{name.strip('[]')}" if not host.startswith("ssh://") else host
