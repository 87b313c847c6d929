"""Asks many hosts for their inventories; one that does not answer becomes a line beside its name."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from gputrain_tui.hosts.inventory import Inventory
from gputrain_tui.hosts.inventory_program import inventory_program
from gputrain_tui.hosts.ssh import Ssh
from gputrain_tui.hosts.ssh_failure import why_not
from trainer.contract.errors import RequestError

AT_ONCE = 16
"""Hosts that are asked at the same time."""
LIMIT_S = 12.0
"""For one host, from the connection to its last word."""
LONGEST_ANSWER = 1 << 22
"""Bytes."""
LONGEST_TEXT = 1000
"""Characters of one text in it."""
MOST_BITS = 63
"""Of one integer in it."""


@dataclass(frozen=True, kw_only=True)
class HostReport:
    """What one host said, or why it said nothing."""

    host: str
    """As the person names it."""
    inventory: Inventory | None = None
    problem: str = ""
    """One line; empty with an inventory."""
    took_s: float = 0.0


def ask_host(host: str, ssh: Ssh, *, limit_s: float = LIMIT_S) -> HostReport:
    """Ask one host for its inventory."""
    begin = time.monotonic()
    # Start-up files may print, and so may what greets a login: only what follows this word counts.
    frame = f"gputrain-{secrets.token_hex(8)}:"
    try:
        answer = ssh.call(
            host, "python3", "-", frame, stdin=inventory_program(), limit_s=limit_s, most_bytes=LONGEST_ANSWER
        )
    except RequestError as error:
        return HostReport(host=host, problem=str(error))
    took = time.monotonic() - begin
    found, problem = None, ""
    if answer.late:
        problem = f"it did not answer within {limit_s:g} s"
    elif answer.flooded:
        problem = f"it says more than {LONGEST_ANSWER >> 20} MiB, and no inventory"
    elif answer.code != 0:
        problem = why_not(host, answer.code, answer.stderr)
    else:
        found = framed(answer.stdout, frame)
        problem = "" if found is not None else "what it answered is no inventory"
    return HostReport(host=host, inventory=found, problem=problem, took_s=took)


def framed(stdout: bytes, frame: str) -> Inventory | None:
    """Find the inventory between whatever else was printed."""
    _, found, rest = stdout.rpartition(frame.encode())
    if not found:
        return None
    try:
        inventory = msgspec.json.decode(rest.partition(b"\n")[0], type=Inventory)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return inventory if _is_bounded(asdict(inventory)) else None


def _is_bounded(value: Any) -> bool:
    """Whether numbers can be computed with and texts be put into a table, whatever a host may answer."""
    if isinstance(value, dict | list | tuple):
        return all(map(_is_bounded, value.values() if isinstance(value, dict) else value))
    if isinstance(value, str):
        return len(value) <= LONGEST_TEXT
    return not isinstance(value, int) or value.bit_length() <= MOST_BITS


class HostSurvey:
    """Asks one host after the other, or several at once from threads, over connections that are opened when needed."""

    def __init__(self) -> None:
        self._ssh: Ssh | None = None
        self._closed = False
        self._lock = threading.Lock()

    def __call__(self, host: str) -> HostReport:
        """Ask one host."""
        try:
            with self._lock:
                if self._ssh is None:
                    self._ssh = Ssh()
                ssh = self._ssh
                if self._closed:
                    ssh.close()
        except RequestError as error:
            return HostReport(host=host, problem=str(error))
        return ask_host(host, ssh)

    def close(self) -> None:
        """End what is being asked."""
        with self._lock:
            self._closed = True
            if self._ssh is not None:
                self._ssh.close()


def ask_hosts(
    hosts: Iterable[str], *, limit_s: float = LIMIT_S, one: Callable[..., HostReport] = ask_host, ssh: Ssh | None = None
) -> list[HostReport]:
    """Ask hosts side by side; return their sightings in the same order.

    Raises:
        RequestError: ssh cannot be used here at all.
    """
    names = list(hosts)
    if not names:
        return []
    connections = ssh or Ssh()
    with ThreadPoolExecutor(min(AT_ONCE, len(names)), thread_name_prefix="ask") as pool:
        try:
            return list(pool.map(lambda host: one(host, connections, limit_s=limit_s), names))
        except BaseException:  # Ctrl-C, too; it goes on
            connections.close()  # or the threads would be waited for
            raise
