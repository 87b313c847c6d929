"""torch.compile: whether it is at work, by the stacks of all threads, how long it was, and what it leaves as it is."""

from __future__ import annotations

import importlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from trainer.contract.record import Doing, EventWriter
from trainer.host.user_code import frames_of, innermost_line

COMPILER_FILES = tuple(
    os.path.join("torch", *parts)  # noqa: PTH118 - ends of file names, compared as text
    for parts in (("_dynamo", "convert_frame.py"), ("_inductor", "compile_fx.py"))
)
"""Files of torch.compile. Frames of other files of it are also on the stack while compiled code runs."""


LONG_COMPILATION_S = 2.0
"""Minimum time of a compilation before it is reported, seconds: shorter ones come with each new shape."""


def is_compiling() -> bool:
    """Whether torch.compile is at work in any thread: the backward pass of a GPU is compiled in a thread of its own."""
    if "torch._dynamo.utils" not in sys.modules:
        return False
    return any(
        frame.f_code.co_filename.endswith(COMPILER_FILES) and "compile" in frame.f_code.co_name
        for thread in sys._current_frames()
        for frame in frames_of(thread)
    )


def compiled_ns() -> float:
    """Return the time for which torch.compile was at work in this process, nanoseconds."""
    compiler = sys.modules.get("torch._dynamo.utils")
    if compiler is None or not (times := compiler.cumulative_time_spent_ns):
        return 0.0
    return float(times.get("entire_frame_compile", 0.0) + times.get("entire_backward_compile", 0.0))


class RecompileCount:
    """Count of compilations of code that was compiled before, from here on, with torch's reasons."""

    def __init__(self) -> None:
        self.times = 0
        self.reasons: list[str] = []
        self.gave_up = False
        """Whether torch has reached its limit for some code, and compiles that no more."""
        self._seen_ns = compiled_ns()
        self._versions = {frame: version for frame, version, _ in _compilations()}

    def grew(self) -> bool:
        """Return whether code was compiled again since the last call."""
        if (now := compiled_ns()) == self._seen_ns:
            return False
        self._seen_ns = now
        before = self.times
        for frame, version, metrics in _compilations():
            if version <= self._versions.get(frame, 0):
                continue
            self._versions[frame] = version
            if metrics.fail_type is None:
                self.times += 1
            else:
                self.gave_up = True
            if reason := getattr(metrics, "recompile_reason", None):
                self.reasons.append(reason.partition(": ")[2].partition("#")[0].strip())
        return self.times > before or self.gave_up


def _compilations() -> list[tuple[str, int, Any]]:
    """Return the last compilations: number of the code, how often that was compiled before, and torch's metrics."""
    found = []
    for metrics in sys.modules["torch._dynamo.utils"].get_compilation_metrics():
        if matched := re.search(r"(\d+)/(\d+)(?:_\d+)?$", metrics.compile_id or ""):
            found.append((matched[1], int(matched[2]), metrics))
    return found


def leave_uncompiled(function: Callable[..., Any], *, callees: bool) -> None:
    """Have torch.compile run a function as it is, when compiled code calls it or it calls compiled code.

    Other functions with the same code object are left uncompiled with it, and with ``callees`` the functions that it
    calls. ``torch.compiler.disable`` does that too, but imports the compiler for it, which takes seconds.
    """
    try:
        dynamo: Any = importlib.import_module("torch._C._dynamo.eval_frame")
        skip, default = dynamo._FrameAction.SKIP, dynamo._FrameAction.DEFAULT
        strategy = dynamo._FrameExecStrategy(skip, skip if callees else default)
        dynamo.set_code_exec_strategy(function.__code__, strategy)
    except (ImportError, AttributeError):
        return  # another torch: its compiler may compile the function, which makes it slower


class CompilationReport:
    """Records once that torch.compile is at work: a script may train without a call that is seen until then."""

    def __init__(self, writer: EventWriter, rank: int, is_on: Callable[[], bool]) -> None:
        self._writer = writer
        self._rank = rank
        self._is_on = is_on
        self._since: float | None = None
        self._reported = False

    def check(self, _last: bool) -> None:
        """Look for a compilation; called before each write, until the first step begins."""
        if self._reported or not self._is_on() or not is_compiling():
            self._since = None
            return
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        waited_s = now - self._since
        if waited_s < LONG_COMPILATION_S:
            return
        self._reported = True
        self._writer.write(
            Doing(
                time=time.time(),
                rank=self._rank,
                step=1,
                part="compile",
                parts_done=0,
                waited_ms=round(waited_s * 1e3, 1),
                line=innermost_line(threading.main_thread().ident or 0),
            )
        )
