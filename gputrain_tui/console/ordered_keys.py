"""Handling of keys strictly one after the other.

Textual sends a key to the widget that is focused when the key arrives. The key before it may still be on its way
through the widgets, and open an input line: text typed ahead would then run commands.
"""

from __future__ import annotations

import math
from collections import deque
from functools import partial

from textual import events, on
from textual.app import App
from textual.message import Message
from textual.widget import Widget


class KeyPassed(Message):
    """Mark posted to the key's target behind each key; when it has been handled, so has the key."""

    def __init__(self, number: int, again_to: Widget | None = None) -> None:
        super().__init__()
        self.number = number
        self.again_to = again_to
        """Widget to post the mark to once more; None: it has been there twice."""


class OrderedKeys(App[int]):
    """App that handles a key only after the one before it."""

    def __init__(self, *, ansi_color: bool | None = None) -> None:
        super().__init__(ansi_color=ansi_color)
        self.quiet_s = math.inf
        """Seconds between the last two keys; infinite after a click."""
        self._key_time = -math.inf
        """Time of the last key, on the clock of events."""
        self._waiting: deque[events.Key] = deque()
        self._key_number = 0
        self._under_way = 0
        """Number of the key that is being handled; 0: none."""

    def before_key(self, event: events.Key) -> bool:
        """Return whether a key counts; called before each key is handled."""
        return True

    async def on_event(self, event: events.Event) -> None:
        """Hold a key back until the one before it has been handled."""
        # Most seconds for which a key waits for the one before it, whose mark is lost if its widget is removed.
        key_patience_s = 0.5
        if isinstance(event, events.Key) and not event.is_forwarded:
            self._waiting.append(event)
            if self._under_way and event.time - self._key_time < key_patience_s:
                self.set_timer(key_patience_s, partial(self._next_key, self._under_way))
            else:
                await self._next_key(self._under_way)
            return
        if isinstance(event, events.MouseDown) and not event.is_forwarded:
            self.quiet_s = math.inf
        await super().on_event(event)

    async def _next_key(self, passed: int) -> None:
        """Send the next key to the focused widget, if the key with number ``passed`` is the one being handled."""
        if passed != self._under_way:
            return
        self._under_way = 0
        while self._waiting and not self._under_way:
            event = self._waiting.popleft()
            self.quiet_s, self._key_time = event.time - self._key_time, event.time
            if not self.before_key(event):
                continue
            self._key_number += 1
            target = self.focused or self.screen
            await super().on_event(event)
            # The mark goes to the widget twice: the second time it is also behind messages that the key caused.
            if target.post_message(KeyPassed(self._key_number, target)):
                self._under_way = self._key_number

    @on(KeyPassed)
    def _passed(self, message: KeyPassed) -> None:
        widget = message.again_to
        there = widget is not None and widget.is_attached and widget.screen is self.screen
        if widget is None or not there or not widget.post_message(KeyPassed(message.number)):
            self.call_later(self._next_key, message.number)  # after a pending change of the focus
