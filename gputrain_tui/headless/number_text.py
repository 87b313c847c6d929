"""Formats rates, losses and shares for the progress line, the closing report and the console."""

from __future__ import annotations

from gputrain_tui import tables
from gputrain_tui.state.figures import Throughput


def number(value: float | None, digits: int = 1) -> str:
    """Return a count or rate as in every table, but a dash for None."""
    return tables.number(value, digits) or "–"


def loss_text(value: float | None) -> str:
    """Return a loss in nats with four decimals; a dash for None."""
    return "–" if value is None else f"{value:.4f}"


def percent(share: float | None) -> str:
    """Return a share, 0 to 1, as a percentage; a dash for None."""
    return "–" if share is None else f"{100 * share:.1f}%"


def further_rates(rates: Throughput) -> str:
    """Return tokens per second and model FLOPs utilization, those that are known."""
    tokens = "" if rates.tokens_per_s is None else f"{number(rates.tokens_per_s)} tokens/s"
    return "  ".join(filter(None, [tokens, "" if rates.mfu is None else f"MFU {percent(rates.mfu)}"]))
