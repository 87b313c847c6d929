"""`gputrain help` in a pipe, on a terminal, and what it imports."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys

import pytest

from gputrain_tui.help_topics import ORDER


def gputrain(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-P", "-m", "gputrain_tui", *argv], capture_output=True, text=True)


def on_terminal(*argv: str, **environ: str) -> str:
    """Return the output of a command on a terminal, also that of a pager."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-P", "-m", "gputrain_tui", *argv]
    process = subprocess.Popen(command, stdin=follower, stdout=follower, env=os.environ | {"TERM": "xterm"} | environ)
    os.close(follower)
    output = b""
    while True:
        try:
            read = os.read(leader, 1 << 16)
        except OSError:  # Linux: the terminal has no writer any more
            break
        output += read
    os.close(leader)
    assert process.wait() == 0
    return output.decode().replace("\r\n", "\n")


def test_without_a_topic_the_topics_are_listed() -> None:
    listed = gputrain("help").stdout
    assert [line.split()[0] for line in listed.splitlines() if line.startswith("  ")] == list(ORDER)
    found = json.loads(gputrain("help", "--json").stdout)
    assert [topic["topic"] for topic in found["topics"]] == list(ORDER)


def test_in_a_pipe_a_topic_is_plain_text() -> None:
    done = gputrain("help", "slurm")
    assert done.returncode == 0
    assert done.stdout.startswith("Slurm: ")
    assert "\x1b" not in done.stdout
    assert json.loads(gputrain("help", "slurm", "--json").stdout)["markdown"].startswith("# Slurm: ")


def test_on_a_terminal_the_pager_shows_it() -> None:
    assert on_terminal("help", "slurm", PAGER="sed 's/^/> /'").startswith("> Slurm: ")


@pytest.mark.parametrize("environ", [{"PAGER": ""}, {"TERM": "dumb", "PAGER": "false"}, {"PAGER": "cat"}])
def test_without_a_pager_it_is_printed(environ: dict[str, str]) -> None:
    assert on_terminal("help", "exit-codes", **environ).startswith("Exit codes")


def test_an_unknown_topic_is_one_line_with_the_nearest_one() -> None:
    done = gputrain("help", "slrum")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "did you mean 'slurm'?" in done.stderr


def test_the_help_names_the_command_and_needs_neither_torch_nor_textual() -> None:
    assert "  help " in gputrain("--help").stdout
    program = (
        "import sys; from gputrain_tui.cli import main; main(['help', 'recipe']);"
        "assert not {'torch', 'textual', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)
