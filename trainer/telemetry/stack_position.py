"""Whether torch.compile is at work, by the Python stacks of all threads."""

from __future__ import annotations

import os
import sys

from trainer.host.user_code import frames_of

COMPILER_FILES = tuple(
    os.path.join("torch", *parts)  # noqa: PTH118 - ends of file names, compared as text
    for parts in (("_dynamo", "convert_frame.py"), ("_inductor", "compile_fx.py"))
)
"""Files of torch.compile. Frames of other files of it are also on the stack while compiled code runs."""


def is_compiling() -> bool:
    """Whether torch.compile is at work in any thread: the backward pass of a GPU is compiled in a thread of its own."""
    if "torch._dynamo" not in sys.modules:
        return False
    return any(
        frame.f_code.co_filename.endswith(COMPILER_FILES) and "compile" in frame.f_code.co_name
        for thread in sys._current_frames()
        for frame in frames_of(thread)
    )
