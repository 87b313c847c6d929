"""Time up to which the record of each node is known to be whole: a full disk loses steps and machine samples alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gputrain_tui.state.run_state import RunState

MIN_RECORD_BYTES = 16 << 10
"""Space on the disk of a record below which events may be missing."""
RECORD_LAG_S = 5.0
"""Age of a node's newest sample, which it takes once a second, from which its record may have stopped."""


class RecordWatch:
    """Arrival of the nodes' machine samples that show space for their records, by the clock of the reader."""

    def __init__(self) -> None:
        self._recorded_at: dict[int, float] = {}
        """By node, the arrival of its newest such sample; 0 for none. Nodes whose samples lack the space are absent."""
        self._samples: dict[int, object] = {}

    def note(self, state: RunState, now: float) -> None:
        for node, sample in state.nodes.items():
            if sample is self._samples.get(node):
                continue
            self._samples[node] = sample
            if sample.record_free_bytes is not None:
                is_free = sample.record_free_bytes >= MIN_RECORD_BYTES
                self._recorded_at[node] = now if is_free else self._recorded_at.get(node, 0.0)

    def whole_until(self, node: int | None, now: float) -> float:
        """Return the time up to which the record of a node is known to be whole; now if nothing speaks against it."""
        recorded_at = now if node is None else self._recorded_at.get(node, now)
        return now if now - recorded_at < RECORD_LAG_S else recorded_at

    def is_whole(self, now: float) -> bool:
        return all(self.whole_until(node, now) == now for node in self._recorded_at)
