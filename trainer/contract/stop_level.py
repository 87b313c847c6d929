"""Levels of a stop request, the same from the terminal to the training loop."""

from __future__ import annotations

from enum import IntEnum


class StopLevel(IntEnum):
    """Level of a stop request; a higher one replaces a lower one."""

    NONE = 0
    """No stop request."""
    SAVE = 1
    """Save, then exit."""
    NOW = 2
    """Exit without saving."""
    KILL = 3
    """Kill the processes that have not exited yet."""
