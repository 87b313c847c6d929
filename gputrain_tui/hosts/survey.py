"""Queries the inventories of many hosts over ssh; for a host without answer there is one line with the reason."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from gputrain_tui.hosts.inventory import Inventory
from gputrain_tui.hosts.inventory_program import inventory_program
from gputrain_tui.hosts.ssh import Ssh
from gputrain_tui.hosts.ssh_failure import explain_failure
from trainer.contract.errors import RequestError

MAX_PARALLEL_HOSTS = 16
"""Hosts that are queried at a time: each costs an ssh process and a thread here."""
HOST_TIMEOUT_S = 12.0
"""Time limit of one host, from connecting to the end of its answer; most answer within a second."""
MAX_ANSWER_BYTES = 1 << 22
"""Limit of a host's output; an inventory has a few KiB."""
MAX_TEXT_CHARS = 1000
"""Limit of one text in an inventory: names are short, and tables must stay readable."""
MAX_INT_BITS = 63
"""Limit of one integer in an inventory: byte counts fit, and arithmetic stays fast."""

INVENTORY = msgspec.json.Decoder(Inventory)
"""Made before any thread: msgspec crashes if several threads decode a type for the first time."""


@dataclass(frozen=True, kw_only=True)
class HostReport:
    """The inventory of one host, or the reason why there is none."""

    host: str
    """As the user wrote it."""
    inventory: Inventory | None = None
    problem: str = ""
    """One line; empty with an inventory."""


def query_host(host: str, ssh: Ssh, *, timeout_s: float = HOST_TIMEOUT_S) -> HostReport:
    """Run the inventory program on one host; return its inventory, or the reason why there is none."""
    # Start-up files and login banners may print as well: the inventory is the line behind this mark.
    mark = f"gputrain-{secrets.token_hex(8)}:"
    try:
        result = ssh.run(
            host, "python3", "-I", "-", mark, stdin=inventory_program(), timeout_s=timeout_s, max_bytes=MAX_ANSWER_BYTES
        )
    except RequestError as error:
        return HostReport(host=host, problem=str(error))
    inventory, problem = None, ""
    if result.timed_out:
        problem = f"it did not answer within {timeout_s:g} s"
    elif result.too_long:
        problem = f"it printed more than {MAX_ANSWER_BYTES >> 20} MiB, but no inventory"
    elif result.code != 0:
        problem = explain_failure(host, result.code, result.stderr)
    else:
        inventory = extract_inventory(result.stdout, mark)
        problem = "" if inventory is not None else "it sent no valid inventory"
    return HostReport(host=host, inventory=inventory, problem=problem)


def extract_inventory(stdout: bytes, mark: str) -> Inventory | None:
    """Return the inventory behind the last mark; None if there is no valid one."""
    _, found, rest = stdout.rpartition(mark.encode())
    if not found:
        return None
    try:
        inventory = INVENTORY.decode(rest.partition(b"\n")[0])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return inventory if is_bounded(asdict(inventory)) else None


def is_bounded(value: Any) -> bool:
    """Whether all texts and integers of an untrusted answer are short enough for tables and arithmetic."""
    if isinstance(value, dict | list | tuple):
        return all(map(is_bounded, value.values() if isinstance(value, dict) else value))
    if isinstance(value, str):
        return len(value) <= MAX_TEXT_CHARS
    return not isinstance(value, int) or value.bit_length() <= MAX_INT_BITS


class HostSurvey:
    """Queries hosts for the console, from several threads; ssh is set up at the first query."""

    def __init__(self) -> None:
        self._ssh: Ssh | None = None
        self._closed = False
        self._lock = threading.Lock()

    def __call__(self, host: str) -> HostReport:
        """Query one host."""
        try:
            with self._lock:
                if self._ssh is None:
                    self._ssh = Ssh()
                ssh = self._ssh
                if self._closed:
                    ssh.close()
        except RequestError as error:
            return HostReport(host=host, problem=str(error))
        return query_host(host, ssh)

    def close(self) -> None:
        """Kill all running queries."""
        with self._lock:
            self._closed = True
            if self._ssh is not None:
                self._ssh.close()


def query_hosts(
    hosts: Iterable[str],
    *,
    timeout_s: float = HOST_TIMEOUT_S,
    query: Callable[..., HostReport] = query_host,
    ssh: Ssh | None = None,
) -> list[HostReport]:
    """Query hosts in parallel; return their reports in the same order.

    Raises:
        RequestError: ``GPUTRAIN_SSH`` or the folder of ssh's sockets is unusable.
    """
    names = list(hosts)
    if not names:
        return []
    connections = ssh or Ssh()
    with ThreadPoolExecutor(min(MAX_PARALLEL_HOSTS, len(names)), thread_name_prefix="ask") as pool:
        try:
            return list(pool.map(lambda host: query(host, connections, timeout_s=timeout_s), names))
        except BaseException:  # also Ctrl-C
            connections.close()  # leaving the pool waits for its threads
            raise
