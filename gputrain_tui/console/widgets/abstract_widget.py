"""Metaclass for abstract methods in widgets: an incomplete subclass fails at construction, not when it is drawn."""

from __future__ import annotations

from abc import ABCMeta

from textual.message_pump import _MessagePumpMeta


class AbstractWidgetMeta(_MessagePumpMeta, ABCMeta):
    """Metaclass of widgets and screens with abstract methods."""
