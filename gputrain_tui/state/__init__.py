"""Everything a view shows about a run, folded from its events; no I/O, no clock, bounded memory.

``run`` is the fold, ``rank`` what it keeps per rank, ``totals`` the running sums behind every mean, ``synchronisation``
what the ranks' waits for each other tell, ``pace`` what the time left is told from, ``replicas`` whether
the ranks hold the same model.
"""

from __future__ import annotations

from gputrain_tui.state.rank import WINDOW, RankView
from gputrain_tui.state.run import RunState
from gputrain_tui.state.synchronisation import OPEN_STEPS

__all__ = ["OPEN_STEPS", "WINDOW", "RankView", "RunState"]
