"""Lines of the user's code: in files outside of Python's library, of installed packages and of these packages."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from functools import cache
from os.path import realpath
from pathlib import Path
from traceback import walk_tb
from types import FrameType, TracebackType
from typing import BinaryIO

_INSTALLED = ("/site-packages/", "/dist-packages/")
"""In the path of every installed package, also in one of another environment."""


def user_line(file: str, line: int, function: str) -> str:
    """Return a line of the user's code, such as ``train.py:12 in augment``; empty for any other code.

    The file is relative to the working folder if it is below it; otherwise its name alone.
    """
    if not is_user_code(file):
        return ""
    shown = shown_file(file)
    shown = Path(shown).name if Path(shown).is_absolute() else shown
    return f"{shown}:{line} in {function.encode(errors='backslashreplace').decode()}"


def is_user_code(file: str) -> bool:
    """Whether a file is neither of Python's library, nor of an installed package, nor of these packages.

    Packages are also installed outside of this environment: in a user's or the system's folder, or that of a module.
    """
    return not file.startswith(("<", *_folders_of_libraries())) and not any(name in file for name in _INSTALLED)


@contextmanager
def printing_to_stderr() -> Iterator[BinaryIO]:
    """Have the user's code print to standard error; yield a file on standard output for a result that programs read."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(kept), "wb") as output, redirect_stdout(sys.stderr):
            yield output
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def imported_files() -> dict[str, int]:
    """Return the files of the user's own modules that are imported, with the time of their last change in ns."""
    files = {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and is_user_code(file):
            with suppress(OSError):  # it is gone, or was never one
                files[str(Path(file).absolute())] = Path(file).stat().st_mtime_ns
    return files


def shown_file(file: str) -> str:
    """Return a path, relative to the working folder if it is below it; file names need not be UTF-8."""
    try:
        shown = str(Path(file).relative_to(Path.cwd()))
    except (ValueError, OSError):
        shown = file
    return shown.encode(errors="backslashreplace").decode()


def innermost_user_line(trace: TracebackType | None) -> str:
    """Return the innermost line of the user's code in a traceback; empty if none."""
    innermost = ""
    for frame, line in walk_tb(trace):
        innermost = user_line(frame.f_code.co_filename, line, frame.f_code.co_name) or innermost
    return innermost


def innermost_line(thread: int) -> str:
    """Return the innermost line of the user's code in a thread of this process; empty if none."""
    lines = (user_line(each.f_code.co_filename, each.f_lineno, each.f_code.co_name) for each in frames_of(thread))
    return next(filter(None, lines), "")


def frames_of(thread: int) -> Iterator[FrameType]:
    """Yield the frames of a thread, the innermost first."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back


@cache
def _folders_of_libraries() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return (*folders, *map(realpath, folders), str(Path(__file__).parents[1]))
