"""The state of a run, folded from its events; no I/O, no clock, bounded memory.

``run_state`` is the fold, ``rank_state`` the state of one rank, ``totals`` the running sums behind means,
``synchronisation`` the measures from the ranks' waits for each other, ``process_groups`` those of one group,
``elapsed`` the step rate for the time left, ``standstill`` the time without a step, ``step_losses`` the loss of one
step, ``checksums`` the comparison of the ranks' models, ``figures`` the numbers that views share, ``finding_text`` the
words of findings, ``rank_stacks`` the answers to a request for stacks.
"""

from __future__ import annotations

from gputrain_tui.state.rank_state import WINDOW, RankView
from gputrain_tui.state.run_state import RunState

__all__ = ["WINDOW", "RankView", "RunState"]
