"""Runs the command of ``[report] on_end`` once for a run that has ended; it costs the run a warning at most."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress

from gputrain_tui.history.status_file import Status
from trainer.contract.errors import printable
from trainer.contract.record import RunDir

TIMEOUT_S = 30.0
"""How long the command may take, then it is killed: a command in the foreground ends only after it."""
POLL_S = 0.1
"""Time between two looks for a stop request, which ends the wait."""


def run_on_end(command: str, run_dir: RunDir, status: Status, *, hurried: Callable[[], bool]) -> str:
    """Run the command unless it was run; return a warning, empty where it has succeeded.

    Args:
        command: a line for the shell, which finds everything about the run in its environment and nowhere else.
        run_dir: of the run; the log of the command is in it.
        status: how the run has ended.
        hurried: whether somebody does not want to wait any longer.
    """
    log = run_dir.on_end_log
    try:
        # Whoever makes the log runs the command, also where a supervisor was killed while it ended the run.
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return ""
    except OSError:  # a full disk, a deleted run directory
        output = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    environment = {
        "GPUTRAIN_RUN_ID": status.run,
        "GPUTRAIN_RUN_NAME": status.recipe,
        "GPUTRAIN_RUN_STATUS": status.status,
        "GPUTRAIN_RUN_EXIT_CODE": "" if status.exit_code is None else str(status.exit_code),
        "GPUTRAIN_RUN_MESSAGE": printable(status.message or ""),
        "GPUTRAIN_RUN_DIR": str(run_dir.path),
    }
    try:
        with subprocess.Popen(
            ["/bin/sh", "-c", command],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process:
            problem = _await(process, hurried)
    except OSError as error:
        problem = f"could not be started: {error.strerror}"
    finally:
        os.close(output)
    return problem and f"report.on_end {problem}; its output is in {log}"


def _await(process: subprocess.Popen[bytes], hurried: Callable[[], bool]) -> str:
    waited_s = 0.0
    while waited_s < TIMEOUT_S and not hurried():
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(POLL_S)
            how = f"was killed by signal {-code}" if code < 0 else f"has failed with exit code {code}"
            return how if code else ""
        waited_s += POLL_S
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return f"took longer than {TIMEOUT_S:.0f} s and was killed" if waited_s >= TIMEOUT_S else "was not waited for"
