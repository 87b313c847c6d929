"""Runs as jobs of Slurm: submits, follows and stops them, and records how Slurm ended them.

The job's script is the supervisor. ``python -m gputrain_tui.lifecycle.launchers.slurm_submission RUN_DIR [--lease]``
follows the job on the machine where it was submitted: it records why the job is pending, forwards stop requests and
ends with the job. With ``--lease`` the job is stopped when standard input is closed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import msgspec

from gputrain_tui.history.plan_file import SlurmJob, SlurmSubmission, read_job, read_plan, read_submission
from gputrain_tui.history.run_folders import Run, open_run
from gputrain_tui.history.run_reader import RunReader
from gputrain_tui.history.status_file import ENDED, read_status, write_status
from gputrain_tui.hosts import slurm_commands
from gputrain_tui.lifecycle import attempt_outcome, run_end
from gputrain_tui.lifecycle.attempt import AttemptResult, failed, with_note
from gputrain_tui.lifecycle.directory_watch import SILENT_S, SupervisorBeats, read_stop_file, write_stop_file
from gputrain_tui.lifecycle.launchers import slurm_successor
from gputrain_tui.lifecycle.launchers.slurm_cause import REQUEUED
from gputrain_tui.lifecycle.polling import MAX_QUERY_INTERVAL_S, MIN_QUERY_INTERVAL_S, wait_until
from gputrain_tui.lifecycle.report_sinks import report_end
from gputrain_tui.lifecycle.run_status import RunStatusWriter
from gputrain_tui.lifecycle.saving_time import saving_time_before
from gputrain_tui.plan.batch_script import SIGNAL, sbatch_arguments, supervisor_script
from gputrain_tui.plan.planner import Plan
from gputrain_tui.preflight.checks import with_location
from gputrain_tui.preflight.result import CheckResult, NotReadyError, error, ok, warning
from gputrain_tui.recipe.model import Recipe, SlurmOptions
from gputrain_tui.state import RunState
from trainer.contract.errors import ExitCode, RequestError
from trainer.contract.record import RunDir, create_atomically, write_atomically
from trainer.contract.record.regular_file import open_to_append
from trainer.contract.stop_level import StopLevel
from trainer.host.stop_request import STARTER_SIGNAL, STOP_REASONS, StopRequest

POLL_S = 0.2
SIGNAL_INTERVAL_S = 2.0
"""Time between two stop signals to a job, repeated as the first may precede the supervisor's signal handlers."""
RECORD_TIMEOUT_S = 5.0
"""Time for the supervisor of a completed job to record the end of the run."""
PUT_BACK_AFTER_LOSS = f"{REQUEUED}, as it lost the host of its supervisor"
FIX = "`sinfo` lists the partitions and nodes of the cluster"
NODES_FIX = "`sinfo -N -o '%N %P %G %c %m %f'` lists nodes with partition, GPUs, cores, memory and features"
NOT_OF_NODES = ("--job-name=", "--output=", "--open-mode=", "--ntasks-per-node=", "--requeue", SIGNAL)
"""Beginnings of the options of ``sbatch`` that any node fulfils."""
KEY_OF_WORD = {
    "partition": "partition",
    "account": "account",
    "qos": "qos",
    "time": "time",
    "memory": "mem",
    "feature": "constraint",
    "gres": "gpu_type",
    "node count": "nodes",
}
"""Key of ``[slurm]`` that a refusal by Slurm is about, by a word in its message."""


def check(recipe: Recipe, plan: Plan) -> CheckResult:
    """Return whether Slurm would accept the job of a run, from ``sbatch --test-only``."""
    arguments, script = _submission(recipe, plan, RunDir(Path(os.devnull)))
    try:
        accepted = slurm_commands.test(arguments, script)
    except RequestError as refused:
        refusal = str(refused)
        if "node configuration is not available" in refusal:
            return with_location(_without_fitting_nodes(refusal, recipe, arguments), recipe)
        keys = (f"slurm.{key}" for word, key in KEY_OF_WORD.items() if word in refusal.lower())
        return with_location(error("Slurm", refusal, FIX, key=next(keys, "cluster.launcher")), recipe)
    return ok("Slurm", accepted.removeprefix("sbatch: "))


def _without_fitting_nodes(refusal: str, recipe: Recipe, arguments: Sequence[str]) -> CheckResult:
    """Return what a refusal means that is also given for nodes that come back, for which sbatch queues the job."""
    drained: list[str] = []
    with suppress(RequestError):
        drained = slurm_commands.drained_hosts(None if recipe.slurm is None else recipe.slurm.partition)
    if drained:
        what = f"{refusal}; the job may wait for {', '.join(drained)}, down or drained"
        return warning("Slurm", what, "`sinfo --list-reasons` tells why", key="slurm.nodes")
    requests = [word for word in arguments if not word.startswith(NOT_OF_NODES)]
    return error("Slurm", f"{refusal}, requested were {' '.join(requests)}", NODES_FIX, key="slurm.nodes")


