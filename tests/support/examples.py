"""How many examples a hypothesis test tries: some in the default run, many with ``-m slow``."""

from __future__ import annotations

import pytest
from hypothesis import is_hypothesis_test

_wanted = {"long": False}


def configure(config: pytest.Config) -> None:
    """Note before any test is read whether the slow variants are selected."""
    expression = config.option.markexpr
    _wanted["long"] = "slow" in expression.replace("not slow", "")


def examples(few: int, many: int) -> int:
    """Return how many to try now."""
    return many if _wanted["long"] else few


def mark_long(item: pytest.Item) -> None:
    """Make a hypothesis test one of the slow ones where these are selected."""
    if _wanted["long"] and is_hypothesis_test(getattr(item, "obj", None)):
        item.add_marker(pytest.mark.slow)
