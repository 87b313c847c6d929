"""Entry and exit of a worker process: guards set before anything else runs, exit without destructors."""

from __future__ import annotations

import dataclasses
import os
import pkgutil
import signal
import sys
import warnings
from typing import NoReturn

from trainer.agent import end_signal
from trainer.agent.assignment import RankAssignment
from trainer.agent.code_position import report_position
from trainer.agent.forkserver import set_variables
from trainer.agent.rank_failure import failure_of
from trainer.contract.errors import ExitCode, MachineNotReadyError, RequestError, TrainingError
from trainer.contract.outcome import RankReport, exit_code_of
from trainer.contract.record import RunDir
from trainer.host import process_guard
from trainer.host.stop_request import SAVE_SIGNALS, StopRequest


def enter(target: str, assignment: RankAssignment) -> NoReturn:
    """Run the function ``module:name`` as the rank in a process started for it, and end the process."""
    assert assignment.parent_pid is not None
    end_signal.block(ends=not assignment.is_script)
    process_guard.die_with_process(assignment.parent_pid)
    process_guard.set_signals()
    process_guard.print_stacks_of_forks()
    set_variables(assignment.environment)
    terminal = None if assignment.terminal is None else os.dup(assignment.terminal)
    if assignment.run_dir is not None:
        process_guard.redirect_output(RunDir(assignment.run_dir).rank_log(assignment.rank))
    else:
        process_guard.print_by_line()
    # A scheduler that ends a job may signal all of its processes, and a terminal its whole foreground group. A rank
    # that died of that could not save on the node agent's stop request. The agent ends ranks by other signals.
    stop_request = StopRequest([number for number in SAVE_SIGNALS if number != signal.SIGINT])

    def report(report: RankReport) -> None:
        if report.stoppable:
            stop_request.catch()
        assignment.report(report)

    def stop_requested() -> bool:
        return bool(stop_request.level) or assignment.stop_requested()

    leave(run(target, dataclasses.replace(assignment, report=report, stop_requested=stop_requested, terminal=terminal)))


def run(target: str, assignment: RankAssignment) -> int:
    """Call the rank's function, ``module:name``, and return the exit code.

    The function reports ``finished`` or ``failed`` itself; its exception is reported for it.
    """
    # numpy is no dependency; torch warns of that at the first use.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    if assignment.run_dir is not None:
        report_position(assignment.report, assignment.stack_requests)
    try:
        code = pkgutil.resolve_name(target)(assignment)
    except Exception as error:  # noqa: BLE001  (any error is reported, and the rank ends)
        expected, not_ready = isinstance(error, RequestError | TrainingError), isinstance(error, MachineNotReadyError)
        lines = str(error).strip().splitlines() or [type(error).__name__]
        failure = failure_of(
            error,
            kind="refused" if not_ready else "request" if isinstance(error, RequestError) else "exception",
            message=lines[0] if expected else "",
            rank=assignment.rank,
            host=assignment.host,
            defect=not expected,
        )
        if failure.traceback is not None:
            print(failure.traceback, file=sys.stderr)
        assignment.failed(failure)
        return exit_code_of(failure)
    return code if isinstance(code, int) else ExitCode.FINISHED


def leave(code: int) -> NoReturn:
    """End this process at once, without destructors: gloo's may hang or abort a successful rank."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
