"""``python -m trainer FLAGS``: parse, decide, go. Without torch, which only the ranks need."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from trainer.errors import ExitCode, RequestError, TrainingError, nearest
from trainer.options import Distributed, Training
from trainer.schema import Option, check, describe, read_flags

S = TypeVar("S")


def main(words: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> int:
    """Run the command line and return the exit code; what a user did wrong is one line on standard error."""
    words = list(sys.argv[1:] if words is None else words)
    try:
        if "--describe-task" in words:
            return _describe_task(words)
        if "--help" in words or "-h" in words:
            return _help(words)
        return _train(words, environ)
    except RequestError as error:
        return _refuse(error, ExitCode.BAD_REQUEST)
    except TrainingError as error:
        return _refuse(error, ExitCode.FAILED)
    except KeyboardInterrupt:
        return ExitCode.STOPPED


def _refuse(error: Exception, code: ExitCode) -> ExitCode:
    print(f"trainer: {error}", file=sys.stderr)
    return code


def _train(words: Sequence[str], environ: Mapping[str, str]) -> int:
    options, left = _read(Distributed, words)
    _check_training(left)

    # Not before the flags are known to be right: help and refusals answer at once.
    from trainer.devices import visible_devices
    from trainer.dispatch import decide
    from trainer.launch import launch

    devices = [] if options.cpu else visible_devices(environ)
    decision = decide(options, environ, len(devices))
    if decision.spawn:
        print(f"trainer: {decision.why}", file=sys.stderr)
    return launch(decision, options, left, devices=devices, environ=environ)


def _check_training(words: Sequence[str]) -> None:
    """Refuse wrong options before anything starts; those of a user's own task are left to the ranks, which import it.

    Raises:
        RequestError: an option is wrong, or data of a built-in task is missing.
    """
    from trainer.tasks.registry import check_data, options_schema

    training, left = _read(Training, words)
    schema = options_schema(training.task)
    if schema is None:
        stray = [word for word in left[:1] if not word.startswith("--")]
        if stray:
            raise RequestError(f"{stray[0]!r} belongs to no option")
        return
    values, unknown = read_flags(left, describe(schema))
    if unknown:
        raise _unknown(unknown[0], training.task, describe(schema))
    check_data(check(schema, values, where=_flag_of(describe(schema))))


def _read(schema: type[S], words: Sequence[str]) -> tuple[S, list[str]]:
    """Read one schema's flags and return the words that are left."""
    known = describe(schema)
    values, left = read_flags(words, known)
    return check(schema, values, where=_flag_of(known)), left


def _flag_of(options: Sequence[Option]) -> Any:
    flags = {option.name: option.flag for option in options}
    return lambda name: flags.get(name, name)


def _unknown(word: str, task: str, task_options: Sequence[Option]) -> RequestError:
    if not word.startswith("-"):
        return RequestError(f"{word!r} belongs to no option")
    options = [*describe(Distributed), *describe(Training), *task_options]
    flags = [flag for option in options for flag in (option.flag, *option.aliases)]
    flag = word.partition("=")[0]
    return RequestError(f"{flag} is no option of the trainer or of task {task}{nearest(flag, flags)}")


def _help(words: Sequence[str]) -> int:
    """Print the help, with the options of the task where one is named."""
    from trainer.help import render

    task = _value_after("--task", words)
    options = _task_options(task) if task else None
    print(render(task, options, min(shutil.get_terminal_size().columns, 120)))
    return ExitCode.FINISHED


def _describe_task(words: Sequence[str]) -> int:
    """Print the options of a task as JSON, for the console, which does not import torch."""
    import msgspec

    name = _value_after("--describe-task", words)
    if not name:
        raise RequestError("--describe-task needs the name of a task")
    print(msgspec.json.encode(_task_options(name)).decode())
    return ExitCode.FINISHED


def _task_options(name: str) -> list[Option]:
    from trainer.tasks.registry import load_task, options_schema

    schema = options_schema(name)
    return describe(load_task(name).Options if schema is None else schema)


def _value_after(flag: str, words: Sequence[str]) -> str:
    for index, word in enumerate(words):
        if word.startswith(flag + "="):
            return word.partition("=")[2]
        if word == flag and index + 1 < len(words) and not words[index + 1].startswith("--"):
            return words[index + 1]
    return ""


if __name__ == "__main__":
    sys.exit(main())
