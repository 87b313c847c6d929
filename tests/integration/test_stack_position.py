"""Where a stuck script is: the part of its loop, its own innermost line, and whether torch.compile is at work."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.contract.record import Doing, EventWriter, decode_events
from trainer.host.user_code import innermost_line
from trainer.telemetry import torch_compile
from trainer.telemetry.step_tracker import StepTracker
from trainer.telemetry.torch_compile import is_compiling


def tracker() -> StepTracker:
    return StepTracker(EventWriter(None), rank=0, device=torch.device("cpu"))


def after_batch_of_ddp(steps: StepTracker) -> None:
    steps.mark("data")


def in_forward(steps: StepTracker) -> None:
    steps.mark(then="forward")


def after_forward(steps: StepTracker) -> None:
    steps.mark(then="forward")
    steps.forward_done = True


def after_backward(steps: StepTracker) -> None:
    steps.mark("backward", then="optimizer")


def stepping(steps: StepTracker) -> None:
    steps.mark("backward", then="optimizer")
    steps.stepping = True


@pytest.mark.parametrize(
    ("do", "lap", "part"),
    [
        (lambda _: None, None, "other"),
        (lambda steps: steps.mark(then="data"), "other", "data"),
        (after_batch_of_ddp, "data", "batch"),
        (lambda steps: steps.mark("data", then="forward"), "data", "loss"),
        (in_forward, "other", "forward"),
        (after_forward, "other", "loss"),
        (lambda steps: steps.mark(then="backward"), "forward", "backward"),
        (after_backward, "backward", "gradients"),
        (stepping, "backward", "optimizer"),
        (lambda steps: steps.mark_evaluation(), "optimizer", "other"),
    ],
)
def test_a_script_is_said_to_be_where_it_was_last_seen(do: Callable[[StepTracker], None], lap: Any, part: str) -> None:
    steps = tracker()
    do(steps)
    assert steps.meter.part_after(lap) == part


@pytest.mark.parametrize("below", [True, False], ids=["below the working folder", "elsewhere"])
def test_the_innermost_line_is_of_the_user_s_code_and_not_of_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: bool
) -> None:
    (tmp_path / "sub").mkdir()
    script = tmp_path / "sub" / "train.py"
    script.write_text("def augment(event):\n    event.wait()\n")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path if below else tmp_path / "other")
    names: dict[str, Any] = {}
    exec(compile(script.read_text(), str(script), "exec"), names)
    go_on = threading.Event()
    thread = threading.Thread(target=names["augment"], args=(go_on,))
    thread.start()
    assert thread.ident is not None
    line = ""
    while not line:  # until the thread is in its function
        line = innermost_line(thread.ident)
    go_on.set()
    thread.join()
    assert line in {f"{'sub/train.py' if below else 'train.py'}:{number} in augment" for number in (1, 2)}
    assert innermost_line(thread.ident) == ""


def test_a_compilation_is_seen_while_it_lasts_and_not_when_the_compiled_code_runs() -> None:
    compiling: list[bool] = []
    running: list[bool] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        compiling.append(is_compiling())
        return graph.forward

    def script(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        running.append(is_compiling())
        return x + 1

    assert not is_compiling()
    torch.compile(lambda x: x * 2, backend=backend)(torch.ones(2))
    torch.compile(torch.compiler.disable(script), backend=backend)(torch.ones(2))
    assert all(compiling)
    assert compiling
    assert running == [False]


def test_a_compilation_before_the_first_step_is_recorded_once_while_it_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_compile, "LONG_COMPILATION_S", 0.0)
    writer = EventWriter(tmp_path / "0.ndjson", rank=0)
    report = torch_compile.CompilationReport(writer, 0, lambda: True)

    def backend(graph: Any, _inputs: Any) -> Any:
        report.check(False)
        report.check(False)
        return graph.forward

    report.check(False)
    torch.compile(lambda x: x * 3, backend=backend)(torch.ones(3))
    report.check(False)
    writer.close()
    (event,) = decode_events((tmp_path / "0.ndjson").read_bytes())
    assert isinstance(event, Doing)
    assert (event.part, event.step) == ("compile", 1)
    assert "test_stack_position.py" in event.line
