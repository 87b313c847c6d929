"""A log file that outlives a full disk: what the disk refuses is counted, and the program goes on."""

from __future__ import annotations

import io


class LogFile(io.FileIO):
    """A file that takes everything: what the disk refuses is counted, and the count written once it takes more."""

    def __init__(self, fd: int) -> None:
        """Write to an open file, which stays open."""
        super().__init__(fd, "wb", closefd=False)
        self._lost_bytes = 0
        self._why = ""

    def write(self, data: object, /) -> int:
        """Write what the disk takes; return the size of all."""
        left = view = memoryview(data).cast("B")  # type: ignore[arg-type]
        try:
            if self._lost_bytes:
                super().write(f"[{self._lost_bytes} bytes of output were lost: {self._why}]\n".encode())
                self._lost_bytes = 0
            while left:
                left = left[super().write(left) :]
        except OSError as error:
            self._lost_bytes += len(left)
            self._why = error.strerror or str(error)
        return len(view)
