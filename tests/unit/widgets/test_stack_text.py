"""A stack shows the thread that trains first, and every function's whole name."""

from __future__ import annotations

import pytest

from gputrain_tui.console.widgets.stack_view import frame_lines, stack_lines
from trainer.contract.record import CodeFrame, ThreadStack

FRAME = CodeFrame("/opt/venv/lib/python3.11/site-packages/torch/autograd/graph.py", 829, "_engine_run_backward")
THREADS = [
    ThreadStack("MainThread", [FRAME, CodeFrame("train.py", 212, "step", True)]),
    ThreadStack("event-writer", [CodeFrame("/opt/trainer/contract/record/writer.py", 168, "_run")]),
]


def test_the_main_thread_comes_first_and_the_users_code_stands_out() -> None:
    lines = stack_lines(THREADS, 100)
    assert [text for text, style in lines if style == "accent"] == ["main thread", "event-writer"]
    assert [(text.split()[0], style) for text, style in lines if style != "accent"] == [
        ("_engine_run_backward", "dim"),
        ("step", "bright"),
        ("_run", "dim"),
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
    lines = frame_lines(CodeFrame("a.py", 3, name), 30)
    assert "".join(lines[:-1]) == name
    assert lines[-1].strip() == "a.py:3"