def _submission(recipe: Recipe, plan: Plan, run_dir: RunDir) -> tuple[list[str], str]:
    options = recipe.slurm or SlurmOptions()
    log = str(run_dir.logs / "supervisor.log") if run_dir.path.is_dir() else os.devnull
    saving_s = saving_time_before(recipe) if options.requeue else None
    arguments = sbatch_arguments(plan, options, name=recipe.name, output=log, saving_s=saving_s)
    return arguments, supervisor_script(str(run_dir.path), python=sys.executable, setup=options.setup)


def submit(run: Run, recipe: Recipe, plan: Plan) -> slurm_commands.Job | None:
    """Submit a run whose directory is written; return Slurm's record of the job, None if it cannot be read.

    Raises:
        NotReadyError: Slurm refuses the job; the run directory is deleted.
    """
    write_status(run.dir, msgspec.structs.replace(run.status, status="queued", supervisor=None))
    arguments, script = _submission(recipe, plan, run.dir)
    submission = SlurmSubmission(arguments=arguments, script=script)
    write_atomically(run.dir.submission, msgspec.json.encode(submission))
    try:
        number = slurm_commands.submit(arguments, script)
    except RequestError as refused:
        shutil.rmtree(run.dir.path, ignore_errors=True)
        raise NotReadyError([error("Slurm", str(refused))]) from None
    job = None
    with suppress(RequestError):
        job = slurm_commands.job(number)
    record = SlurmJob(number=number, partition="" if job is None else job.partition, batch=True)
    with suppress(FileExistsError):  # the job's supervisor may have written it
        create_atomically(run.dir.slurm, msgspec.json.encode(record))
    return job


def refresh(run: Run) -> Run:
    """Return a run with its current status; if its job is over without a recorded end, record one first."""
    job = read_job(run.dir)
    if job is None or run.state in ENDED:
        return run
    with suppress(RequestError):
        now = slurm_commands.job(job.number)
        if now is None or now.is_over:
            _record_end(run.dir, job.number)
        elif now.state == "PENDING" and run.state != "queued":
            _record_put_back(run.dir)
    return open_run(run.dir.path) or run


def _record_end(run_dir: RunDir, number: int, *, is_silent: bool = False) -> None:
    """Record the end of a run whose job is over, unless its supervisor records it within ``RECORD_TIMEOUT_S``.

    ``is_silent``: whether the supervisor has been silent for that time already.

    Raises:
        RequestError: Slurm does not answer.
    """
    job = slurm_commands.job(number)
    if not is_silent and (job is None or job.nodes):  # else it has no supervisor
        wait_until(lambda: run_end.is_recorded(run_dir), RECORD_TIMEOUT_S)
        job = slurm_commands.job(number)
    if job is not None and not job.is_over:
        return  # a job that is put back into the queue passes through the states of one that has ended
    with os.fdopen(open_to_append(run_dir.lock), "ab") as lock:
        if not run_end.take_lock(lock, patience_s=RECORD_TIMEOUT_S) or run_end.is_recorded(run_dir):
            return
        plan = read_plan(run_dir)
        if run_end.recorded_exit_code(run_dir, plan) is not None:
            return
        current = read_job(run_dir)
        if current is not None and current.number != number:
            return  # its supervisor has submitted a successor
        writer = RunStatusWriter(run_dir, plan)
        ended = _result(run_dir, job)
        state = _recorded_state(run_dir)
        if job is not None and _wants_successor(run_dir, job):
            problem = _submit_successor(run_dir, job, partial(writer.requeued, ended, state=state))
            if not problem:
                return
            ended = with_note(ended, f"and does not go on: {problem}")
        writer.close(ended, left=[], state=state)
        report_end(run_dir, writer)


def _recorded_state(run_dir: RunDir) -> RunState | None:
    """Return a run's state after its whole record, for one that no longer grows; None if it cannot be read."""
    state = RunState()
    try:
        with closing(RunReader(run_dir)) as reader:
            state.apply_all(reader.rest())
    except OSError:
        return None
    return state


