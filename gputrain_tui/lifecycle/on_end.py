"""Runs the command of ``[report] on_end`` once per run, at its end; a failure becomes a warning of the run."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress

from gputrain_tui.history.status_file import Status
from gputrain_tui.state.finding_text import run_mark
from trainer.contract.errors import printable
from trainer.contract.record import RunDir

TIMEOUT_S = 30.0
"""Time limit of the command, after which it is killed; `gputrain run` in the foreground waits for it."""
POLL_S = 0.1
"""Time between two checks for a stop request, which ends the wait."""


def run_on_end(command: str, run_dir: RunDir, status: Status, *, is_interrupted: Callable[[], bool]) -> str:
    """Run the command unless it was run before; return a warning, empty if it succeeded.

    It gets the facts of the run as environment variables only.
    """
    log = run_dir.on_end_log
    try:
        # The process that creates the log runs the command: at most once, even if a supervisor was killed meanwhile.
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
        "GPUTRAIN_RUN_FINDING": printable(run_mark(status.findings)),
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
            problem = _await(process, is_interrupted)
    except OSError as error:
        problem = f"could not be started: {error.strerror}"
    finally:
        os.close(output)
    return problem and f"report.on_end {problem}; its output is in {log}"


def _await(process: subprocess.Popen[bytes], is_interrupted: Callable[[], bool]) -> str:
    waited_s = 0.0
    while waited_s < TIMEOUT_S and not is_interrupted():
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(POLL_S)
            how = f"was killed by signal {-code}" if code < 0 else f"has failed with exit code {code}"
            return how if code else ""
        waited_s += POLL_S
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return (
        f"took longer than {TIMEOUT_S:.0f} s and was killed" if waited_s >= TIMEOUT_S else "was killed before it ended"
    )
