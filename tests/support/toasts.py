"""What a console tells in toasts."""

from __future__ import annotations

from typing import Any

from textual.app import App


def toasts_of(app: App[Any]) -> list[str]:
    """Return the list to which the text of each toast is added from now on."""
    told: list[str] = []
    shown = app.notify

    def notify(message: str, **named: Any) -> None:
        told.append(message)
        shown(message, **named)

    app.notify = notify  # type: ignore[method-assign]
    return told
