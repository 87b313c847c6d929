"""Run a command in a pseudo-terminal and measure it from outside: output, latency, CPU time and memory."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
CONTROL = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[PX^_\]].*?(?:\x1b\\|\x07)|\x1b[@-Z\\-_=>78]", re.DOTALL)
"""Escape sequences, which are removed from the output."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Resources that a process used during an interval."""

    cpu_percent: float
    """CPU time in percent of one core."""
    bytes_per_s: float
    """Output to the terminal."""
    rss_bytes: int
    """Resident memory at the end of the interval."""
    read_bytes: int
    """Bytes read from files."""


class Terminal:
    """Command in a pseudo-terminal; a thread reads its output at once, as a terminal does."""

    def __init__(
        self, argv: Sequence[str | Path], *, env: Mapping[str, str], columns: int = 190, rows: int = 52
    ) -> None:
        self._lock = threading.Lock()
        self._grown = threading.Condition(self._lock)
        self._raw = bytearray()
        self._master, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.started = time.perf_counter()
        self.process = subprocess.Popen(
            [os.fspath(word) for word in argv],
            stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
            env={**env, "TERM": "xterm-256color", "COLORTERM": "truecolor"},
        )  # fmt: skip
        os.close(terminal)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(5)
        os.close(self._master)

    @property
    def written(self) -> int:
        """Number of bytes written so far."""
        with self._lock:
            return len(self._raw)

    def text(self, since: int = 0) -> str:
        """Return the output after a position, without escape sequences."""
        with self._lock:
            raw = bytes(self._raw[since:])
        return CONTROL.sub(b"", raw).decode("utf-8", "replace")

    def wait_for(self, needle: str | re.Pattern[str], *, since: int = 0, timeout_s: float = 20.0) -> float:
        """Wait for a text in the output after a position; return the time, in ``perf_counter``'s seconds."""
        pattern = re.compile(re.escape(needle)) if isinstance(needle, str) else needle
        deadline = time.perf_counter() + timeout_s
        searched = -1
        while True:
            with self._lock:
                while len(self._raw) == searched:
                    if not self._grown.wait(max(0.0, deadline - time.perf_counter())):
                        break
                searched = len(self._raw)
                now = time.perf_counter()
            if pattern.search(self.text(since)):
                return now
            if now >= deadline or (self.process.poll() is not None and self.written == searched):
                raise AssertionError(f"{pattern.pattern!r} did not come: {self.text(since)[-2000:]!r}")

    def send(self, keys: str) -> float:
        """Send keys; return the time, in ``perf_counter``'s seconds."""
        now = time.perf_counter()
        os.write(self._master, keys.encode())
        return now

    def resize(self, columns: int, rows: int) -> None:
        """Change the size of the terminal."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        os.killpg(self.process.pid, signal.SIGWINCH)

    def usage(self, seconds: float) -> Usage:
        """Measure the process for a number of seconds."""
        cpu, read, written, begin = self._cpu_s(), self._read_bytes(), self.written, time.perf_counter()
        time.sleep(seconds)
        took = time.perf_counter() - begin
        return Usage(
            cpu_percent=100 * (self._cpu_s() - cpu) / took,
            bytes_per_s=(self.written - written) / took,
            rss_bytes=self.rss_bytes(),
            read_bytes=self._read_bytes() - read,
        )

    def rss_bytes(self) -> int:
        """Return the resident memory of the process."""
        return int((self._proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def modules(self, *names: str) -> list[str]:
        """Return those of the named libraries that the process has mapped."""
        maps = (self._proc / "maps").read_text()
        return [name for name in names if f"/{name}/" in maps]

    def leave(self, key: str = "q", timeout_s: float = 10.0) -> int:
        """Press the key that ends the command; return the exit code."""
        self.send(key)
        return self.process.wait(timeout_s)

    def waited_ms(self) -> float:
        """Return the total time for which the threads between a key and its answer were runnable without a core.

        These are this thread, the process's main thread, and the thread that reads the output.
        """
        tasks = (
            f"{os.getpid()}/task/{threading.get_native_id()}",
            f"{self.process.pid}/task/{self.process.pid}",
            f"{os.getpid()}/task/{self._reader.native_id}",
        )
        return sum(int(Path(f"/proc/{task}/schedstat").read_text().split()[1]) for task in tasks) / 1e6

    @property
    def _proc(self) -> Path:
        return Path(f"/proc/{self.process.pid}")

    def _cpu_s(self) -> float:
        """Return the CPU time of all threads of the process, user and system."""
        fields = (self._proc / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * TICK_S

    def _read_bytes(self) -> int:
        return int(re.findall(r"rchar: (\d+)", (self._proc / "io").read_text())[0])

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 65536)
            except OSError:  # the other end is closed
                return
            if not data:
                return
            with self._grown:
                self._raw += data
                self._grown.notify_all()


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Time from a key to its answer."""

    ms: float
    waited_ms: float
    """Part of the time in which a thread waited for a core, as happens on a busy machine."""

    @property
    def own_ms(self) -> float:
        return max(self.ms - self.waited_ms, 0.0)


def latencies(terminal: Terminal, presses: Sequence[tuple[str, str]], *, pause: Callable[[], float]) -> list[Latency]:
    """Press keys one after the other; return the latency of each.

    Args:
        terminal: terminal of the command.
        presses: keys, and a pattern that is written only in answer to them.
        pause: returns the seconds to wait before each key, so that keys come at any time between two paints.
    """
    found = []
    for keys, answer in presses:
        time.sleep(pause())
        since, waited = terminal.written, terminal.waited_ms()
        pressed = terminal.send(keys)
        ms = 1000 * (terminal.wait_for(re.compile(answer), since=since, timeout_s=5.0) - pressed)
        found.append(Latency(ms=ms, waited_ms=terminal.waited_ms() - waited))
    return found
