"""Formats rates, losses, shares and ranks for the progress line, the closing report and the console."""

from __future__ import annotations

from collections.abc import Sequence

from gputrain_tui.state.figures import Throughput


def number(value: float | None, digits: int = 1) -> str:
    """Return a count or rate as ``1,234`` or ``12.3``; a dash for None."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}f}"


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


def ranks_text(ranks: Sequence[int], limit: int = 8) -> str:
    """Return ``rank 3`` or ``ranks 1, 2, … (12)``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    names = ", ".join(str(rank) for rank in ranks[:limit])
    return f"ranks {names}" + (f", … ({len(ranks)})" if len(ranks) > limit else "")
