"""Number of examples of a hypothesis test: few in the default run, many with ``-m slow``."""

from __future__ import annotations

import pytest
from hypothesis import is_hypothesis_test

_wanted = {"long": False}


def configure(config: pytest.Config) -> None:
    """Store whether slow tests are selected; called before test modules are imported."""
    expression = config.option.markexpr
    _wanted["long"] = "slow" in expression.replace("not slow", "")


def examples(few: int, many: int) -> int:
    """Return the number of examples for this run."""
    return many if _wanted["long"] else few


def mark_long(item: pytest.Item) -> None:
    """Mark a hypothesis test as slow if slow tests are selected."""
    if _wanted["long"] and is_hypothesis_test(getattr(item, "obj", None)):
        item.add_marker(pytest.mark.slow)
