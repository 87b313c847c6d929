"""The state of a run whose supervisor is gone, from its whole record."""

from __future__ import annotations

from contextlib import closing

from gputrain_tui.history.run_reader import RunReader
from gputrain_tui.state import RunState
from trainer.contract.record import RunDir


def recorded_state(run_dir: RunDir) -> RunState | None:
    """Return a run's state after its whole record, for one that no longer grows; None if it cannot be read."""
    state = RunState()
    try:
        with closing(RunReader(run_dir)) as reader:
            state.apply_all(reader.poll())
            while reader.backlog_bytes:
                state.apply_all(reader.poll())
    except OSError:
        return None
    return state
