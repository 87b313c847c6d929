"""Runs as jobs of Slurm: submits, follows and stops them, and records how Slurm ended them.

The job's script is the supervisor. ``python -m gputrain_tui.lifecycle.slurm_jobs RUN_DIR [--lease]`` follows the job on
the machine where it was submitted: it records why the job is pending, forwards stop requests and ends with the job.
With ``--lease`` the job is stopped when standard input is closed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

import msgspec

from gputrain_tui.history.plan_file import read_plan
from gputrain_tui.history.run_folders import Run, open_run
from gputrain_tui.history.slurm_file import SlurmJob, read_job
from gputrain_tui.history.status_file import ENDED, read_status, write_status
from gputrain_tui.hosts import slurm
from gputrain_tui.lifecycle import attempt_outcome, settle
from gputrain_tui.lifecycle.attempt import AttemptResult
from gputrain_tui.lifecycle.launchers.slurm import UNSEEN, place_on_allocation
from gputrain_tui.lifecycle.report import report_end
from gputrain_tui.lifecycle.run_status import RunStatusWriter
from gputrain_tui.plan.batch_script import sbatch_words, supervisor_script
from gputrain_tui.plan.planner import Plan, PlannedNode
from gputrain_tui.preflight.result import CheckResult
from gputrain_tui.recipe.model import Recipe, SlurmOptions
from gputrain_tui.tables import size
from trainer.contract.errors import ExitCode, RequestError
from trainer.contract.outcome import LOST_PEER_KINDS, node_outcome
from trainer.contract.record import Failure, Queued, RunDir, write_atomically
from trainer.contract.record.regular_file import open_to_append, size_of
from trainer.contract.stop_level import StopLevel
from trainer.host.stop_request import LEASE_LOST, STARTER_SIGNAL, STOP_REASONS, StopRequest

POLL_S = 0.2
"""Time between two reads of a run's status."""
MIN_QUERY_INTERVAL_S, MAX_QUERY_INTERVAL_S = 1.0, 15.0
"""First and longest time between two queries to Slurm; it doubles, to spare the one controller of the cluster."""
SIGNAL_INTERVAL_S = 2.0
"""Time between two stop signals to a job, repeated as the first may precede the supervisor's signal handlers."""
RECORD_TIMEOUT_S = 5.0
"""Time for the supervisor of a completed job to record the end of the run."""
LINES = 40
"""Last lines of a log that are searched for messages of Slurm."""
REQUEUED = "Slurm put it back into its queue"
SLURM_MESSAGES = (
    ("DUE TO TIME LIMIT", slurm.WORDS["TIMEOUT"]),
    ("DUE TO PREEMPTION", slurm.WORDS["PREEMPTED"]),
    ("DUE TO NODE FAILURE", slurm.WORDS["NODE_FAIL"]),
    ("DUE TO JOB REQUEUE", REQUEUED),
)
"""Text that Slurm prints when it ends a job or step, and the cause; at that time no command reports the cause."""
CANCELLED = "CANCELLED AT"
"""Text of every cancellation; without a cause after it: ``scancel``, or the supervisor of a run that has failed."""
NODE_FAILURE = re.compile(r"^srun: error: Node failure on ", re.MULTILINE)
"""Line of the step whose node was lost."""
OUT_OF_MEMORY = re.compile(
    r"oom.kill|out of memory|exceeded (?:job |step )?memory limit(?: \(\d+ > (\d+)\))?", re.IGNORECASE
)
"""Message of Slurm that a node's processes exceeded the memory limit; some have the limit in bytes."""
CONSEQUENCES = frozenset({*LOST_PEER_KINDS, "signal", "exit", "out_of_memory", "join_timeout"})
"""Kinds of failures that may be consequences of Slurm's actions; other kinds are causes themselves."""
KILLED_WORKER = "killed by signal"
"""Part of the error of torch's DataLoader if one of its worker processes was killed."""
USER_STOP_SUFFIXES = ("USR1", "USR2", "INT", "on another host", *STOP_REASONS.values())
"""Ends of the reasons of stops that were requested by a person, not by Slurm."""
FIX = "`sinfo` lists the partitions and nodes of the cluster"
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
    if "SLURM_JOB_ID" in os.environ:
        return CheckResult(status="ok", check="Slurm", what=f"in job {os.environ.get('SLURM_JOB_ID')}")
    words, script = _submission(recipe, plan, RunDir(Path(os.devnull)))
    try:
        accepted = slurm.test(words, script)
    except RequestError as error:
        refusal = str(error)
        key = next(
            (("slurm", key) for word, key in KEY_OF_WORD.items() if word in refusal.lower()), ("cluster", "launcher")
        )
        where = recipe.where(*key)
        return CheckResult(status="error", check="Slurm", what=refusal, fix=FIX, key=".".join(key), where=where)
    return CheckResult(status="ok", check="Slurm", what=accepted.removeprefix("sbatch: "))


