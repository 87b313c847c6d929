"""Runs the command of ``[report] on_finding`` when a finding is raised and when it is cleared."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress

import msgspec

from gputrain_tui.history.status_file import read_status
from gputrain_tui.state.finding_text import marking
from trainer.contract.errors import printable
from trainer.contract.record import Finding, RunDir, write_atomically
from trainer.contract.record.regular_file import open_to_append, read_json

COMMAND_TIMEOUT_S = 30.0
"""Time limit of a command of ``[report]``, after which it is killed."""
KIND_INTERVAL_S = 60.0
"""Minimum time between two calls for findings of one kind."""
_TOLD: msgspec.json.Decoder[list[Finding]] = msgspec.json.Decoder(list[Finding])


class FindingCommand:
    """The command of one run for its findings; it runs beside the supervisor, which does not wait for it.

    It is called for findings that mark a run, all but those that only inform. What was told is in the run directory,
    so that the successor of a killed supervisor does not tell it again.
    """

    def __init__(self, run_dir: RunDir, command: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._dir = run_dir
        self._command = command
        self._clock = clock
        self._told: dict[tuple[str, int | None], Finding] = {}
        """Findings of which was last told that they stand."""
        with suppress(OSError, ValueError):
            self._told = {(each.kind, each.rank): each for each in read_json(run_dir.told_findings, _TOLD)}
        self._standing = set(self._told)
        self._changes: Counter[str] = Counter()
        """Raises and clearings by kind since the last call for it."""
        self._due: dict[str, float] = {}
        """Time of the next call for a kind."""
        self._running: dict[subprocess.Popen[bytes], float] = {}
        """Commands that have not ended, with the time at which they are killed."""
        self._failed: list[str] = []
        """A line for each that could not be started."""

    def pids(self) -> set[int]:
        return {process.pid for process in self._running}

    def update(self, findings: Iterable[Finding]) -> None:
        """Start the command for what has changed; of several changes of a kind for the most urgent one."""
        now, standing = self._clock(), {(each.kind, each.rank): each for each in marking(findings)}
        self._changes.update(kind for kind, _ in self._standing ^ standing.keys())
        self._standing = set(standing)
        raised = [each for key, each in standing.items() if key not in self._told]
        cleared = [
            msgspec.structs.replace(each, time=time.time(), state="cleared")
            for key, each in self._told.items()
            if key not in standing
        ]
        first = {each.kind: each for each in reversed([*raised, *cleared])}
        due = [each for each in first.values() if now >= self._due.get(each.kind, now)]
        for change in due:
            self._due[change.kind] = now + KIND_INTERVAL_S
            kept = {key: each for key, each in self._told.items() if each.kind != change.kind}
            self._told = kept | {key: each for key, each in standing.items() if each.kind == change.kind}
        if due:
            with suppress(
                OSError
            ):  # before the calls: rather than twice, a killed supervisor tells a change not at all
                write_atomically(self._dir.told_findings, msgspec.json.encode(list(self._told.values())))
        for change in due:
            self._start(change, others=max(0, self._changes.pop(change.kind, 1) - 1))

    def problems(self) -> list[str]:
        """Return a line for each command that has failed since the last call; kill those that take too long."""
        failed, self._failed = self._failed, []
        for process, deadline in list(self._running.items()):
            if (code := process.poll()) is None and self._clock() < deadline:
                continue
            del self._running[process]
            if code is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if problem := describe_end(code):
                failed.append(self._problem(problem))
        return failed

    def wait(self, *, is_interrupted: Callable[[], bool]) -> list[str]:
        """Wait for the commands that run; return a line for each that has failed."""
        failed = []
        while self._running and not is_interrupted():
            with suppress(subprocess.TimeoutExpired):
                next(iter(self._running)).wait(0.05)
            failed += self.problems()
        return failed

    def _start(self, finding: Finding, *, others: int) -> None:
        status = read_status(self._dir)
        run = {
            "id": self._dir.path.name if status is None else status.run,
            "name": "" if status is None else status.recipe,
            "dir": str(self._dir.path),
        }
        facts = {name: getattr(finding, name) for name in ("kind", "state", "severity", "rank", "host", "step")}
        facts |= {"message": finding.message, "advice": finding.advice, "others": others}
        environment = {f"GPUTRAIN_RUN_{name.upper()}": printable(value) for name, value in run.items()}
        for name, value in facts.items():
            environment[f"GPUTRAIN_FINDING_{name.upper()}"] = "" if value is None else printable(str(value))
        text = msgspec.json.encode({"run": run, "finding": finding, "others": others})
        try:
            output = open_to_append(self._dir.on_finding_log)
        except OSError:  # a full disk, a deleted run directory
            output = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        given, giving = os.pipe()
        try:
            os.set_blocking(giving, False)  # a command that does not read may not hold up the supervisor
            with suppress(BlockingIOError):
                os.write(giving, text)
            process = subprocess.Popen(
                ["/bin/sh", "-c", self._command],
                env={**os.environ, **environment},
                stdin=given,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._running[process] = self._clock() + COMMAND_TIMEOUT_S
        except OSError as error:
            self._failed.append(self._problem(f"could not be started: {error.strerror}"))
        finally:
            for descriptor in (output, given, giving):
                os.close(descriptor)

    def _problem(self, problem: str) -> str:
        return f"report.on_finding {problem}; its output is in {self._dir.on_finding_log}"


def describe_end(code: int | None) -> str:
    """Return why a command has failed, by its exit code, None if it took too long; empty if it succeeded."""
    if code is None:
        return f"took longer than {COMMAND_TIMEOUT_S:.0f} s and was killed"
    if not code:
        return ""
    return f"was killed by signal {-code}" if code < 0 else f"has failed with exit code {code}"
