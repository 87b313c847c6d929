"""Log file that survives a full disk: bytes that cannot be written are counted, and the program goes on."""

from __future__ import annotations

import io


class LogFile(io.FileIO):
    """File whose writes never fail: lost bytes are counted, and the count is written once the disk has space again."""

    def __init__(self, fd: int) -> None:
        """Write to an open descriptor, which ``close`` leaves open."""
        super().__init__(fd, "wb", closefd=False)
        self._lost_bytes = 0
        self._why = ""

    def write(self, data: object, /) -> int:
        """Write as many bytes as the disk takes and count the rest as lost; return the size of ``data``."""
        rest = view = memoryview(data).cast("B")  # type: ignore[arg-type]
        try:
            if self._lost_bytes:
                super().write(f"[{self._lost_bytes} bytes of output were lost: {self._why}]\n".encode())
                self._lost_bytes = 0
            while rest:
                rest = rest[super().write(rest) :]
        except OSError as error:
            self._lost_bytes += len(rest)
            self._why = error.strerror or str(error)
        return len(view)
