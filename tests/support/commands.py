"""Runs a command of the console in the tests' own process, where the process itself is not what is tested."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from gputrain_tui.cli import main

Command = Callable[..., subprocess.CompletedProcess[str]]


def command(capsys: pytest.CaptureFixture[str], *given: str) -> Command:
    """Return what runs a command that begins with these words; its exit code, output and errors."""

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        line = [*given, *map(str, words)]
        code = main(line)
        return subprocess.CompletedProcess(line, code, *capsys.readouterr())

    return run
