"""Boot id and boot time of this machine, and what its clock was set by since a moment."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainer.host.proc_files import PROC, read_text


def boot_id(proc: Path = PROC) -> str:
    """Return the id that the kernel draws at each boot; empty if it is unknown."""
    return read_text(proc / "sys/kernel/random/boot_id").strip()


def boot_time_s(proc: Path = PROC) -> float:
    """Return the time of the boot, Unix seconds; 0 if it is unknown."""
    lines = read_text(proc / "stat").splitlines()
    return next((float(line.split()[1]) for line in lines if line.startswith("btime ")), 0.0)


@dataclass(frozen=True, kw_only=True)
class BootMoment:
    """A moment by the time since the boot, which nobody sets as they set the clock."""

    boot_id: str
    uptime_s: float

    @staticmethod
    def now() -> BootMoment | None:
        """Return this moment; None where boot id or uptime are unknown."""
        boot, uptime = boot_id(), uptime_s()
        return BootMoment(boot_id=boot, uptime_s=uptime) if boot and uptime is not None else None

    def since_s(self) -> float | None:
        """Return the seconds since then; None on another machine or after another boot."""
        uptime = uptime_s()
        return uptime - self.uptime_s if uptime is not None and boot_id() == self.boot_id else None


def uptime_s() -> float | None:
    """Return the seconds since the boot; None if they are unknown."""
    numbers = read_text(PROC / "uptime").split()
    return float(numbers[0]) if numbers else None


BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Clock that nobody sets; on Linux it runs on while the machine sleeps, as the clock does."""
MIN_CLOCK_SET_S = 1.0
"""Change of the clock that counts as set: slower corrections, as of a time service, change no duration noticeably."""


class ClockSet:
    """By how much the clock of this machine was set since this object was made."""

    def __init__(
        self,
        now: Callable[[], float] = time.time,
        since_boot: Callable[[], float] = lambda: time.clock_gettime(BOOT_CLOCK),
    ) -> None:
        self._now = now
        self._since_boot = since_boot
        self._offset_s = now() - since_boot()

    def ms(self) -> float | None:
        """Return by how much the clock was set, whole ms, forward if positive; None below a second."""
        set_s = self._now() - self._since_boot() - self._offset_s
        return float(round(set_s * 1e3)) if abs(set_s) >= MIN_CLOCK_SET_S else None
