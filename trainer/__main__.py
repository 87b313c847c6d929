"""``python -m trainer``: parse the flags, decide which ranks start here, and launch them; torch-free."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path and __file__ != f"{sys.path[0]}/trainer/__main__.py":
    # Typed without -P: from here on, no file of the working folder may be imported in place of one of ours.
    os.execv(sys.executable, [sys.orig_argv[0], "-P", *sys.orig_argv[1:]])

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from trainer.contract.errors import (
    BROKEN_PIPE_CODE,
    ExitCode,
    MachineNotReadyError,
    RequestError,
    TrainingError,
    nearest,
    print_message,
    printable_lines,
    quoted,
    require_utf8,
)
from trainer.contract.options import Distributed, Script, Training, TrainingSpec
from trainer.contract.schema import Option, check, describe, read_flags, unknown_option

S = TypeVar("S")


def main(arguments: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> int:
    """Run the command line and return the exit code; a wrong request is one line on standard error."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        dashes = arguments.index("--") if "--" in arguments else None
        own, script_argv = arguments[:dashes], None if dashes is None else arguments[dashes + 1 :]
        require_utf8(arguments)
        if "--describe-task" in own:
            return _describe_task(own)
        if "--help" in own or "-h" in own:
            return _help(own)
        return _train(own, script_argv, environ)
    except MachineNotReadyError as error:
        return _refuse(error, ExitCode.REFUSED)
    except RequestError as error:
        return _refuse(error, ExitCode.BAD_REQUEST)
    except TrainingError as error:
        return _refuse(error, ExitCode.FAILED)
    except KeyboardInterrupt:
        return ExitCode.STOPPED


def _refuse(error: Exception, code: ExitCode) -> ExitCode:
    print_message(str(error), program="trainer")
    return code


def _train(arguments: Sequence[str], script_argv: Sequence[str] | None, environ: Mapping[str, str]) -> int:
    try:
        Path.cwd()
    except FileNotFoundError:  # torch's libraries cannot be loaded without one, and the ranks would die
        raise RequestError("the working directory is gone: change to one that exists") from None
    with _refuse_os_errors():
        options, remaining = _read(Distributed, arguments)
        ranks_run = _script(remaining, script_argv) or _check_training(remaining)

    # Imported after the flags are checked, so that help and refusals come at once.
    from trainer.host import resource_limits
    from trainer.host.visible_devices import visible_devices

    training = None if isinstance(ranks_run, Script) else ranks_run.training
    resource_limits.require(
        _max_local_ranks(options, environ),
        rank_bytes=resource_limits.SCRIPT_BYTES if training is None else resource_limits.RANK_BYTES,
    )
    if training is not None and training.num_workers:
        resource_limits.require_shared_memory()
    from trainer.agent.launch import launch
    from trainer.agent.script_environment import refuse_file_rendezvous
    from trainer.contract.option_rules import require_ranks
    from trainer.environments.dispatch import decide

    devices = [] if options.cpu else visible_devices(environ)
    decision = decide(options, environ, len(devices))
    if isinstance(ranks_run, Script):
        refuse_file_rendezvous(decision.init_method)
    elif decision.exchange is None:  # otherwise the world size is known to the ranks only
        require_ranks(ranks_run.training, decision.world_size)
    if decision.spawn:
        print_message(decision.why, program="trainer")
    return launch(decision, options, ranks_run, devices=devices, environ=environ)


