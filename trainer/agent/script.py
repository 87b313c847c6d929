"""A user's script run as a rank, like ``python -u script.py args`` under torchrun, with its end in the record.

A module is run like ``python -u -m package.module args``.

The script runs in a process that forks from a small server without torch, so variables that it sets before it imports
torch have an effect, as in a new interpreter. Its end is reported before the interpreter is finalized, during which
torch's gloo may abort a successful process (pytorch issue 190489); the process then exits by ``os._exit``.
"""

from __future__ import annotations

import atexit
import io
import multiprocessing
import multiprocessing.process
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from trainer.agent import own_package
from trainer.agent.assignment import RankAssignment
from trainer.agent.rank_failure import error_line, failure_of, last_error, text_of
from trainer.agent.script_environment import RANK_PID
from trainer.contract.errors import ExitCode
from trainer.contract.outcome import is_lost_peer, lost_peer_text
from trainer.contract.record import EventWriter, Failure, RankStateName, RunDir
from trainer.contract.record.regular_file import size_of
from trainer.host.import_path import python_path
from trainer.host.stop_request import OWN_SIGNAL_S, STOP_CODES
from trainer.host.user_code import innermost_user_line

MODULE = "-m"
"""First word of a rank whose script is a module."""


def run_script(
    assignment: RankAssignment,
    *,
    at_start: Callable[[], None] = lambda: None,
    at_end: Callable[[bool], str] = lambda _: "",
    hidden: str | None = None,
) -> int:
    """Run the script, report its end, and return the exit code for ``os._exit``.

    Args:
        assignment: the rank.
        at_start: called when the process is like a new interpreter for the script.
        at_end: called when the script's code has ended, before its end is recorded, with whether it failed; returns
            why the end of the rank's record is not on disk, empty where it is.
        hidden: folder whose frames are removed from the script's tracebacks.
    """
    pid = os.getpid()
    # With this pid in the environment, trainer.watch leaves the rank's states to this module.
    os.environ[RANK_PID] = str(pid)
    write_state(assignment, "training")
    _imitate_new_interpreter(assignment.script_argv)
    at_start()
    code, failure, lost_pid = _run(assignment, hidden)
    if os.getpid() != pid:
        return code  # a process that the script has forked: its end is not the rank's
    own_package.restore()
    starts_ranks = assignment.starts_ranks()
    # Where its processes are the ranks, this one has no place in the record, and the node agent attributes its failure.
    record: Callable[..., str] = (lambda *_: "") if starts_ranks else partial(write_state, assignment)
    not_recorded = at_end(failure is not None or starts_ranks)
    if failure is not None and not (code in STOP_CODES and _is_stopped(assignment)):
        not_recorded = record("failed", failure) or not_recorded
        assignment.failed(failure, not_recorded=not_recorded, lost_pid=lost_pid)
        return code
    if failure is not None or assignment.stop_requested():
        # It exited on the stop request: its training may be incomplete.
        assignment.stopped(None, None, not_recorded=not_recorded)
        return ExitCode.STOPPED
    not_recorded = record("finished") or not_recorded
    assignment.finished(not_recorded=not_recorded)
    return ExitCode.FINISHED


