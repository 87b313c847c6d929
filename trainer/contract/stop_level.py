"""How urgently a run is to stop, in the same levels from the terminal to the training loop."""

from __future__ import annotations

from enum import IntEnum


class StopLevel(IntEnum):
    """Level of a stop request; a higher one replaces a lower one."""

    NONE = 0
    """Nobody has asked for a stop."""
    SAVE = 1
    """Save, then leave."""
    NOW = 2
    """Leave without saving."""
    KILL = 3
    """Kill what has not left yet."""
