"""Reports a run to TensorBoard, wandb and ``on_end``, by ``[report]`` of its recipe; errors become warnings of the run.

Imported after the nodes are started, so that it does not delay the first step.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from gputrain_tui import paths
from gputrain_tui.history.status_file import read_status
from gputrain_tui.lifecycle import leftovers
from gputrain_tui.lifecycle.attempt_outcome import last_lines
from gputrain_tui.lifecycle.on_end import run_on_end
from gputrain_tui.lifecycle.sink_state import read_sink_state
from gputrain_tui.recipe.model import ReportOptions
from gputrain_tui.recipe.source import MAX_RECIPE_BYTES
from trainer.contract.errors import printable
from trainer.contract.record import RunDir
from trainer.contract.record.regular_file import open_to_append, read_whole
from trainer.contract.schema import check
from trainer.host.processes import descendants

if TYPE_CHECKING:
    from gputrain_tui.lifecycle.run_status import RunStatusWriter

SINK_TIMEOUT_S = 30.0
"""Time limit of a sink for the rest of the record after the end of the run, in which wandb uploads."""
POLL_S = 0.05
"""Time between two checks whether a sink has ended."""


class LiveSink:
    """Process that writes the record of a run to one sink, TensorBoard or wandb."""

    def __init__(self, run_dir: RunDir, name: str, target: str) -> None:
        """Start the process; it ends with this one."""
        self.name = name
        self._log = run_dir.logs / f"report-{name}.log"
        self._reported = False
        output = open_to_append(self._log)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "gputrain_tui.lifecycle.sink_program", str(run_dir.path), name, target],
                env={**os.environ, leftovers.MARK: str(run_dir.path)},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        finally:
            os.close(output)

    def pids(self) -> set[int]:
        """Return the process and its descendants; none once it has ended."""
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
        deadline = time.monotonic() + SINK_TIMEOUT_S
        while self._process.poll() is None and time.monotonic() < deadline and not is_interrupted():
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(POLL_S)
        left = self.pids()
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        if left:
            whole = "; `gputrain export --to tensorboard` writes the whole record" if self.name == "tensorboard" else ""
            return f"report.{self.name} is incomplete: its end was not written in time; see {self._log}{whole}"
        return self.problem()


class RunReport:
    """Live sinks and end command of one run."""

    def __init__(self, run_dir: RunDir, options: ReportOptions) -> None:
        self._dir = run_dir
        self._options = options
        self._sinks: list[LiveSink] = []

    def begin(self) -> list[str]:
        """Start the sinks that are not finished; return a line for each one that cannot be started."""
        problems = []
        for name, target in (("tensorboard", self._options.tensorboard), ("wandb", self._options.wandb)):
            state = read_sink_state(self._dir, name)
            if target is None or (state is not None and state.finished):
                continue
            try:
                self._sinks.append(LiveSink(self._dir, name, target))
            except OSError as error:
                problems.append(f"report.{name} is not written: {error.strerror}")
        return problems

    def pids(self) -> set[int]:
        """Return the processes of the sinks, which continue from one attempt to the next."""
        return set().union(*(sink.pids() for sink in self._sinks))

    def problems(self) -> list[str]:
        """Return a line for each sink that has failed since the last call."""
        return [problem for sink in self._sinks if (problem := sink.problem())]

    def end(self, writer: RunStatusWriter, *, is_interrupted: Callable[[], bool] = bool) -> None:
        """End the sinks and run ``on_end``; called once per run, after its final status, by the holder of the lock.

        Args:
            writer: writes the warnings into the status.
            is_interrupted: whether to kill what has not ended and return.
        """
        problems = [sink.end(is_interrupted=is_interrupted) for sink in self._sinks]
        if self._options.on_end:
            problems.append(run_on_end(self._options.on_end, self._dir, writer.status, is_interrupted=is_interrupted))
        for problem in filter(None, problems):
            writer.warn(problem)


def read_report(run_dir: RunDir, *, adopted: bool) -> RunReport | None:
    """Return the report of a run by its recipe; None without ``[report]`` or a readable recipe.

    An adopted run must be the one that was started in this user's runs folder: stopping a run directory that was copied
    or made by someone else must not run its commands.
    """
    try:
        if adopted and not _was_started_here(run_dir):
            return None
        text = read_whole(run_dir.recipe, MAX_RECIPE_BYTES)
        if b"report" not in text:
            return None
        table = tomllib.loads(text.decode("utf-8")).get("report")
        return RunReport(run_dir, check(ReportOptions, table, where=str)) if isinstance(table, dict) else None
    except (OSError, ValueError, RecursionError):
        return None


def _was_started_here(run_dir: RunDir) -> bool:
    """Whether a run directory is in the runs folder and no copy.

    Raises:
        OSError: it cannot be read.
    """
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
