"""Position of a thread in the user's code, from its Python stack, read by another thread while it is stuck."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import FrameType

from trainer.host.user_code import user_line

COMPILER_FILES = tuple(
    os.path.join("torch", *parts)  # noqa: PTH118 - ends of file names, compared as text
    for parts in (("_dynamo", "convert_frame.py"), ("_inductor", "compile_fx.py"))
)
"""Files of torch.compile. Frames of other files of it are also on the stack while compiled code runs."""


def innermost_line(thread: int) -> str:
    """Return the innermost line of the user's code in a thread, such as ``train.py:12 in augment``; empty if none."""
    for frame in _frames(thread):
        if line := user_line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name):
            return line
    return ""


def is_compiling() -> bool:
    """Whether torch.compile is at work in any thread: the backward pass of a GPU is compiled in a thread of its own."""
    if "torch._dynamo" not in sys.modules:
        return False
    return any(
        frame.f_code.co_filename.endswith(COMPILER_FILES) and "compile" in frame.f_code.co_name
        for thread in sys._current_frames()
        for frame in _frames(thread)
    )


def _frames(thread: int) -> Iterator[FrameType]:
    """Yield the frames of a thread, the innermost first."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back
