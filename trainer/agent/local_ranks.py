"""Finds the processes of this node's ranks where a launcher started each of them by itself.

Each writes into the record that it exists; the one with local rank 0, which samples the node, reads that.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trainer.contract.record import RankState, RunDir, decode_events
from trainer.contract.record.regular_file import MAX_FILE_BYTES, read_part
from trainer.host.boot import boot_time_s
from trainer.host.proc_files import PROC
from trainer.host.processes import CLOCK_TICKS_HZ, read_stat

CLOCK_SLACK_S = 1.0
"""How much later than its word a process may seem to have started: the kernel counts in ticks since boot."""


class LocalRanks:
    """The ranks of a node, as far as they have recorded that they exist.

    Args:
        run_dir: the record.
        node: index of the node.
        host: name of this machine; nodes that were given one number are told apart by it.
        count: how many ranks the node has; when all are known, nothing more is read.
        proc: where the process file system is.
    """

    def __init__(self, run_dir: RunDir, node: int, host: str, count: int, *, proc: Path = PROC) -> None:
        self._path = run_dir.node_events(node)
        self._host = host
        self._count = count
        self._proc = proc
        self._read = 0
        self._boot_s = boot_time_s(proc)
        self.pids: dict[int, int] = {}
        """Rank to process id."""
        self.devices: dict[int, str] = {}
        """Rank to the name of its device in the record."""

    @property
    def complete(self) -> bool:
        """Whether all are known."""
        return len(self.pids) >= self._count

    def read(self) -> Mapping[int, int]:
        """Read the record since the last call; return rank to process id."""
        if self.complete:
            return self.pids
        try:
            lines = read_part(self._path, self._read, MAX_FILE_BYTES)
        except OSError:
            return self.pids
        lines = lines[: lines.rfind(b"\n") + 1]
        self._read += len(lines)
        for event in decode_events(lines):
            if (
                isinstance(event, RankState)
                and event.state == "spawned"
                and event.host == self._host
                and event.pid is not None
                and self._is(event.pid, event.time)
            ):
                self.pids[event.rank] = event.pid
                self.devices[event.rank] = event.device or ""
        return self.pids

    def _is(self, pid: int, said_at: float) -> bool:
        """Whether the process lives and is the one that said so: in an older record its number is another's by now."""
        stat = read_stat(pid, self._proc)
        return stat is not None and self._boot_s + stat.start_ticks / CLOCK_TICKS_HZ <= said_at + CLOCK_SLACK_S
