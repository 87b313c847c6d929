"""File descriptors in a process where somebody else's code runs, which may close any of them."""

from __future__ import annotations

import os


class OwnedDescriptor:
    """A descriptor with what it was opened for.

    A script may close all descriptors and open its own under the same numbers; what is written there afterwards would
    be in the script's files.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._opened_for = _identity(fd)

    @property
    def is_ours(self) -> bool:
        """Whether the number still stands for what it was opened for."""
        try:
            return _identity(self.fd) == self._opened_for
        except OSError:
            return False

    def close(self) -> None:
        """Close it, unless the number stands for something else by now."""
        if self.is_ours:
            os.close(self.fd)


def _identity(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino
