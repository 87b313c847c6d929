"""The console in a real terminal: launch the demo by keys, leave, come back, stop it, and nothing is left."""

from __future__ import annotations

import base64
import os
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import synthetic

from gputrain_tui.console.screens.confirm import LEAST_KEY_GAP_S
from gputrain_tui.history.run_folders import list_runs

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")

GPUTRAIN = Path(sys.executable).parent / "gputrain"
RANK = re.compile(r"^ *▸? *(\d+)(?: +\S+){0,2}? +training +(\d+) +(\d+\.\d+)", re.MULTILINE)
"""A line of the rank table: rank, step and loss."""
PATIENCE_S = 90.0
"""Longer than anything takes on a busy machine."""


class Tmux:
    """A terminal with a shell in it, on a server of its own."""

    def __init__(self, socket: Path, env: dict[str, str]) -> None:
        self._words = ["tmux", "-S", os.fspath(socket), "-f", "/dev/null"]
        self._env = env
        self._run("new-session", "-d", "-x", "120", "-y", "40", "env PS1='$ ' sh")
        self._run("set", "-sg", "escape-time", "0")
        # A client that gets all output: the event after which the screen is compared again.
        self._changes = subprocess.Popen(
            [*self._words, "-C", "attach", "-f", "read-only,ignore-size"],
            env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def close(self) -> None:
        with self._changes:
            self._changes.kill()
        subprocess.run([*self._words, "kill-server"], env=self._env, check=False, capture_output=True)

    def type(self, text: str) -> None:
        self._run("send-keys", "-l", text)

    def press(self, *keys: str) -> None:
        self._run("send-keys", *keys)

    def send(self, raw: str) -> None:
        """Send bytes as a terminal does that takes nothing out of a paste."""
        self._run("send-keys", "-H", *(f"{byte:02x}" for byte in raw.encode()))

    def record(self, path: Path) -> None:
        """Write all that programs send to the terminal into a file, too."""
        self._run("pipe-pane", f"cat > {path}")

    def buffer(self) -> str:
        """Return tmux's newest buffer, from which it pastes."""
        return self._run("show-buffer")

    def resize(self, columns: int, rows: int) -> None:
        self._run("resize-window", "-x", str(columns), "-y", str(rows))

    def screen(self) -> str:
        return self._run("capture-pane", "-p")

    def wait(self, *needles: str) -> str:
        """Wait until all texts are on the screen; return the screen."""
        return self.until(lambda screen: all(needle in screen for needle in needles), " and ".join(needles))

    def until(self, there: Callable[[str], object], what: str) -> str:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            screen = self.screen()
            if there(screen):
                return screen
            assert time.monotonic() < deadline, f"waited in vain for {what}:\n{screen}"
            self._await_change(deadline)

    def _await_change(self, deadline: float) -> None:
        """Wait until something came out since the last time."""
        assert self._changes.stdout is not None
        if select.select([self._changes.stdout], [], [], max(deadline - time.monotonic(), 0))[0]:
            assert os.read(self._changes.stdout.fileno(), 1 << 20), "tmux has ended"

    def exit_code(self, command: str, number: int) -> int:
        """Return how the last command ended, once the shell is back; ``number`` tells it from earlier ones."""
        screen = self.until(lambda shown: re.search(rf"END{number}=\d+", shown), f"the end of {command}")
        found = re.search(rf"END{number}=(\d+)", screen)
        assert found is not None
        return int(found[1])

    def start(self, command: str, number: int) -> None:
        self.type(f"clear; {command}; echo END{number}=$?")
        self.press("Enter")

    def _run(self, *words: str) -> str:
        done = subprocess.run([*self._words, *words], env=self._env, check=True, capture_output=True, text=True)
        return done.stdout


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Tmux]:
    env = {
        **os.environ,
        "GPUTRAIN_HOME": str(tmp_path / "home"),
        "GPUTRAIN_CACHE": str(tmp_path / "cache"),
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
    }
    env.pop("TMUX", None)
    tmux = Tmux(tmp_path / "tmux", env)
    try:
        yield tmux
    finally:
        tmux.close()


def losses(screen: str) -> dict[int, float]:
    """Return the loss of each rank that trains."""
    return {int(rank): float(loss) for rank, _, loss in RANK.findall(screen)}


def running_with(home: Path) -> dict[int, str]:
    """Return the command lines of the processes that were started with this home, by process id."""
    found = {}
    mark = f"GPUTRAIN_HOME={home}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes().split(b"\0"):
                line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                found[int(process.name)] = line
        except OSError:
            continue  # it has ended, or is another person's
    return {pid: line for pid, line in found.items() if line and not line.startswith(("tmux", "sh ", "env "))}


def await_end(pid: int, deadline: float) -> None:
    """Wait until a process that is no child of this one has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        select.select([descriptor], [], [], max(deadline - time.monotonic(), 0))
    finally:
        os.close(descriptor)


def test_the_demo_is_launched_left_found_again_and_stopped_by_keys(terminal: Tmux, tmp_path: Path) -> None:
    home = tmp_path / "home"
    terminal.start(f"{GPUTRAIN}", 1)
    terminal.wait("demo", "Quit")
    terminal.press("d")
    first = losses(terminal.until(lambda screen: set(losses(screen)) == {0, 1}, "the first step of both ranks"))
    terminal.until(
        lambda screen: all(losses(screen).get(rank, 99.0) < loss - 0.3 for rank, loss in first.items()),
        f"losses below {first}",
    )
    terminal.resize(80, 24)
    terminal.until(lambda screen: set(losses(screen)) == {0, 1} and "Quit" in screen, "the smaller screen")
    terminal.press("q")
    assert terminal.exit_code("gputrain", 1) == 0
    (run,) = list_runs(home / "runs")
    assert run.state == "running", "leaving the console leaves the run"
    text = terminal.screen().replace("\n", "")
    assert f"1 run goes on: {run.id} (`gputrain attach {run.id}`, `gputrain stop {run.id}`)" in text

    terminal.start(f"{GPUTRAIN} attach", 2)
    again = losses(terminal.until(lambda screen: set(losses(screen)) == {0, 1}, "both ranks once more"))
    assert all(again[rank] < loss for rank, loss in first.items())
    terminal.press("S")
    terminal.wait("Stop it")
    time.sleep(2 * LEAST_KEY_GAP_S)  # there is no event for a key that was not typed
    terminal.press("y")
    terminal.wait("stopped")
    terminal.press("q")
    assert terminal.exit_code("gputrain attach", 2) == 0
    assert "goes on" not in terminal.screen()
    (run,) = list_runs(home / "runs")
    assert (run.state, run.status.exit_code) == ("stopped", 130)
    assert (run.status.message or "").startswith("stopped in the console at step ")

    terminal.start(f"{GPUTRAIN} runs", 3)
    assert terminal.exit_code("gputrain runs", 3) == 0
    assert run.id in terminal.screen()
    deadline = time.monotonic() + 10
    while left := running_with(home):
        assert time.monotonic() < deadline, f"still running: {left}"
        await_end(next(iter(left)), deadline)


def test_pasted_escape_sequences_press_no_key(terminal: Tmux, tmp_path: Path) -> None:
    terminal.start(f"{GPUTRAIN}", 1)
    terminal.wait("demo", "Quit")
    terminal.send(f"\x1b[200~d \x1b]{'dq' * 30}\x1b[31m d q\x1b[201~")
    terminal.press("2")  # what comes after it is seen after it
    terminal.wait("L Launch", "Quit")
    assert list_runs(tmp_path / "home" / "runs") == []
    terminal.press("q")
    assert terminal.exit_code("gputrain", 1) == 0


def copied(path: Path) -> list[str]:
    """Return the texts that a program put on the terminal's clipboard (OSC 52)."""
    found = re.findall(rb"\x1b\]52;c;([A-Za-z0-9+/=]*)\x07", path.read_bytes())
    return [base64.b64decode(text).decode() for text in found]


def test_selected_text_and_the_failure_reach_the_terminals_clipboard(terminal: Tmux, tmp_path: Path) -> None:
    synthetic.run(tmp_path / "home" / "runs", steps=40, failed_rank=1, status="failed")
    terminal.record(raw := tmp_path / "raw")
    terminal.start(f"{GPUTRAIN} attach", 1)
    screen = terminal.wait("out of memory", "Quit")
    line = next(y for y, row in enumerate(screen.splitlines()) if "CUDA out of memory. Tried" in row)
    begin = screen.splitlines()[line].index("CUDA out of memory")
    for code, x, end in ((0, begin, "M"), (32, begin + 17, "M"), (0, begin + 17, "m")):
        terminal.send(f"\x1b[<{code};{x + 1};{line + 1}{end}")
    terminal.wait("text is selected")
    terminal.press("C-c")
    terminal.wait("copied 18 characters")
    terminal.press("c")
    terminal.wait("copied the failure")
    terminal.press("C-c")
    terminal.wait("q leaves the console")
    terminal.press("q")
    assert terminal.exit_code("gputrain attach", 1) == 0
    selected, failure = copied(raw)
    assert selected == "CUDA out of memory"
    assert "rank 1 on localhost failed in step 41: out of memory" in failure
    assert "torch.OutOfMemoryError" in failure
    assert terminal.buffer() == failure, "tmux as it is by default takes none of that"


def test_keys_typed_ahead_go_into_the_line_that_a_key_opens(terminal: Tmux, tmp_path: Path) -> None:
    synthetic.run(tmp_path / "home" / "runs", nodes=2, ranks_per_node=4, steps=40)
    terminal.start(f"{GPUTRAIN} attach", 1)
    terminal.wait("ranks 8", "Quit")
    terminal.type("/node001")  # in one read, as fast fingers and slow links send it
    terminal.wait("ranks 8  /node001  4", "filter")
    terminal.press("Tab")
    terminal.press("q")
    assert terminal.exit_code("gputrain attach", 1) == 0


def test_a_run_directory_anywhere_is_attached_to_by_its_path(terminal: Tmux, tmp_path: Path) -> None:
    synthetic.run(tmp_path / "elsewhere", nodes=2, ranks_per_node=4, steps=40)
    (run_dir,) = (tmp_path / "elsewhere").iterdir()
    for name in ("plan.json", "recipe.toml"):  # `python -m trainer --run-dir` leaves neither
        (run_dir / name).unlink(missing_ok=True)
    terminal.start(f"{GPUTRAIN} attach {run_dir}", 1)
    terminal.wait("ranks 8", "Quit")
    terminal.press("q")
    assert terminal.exit_code("gputrain attach", 1) == 0


def test_a_dumb_terminal_gets_a_line_in_place_of_the_screen(terminal: Tmux) -> None:
    terminal.start(f"TERM=dumb {GPUTRAIN}", 1)
    assert terminal.exit_code("gputrain", 1) == 2
    text = terminal.screen().replace("\n", "")
    assert text.startswith("gputrain: the console needs a terminal that it can draw on, not TERM=dumb; `gputrain run")
    terminal.start(f"{GPUTRAIN} | cat", 2)
    terminal.exit_code("gputrain", 2)
    assert "the console needs a terminal; `gputrain run RECIPE`" in terminal.screen().replace("\n", "")
