from __future__ import annotations

import io
import os
import threading
from pathlib import Path

import pytest

from trainer.agent.line_printer import LinePrinter
from trainer.host.process_guard import LogFile


def test_output_lost_on_a_full_disk_raises_nothing_and_is_counted_in_the_log(tmp_path: Path) -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    stream = io.TextIOWrapper(io.BufferedWriter(LogFile(descriptor)), line_buffering=True)
    print("these words are lost", file=stream)
    print("and these", file=stream)
    room = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(room, descriptor)
    print("there is room again", file=stream)
    assert (tmp_path / "log").read_text() == (
        "[31 bytes of output were lost: No space left on device]\nthere is room again\n"
    )


def test_printed_text_is_in_the_file_before_print_returns(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    stream = io.TextIOWrapper(io.BufferedWriter(LogFile(descriptor)), line_buffering=True)
    print("x" * 100_000, file=stream)
    assert (tmp_path / "log").stat().st_size == 100_001


class Stalled(io.StringIO):
    """A stream whose disk answers on request."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def write(self, text: str) -> int:
        assert self.go.wait(60)
        return super().write(text)


def test_printing_does_not_wait_for_a_stalled_disk_and_keeps_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stalled()
    monkeypatch.setattr("sys.stdout", stream)
    printer = LinePrinter()
    for line in ("one", "two", "three"):
        printer.print_line(line)  # would wait for ever
    stream.go.set()
    printer.close()
    assert stream.getvalue() == "one\ntwo\nthree\n"
