"""Reports a run to TensorBoard, wandb and commands, by ``[report]`` of its recipe; errors become warnings of the run.

Imported after the nodes are started, so that it does not delay the first step.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from gputrain_tui import paths
from gputrain_tui.history.recorded_recipe import recorded_table
from gputrain_tui.history.status_file import Status, read_status
from gputrain_tui.lifecycle.attempt_outcome import last_lines
from gputrain_tui.lifecycle.finding_command import COMMAND_TIMEOUT_S, FindingCommand, describe_end
from gputrain_tui.recipe.model import ReportOptions
from gputrain_tui.state.finding_text import run_mark
from trainer.contract.errors import printable
from trainer.contract.record import Finding, RunDir
from trainer.contract.record.regular_file import open_to_append
from trainer.contract.schema import check
from trainer.host.processes import RUN, descendants

if TYPE_CHECKING:
    from gputrain_tui.lifecycle.run_status import RunStatusWriter

SINK_TIMEOUT_S = 30.0
"""Time limit of a sink for the rest of the record after the end of the run, in which wandb uploads."""
POLL_S = 0.05
"""Time between two checks whether a stop request ends the wait for a process."""


class LiveSink:
    """Process that writes the record of a run to one sink, TensorBoard or wandb."""

    def __init__(self, run_dir: RunDir, name: str, target: str) -> None:
        self.name = name
        self._log = run_dir.logs / f"report-{name}.log"
        self._reported = False
        output = open_to_append(self._log)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "gputrain_tui.lifecycle.sink_program", str(run_dir.path), name, target],
                env={**os.environ, RUN: str(run_dir.path)},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        finally:
            os.close(output)

    def pids(self) -> set[int]:
        pid = self._process.pid
        return {pid, *descendants(pid)} if self._process.poll() is None else set()

    def problem(self) -> str:
        """Return the error of a process that has failed, at the first call; empty otherwise."""
        if self._reported or not self._process.poll():
            return ""
        self._reported = True
        lines = last_lines(self._log, 1)
        return f"report.{self.name} is no longer written: {printable(lines[0]) if lines else 'it was killed'}"

    def end(self, *, is_interrupted: Callable[[], bool]) -> str:
        """Wait until the rest of the record is written, at most ``SINK_TIMEOUT_S``; return an error or nothing."""
        stdin = self._process.stdin
        assert stdin is not None
        stdin.close()
        _wait(self._process, SINK_TIMEOUT_S, is_interrupted)
        left = self.pids()
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        if left:
            whole = "; `gputrain export --to tensorboard` writes the whole record" if self.name == "tensorboard" else ""
            return f"report.{self.name} is incomplete: its end was not written in time; see {self._log}{whole}"
        return self.problem()


class ReportSinks:
    """Live sinks of one run, and its commands for findings and for the end."""

    def __init__(self, run_dir: RunDir, options: ReportOptions) -> None:
        self._dir = run_dir
        self._options = options
        self._sinks: list[LiveSink] = []
        self._on_finding = None if options.on_finding is None else FindingCommand(run_dir, options.on_finding)

    def begin(self) -> list[str]:
        """Start the sinks; return a line for each one that cannot be started."""
        problems = []
        for name, target in (("tensorboard", self._options.tensorboard), ("wandb", self._options.wandb)):
            if target is None:
                continue
            try:
                self._sinks.append(LiveSink(self._dir, name, target))
            except OSError as error:
                problems.append(f"report.{name} is not written: {error.strerror}")
        return problems

    def pids(self) -> set[int]:
        """Return the processes of sinks and commands, which continue from one attempt to the next."""
        commands = set() if self._on_finding is None else self._on_finding.pids()
        return commands.union(*(sink.pids() for sink in self._sinks))

    def tell(self, findings: Iterable[Finding]) -> None:
        """Run ``on_finding`` for those that are new among the findings that stand, and for those that no longer do."""
        if self._on_finding is not None:
            self._on_finding.update(findings)

    def problems(self) -> list[str]:
        """Return a line for each sink or command that has failed since the last call."""
        commands = [] if self._on_finding is None else self._on_finding.problems()
        return [*commands, *(problem for sink in self._sinks if (problem := sink.problem()))]

    def end(self, writer: RunStatusWriter, *, is_interrupted: Callable[[], bool] = bool) -> None:
        """End the sinks and run ``on_end``; called once per run, after its final status, by the holder of the lock."""
        problems = [] if self._on_finding is None else self._on_finding.wait(is_interrupted=is_interrupted)
        problems += [sink.end(is_interrupted=is_interrupted) for sink in self._sinks]
        if self._options.on_end:
            problems.append(run_on_end(self._options.on_end, self._dir, writer.status, is_interrupted=is_interrupted))
        for problem in filter(None, problems):
            writer.warn(problem)


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
            problem = _await_on_end(process, is_interrupted)
    except OSError as error:
        problem = f"could not be started: {error.strerror}"
    finally:
        os.close(output)
    return problem and f"report.on_end {problem}; its output is in {log}"


def _await_on_end(process: subprocess.Popen[bytes], is_interrupted: Callable[[], bool]) -> str:
    if not _wait(process, COMMAND_TIMEOUT_S, is_interrupted):
        in_time = is_interrupted()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return "was killed before it ended" if in_time else describe_end(None)
    return describe_end(process.returncode)


def _wait(process: subprocess.Popen[bytes], timeout_s: float, is_interrupted: Callable[[], bool]) -> bool:
    """Wait for the end of a process; return whether it has ended before the time limit and the interrupt."""
    deadline = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < deadline and not is_interrupted():
        with suppress(subprocess.TimeoutExpired):
            process.wait(POLL_S)
    return process.returncode is not None


def read_report(run_dir: RunDir, *, adopted: bool) -> ReportSinks | None:
    """Return the report of a run by its recipe; None without ``[report]`` or a readable recipe.

    An adopted run must be the one that was started in this user's runs folder: stopping a run directory that was copied
    or made by someone else must not run its commands.
    """
    try:
        if adopted and not _was_started_here(run_dir):
            return None
        table = recorded_table(run_dir, "report")
        return ReportSinks(run_dir, check(ReportOptions, table, where=str)) if table else None
    except (OSError, ValueError, RecursionError):
        return None


def _was_started_here(run_dir: RunDir) -> bool:
    status = read_status(run_dir)
    known = None if status is None else status.inode
    return run_dir.path.parent.samefile(paths.runs_folder()) and known == run_dir.path.stat().st_ino


def report_end(run_dir: RunDir, writer: RunStatusWriter) -> None:
    """Report the end of a run whose supervisor was killed before its report ended."""
    report = read_report(run_dir, adopted=True)
    if report is not None:
        for problem in report.begin():
            writer.warn(problem)
        report.end(writer)
