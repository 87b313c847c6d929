"""A stack shows the thread that trains first, and every function's whole name."""

from __future__ import annotations

import pytest

from gputrain_tui.console.widgets.stack_view import frame_lines, stack_lines

FRAME = '  File "/opt/venv/lib/python3.11/site-packages/torch/autograd/graph.py", line 829 in _engine_run_backward'
STACK = [
    "Thread 0x00007f01 (most recent call first):",
    '  File "/opt/trainer/contract/record/writer.py", line 168 in _run',
    "",
    "Current thread 0x00007f02 (most recent call first):",
    FRAME,
    '  File "/opt/trainer/engine/loop.py", line 212 in _step',
    "step 12 loss 2.5",
    '  File "printed by somebody else", line 1 in nothing',
]


def test_the_main_thread_comes_first_and_later_output_is_no_part_of_it() -> None:
    lines = stack_lines(STACK, 100)
    assert [text for text, is_heading in lines if is_heading] == ["main thread", "other thread 1 of 1"]
    assert [text.split()[0] for text, is_heading in lines if not is_heading] == [
        "_engine_run_backward",
        "_step",
        "_run",
    ]


@pytest.mark.parametrize("width", [20, 30, 40, 60, 120])
def test_a_function_keeps_its_whole_name_and_a_file_its_end(width: int) -> None:
    lines = frame_lines(FRAME, width)
    assert max(map(len, lines)) <= width
    whole = "".join(lines)
    assert "_engine_run_backward" in whole
    assert whole.endswith("graph.py:829")


def test_a_name_longer_than_the_panel_is_wrapped() -> None:
    name = "test_a_function_keeps_its_whole_name_and_a_file_its_end.<locals>.inner"
    lines = frame_lines(f'  File "a.py", line 3 in {name}', 30)
    assert "".join(lines[:-1]) == name
    assert lines[-1].strip() == "a.py:3"
