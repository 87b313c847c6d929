"""The next job of a run: the same one again by ``scontrol requeue``, or a successor where Slurm does not requeue it.

A successor starts when the job before is over (``--dependency=afterany``), and ``slurm.json`` names it from its
submission on: a supervisor of another job refuses the run, so that there are never two on one run directory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from gputrain_tui.history.plan_file import SlurmJob, SlurmSubmission, read_plan, read_submission
from gputrain_tui.history.recorded_recipe import recorded_table
from gputrain_tui.hosts import slurm_commands
from gputrain_tui.lifecycle.run_status import RunStatusWriter
from gputrain_tui.lifecycle.saving_time import saving_time_s
from gputrain_tui.plan import batch_script
from trainer.contract.errors import RequestError
from trainer.contract.home_folder import expand_home
from trainer.contract.record import Queued, RunDir, Step, decode_events, write_atomically
from trainer.contract.record.regular_file import read_tail

STATES = ("TIMEOUT", "PREEMPTED", "NODE_FAIL")
"""States of a job that is over after which the run goes on."""


def record_queued(run_dir: RunDir, job: slurm_commands.Job | None) -> None:
    """Record why a pending job waits; do nothing for other jobs."""
    if job is None or job.state != "PENDING":
        return
    event = Queued(
        time=time.time(), job=job.number, partition=job.partition, reason=job.reason, expected_start=job.starts
    )
    RunStatusWriter(run_dir, read_plan(run_dir)).record(event)


def last_queued(run_dir: RunDir, number: int) -> tuple[str, float | None] | None:
    """Return reason and expected start of a job's wait as recorded last; None if they are not."""
    try:
        lines = read_tail(run_dir.run_events)
    except OSError:
        return None
    waits = [event for event in decode_events(lines) if isinstance(event, Queued) and event.job == number]
    return (waits[-1].reason, waits[-1].expected_start) if waits else None


def asks_for_requeue(run_dir: RunDir, job: SlurmJob | None) -> bool:
    """Whether the recipe has ``slurm.requeue``, and the job is one that ``gputrain run`` has submitted."""
    return job is not None and job.batch and recorded_table(run_dir, "slurm").get("requeue") is True


def has_stepped_since(run_dir: RunDir, moment: float | None) -> bool:
    """Whether rank 0 has recorded a step since a moment, Unix seconds: the next job would make none either."""
    try:
        lines = read_tail(run_dir.rank_events(0)).partition(b"\n")[2]
    except OSError:
        return False
    return any(isinstance(event, Step) and event.time >= (moment or 0.0) for event in decode_events(lines))


def file_seen_by_all(run_dir: RunDir, workdir: str, *, make: bool) -> str:
    """Return a file in ``train.save_dir`` that all nodes must see, relative to their workdir or absolute.

    It is empty without that folder: the run directory, which all nodes see, then has the checkpoints.

    Args:
        run_dir: of the run.
        workdir: of the first node.
        make: whether to create it, as the first job of a run does; the later ones must find it.
    """
    folder = recorded_table(run_dir, "train").get("save_dir")
    if not isinstance(folder, str):
        return ""
    name = Path(folder) / f".{run_dir.path.name}.seen"
    if make:
        path = expand_home(workdir) / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        except OSError:  # the first save, or rank 0 as it starts, has the reason
            return ""
    return str(name)


def go_on(
    run_dir: RunDir, job: SlurmJob, lost: Sequence[str], *, saving_s: float | None, record: Callable[[str], None]
) -> str:
    """Put a job back into the queue, or submit its successor; return why neither is possible, empty if one is.

    Args:
        run_dir: of the run.
        job: the one that ends.
        lost: hosts that failed in it.
        saving_s: from the stop request to the end of all ranks, seconds; None without a request.
        record: writes that the run is queued, with a note on how.
    """
    submission = read_submission(run_dir)
    before_s = None if submission is None else _earlier_signal_s(run_dir, submission, saving_s)
    refused = _refusal(job.number)
    if not refused and before_s is None:
        intended = _leaving_out(_excluded(submission, lost))
        record(intended)  # before the command that ends this process
        try:
            slurm_commands.requeue(job.number)
        except RequestError as error:
            refused = str(error)
        else:
            if (note := leave_out(run_dir, job, lost)) != intended:
                record(note)
            return ""
    if submission is None:
        return refused
    why = refused
    if before_s is not None:
        submission = msgspec.structs.replace(
            submission, arguments=batch_script.with_signal(submission.arguments, before_s)
        )
        why = refused or f"saving needs the signal {before_s} s before the limit"
    try:
        number, note = submit_successor(run_dir, job, submission, lost)
    except RequestError as error:
        return "; ".join(filter(None, [refused, f"its successor was refused: {error}"]))
    record(f"{note} ({why})")
    with suppress(RequestError):
        record_queued(run_dir, slurm_commands.job(number))
    return ""