@contextmanager
def _refuse_os_errors() -> Iterator[None]:
    """Convert an ``OSError`` about a path, such as a name that is too long, into a ``RequestError``."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        raise RequestError(f"{error.filename}: {error.strerror}") from None


def _max_local_ranks(options: Distributed, environ: Mapping[str, str]) -> int:
    """Return the number of ranks requested on this node: the world size if nothing indicates other nodes."""
    from trainer.environments import slurm_step

    elsewhere = options.distributed_init_method is not None or "WORLD_SIZE" in environ or slurm_step.is_task(environ)
    return max(options.distributed_gpus or 0, 0 if elsewhere else options.distributed_world_size or 0)


def _script(arguments: Sequence[str], script_argv: Sequence[str] | None) -> Script | None:
    """Read ``--script`` and its arguments after ``--``; None without it. It excludes the task and all training options.

    Raises:
        RequestError: the script does not exist, or a flag has no effect.
    """
    flags = [option for option in describe(Script) if option.name != "args"]
    values, remaining = read_flags(arguments, flags)
    if "script" not in values:
        if values:
            raise RequestError(f"{_flag_names(flags)(next(iter(values)))} needs --script FILE")
        if script_argv is not None:
            raise RequestError("the arguments after -- are for a script: name it with --script FILE")
        return None
    path = Path(values["script"])
    if not values.get("module") and (path.is_dir() or not path.exists()):
        reason = "is a folder" if path.is_dir() else "does not exist"
        raise RequestError(f"--script {path} {reason}: name a Python file")
    _, unknown = read_flags(remaining, describe(Training))
    task_flags = [word for word in remaining if word not in unknown]
    if task_flags:
        flag = task_flags[0].partition("=")[0]
        if flag == "--task":
            raise RequestError("--script and --task exclude each other: keep one of them")
        raise RequestError(f"{flag} is for tasks, but --script runs a script; the script's own arguments follow --")
    if unknown:
        names = [flag for option in [*describe(Distributed), *flags] for flag in (option.flag, *option.aliases)]
        hint = nearest(unknown[0].partition("=")[0], names) or "; the script's own arguments follow --"
        raise RequestError(f"{quoted(unknown[0])} is not an option of the trainer{hint}")
    script = check(Script, values | {"script": str(path), "args": list(script_argv or ())}, where=_flag_names(flags))
    from trainer.contract.option_rules import require_one_launcher

    require_one_launcher(script)
    return script


def _check_training(arguments: Sequence[str]) -> TrainingSpec:
    """Return the training, checked before any process starts; the ranks, which import a user's own task, check its.

    Raises:
        RequestError: an option is wrong, options contradict each other, or data of a built-in task is missing.
    """
    from trainer.contract.builtin_tasks import check_data, options_schema
    from trainer.contract.fairseq_flags import remove_fairseq_flags
    from trainer.contract.option_rules import require_consistent, require_end
    from trainer.contract.task_files import require_optimizer

    training, remaining = _read(Training, arguments)
    schema = options_schema(training.task)
    if schema is None:
        if remaining and not remaining[0].startswith("--"):
            raise RequestError(f"unexpected argument {quoted(remaining[0])}")
        spec = TrainingSpec(training=training, task_flags=tuple(remaining))
    else:
        known = describe(schema)
        values, unknown = read_flags(remaining, known)
        unknown, notes = remove_fairseq_flags(unknown)
        if unknown:
            raise _unknown(unknown[0], training.task, known)
        task_options = check(schema, values, where=_flag_names(known))
        spec = TrainingSpec(training=training, task_options=task_options, notes=tuple(notes))
    require_consistent(training, spec.task_options)
    require_end(training, spec.task_options)
    require_optimizer(training)
    check_data(spec.task_options)
    return spec


def _read(schema: type[S], arguments: Sequence[str]) -> tuple[S, list[str]]:
    """Read the flags of a schema; return its object and the remaining arguments."""
    known = describe(schema)
    values, remaining = read_flags(arguments, known)
    return check(schema, values, where=_flag_names(known)), remaining


def _flag_names(options: Sequence[Option]) -> Any:
    flags = {option.name: option.flag for option in options}
    return lambda name: flags.get(name, name)


def _unknown(word: str, task: str, task_options: Sequence[Option]) -> RequestError:
    if not word.startswith("-"):
        return RequestError(f"unexpected argument {quoted(word)}")
    options = [*describe(Distributed), *describe(Training), *task_options]
    flags = [flag for option in options for flag in (option.flag, *option.aliases)]
    return unknown_option(word, task, flags)


def _help(arguments: Sequence[str]) -> int:
    """Print the help, with the options of the task given by ``--task``."""
    from trainer.contract.flag_help import render

    task = _value_after("--task", arguments)
    options = _task_options(task) if task else None
    text = render(task, options, min(shutil.get_terminal_size().columns, 120))
    return _print(printable_lines(text))


def _describe_task(arguments: Sequence[str]) -> int:
    """Print the options of a task as JSON, for the console, which does not import torch."""
    import msgspec

    from trainer.host.user_code import imported_files, printing_to_stderr

    name = _value_after("--describe-task", arguments)
    if not name:
        raise RequestError("--describe-task needs the name of a task")
    with printing_to_stderr():  # what the task's file prints
        options: object = _task_options(name)
    described = {"options": options, "mtimes_ns": imported_files()} if "--with-files" in arguments else options
    return _print(msgspec.json.encode(described).decode())


def _print(text: str) -> int:
    """Print a text and return the exit code; the reader may close the pipe early, as ``head`` does."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that flushing at exit does not fail too
        return BROKEN_PIPE_CODE
    return ExitCode.FINISHED


def _task_options(name: str) -> list[Option]:
    from trainer.contract.builtin_tasks import options_schema
    from trainer.tasks.registry import load_task

    schema = options_schema(name)
    with _refuse_os_errors():
        return describe(load_task(name).Options if schema is None else schema)


def _value_after(flag: str, arguments: Sequence[str]) -> str:
    for index, word in enumerate(arguments):
        if word.startswith(flag + "="):
            return word.partition("=")[2]
        if word == flag and index + 1 < len(arguments) and not arguments[index + 1].startswith("--"):
            return arguments[index + 1]
    return ""


if __name__ == "__main__":
    sys.exit(main())
