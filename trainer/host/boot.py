"""Reads the boot id and the boot time of this machine."""

from __future__ import annotations

from pathlib import Path

from trainer.host.proc_files import PROC, read_text


def boot_id(proc: Path = PROC) -> str:
    """Return the kernel's name for this start of the machine; empty where that is unknown."""
    return read_text(proc / "sys/kernel/random/boot_id").strip()


def boot_time_s(proc: Path = PROC) -> float:
    """Return when the machine started, Unix seconds; 0 where that is unknown."""
    lines = read_text(proc / "stat").splitlines()
    return next((float(line.split()[1]) for line in lines if line.startswith("btime ")), 0.0)


def uptime_s() -> float | None:
    """Return for how long the machine has been running; None where that is unknown."""
    words = read_text(PROC / "uptime").split()
    return float(words[0]) if words else None
