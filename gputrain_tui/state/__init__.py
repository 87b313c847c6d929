"""The state of a run, folded from its events; no I/O, no clock, bounded memory.

``run`` is the fold, ``rank`` the state of one rank, ``totals`` the running sums behind means, ``synchronisation`` the
measures from the ranks' waits for each other, ``pace`` the step rate for the time left, ``standstill`` the time without
a step, ``step_losses`` the loss of one step, ``desync`` the comparison of the ranks' models.
"""

from __future__ import annotations

from gputrain_tui.state.rank_state import WINDOW, RankView
from gputrain_tui.state.run_state import RunState

__all__ = ["WINDOW", "RankView", "RunState"]
