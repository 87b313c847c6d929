"""A user's own metrics: numbers by name that a script, or the client of an experiment tracker in it, gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class OwnMetrics:
    """Stub, which the one that records replaces."""

    def add(self, metrics: Mapping[Any, Any]) -> None:
        """Take numbers by name."""


OWN = OwnMetrics()
"""Those of this process."""
