"""Steps of a rank on another host that cannot be copied, as the disk of the run directory is full."""

from __future__ import annotations

from trainer.contract.record import RunDir
from trainer.contract.record.unrecorded import UnrecordedSteps

COPY_ENDED = "its copy here ended as the disk of the run directory is full"


class UncopiedSteps:
    """Counts the steps in the parts of a rank's event file that are not written here."""

    def __init__(self, run_dir: RunDir, rank: int) -> None:
        self._steps = UnrecordedSteps(run_dir.gaps / f"{rank}.json", rank)
        self._torn = b""
        """Begin of a line whose rest is in the next part."""
        self.stands = False
        """Whether a part was not written."""

    def begin(self, part: bytes, written: int) -> None:
        """Count a part of which only the first bytes were written, and those after it."""
        self.stands, self._torn = True, b""
        self.add(part[part.rfind(b"\n", 0, written) + 1 :])

    def add(self, part: bytes) -> None:
        """Count the next part."""
        *lines, self._torn = (self._torn + part).split(b"\n")
        self._steps.note_unwritten(lines, COPY_ENDED)

    def tell(self) -> None:
        """Tell what has been counted."""
        self._steps.tell(at_once=True)

    def clear(self) -> None:
        """Forget what was counted: all of it is about to be sent again."""
        if self.stands:
            self.stands = False
            self._steps.clear()
            self.tell()
