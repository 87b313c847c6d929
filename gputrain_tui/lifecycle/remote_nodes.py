"""Run directories of nodes on hosts that do not share the file system of the launching machine."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec

from trainer.contract.errors import RecordError
from trainer.contract.record import RunDir, write_atomically
from trainer.contract.record.regular_file import read_json

FILE = "remote.json"
"""File in the folder of a node's attempt; absent if the host sees the run directory of the launching machine."""


class RemoteNode(msgspec.Struct, frozen=True, kw_only=True):
    """Node that writes into a run directory of its own host."""

    host: str
    run_dir: str


_decode = msgspec.json.Decoder(RemoteNode)


def attempt_folders(run_dir: RunDir, node: int) -> list[Path]:
    """Return the folders of a node's attempts, ``agents/<node>.<attempt>.<token>``, oldest first."""
    folders = [path for path in run_dir.agents.glob(f"{node}.*.*") if path.name.split(".")[1].isdecimal()]
    return sorted(folders, key=lambda path: int(path.name.split(".")[1]))


def write_remote_node(run_dir: RunDir, attempt: str, remote: RemoteNode) -> None:
    """Write ``remote.json`` of an attempt of a node."""
    write_atomically(run_dir.agents / attempt / FILE, msgspec.json.encode(remote))


def path_with_host(run_dir: RunDir, node: int, path: str) -> str:
    """Return a path of a node as ``HOST:PATH`` if its host has a run directory of its own, else unchanged."""
    remote = remote_node(run_dir, node)
    return path if remote is None else f"{remote.host}:{path}"


def remote_nodes(run_dir: RunDir) -> list[RemoteNode]:
    """Return the nodes with a run directory of their own host, for all attempts."""
    nodes = []
    for path in run_dir.agents.glob(f"*/{FILE}"):
        with suppress(RecordError):
            nodes.append(read_json(path, _decode))
    return nodes


def remote_node(run_dir: RunDir, node: int) -> RemoteNode | None:
    """Return the host and run directory of a node, of its newest attempt with ``remote.json``; None without one."""
    for folder in reversed(attempt_folders(run_dir, node)):
        try:
            return read_json(folder / FILE, _decode)
        except RecordError:
            continue
    return None
