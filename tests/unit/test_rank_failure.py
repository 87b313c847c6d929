from __future__ import annotations

from bdb import BdbQuit
from pathlib import Path

import pytest

from gputrain_tui.lifecycle.attempt_outcome import last_lines
from trainer.agent.rank_failure import error_line, last_error

CARRIED = """\
Caught OSError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "data.py", line 3, in __getitem__
ValueError: x

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "data.py", line 5, in __getitem__
OSError: [Errno 5] Input/output error: 'shard-7.bin
and more'
"""
"""What torch makes of an error of a data loading process; tests/faults/test_loader_workers.py has a real one."""


def test_the_error_line_of_a_data_loading_process_is_its_own() -> None:
    message = "OSError: [Errno 5] Input/output error: 'shard-7.bin (in DataLoader worker process 0)"
    assert error_line(OSError(CARRIED)) == message


def test_a_log_that_ends_with_such_an_error_names_it_too(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(f"Traceback (most recent call last):\n  File x, line 1\nOSError: {CARRIED}\n")
    assert last_error(log).startswith("OSError: [Errno 5]")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("\n no more data\nreally"), "ValueError:  no more data"),
        (ValueError(), "ValueError"),
        (RuntimeError("Caught nothing"), "RuntimeError: Caught nothing"),
        (RuntimeError("Caught fish in a net."), "RuntimeError: Caught fish in a net."),
        (
            BdbQuit(),
            "BdbQuit: breakpoint() needs a terminal, and a rank has none; attach a debugger such as debugpy instead",
        ),
    ],
)
def test_another_error_is_shown_by_its_class_and_first_line(error: BaseException, line: str) -> None:
    assert error_line(error) == line


NOTE = "[W1128 16:12:04.123456789 socket.cpp:764] [c10d] The client socket cannot be initialized to connect to [h1]"
ERROR = "[E1128 16:12:04.123456789 socket.cpp:1023] [c10d] The client socket has timed out"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"loading\n{NOTE}\n{NOTE}\n", ["loading"]),
        (f"{NOTE}\nboom\n{NOTE}", ["boom"]),
        (f"{NOTE}\n{ERROR}\n", [ERROR]),
        (f"{NOTE}\n\n", [NOTE]),
        ("a\nb\nc\n", ["b", "c"]),
        ("\n", []),
    ],
)
def test_torchs_notes_on_connections_are_nobodys_last_output_and_no_error(
    tmp_path: Path, text: str, shown: list[str]
) -> None:
    log = tmp_path / "0.log"
    log.write_text(text)
    assert last_lines(log, 2) == shown
    assert last_error(log, any_line=True) == (shown[-1] if shown not in ([], [NOTE]) else "")
