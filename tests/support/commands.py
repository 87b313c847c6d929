"""Run commands of the console in the test process, for tests that do not need a process of their own."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from gputrain_tui.cli import main

Command = Callable[..., subprocess.CompletedProcess[str]]


def command(capsys: pytest.CaptureFixture[str], *given: str) -> Command:
    """Return a function that runs a command line starting with ``given``, and returns exit code, stdout and stderr."""

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        line = [*given, *map(str, words)]
        code = main(line)
        return subprocess.CompletedProcess(line, code, *capsys.readouterr())

    return run