def _record_put_back(run_dir: RunDir) -> None:
    """Record that Slurm has put a run back into its queue whose supervisor could not: its host is lost."""
    with os.fdopen(open_to_append(run_dir.lock), "ab") as lock:
        if not run_end.take_lock(lock, patience_s=0.0) or run_end.is_recorded(run_dir):
            return
        writer = RunStatusWriter(run_dir, read_plan(run_dir))
        if writer.status.status == "queued":
            return
        ended, state = AttemptResult(status="stopped", reason=PUT_BACK_AFTER_LOSS), _recorded_state(run_dir)
        if slurm_successor.asks_for_requeue(run_dir, read_job(run_dir)):
            writer.requeued(ended, state=state)
        else:  # as after the loss of another node: it goes on if Slurm starts it again
            writer.close(ended, left=[], state=state)
            report_end(run_dir, writer)


def _wants_successor(run_dir: RunDir, job: slurm_commands.Job) -> bool:
    """Whether a run with ``slurm.requeue`` goes on after a job that ended before its supervisor could see to that."""
    asks = slurm_successor.asks_for_requeue(run_dir, read_job(run_dir))
    return asks and job.state in slurm_successor.STATES and slurm_successor.has_stepped_since(run_dir, job.starts)


def _submit_successor(run_dir: RunDir, job: slurm_commands.Job, record: Callable[[str], None]) -> str:
    """Submit the job that follows one that is over, and record that; return why that is not possible, else empty."""
    before, submission = read_job(run_dir), read_submission(run_dir)
    if before is None or submission is None:
        return "the arguments of its submission are not recorded"
    lost: list[str] = []
    with suppress(RequestError):
        lost = slurm_commands.lost_hosts(job.nodes)
    try:
        record(slurm_successor.submit_successor(run_dir, before, submission, lost)[1])
    except RequestError as error:
        return str(error)
    return ""


def _result(run_dir: RunDir, job: slurm_commands.Job | None) -> AttemptResult:
    """Return the result of a run whose supervisor has recorded none, by the end of its job."""
    if job is None:
        return failed("slurm", _unrecorded("its Slurm job has ended (no longer known to Slurm)"))
    status = read_status(run_dir)
    if status is None or status.status == "queued":  # its supervisor has not begun
        if not job.launched:
            fix = f"{slurm_commands.UNSEEN} {run_dir.path}: GPUTRAIN_HOME must be on a disk that all nodes share"
            return failed("slurm", f"the job could not start on {job.nodes}, which {fix}")
        if job.exit_code == ExitCode.REFUSED:
            return failed("slurm", f"the job was refused on its node: {_last_line(run_dir)}")
    cause = slurm_commands.WORDS.get(job.state, f"its Slurm job has ended ({job.state.lower()})")
    if job.state == "CANCELLED":
        return AttemptResult(status="stopped", reason=read_stop_file(run_dir)[1] or cause)
    if job.state == "NODE_FAIL":
        lost: list[str] = []
        with suppress(RequestError):
            lost = slurm_commands.lost_hosts(job.nodes)
        return failed("node_lost", f"Slurm lost {' and '.join(lost)}" if lost else cause)
    return failed("slurm", _unrecorded(cause))


def _unrecorded(cause: str) -> str:
    return f"{cause}, and its supervisor did not record why"


def _last_line(run_dir: RunDir) -> str:
    """Return the last two lines of the supervisor's log; without any, that its node does not see the run directory."""
    lines = attempt_outcome.last_lines(run_dir.logs / "supervisor.log", 2)
    text = "; ".join(line.removeprefix("gputrain: ") for line in lines)
    return text or f"it does not see {run_dir.path}, which must be on a disk that all nodes share"


class JobStop:
    """Stop request to a job, whose signal is repeated until the job ends."""

    def __init__(self, run_dir: RunDir, job: SlurmJob, origin: int) -> None:
        """Make a request; ``origin``: signal that names it to the supervisor, one of ``STOP_REASONS``."""
        self._dir = run_dir
        self._first = job
        self._origin = origin
        self._due = 0.0
        """Time of the next signal, monotonic seconds."""

    def send(self, level: StopLevel) -> None:
        """Signal or cancel the job if the next signal is due; to be called until the run has ended."""
        if time.monotonic() < self._due:
            return
        status, job = read_status(self._dir), read_job(self._dir) or self._first  # a successor may have been submitted
        waiting = job.batch and status is not None and status.status == "queued"
        if level > StopLevel.SAVE or (waiting and _is_pending(job)):
            cancel(self._dir, job, STOP_REASONS[self._origin])
        elif job.batch:
            slurm_commands.signal_script(job.number, str(self._origin))
        else:
            slurm_commands.signal_steps(job.number, self._dir.path.name, "USR1")
        self._due = time.monotonic() + SIGNAL_INTERVAL_S


