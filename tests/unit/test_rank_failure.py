from __future__ import annotations

from pathlib import Path

import pytest

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
    ],
)
def test_another_error_is_shown_by_its_class_and_first_line(error: BaseException, line: str) -> None:
    assert error_line(error) == line
