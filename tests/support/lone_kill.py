"""Kills a supervisor together with its successor, as the end of all processes of a user does."""

from __future__ import annotations

import os
import signal

import psutil


def kill_without_successor(supervisor: int) -> None:
    os.kill(supervisor, signal.SIGSTOP)  # so that it starts no successor meanwhile
    for child in psutil.Process(supervisor).children():
        if any(
            "gputrain_tui.lifecycle.supervisor" in word for word in child.cmdline()
        ):  # also between its fork and its exec
            child.kill()
    os.kill(supervisor, signal.SIGKILL)