def cancel(run_dir: RunDir, job: SlurmJob, reason: str) -> None:
    """Cancel a job by ``scancel``; ``reason`` is kept for whoever records the end of a run whose supervisor does not.

    A supervisor that begins at this moment stops at once: it reads the stop file.
    """
    if not read_stop_file(run_dir)[0]:
        with suppress(OSError):  # its end then has Slurm's reason
            write_stop_file(run_dir, reason)
    slurm_commands.cancel(job.number)


def _is_pending(job: SlurmJob) -> bool:
    now = slurm_commands.job(job.number)
    return now is not None and now.state == "PENDING"


def stop(run: Run, job: SlurmJob, origin: int, *, timeout_s: float) -> Run:
    """Stop a run through Slurm, from any host of the cluster; return the ended run. RequestError: it does not end."""
    request, level = JobStop(run.dir, job, origin), StopLevel.SAVE
    deadline = time.monotonic() + timeout_s
    query_at = time.monotonic() + MIN_QUERY_INTERVAL_S
    if run.state in ENDED:
        if _is_pending(job):  # requeued
            slurm_commands.cancel(job.number)
        return run
    while True:
        now = open_run(run.dir.path) or run
        if now.state in ENDED:
            return now
        request.send(level)
        if time.monotonic() >= query_at:
            now, query_at = refresh(now), time.monotonic() + MIN_QUERY_INTERVAL_S
        if time.monotonic() >= deadline and level > StopLevel.SAVE:
            raise RequestError(f"stop: job {job.number} of {run.id} does not end; see `scontrol show job {job.number}`")
        if time.monotonic() >= deadline:
            level, deadline = StopLevel.NOW, deadline + timeout_s
        time.sleep(POLL_S)


def watch(run_dir: RunDir, *, leased: bool) -> subprocess.Popen[bytes]:
    """Start a process that runs ``follow`` for a submitted run."""
    arguments = [sys.executable, "-P", "-m", __name__, str(run_dir.path), *(["--lease"] if leased else [])]
    stdin = subprocess.PIPE if leased else subprocess.DEVNULL
    return subprocess.Popen(
        arguments, stdin=stdin, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )


def follow(run_dir: RunDir, *, leased: bool) -> int:
    """Follow a submitted run to its end, or without a lease until its job starts; return its exit code."""
    job = read_job(run_dir)
    assert job is not None
    request = JobStop(run_dir, job, STARTER_SIGNAL)
    query_at, interval_s, was_queued = 0.0, MIN_QUERY_INTERVAL_S, True
    shown: tuple[str, float | None] | None = None
    beats = SupervisorBeats(run_dir)
    with StopRequest(lease=leased) as stop_request:
        while True:
            is_recorded = run_end.is_recorded(run_dir)  # before the status is read, which then has the exit code
            status = read_status(run_dir)
            if is_recorded or status is None:
                return ExitCode.FAILED if status is None or status.exit_code is None else status.exit_code
            if not leased and status.status != "queued":
                return ExitCode.FINISHED
            if status.status == "queued" and not was_queued:  # requeued: the wait is shown at once
                query_at, interval_s = time.monotonic(), MIN_QUERY_INTERVAL_S
            was_queued = status.status == "queued"
            if not was_queued and beats.silent_s() >= SILENT_S:  # its host may be lost
                query_at, interval_s = min(query_at, time.monotonic() + MIN_QUERY_INTERVAL_S), MIN_QUERY_INTERVAL_S
            if (current := read_job(run_dir) or job).number != job.number:
                job, shown = current, None  # a successor, whose wait the supervisor before has recorded at first
                interval_s = MIN_QUERY_INTERVAL_S
                query_at = time.monotonic() + interval_s
            with suppress(RequestError):
                if stop_request.level:
                    request.send(stop_request.level)
                    interval_s = MIN_QUERY_INTERVAL_S
                if time.monotonic() >= query_at:
                    now = slurm_commands.job(job.number)
                    if now is None or now.is_over:
                        _record_end(run_dir, job.number, is_silent=beats.silent_s() >= RECORD_TIMEOUT_S)
                    elif now.state == "PENDING" and status.status != "queued":
                        _record_put_back(run_dir)
                    elif (shown or slurm_successor.last_queued(run_dir, job.number)) != (now.reason, now.starts):
                        shown = (now.reason, now.starts)
                        slurm_successor.record_queued(run_dir, now)
                    query_at = time.monotonic() + interval_s
                    interval_s = min(2 * interval_s, MAX_QUERY_INTERVAL_S)
            stop_request.wait(POLL_S)


if __name__ == "__main__":
    sys.exit(follow(RunDir(Path(sys.argv[1]).absolute()), leased="--lease" in sys.argv[2:]))
