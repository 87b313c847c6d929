"""Queries the inventories of many hosts over ssh; for a host without answer there is one line with the reason."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from gputrain_tui.hosts.first_answers import FirstAnswers
from gputrain_tui.hosts.host_channel import ANSWER_S, HostError
from gputrain_tui.hosts.inventory import Inventory
from gputrain_tui.hosts.ssh import Ssh
from trainer.contract.errors import RequestError

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


def query_host(host: str, ssh: Ssh, *, timeout_s: float = ANSWER_S, first: FirstAnswers | None = None) -> HostReport:
    """Return the inventory of one host, or the reason why there is none; ``first`` is shared with other hosts."""
    try:
        with ssh.shared_channel(host) as channel:
            if first is not None:
                channel.first_answer(first, timeout_s)
            return HostReport(host=host, inventory=channel.call("inventory", INVENTORY, timeout_s))
    except HostError as error:
        return HostReport(host=host, problem=str(error))


class HostSurvey:
    """Queries hosts for the console, from several threads; ssh is set up at the first query."""

    def __init__(self) -> None:
        self._ssh: Ssh | None = None
        self._closed = False
        self._lock = threading.Lock()

    def __call__(self, host: str) -> HostReport:
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
        with self._lock:
            self._closed = True
            if self._ssh is not None:
                self._ssh.close()


def query_hosts(hosts: Sequence[str]) -> list[HostReport]:
    """Query hosts in parallel; return their reports in the same order."""
    ssh, first = Ssh(), FirstAnswers(len(hosts))
    return ssh.on_all(lambda host: query_host(host, ssh, first=first), hosts)
