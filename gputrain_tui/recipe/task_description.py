"""Returns the options of a task without importing torch.

A user's task is a class in a file that imports torch, so a short-lived process describes it. The description is cached
as long as that file and all others of the user's that it imports are as they were.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from gputrain_tui.paths import cache_folder
from trainer.contract.builtin_tasks import BUILT_IN, options_schema
from trainer.contract.errors import RequestError, nearest
from trainer.contract.home_folder import expand_home
from trainer.contract.schema import Option, describe


class TaskDescription(msgspec.Struct, kw_only=True):
    """A cache entry for a user's task."""

    options: list[Option]
    mtimes_ns: dict[str, int]
    """The user's files that define them, with the time of their last change."""

    def is_current(self) -> bool:
        """Return whether all files are as they were."""
        try:
            return all(Path(file).stat().st_mtime_ns == mtime_ns for file, mtime_ns in self.mtimes_ns.items())
        except OSError:
            return False


def describe_task(task: str) -> Sequence[Option]:
    """Return the options of a task: a built-in one's name, or ``module:Class`` or ``path.py:Class``."""
    if task in BUILT_IN:
        schema = options_schema(task)
        assert schema is not None, f"the built-in task {task} declares no options"
        return describe(schema)
    if task.endswith(".py"):
        raise RequestError(f"a file has no task without the name of its class: {task}:Class")
    if ":" not in task:
        guess = nearest(task, BUILT_IN) or f"; built in are {', '.join(BUILT_IN)}"
        raise RequestError(f"there is no such task{guess}; name your own as module:Class or path.py:Class")
    return _task_options(task)


def _task_options(task: str) -> list[Option]:
    file = task_file(task)
    if file is None:
        return _describe_in_subprocess(task).options
    import hashlib  # loads OpenSSL, which is slow and which built-in tasks do not need

    key = hashlib.sha256(f"{file.resolve()}:{task}:{sys.prefix}".encode()).hexdigest()[:24]
    cached = cache_folder() / "tasks" / f"{key}.json"
    try:
        entry = msgspec.json.decode(cached.read_bytes(), type=TaskDescription)
        if entry.is_current():
            return entry.options
    except (OSError, msgspec.DecodeError):
        pass  # not cached, or in the format of another version
    changed_ns = file.stat().st_mtime_ns  # before it is imported; an installed package's file is not the user's
    entry = _describe_in_subprocess(task)
    entry.mtimes_ns[str(file.resolve())] = changed_ns
    with suppress(OSError):  # it only costs another import
        cached.parent.mkdir(parents=True, exist_ok=True)
        draft = cached.with_suffix(f".{os.urandom(4).hex()}.tmp")
        draft.write_bytes(msgspec.json.encode(entry))
        draft.replace(cached)
    return entry.options


def task_file(task: str) -> Path | None:
    """Return the file that defines ``module:Class`` or ``path.py:Class``, without an import; None if there is none."""
    module = task.rpartition(":")[0]
    if module.endswith(".py"):
        path = expand_home(module)
        return path if os.path.isfile(path) else None  # noqa: PTH113 - Path.is_file() raises if the name is too long
    if not re.fullmatch(r"\w+(\.\w+)*", module):
        return None
    relative = Path(*module.split("."))
    for folder in (Path.cwd(), *(Path(entry) for entry in sys.path if entry)):
        for candidate in (folder / relative.with_suffix(".py"), folder / relative / "__init__.py"):
            if os.path.isfile(candidate):  # noqa: PTH113 - Path.is_file() raises in a forbidden folder
                return candidate
    return None


def _describe_in_subprocess(task: str) -> TaskDescription:
    argv = [sys.executable, "-P", "-m", "trainer", "--describe-task", task, "--with-files"]
    describe_timeout_s = 120.0  # time limit of importing torch and a task, which takes seconds
    try:
        answer = subprocess.run(argv, capture_output=True, timeout=describe_timeout_s, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise RequestError(f"it took longer than {describe_timeout_s:.0f} s to import") from None
    if answer.returncode != 0:
        lines = answer.stderr.decode(errors="replace").strip().splitlines()
        raise RequestError(
            lines[-1].removeprefix("trainer: ") if lines else f"importing it ended with exit code {answer.returncode}"
        )
    try:
        return msgspec.json.decode(answer.stdout, type=TaskDescription)
    except msgspec.DecodeError as error:
        raise RequestError(f"its options cannot be read: {error}") from None
