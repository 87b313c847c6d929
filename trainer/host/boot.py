"""Boot id and boot time of this machine."""

from __future__ import annotations

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
    words = read_text(PROC / "uptime").split()
    return float(words[0]) if words else None
