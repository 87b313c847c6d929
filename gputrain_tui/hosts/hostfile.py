"""Reads hostfiles in the formats of MPI, Horovod and DeepSpeed, one host per line, and lists of hosts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from gputrain_tui.recipe.model import Gpus, Node
from gputrain_tui.recipe.values import parse_gpus
from trainer.contract.errors import RequestError, nearest, quoted

KEYS = ("slots", "max_slots", "gpus", "port")
HOST = re.compile(r"(?P<host>(?:[\w.+-]+@)?(?:\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]|[\w][\w.-]*))(?::(?P<slots>.*))?")
IPV6_ADDRESS = re.compile(r"(?:[\w.+-]+@)?[0-9A-Fa-f]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f.]*(?:%[\w.-]+)?")


@dataclass(frozen=True, kw_only=True)
class HostEntry:
    """One host of a hostfile or a ``--hosts`` list."""

    host: str
    """As ssh and a recipe take it: ``gpu1``, ``ada@gpu1``, ``[fd00::1]``, ``ssh://gpu1:2222``."""
    slots: int | None = None
    gpus: Gpus | None = None
    """As the key ``gpus`` of a recipe's node."""

    @property
    def node(self) -> Node:
        return Node(host=self.host, gpus=self.gpus, ranks=self.slots)


def read_hostfile(path: Path) -> tuple[HostEntry, ...]:
    """Read a hostfile; raise RequestError if it cannot be read, names no host, or a line is wrong."""
    # Enough for forty thousand hosts; a larger file was named by mistake and is not read.
    max_hostfile_bytes = 1 << 20
    try:
        with path.open("rb") as file:
            content = file.read(max_hostfile_bytes + 1)
        text = content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise RequestError(f"{path} cannot be read: {reason}; name a file with one host per line") from None
    if len(content) > max_hostfile_bytes:
        raise RequestError(f"{path} is longer than {max_hostfile_bytes >> 20} MiB; name a file with one host per line")
    return parse_hosts(text, name=str(path))


def parse_hosts(text: str, *, name: str) -> tuple[HostEntry, ...]:
    """Parse lines such as ``gpu1``, ``ada@gpu1 slots=4``, ``gpu1:4``, ``[fd00::1] gpus=0,2 port=2222  # a comment``."""
    entries: dict[str, tuple[int, HostEntry]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        entry = _parse_entry(words, f"{name}:{number}")
        if entry.host in entries:
            raise RequestError(
                f"{name}:{number}: {entry.host} is already on line {entries[entry.host][0]}; keep one line per host"
            )
        entries[entry.host] = number, entry
    if not entries:
        raise RequestError(f"{name} names no host; write one per line, such as `gpu1` or `gpu1 gpus=0,2`")
    return tuple(entry for _, entry in entries.values())


def parse_host_list(text: str) -> tuple[HostEntry, ...]:
    """Parse the comma-separated list of hosts of ``--hosts``; raise RequestError for a word that is no host."""
    entries: dict[str, HostEntry] = {}
    for word in text.split(","):
        if word.strip():
            entry = _parse_entry([word.strip()], "--hosts")
            entries[entry.host] = entry
    if not entries:
        raise RequestError(f"--hosts is {quoted(text)}, but must name hosts, separated by commas, such as gpu1,gpu2")
    return tuple(entries.values())


def _parse_entry(words: list[str], where: str) -> HostEntry:
    word, *settings = words
    port: int | None = None
    slots: int | None = None
    gpus: Gpus | None = None
    match = None
    if word.startswith("ssh://"):
        host, colon, number = word.removeprefix("ssh://").rstrip("/").partition("]:")
        host, colon, number = (f"{host}]", colon, number) if colon else host.partition(":")
        port = _number(number, where, "port", 65535) if colon else None
        match = HOST.fullmatch(host)
    elif IPV6_ADDRESS.fullmatch(word):
        user, at, address = word.rpartition("@")
        match = HOST.fullmatch(f"{user}{at}[{address}]")
    else:
        match = HOST.fullmatch(word)
    if match is None:
        raise RequestError(f"{where}: {quoted(word)} is not a host; write a name, an address, user@host or [address]")
    max_slots = 4096  # beyond the cores of any machine, so that a larger number is a typing error
    if match["slots"] is not None:
        slots = _number(match["slots"], where, f"the number of slots after {match['host']}:", max_slots)
    for setting in settings:
        key, equals, value = setting.partition("=")
        key = key.lower().replace("-", "_")
        if not equals or key not in KEYS:
            known = f"; allowed are {', '.join(f'{name}=' for name in KEYS if name != 'max_slots')}"
            raise RequestError(f"{where}: {quoted(setting)} is not known{nearest(key, KEYS) or known}")
        if key == "port":
            port = _number(value, where, "port", 65535)
        elif key == "slots":
            slots = _number(value, where, "slots", max_slots)
        elif key == "gpus":
            gpus = parse_gpus(value, where=f"{where}: gpus")
    if slots is not None and gpus is not None:
        raise RequestError(f"{where}: {match['host']} has slots and gpus; keep one of them")
    host = match["host"] if port is None else f"ssh://{match['host']}:{port}"
    return HostEntry(host=host, slots=slots, gpus=gpus)


def _number(text: str, where: str, name: str, largest: int) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text) or not 1 <= int(text) <= largest:
        raise RequestError(f"{where}: {name} is {quoted(text)}, but must be a whole number from 1 to {largest}")
    return int(text)
