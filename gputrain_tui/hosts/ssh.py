"""Opens channels to hosts by the system's ``ssh``.

It never asks for a password: a host that needs one is a failure. ``GPUTRAIN_SSH`` is the command, by default ``ssh``,
and may have options such as ``ssh -F lab/ssh_config``, which override ``OPTIONS``.
"""

from __future__ import annotations

import atexit
import os
import shlex
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakSet

import msgspec

from gputrain_tui.hosts.host_channel import END_S, HostChannel
from gputrain_tui.hosts.host_pipes import HostPipes
from trainer.contract.errors import RequestError

T = TypeVar("T")
MAX_PARALLEL_HOSTS = 64
"""Hosts that answer a request at a time: each costs an ssh process and a thread here."""
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

_IDLE: defaultdict[tuple[str, ...], list[HostChannel]] = defaultdict(list)
"""Open channels that nobody uses, by ssh's command and host: the inventory's serves the checks and then the launch."""
_LOCK = threading.Lock()


class Ssh:
    """Opens channels to hosts, also from several threads."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        """Read ``GPUTRAIN_SSH``; raise RequestError if it is no command line."""
        try:
            self._command = shlex.split(environ.get("GPUTRAIN_SSH", "")) or ["ssh"]
        except ValueError as error:
            raise RequestError(
                f"GPUTRAIN_SSH is {environ['GPUTRAIN_SSH']!r}: {error}; write it as in a shell"
            ) from None
        self._channels: WeakSet[HostChannel] = WeakSet()
        self._closed = False

    def command_line(self, host: str, *command: str) -> list[str]:
        """Return the ssh command line that runs a command, words that no shell changes, on a host."""
        options = [word for setting in OPTIONS for word in ("-o", setting)]
        return [*self._command, *options, "-T", "-x", "--", ssh_destination(host), *command]

    def channel(self, host: str, *, here: bool = False) -> HostChannel:
        """Return a channel to a host, an idle one if there is one; the caller closes it.

        ``here``: the host is this machine, whose program is started without ssh.

        Raises:
            HostError: ``ssh`` cannot be started.
        """

        def command(argv: Sequence[str]) -> list[str]:
            return [sys.executable, *argv] if here else self.command_line(host, "python3", *argv)

        idle = None if here else self._pop_idle(host)
        channel = idle or HostChannel.started(host, command, quoted=not here)
        with _LOCK:
            self._channels.add(channel)
            closed = self._closed
        if closed:
            channel.pipes.kill()
        return channel

    @contextmanager
    def shared_channel(self, host: str) -> Iterator[HostChannel]:
        """Yield a channel that stays open for the next user in this process unless the body fails."""
        channel = self.channel(host)
        try:
            yield channel
        except BaseException:  # also Ctrl-C: the channel may be in the middle of a call
            channel.close(at_once=True)
            raise
        self.keep(channel)

    def keep(self, channel: HostChannel) -> None:
        """Keep a channel open for the next user in this process; it is in no call whose answer is awaited."""
        with _LOCK:
            _IDLE[(*self._command, channel.host)].append(channel)

    def take_idle(self, hosts: Iterable[str]) -> list[HostChannel]:
        """Return the idle channels to some hosts, which the caller uses and closes."""
        taken = []
        for host in dict.fromkeys(hosts):
            while (channel := self._pop_idle(host)) is not None:
                taken.append(channel)
        return taken

    def _pop_idle(self, host: str) -> HostChannel | None:
        while True:
            with _LOCK:
                idle = _IDLE[(*self._command, host)]
                channel = idle.pop() if idle else None
            if channel is None or channel.pipes.exit_code(0) is None:
                return channel
            channel.close(at_once=True)  # the connection has ended meanwhile

    def on_all(self, call: Callable[[Any], T], items: Collection[Any]) -> list[T]:
        """Return what a call returns for each item, such as a host, in parallel; an error closes all connections."""
        with ThreadPoolExecutor(min(MAX_PARALLEL_HOSTS, max(len(items), 1)), thread_name_prefix="hosts") as pool:
            try:
                return list(pool.map(call, items))
            except BaseException:  # also Ctrl-C
                self.close()  # leaving the pool waits for its threads
                raise

    def close(self) -> None:
        """Kill the connections of all channels, so that no caller waits for a host that does not answer."""
        with _LOCK:
            self._closed = True
            channels = list(self._channels)
            idle = [
                (same_host, channel) for same_host in _IDLE.values() for channel in same_host if channel in channels
            ]
            for same_host, channel in idle:
                same_host.remove(channel)
        for channel in channels:
            channel.pipes.kill()
        for _, channel in idle:
            channel.close(at_once=True)


def keep_inherited(encoded: str) -> None:
    """Keep the channels that the process which started this one has passed on: JSON of hosts, marks and descriptors."""
    for host, mark, descriptors in msgspec.json.decode(encoded, type=list[tuple[str, str, tuple[int, int, int, int]]]):
        Ssh().keep(HostChannel(host, HostPipes(*descriptors), mark))


@atexit.register
def _close_idle() -> None:
    """End the programs at the other end of the idle channels, all at once."""
    idle = [channel for same_host in _IDLE.values() for channel in same_host]
    deadline = time.monotonic() + END_S
    for channel in idle:
        channel.pipes.close_stdin()
    for channel in idle:
        channel.pipes.exit_code(max(deadline - time.monotonic(), 0.0))
        channel.pipes.close()


def ssh_destination(host: str) -> str:
    """Return a host in ssh's syntax: an IPv6 address has no brackets there."""
    user, at, name = host.rpartition("@")
    return f"{user}{at}{name.strip('[]')}" if not host.startswith("ssh://") else host
