"""Abstract widgets: a subclass that forgets a method is refused when it is made, not when it is painted."""

from __future__ import annotations

from abc import ABCMeta

from textual.message_pump import _MessagePumpMeta


class Abstract(_MessagePumpMeta, ABCMeta):
    """The metaclass of widgets and screens with abstract methods."""