def _submission(recipe: Recipe, plan: Plan, run_dir: RunDir) -> tuple[list[str], str]:
    options = recipe.slurm or SlurmOptions()
    log = str(run_dir.logs / "supervisor.log") if run_dir.path.is_dir() else os.devnull
    words = sbatch_words(plan, options, name=recipe.name, output=log)
    return words, supervisor_script(str(run_dir.path), python=sys.executable, setup=options.setup)


def submit(run: Run, recipe: Recipe, plan: Plan) -> slurm.Job | None:
    """Submit a run whose directory is written; return Slurm's record of the job, None if it cannot be read.

    Raises:
        RequestError: Slurm refuses the job; its message in one line.
    """
    write_status(run.dir, msgspec.structs.replace(run.status, status="queued", supervisor=None))
    number = slurm.submit(*_submission(recipe, plan, run.dir))
    found = None
    with suppress(RequestError):
        found = slurm.job(number)
    job = SlurmJob(number=number, partition="" if found is None else found.partition, batch=True)
    with suppress(FileExistsError), run.dir.slurm.open("xb") as file:  # the job's supervisor may have written it
        file.write(msgspec.json.encode(job))
    return found


def record_queued(run_dir: RunDir, job: slurm.Job | None) -> None:
    """Record why a pending job waits; do nothing for other jobs."""
    if job is None or job.state != "PENDING":
        return
    event = Queued(
        time=time.time(), job=job.number, partition=job.partition, reason=job.reason, expected_start=job.starts
    )
    RunStatusWriter(run_dir, read_plan(run_dir), now=time.time).record(event)


def place(run_dir: RunDir, plan: Plan) -> Plan:
    """Return the plan on the hosts of this process's allocation; write it and the hosts into the run directory.

    Raises:
        RequestError: the allocation has too few hosts.
    """
    chosen = place_on_allocation(plan)
    before, status = read_job(run_dir), read_status(run_dir)
    job = SlurmJob(
        number=int(os.environ.get("SLURM_JOB_ID", "0")),
        partition=os.environ.get("SLURM_JOB_PARTITION", ""),
        nodes=[node.host for node in chosen.nodes],
        batch=before.batch if before is not None else status is not None and status.status == "queued",
    )
    write_atomically(run_dir.slurm, msgspec.json.encode(job))
    write_atomically(run_dir.plan, msgspec.json.encode(chosen))
    return chosen


def requeues(run_dir: RunDir) -> bool:
    """Whether Slurm requeues the job of a run after the loss of a node."""
    job = read_job(run_dir)
    with suppress(RequestError):
        found = slurm.job(job.number) if job is not None and job.batch else None
        return found is not None and found.requeue
    return False


def log_sizes(run_dir: RunDir) -> dict[str, int]:
    """Return the sizes of the logs that Slurm prints into, by name; taken at the start of an attempt."""
    return {path.name: size_of(path) for path in [*run_dir.logs.glob("node-*.log"), run_dir.logs / "supervisor.log"]}


def with_slurm_cause(
    ended: AttemptResult,
    plan: Plan,
    run_dir: RunDir,
    *,
    since: Mapping[str, int] = MappingProxyType({}),
    environ: Mapping[str, str] = os.environ,
    requeues: Callable[[RunDir], bool] = requeues,
) -> AttemptResult:
    """Return the result of a run with the cause that Slurm printed into its logs: time limit, memory, lost node.

    Args:
        ended: result by the record of the run.
        plan: plan of the run.
        run_dir: run directory, with the logs.
        since: sizes of the logs at the start of the last attempt.
        environ: environment of the job.
        requeues: returns whether Slurm requeues the job after the loss of a node.
    """
    if ended.status == "finished" or (ended.status == "stopped" and str(ended.reason).endswith(USER_STOP_SUFFIXES)):
        return ended
    node_texts = [(node, _slurm_lines(run_dir.node_log(node.node), since)) for node in plan.nodes]
    texts = [*(text for _, text in node_texts), _slurm_lines(run_dir.logs / "supervisor.log", since)]
    last = [lines[-1] for text in texts if (lines := [line for line in text.splitlines() if CANCELLED in line])]
    cause = next((cause for mark, cause in SLURM_MESSAGES if any(mark in line for line in last)), "")
    failure = ended.failure
    is_consequence = failure is None or failure.kind in CONSEQUENCES or KILLED_WORKER in failure.message
    for node, text in node_texts:
        if is_consequence and (found := OUT_OF_MEMORY.search(text)) is not None:
            limit = int(found[1]) if found[1] else _memory_bytes(environ)
            return _out_of_memory(node, failure, limit, run_dir)
    lost = [node for node, text in node_texts if NODE_FAILURE.search(text) or _has_lost_lease(run_dir, node)]
    if cause == slurm.WORDS["NODE_FAIL"] or (lost and is_consequence):
        return _node_lost(lost, requeued=bool(cause) and requeues(run_dir))
    if ended.status == "stopped":
        return AttemptResult(status="stopped", reason=cause or slurm.WORDS["CANCELLED"]) if last else ended
    for node in plan.nodes:
        for line in attempt_outcome.last_lines(run_dir.node_log(node.node), LINES):
            if UNSEEN in line:
                return _failed("slurm", line, host=node.host)
    return _failed("slurm", cause) if cause and cause != REQUEUED else ended


