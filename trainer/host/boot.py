"""Says which start of this machine it is, and when that was."""

from __future__ import annotations

from pathlib import Path

PROC = Path("/proc")


def boot_id(proc: Path = PROC) -> str:
    """Return the kernel's name for this start of the machine; empty where it is not told."""
    return _read(proc / "sys/kernel/random/boot_id").strip()


def boot_time_s(proc: Path = PROC) -> float:
    """Return when the machine started, Unix seconds; 0 where it is not told."""
    lines = _read(proc / "stat").splitlines()
    return next((float(line.split()[1]) for line in lines if line.startswith("btime ")), 0.0)


def uptime_s(proc: Path = PROC) -> float | None:
    """Return for how long the machine has been running; None where it is not told."""
    words = _read(proc / "uptime").split()
    return float(words[0]) if words else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
