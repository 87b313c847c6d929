"""Built-in tasks and their options."""

from __future__ import annotations

from typing import Any

from trainer.contract import task_options
from trainer.contract.errors import RequestError, nearest

_TASKS: dict[str, tuple[str, type[Any]]] = {
    "lm": ("trainer.tasks.lm:LanguageModel", task_options.LmOptions),
    "docnn": ("trainer.tasks.docnn:DocNNTask", task_options.DocNNOptions),
    "mnist": ("trainer.tasks.mnist:MnistTask", task_options.MnistOptions),
    "masked_lm": ("trainer.tasks.masked_lm:MaskedLanguageModel", task_options.MaskedLmOptions),
}
BUILT_IN = {name: target for name, (target, _) in _TASKS.items()}
"""Name of a built-in task → its class."""

COUNTERPARTS = {
    "bert": "masked_lm",
    "language_modeling": "lm",
    "DocNNTask": "docnn",
    "DocumentClassificationTask": "docnn",
}
"""Task names of HetSeq, fairseq and PyText, and the built-in task that trains the same model on its own data format."""


def options_schema(name: str) -> type[Any] | None:
    """Return the options class of a built-in task; None for a user's task, which would have to be imported to get it.

    Raises:
        RequestError: the name is neither built in nor of the form ``module:Class``.
    """
    if name not in BUILT_IN and ":" not in name:
        raise unknown_task(name)
    return _TASKS[name][1] if name in _TASKS else None


def unknown_task(name: str) -> RequestError:
    """Return the error for an unknown task name, with the nearest known one."""
    names = ", ".join(BUILT_IN)
    own = "your own as package.module:Class or path/to/file.py:Class"
    if not name:
        return RequestError(f"no task is named; choose one of {names}, or {own}")
    hint = f"; {COUNTERPARTS[name]} is its counterpart here" if name in COUNTERPARTS else nearest(name, BUILT_IN)
    return RequestError(f"task {name!r} is not known: {names}, or {own}{hint}")


def check_data(task_options: Any) -> None:
    """Check that a task's data exists, where its options can check it without torch."""
    check = getattr(task_options, "check_data", None)
    if check is not None:
        check()