def _slurm_lines(path: Path, since: Mapping[str, int]) -> str:
    """Return the lines that Slurm printed at the end of a log of this attempt."""
    lines = attempt_outcome.last_lines(path, LINES, since=since.get(path.name, 0))
    return "\n".join(line for line in lines if line.startswith(("srun: ", "slurmstepd")))


def _node_lost(nodes: Sequence[PlannedNode], *, requeued: bool) -> AttemptResult:
    ranks = [rank for node in nodes for rank in node.ranks]
    hosts = [node.host for node in nodes]
    message = (
        f"Slurm lost {' and '.join(hosts)} with {attempt_outcome.rank_names(ranks)}"
        if hosts
        else slurm.WORDS["NODE_FAIL"]
    )
    if requeued:
        return AttemptResult(status="stopped", reason=f"{message}, and put the run back into its queue")
    if not hosts:
        return _failed("node_lost", message)
    return _failed("node_lost", f"{message}; see `scontrol show node {','.join(hosts)}`", host=hosts[0])


def _has_lost_lease(run_dir: RunDir, node: PlannedNode) -> bool:
    """Whether a node agent ended because its lease broke; the supervisor itself returns a lease before ending it."""
    outcome = node_outcome(run_dir, node.node)
    return outcome is not None and outcome.stop_reason == LEASE_LOST


def _memory_bytes(environ: Mapping[str, str]) -> int | None:
    """Return the memory limit per node of a job, from ``SLURM_MEM_PER_NODE``; None without one."""
    megabytes = environ.get("SLURM_MEM_PER_NODE", "")
    return int(megabytes) << 20 if megabytes.isdecimal() else None


def _out_of_memory(node: PlannedNode, failure: Failure | None, limit: int | None, run_dir: RunDir) -> AttemptResult:
    rank = failure.rank if failure is not None and failure.host == node.host else None
    rank = node.ranks[0] if rank is None and len(node.ranks) == 1 else rank
    names = attempt_outcome.rank_names(node.ranks if rank is None else [rank])
    if rank is None and (largest := attempt_outcome.largest_rank(run_dir, node.node)) is not None:
        names += f" (rank {largest} used the most)"
    allowed = "" if limit is None else f" of {size(limit)} per node"
    message = f"{names} on {node.host} ran out of memory: Slurm enforced the job's limit{allowed}; raise slurm.mem"
    ended = _failed("out_of_memory", message, host=node.host)
    assert ended.failure is not None
    ended.failure.rank = rank
    return ended


def _failed(kind: str, message: str, *, host: str | None = None) -> AttemptResult:
    failure = Failure(time=time.time(), kind=kind, host=host, message=message)
    return AttemptResult(status="failed", failure=failure)


def refresh(run: Run) -> Run:
    """Return a run with its current status; if its job is over without a recorded end, record one first."""
    job = read_job(run.dir)
    if job is None or run.state in ENDED:
        return run
    with suppress(RequestError):
        found = slurm.job(job.number)
        if found is None or found.is_over:
            _record_end(run.dir, found)
    return open_run(run.dir.path) or run


