"""Where the nodes on other hosts keep their run directory, where that is not the one here."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec

from trainer.contract.errors import RecordError
from trainer.contract.record import RunDir, write_atomically
from trainer.contract.record.regular_file import read_json

FILE = "remote.json"
"""In the folder of an attempt of a node; missing where host and launching side see the same run directory."""


class RemoteNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node that writes into a run directory of its own host."""

    host: str
    """As the plan names it."""
    run_dir: str
    """On that host."""


_decode = msgspec.json.Decoder(RemoteNode)


def attempt_folders(run_dir: RunDir, node: int) -> list[Path]:
    """Return the folders of a node's attempts, ``agents/<node>.<attempt>.<token>``, oldest first."""
    found = [path for path in run_dir.agents.glob(f"{node}.*.*") if path.name.split(".")[1].isdecimal()]
    return sorted(found, key=lambda path: int(path.name.split(".")[1]))


def write_remote_node(run_dir: RunDir, attempt: str, remote: RemoteNode) -> None:
    """Write down where a node keeps its run directory."""
    write_atomically(run_dir.agents / attempt / FILE, msgspec.json.encode(remote))


def path_with_host(run_dir: RunDir, node: int, path: str) -> str:
    """Return a path of a node's as people read it: with its host where that has a run directory of its own."""
    remote = remote_node(run_dir, node)
    return path if remote is None else f"{remote.host}:{path}"


def remote_nodes(run_dir: RunDir) -> list[RemoteNode]:
    """Return where the nodes with a run directory of their own host keep it, all attempts of all nodes."""
    found = []
    for path in run_dir.agents.glob(f"*/{FILE}"):
        with suppress(RecordError):
            found.append(read_json(path, _decode))
    return found


def remote_node(run_dir: RunDir, node: int) -> RemoteNode | None:
    """Return where a node keeps its run directory; None where that is the one here."""
    for folder in reversed(attempt_folders(run_dir, node)):
        try:
            return read_json(folder / FILE, _decode)
        except RecordError:
            continue
    return None
