"""File descriptors in a process that also runs a user's script, which may close any of them."""

from __future__ import annotations

import os


class OwnedDescriptor:
    """File descriptor that detects whether a script has closed it and reused its number.

    Writing to a reused number would write into one of the script's files.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._file = _identity(fd)

    @property
    def is_unchanged(self) -> bool:
        """Whether the descriptor still refers to the file that it was opened for."""
        try:
            return _identity(self.fd) == self._file
        except OSError:
            return False

    def close(self) -> None:
        """Close the descriptor, unless its number was closed or reused."""
        if self.is_unchanged:
            os.close(self.fd)


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