def _record_end(run_dir: RunDir, job: slurm.Job | None) -> None:
    """Record the end of a run whose job is over, unless its supervisor records it within ``RECORD_TIMEOUT_S``."""
    deadline = time.monotonic() + RECORD_TIMEOUT_S
    while not settle.is_settled(run_dir) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    with os.fdopen(open_to_append(run_dir.lock), "ab") as lock:
        if not settle.take_lock(lock, patience_s=RECORD_TIMEOUT_S) or settle.is_settled(run_dir):
            return
        plan = read_plan(run_dir)
        if settle.recorded_exit_code(run_dir, plan) is not None:
            return
        lost: list[str] = []
        state, status = "" if job is None else job.state, read_status(run_dir)
        began = status is not None and status.status != "queued"
        if job is not None and not job.launched and not began:
            fix = f"{UNSEEN} {run_dir.path}: GPUTRAIN_HOME must be on a disk that all nodes share"
            ended = _failed("slurm", f"the job could not start on {job.nodes}, which {fix}")
        elif job is not None and job.exit_code == ExitCode.REFUSED and not began:
            ended = _failed("slurm", f"the job was refused on its node: {_last_line(run_dir)}")
        elif state == "CANCELLED":
            ended = AttemptResult(status="stopped", reason=slurm.WORDS[state])
        elif job is not None and state == "NODE_FAIL":
            with suppress(RequestError):
                lost = slurm.lost_hosts(job.nodes)
            ended = _failed("node_lost", f"Slurm lost {' and '.join(lost)}" if lost else slurm.WORDS[state])
        else:
            cause = slurm.WORDS.get(state) or f"its Slurm job has ended ({state.lower() or 'no longer known to Slurm'})"
            ended = _failed("slurm", f"{cause}, and its supervisor did not record why")
        writer = RunStatusWriter(run_dir, plan, now=time.time)
        writer.close(ended, left=[])
        report_end(run_dir, writer)


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
        self._job = job
        self._origin = origin
        self._due = 0.0
        """Time of the next signal, monotonic seconds."""

    def send(self, level: StopLevel) -> None:
        """Signal or cancel the job if the next signal is due; to be called until the run has ended.

        Raises:
            RequestError: Slurm does not answer.
        """
        if time.monotonic() < self._due:
            return
        status = read_status(self._dir)
        waiting = self._job.batch and status is not None and status.status == "queued"
        if level > StopLevel.SAVE or (waiting and (found := slurm.job(self._job.number)) and found.state == "PENDING"):
            slurm.cancel(self._job.number)
        elif self._job.batch:
            slurm.signal_script(self._job.number, str(self._origin))
        else:
            slurm.signal_steps(self._job.number, self._dir.path.name, "USR1")
        self._due = time.monotonic() + SIGNAL_INTERVAL_S


def stop(run: Run, job: SlurmJob, origin: int, *, timeout_s: float) -> Run:
    """Stop a run through Slurm, from any host of the cluster; return the ended run.

    Raises:
        RequestError: Slurm does not answer, or the run does not end.
    """
    request, level = JobStop(run.dir, job, origin), StopLevel.SAVE
    deadline = time.monotonic() + timeout_s
    query_at = time.monotonic() + MIN_QUERY_INTERVAL_S
    if run.state in ENDED:
        if (waiting := slurm.job(job.number)) is not None and waiting.state == "PENDING":  # requeued
            slurm.cancel(job.number)
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
    words = [sys.executable, "-P", "-m", __name__, str(run_dir.path), *(["--lease"] if leased else [])]
    stdin = subprocess.PIPE if leased else subprocess.DEVNULL
    return subprocess.Popen(
        words, stdin=stdin, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )


def follow(run_dir: RunDir, *, leased: bool) -> int:
    """Follow a submitted run to its end, or without a lease until its job starts; return its exit code."""
    job = read_job(run_dir)
    assert job is not None
    request = JobStop(run_dir, job, STARTER_SIGNAL)
    query_at, interval_s = 0.0, MIN_QUERY_INTERVAL_S
    shown: tuple[str, float | None] | None = None
    with StopRequest(lease=leased) as stop_request:
        while True:
            status = read_status(run_dir)
            if settle.is_settled(run_dir) or status is None:
                return ExitCode.FAILED if status is None or status.exit_code is None else status.exit_code
            if not leased and status.status != "queued":
                return ExitCode.FINISHED
            with suppress(RequestError):
                if stop_request.level:
                    request.send(stop_request.level)
                    interval_s = MIN_QUERY_INTERVAL_S
                if time.monotonic() >= query_at:
                    found = slurm.job(job.number)
                    if found is None or found.is_over:
                        _record_end(run_dir, found)
                    elif shown != (found.reason, found.starts):
                        shown = (found.reason, found.starts)
                        record_queued(run_dir, found)
                    query_at = time.monotonic() + interval_s
                    interval_s = min(2 * interval_s, MAX_QUERY_INTERVAL_S)
            stop_request.wait(POLL_S)


if __name__ == "__main__":
    sys.exit(follow(RunDir(Path(sys.argv[1]).absolute()), leased="--lease" in sys.argv[2:]))
