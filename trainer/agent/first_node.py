"""Node 0 of a run whose nodes are commands typed by hand: the others wait for it in vain once it has failed.

A run's supervisor ends all nodes when one fails. Without it, ranks that wait for rank 0 to listen do so until their
time-out, though the run directory that all nodes share says that it will not come.
"""

from __future__ import annotations

from trainer.contract.outcome import node_outcome
from trainer.contract.record import RunDir

CHECK_S = 1.0
GRACE_S = 10.0
"""Time for the ranks to find out by themselves that their peer is lost, and which one: a report of theirs says more."""


class FirstNode:
    """The failure of node 0, as the shared run directory tells it to ``node``."""

    def __init__(self, run_dir: RunDir, node: int) -> None:
        self.run_dir = run_dir
        self._since_ns = self._written_ns(node)
        """When this node began, by the clock of the file system; an older outcome is of an earlier run."""
        self._due = 0.0
        self._failed_at: float | None = None
        self._message = ""

    def failure(self, now: float) -> str:
        """Return why node 0 has failed, once that is known for ``GRACE_S``, else an empty text; ``now``: monotonic."""
        if self._failed_at is None and now >= self._due:
            self._due = now + CHECK_S
            self._read(now)
        return self._message if self._failed_at is not None and now >= self._failed_at + GRACE_S else ""

    def _read(self, now: float) -> None:
        outcome = node_outcome(self.run_dir, 0)
        if outcome is None or outcome.failure is None or not 0 < self._since_ns < self._written_ns(0):
            return
        self._failed_at = now
        self._message = f"node 0 on {outcome.host} has failed: {outcome.failure.message}"

    def _written_ns(self, node: int) -> int:
        try:
            return self.run_dir.node_result(node).stat().st_mtime_ns
        except OSError:
            return 0
