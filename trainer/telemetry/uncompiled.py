"""Exclusion of measuring functions from torch.compile, for those that a compiled model or training step calls."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def leave_uncompiled(function: Callable[..., Any], *, callees: bool) -> None:
    """Have torch.compile run a function as it is, when compiled code calls it or it calls compiled code.

    ``torch.compiler.disable`` does that too, but imports the compiler for it, which takes seconds.

    Args:
        function: The function; others with the same code object are excluded with it.
        callees: Whether the functions it calls are excluded too; False if it calls the script's own code.
    """
    try:
        dynamo: Any = importlib.import_module("torch._C._dynamo.eval_frame")
        skip, default = dynamo._FrameAction.SKIP, dynamo._FrameAction.DEFAULT
        strategy = dynamo._FrameExecStrategy(skip, skip if callees else default)
        dynamo.set_code_exec_strategy(function.__code__, strategy)
    except (ImportError, AttributeError):
        return  # another torch: its compiler may compile the function, which makes it slower
