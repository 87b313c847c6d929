"""Which ranks a reader of a record knows: those of the plan, and those of attempts with another world.

Events of other ranks are damage: one number could exhaust a reader's memory.
"""

from __future__ import annotations

from gputrain_tui.history.plan_file import read_plan
from gputrain_tui.history.status_file import read_status
from trainer.contract.errors import RecordError
from trainer.contract.record import MAX_RANKS, AnyEvent, RunDir, World, decode_events
from trainer.contract.record.json_lines import damaged_lines

WORLD = b'{"type":"world"'
"""Begin of the line of every ``world`` event."""


class KnownRanks:
    """The ranks of a run, of all attempts, as far as a reader has read; contains the names of their event files."""

    def __init__(self, run: RunDir) -> None:
        """Begin with the ranks of plan and status; with all if the plan cannot be read."""
        self.damaged_lines = 0
        """Lines decoded so far that are no JSON, and so no events."""
        try:
            self.count = read_plan(run).world_size
        except RecordError:
            self.count = MAX_RANKS
            return
        if (status := read_status(run)) is not None:
            self.count = max(self.count, status.recorded_ranks)

    def __contains__(self, name: object) -> bool:
        """Whether an event file, by its name without suffix, is one of a node, the run, or a known rank."""
        text = str(name)
        return not text.isdecimal() or (len(text) < 10 and int(text) < self.count)

    def decode(self, lines: bytes) -> list[AnyEvent]:
        """Return the events of complete lines, without those of unknown ranks; a ``world`` event makes ranks known."""
        if WORLD in lines:
            grown = [event.world_size for event in decode_events(lines) if isinstance(event, World)]
            self.count = max(self.count, *grown, 0)
        events = decode_events(lines, self.count)
        if len(events) < lines.count(b"\n"):
            self.damaged_lines += damaged_lines(lines)
        return events