def _refusal(number: int) -> str:
    """Return why Slurm would not requeue a job, as far as is known before asking it; empty if it may."""
    try:
        now = slurm_commands.job(number)
    except RequestError as error:
        return str(error)
    return "" if now is None or now.requeue else f"Slurm does not requeue job {number}"


def leave_out(run_dir: RunDir, job: SlurmJob, lost: Sequence[str]) -> str:
    """Have a job that was put back into the queue leave out hosts that failed; return a note on that."""
    submission = read_submission(run_dir)
    if not (lost := _excluded(submission, lost)):
        return ""
    excluded = sorted({*job.excluded, *lost})
    try:
        slurm_commands.exclude(job.number, _joined(submission, excluded))
        write_atomically(run_dir.slurm, msgspec.json.encode(msgspec.structs.replace(job, excluded=excluded)))
    except (RequestError, OSError) as error:
        return f"Slurm may use {' and '.join(lost)} again: {error}"
    return _leaving_out(lost)


def submit_successor(
    run_dir: RunDir, job: SlurmJob, submission: SlurmSubmission, lost: Sequence[str]
) -> tuple[int, str]:
    """Submit the job that follows; return its number, and a note with it and the hosts that it leaves out.

    Raises:
        RequestError: Slurm refuses it, or the run directory cannot name it.
    """
    excluded = sorted({*job.excluded, *_excluded(submission, lost)})
    hosts = _joined(submission, excluded)
    environ = slurm_commands.submitter_environment()
    note = _leaving_out(excluded)
    try:
        arguments = batch_script.successor_arguments(submission.arguments, after=job.number, excluded=hosts)
        number = slurm_commands.submit(arguments, submission.script, environ)
    except RequestError as error:
        if not hosts:
            raise
        # Too few nodes are left; one that failed may come back.
        arguments = batch_script.successor_arguments(submission.arguments, after=job.number)
        number = slurm_commands.submit(arguments, submission.script, environ)
        note = f"it may use {' and '.join(excluded)} again, because without: {error}"
    following = SlurmJob(
        number=number, partition=job.partition, batch=True, earlier=[*job.earlier, job.number], excluded=excluded
    )
    try:
        write_atomically(run_dir.slurm, msgspec.json.encode(following))
    except OSError as error:
        with suppress(RequestError):
            slurm_commands.cancel(number)
        raise RequestError(f"cannot write {run_dir.slurm}: {error.strerror}") from None
    with suppress(OSError):  # without it the next job asks for the signal as this one did
        write_atomically(run_dir.submission, msgspec.json.encode(submission))
    return number, "; ".join(filter(None, [f"job {number} follows job {job.number}", note]))


def _earlier_signal_s(run_dir: RunDir, submission: SlurmSubmission, saving_s: float | None) -> int | None:
    """Return how long before its limit the next job needs its signal, seconds; None where it has it early enough.

    That is where saving took at most half of that time.
    """
    asked_s = batch_script.signal_before_limit_s(submission.arguments)
    measured_s = max(saving_s or 0.0, saving_time_s(run_dir) or 0.0)
    if asked_s is None or 2 * measured_s <= asked_s:
        return None
    limit = recorded_table(run_dir, "slurm").get("time")
    wanted_s = batch_script.save_before_limit_s(limit if isinstance(limit, str) else None, measured_s)
    return wanted_s if wanted_s > asked_s else None


def _excluded(submission: SlurmSubmission | None, lost: Sequence[str]) -> list[str]:
    """Return the hosts that failed and can be left out: none if the recipe names its hosts."""
    named = submission is None or any(word.startswith("--nodelist=") for word in submission.arguments)
    return [] if named else sorted(set(lost))


def _leaving_out(hosts: Sequence[str]) -> str:
    return f"leaving out {' and '.join(hosts)}, which failed" if hosts else ""


def _joined(submission: SlurmSubmission | None, hosts: Sequence[str]) -> str:
    """Return hosts together with those that the recipe leaves out; empty without any of ours."""
    given = batch_script.excluded_by(submission.arguments) if submission is not None else []
    return ",".join([*given, *hosts]) if hosts else ""
