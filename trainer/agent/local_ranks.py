"""Processes of this node's ranks under a launcher that starts each rank as a separate command.

Each rank records the state ``spawned`` with its pid; local rank 0, which samples the node, reads these events.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trainer.contract.record import RankState, RunDir, decode_events
from trainer.contract.record.regular_file import MAX_FILE_BYTES, read_part
from trainer.host.boot import boot_time_s
from trainer.host.proc_files import PROC
from trainer.host.processes import CLOCK_TICKS_HZ, read_stat


class LocalRanks:
    """Ranks of a node that have recorded their process; ``host`` tells nodes apart that were given the same index.

    Once all ``count`` ranks are known, nothing more is read.
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
        """Rank to the label of its device in the record."""

    @property
    def complete(self) -> bool:
        return len(self.pids) >= self._count

    def read(self) -> Mapping[int, int]:
        """Read the events since the last call; return rank to process id."""
        if self.complete:
            return self.pids
        try:
            lines = read_part(self._path, self._read, MAX_FILE_BYTES)
        except OSError:
            return self.pids
        lines = lines[: lines.rfind(b"\n") + 1]
        self._read += len(lines)
        for event in decode_events(lines):
            if not isinstance(event, RankState) or event.state != "spawned" or event.host != self._host:
                continue
            if event.pid is not None and self._started_before(event.pid, event.time):
                self.pids[event.rank] = event.pid
                self.devices[event.rank] = event.device or ""
        return self.pids

    def _started_before(self, pid: int, recorded_at: float) -> bool:
        """Whether a process lives and started before its event: the pid of an older event may have been reused."""
        stat = read_stat(pid, self._proc)
        # Tolerance between the start time of a process, in ticks since boot, and the time of its event.
        clock_slack_s = 1.0
        return stat is not None and self._boot_s + stat.start_ticks / CLOCK_TICKS_HZ <= recorded_at + clock_slack_s