def _is_stopped(assignment: RankAssignment) -> bool:
    """Whether a script that exited as after a signal was stopped: a scheduler may signal it before the node agent."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the agent sends it too, and the script has handled one
    until = time.monotonic() + OWN_SIGNAL_S
    while not (stopped := assignment.stop_requested()) and time.monotonic() < until:
        time.sleep(0.01)
    return stopped


def _imitate_new_interpreter(arguments: Sequence[str]) -> None:
    """Set arguments, import path, streams and multiprocessing as in a new interpreter with these arguments."""
    is_module = arguments[0] == MODULE
    sys.argv = list(arguments[1:] if is_module else arguments)
    own_folder = Path.cwd() if is_module else Path(arguments[0]).resolve().parent
    own_folders = [] if os.environ.get("PYTHONSAFEPATH") else [str(own_folder)]
    own_package.hide_from_script([*own_folders, *python_path(os.environ)])
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(write_through=True)
    # Otherwise the script's children, such as data loading processes, would come from the fork server too.
    multiprocessing.set_start_method(None, force=True)
    process: Any = multiprocessing.process
    process._parent_process = None
    multiprocessing.current_process().name = "MainProcess"


def _run(assignment: RankAssignment, hidden: str | None) -> tuple[int, Failure | None, int | None]:
    """Run the script as ``__main__``; return its exit code and its failure, None for a success.

    Third is the process for whose end it failed, where ``torch.multiprocessing`` names it.
    """
    log, log_start = assignment.log, 0 if assignment.log is None else size_of(assignment.log)
    try:
        first, *rest = assignment.script_argv
        code, main = _module(rest[0]) if first == MODULE else _script(first)
        sys.modules["__main__"] = main
        exec(code, main.__dict__)
        _run_exit_functions()
    except SystemExit as error:
        if error.code is None or error.code == 0:
            _run_exit_functions()
            return ExitCode.FINISHED, None, None
        exit_code = error.code if isinstance(error.code, int) else 1
        if not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
            text = f"the script exited with: {error.code}".splitlines()[0]
        else:
            line = last_error(log, since=log_start, any_line=True)
            text = f"the script called sys.exit({exit_code})" + (line and f": {lost_peer_text(line)}")
        where = innermost_user_line(error.__traceback__)
        failure = assignment.failure("exit", text + (where and f" ({type(error).__name__} at {where})"))
        return exit_code, failure, None
    except BaseException as error:  # noqa: BLE001  (any error is recorded, and the rank ends)
        error.__traceback__ = _without_own_frames(error.__traceback__)
        if hidden is not None:
            _hide_frames(error, hidden, set())
        sys.excepthook(type(error), error, error.__traceback__)
        where = innermost_user_line(error.__traceback__)
        text = lost_peer_text(error_line(error)) + (where and f" ({where})")
        failure = failure_of(error, kind=kind_of(error), message=text, rank=assignment.rank, host=assignment.host)
        return ExitCode.FAILED, failure, getattr(error, "error_pid", None)
    return ExitCode.FINISHED, None, None


def _script(name: str) -> tuple[CodeType, ModuleType]:
    """Return the code of a script and a new ``__main__`` module for it, with the interpreter's attributes."""
    path = str(Path(name).absolute())
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)  # without this module's own __future__ imports
    main = ModuleType("__main__")
    main.__dict__.update(
        __builtins__=__builtins__,
        __cached__=None,
        __annotations__={},
        __file__=path,
        __loader__=SourceFileLoader("__main__", path),
    )
    return code, main


def _module(name: str) -> tuple[CodeType, ModuleType]:
    """Return the code of a module and a new ``__main__`` module for it, as ``python -m`` makes them.

    Raises:
        SystemExit: there is no such module, or it cannot be run.
    """
    finder: Any = runpy
    try:
        _, spec, code = finder._get_module_details(name)  # as pdb and cProfile of the standard library find it
    except ImportError as error:
        raise SystemExit(f"python -m {name}: {error}") from None
    sys.argv[0] = spec.origin
    main = ModuleType("__main__")
    main.__dict__.update(
        __builtins__=__builtins__,
        __cached__=spec.cached,
        __file__=spec.origin,
        __loader__=spec.loader,
        __package__=spec.parent,
        __spec__=spec,
    )
    return code, main


def _run_exit_functions() -> None:
    """Join the script's threads and call its ``atexit`` functions, as the interpreter does at its end."""
    interpreter: Any = threading
    interpreter._shutdown()
    atexit._run_exitfuncs()


def _without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the outer frames, which are those of this module."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _hide_frames(error: BaseException | None, folder: str, done: set[int]) -> None:
    """Remove the frames of files in a folder from a traceback and those of its causes and contexts."""
    while error is not None and id(error) not in done:
        done.add(id(error))
        shown: TracebackType | None = None
        frames = []
        trace = error.__traceback__
        while trace is not None:
            frames.append(trace)
            trace = trace.tb_next
        for frame in reversed(frames):
            if not frame.tb_frame.f_code.co_filename.startswith(folder):
                frame.tb_next = shown
                shown = frame
        error.__traceback__ = shown
        _hide_frames(error.__cause__, folder, done)
        error = error.__context__


def kind_of(error: BaseException) -> str:
    """Return the kind of failure that an exception is."""
    # By its name: importing torch's class would load torch into scripts without it.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "out_of_memory"
    return "lost_peer" if is_lost_peer(text_of(error)) else "exception"


def write_state(assignment: RankAssignment, state: RankStateName, failure: Failure | None = None) -> str:
    """Record a state, and a failure; return why they are not on disk, empty if they are.

    Ends the writer's thread, so that the script's process has no thread of ours.
    """
    if assignment.run_dir is None:
        return ""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    event = assignment.state(
        state,
        pid=os.getpid(),
        threads=int(threads) if threads.isdecimal() else None,
        message=None if failure is None else failure.message,
    )
    try:
        writer = EventWriter(RunDir(assignment.run_dir).rank_events(assignment.rank), rank=assignment.rank)
    except OSError as error:  # as where the script has used up the descriptors of its process
        return error.strerror or str(error)
    writer.write(event)
    if failure is not None:
        writer.write(failure)
    writer.close()
    return writer.write_error
