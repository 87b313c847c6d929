"""Cause of the end of a run by the messages that Slurm printed into its logs: time limit, memory, lost node."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from gputrain_tui.history.plan_file import read_job
from gputrain_tui.hosts import slurm_commands
from gputrain_tui.lifecycle import attempt_outcome
from gputrain_tui.lifecycle.attempt import AttemptResult, failed
from gputrain_tui.lifecycle.restart import SCRIPT_FLAG
from gputrain_tui.plan.planner import Plan, PlannedNode
from gputrain_tui.tables import ranks_text, size
from trainer.contract.errors import RequestError
from trainer.contract.outcome import LOST_PEER_KINDS, node_outcome
from trainer.contract.record import Failure, RunDir
from trainer.contract.record.regular_file import size_of
from trainer.host.stop_request import LEASE_LOST, STOP_REASONS

LINES = 40
"""Last lines of a log that are searched for messages of Slurm."""
REQUEUED = "Slurm put it back into its queue"
LIMIT_IS_NEAR = "its time limit in Slurm is near"
PUT_BACK = "and put the run back into its queue"
SLURM_MESSAGES = (
    ("DUE TO TIME LIMIT", slurm_commands.WORDS["TIMEOUT"]),
    ("DUE TO PREEMPTION", slurm_commands.WORDS["PREEMPTED"]),
    ("DUE TO NODE FAILURE", slurm_commands.WORDS["NODE_FAIL"]),
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
NO_GPUS = "Invalid generic resource (gres) specification"
"""Message of srun that the job does not have the GPUs of a step."""
CONSEQUENCES = frozenset({*LOST_PEER_KINDS, "signal", "exit", "out_of_memory", "join_timeout"})
"""Kinds of failures that may be consequences of Slurm's actions; other kinds are causes themselves."""
KILLED_WORKER = "killed by signal"
"""Part of the error of torch's DataLoader if one of its worker processes was killed."""
USER_STOP_SUFFIXES = ("USR1", "USR2", "INT", "on another host", *STOP_REASONS.values())
"""Ends of the reasons of stops that were requested by a person, not by Slurm."""


def is_for_slurm(reason: str) -> bool:
    """Whether a stop has a reason of Slurm's after which a run with ``slurm.requeue`` goes on."""
    words = slurm_commands.WORDS
    return reason.startswith((LIMIT_IS_NEAR, words["TIMEOUT"], words["PREEMPTED"])) or is_put_back(reason)


def is_put_back(reason: str) -> bool:
    """Whether a stop has the reason that Slurm itself has put the job back into its queue."""
    return reason.startswith(REQUEUED) or reason.endswith(PUT_BACK)


def requeues(run_dir: RunDir) -> bool:
    """Whether Slurm requeues the job of a run after the loss of a node."""
    job = read_job(run_dir)
    with suppress(RequestError):
        now = slurm_commands.job(job.number) if job is not None and job.batch else None
        return now is not None and now.requeue
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

    ``since`` has the sizes of the logs at the start of the last attempt.
    """
    if ended.status == "finished" and not any(SCRIPT_FLAG in node.argv for node in plan.nodes):
        return ended
    if ended.status == "stopped" and str(ended.reason).endswith(USER_STOP_SUFFIXES):
        return ended
    node_texts = [(node, _slurm_lines(run_dir.node_log(node.node), since)) for node in plan.nodes]
    texts = [*(text for _, text in node_texts), _slurm_lines(run_dir.logs / "supervisor.log", since)]
    last = [lines[-1] for text in texts if (lines := [line for line in text.splitlines() if CANCELLED in line])]
    cause = next((cause for text, cause in SLURM_MESSAGES if any(text in line for line in last)), "")
    stopped = AttemptResult(status="stopped", reason=cause or slurm_commands.WORDS["CANCELLED"]) if last else ended
    if ended.status == "finished":  # a script that ends with 0 on the signal is stopped, before its node agent hears it
        return stopped
    failure = ended.failure
    is_consequence = failure is None or failure.kind in CONSEQUENCES or KILLED_WORKER in failure.message
    for node, text in node_texts:
        if is_consequence and (match := OUT_OF_MEMORY.search(text)) is not None:
            megabytes = environ.get("SLURM_MEM_PER_NODE", "")
            of_job = int(megabytes) << 20 if megabytes.isdecimal() else None
            return _out_of_memory(node, failure, int(match[1]) if match[1] else of_job, run_dir)
        if is_consequence and NO_GPUS in text:
            gpus = len(set(node.devices))
            what = f"{node.host} has fewer GPUs in this job than the {gpus} of the plan"
            fix = f"salloc and sbatch take --gpus-per-node={gpus}"
            return failed("slurm", f"{what}; {fix}", host=node.host)
    lost = _lost_nodes(node_texts, run_dir)
    if cause == slurm_commands.WORDS["NODE_FAIL"] or (lost and is_consequence):
        return _node_lost(lost, requeued=bool(cause) and requeues(run_dir))
    if ended.status == "stopped":
        return stopped
    if (unseen := _unseen_folder(plan, run_dir)) is not None:
        return unseen
    return failed("slurm", cause) if cause and cause != REQUEUED else ended


def lost_hosts(plan: Plan, run_dir: RunDir, *, since: Mapping[str, int]) -> list[str]:
    """Return the hosts of the nodes that Slurm has lost in the last attempt, by the logs it prints into."""
    texts = [(node, _slurm_lines(run_dir.node_log(node.node), since)) for node in plan.nodes]
    return [node.host for node in _lost_nodes(texts, run_dir)]


def _lost_nodes(node_texts: Sequence[tuple[PlannedNode, str]], run_dir: RunDir) -> list[PlannedNode]:
    return [node for node, text in node_texts if NODE_FAILURE.search(text) or _has_lost_lease(run_dir, node)]


def _slurm_lines(path: Path, since: Mapping[str, int]) -> str:
    """Return the lines that Slurm printed at the end of a log of this attempt."""
    lines = attempt_outcome.last_lines(path, LINES, since=since.get(path.name, 0))
    return "\n".join(line for line in lines if line.startswith(("srun: ", "slurmstepd")))


def _node_lost(nodes: Sequence[PlannedNode], *, requeued: bool) -> AttemptResult:
    ranks = [rank for node in nodes for rank in node.ranks]
    hosts = [node.host for node in nodes]
    message = slurm_commands.WORDS["NODE_FAIL"]
    if hosts:
        message = f"Slurm lost {' and '.join(hosts)} with {ranks_text(ranks)}"
    if requeued:
        return AttemptResult(status="stopped", reason=f"{message}, {PUT_BACK}")
    if not hosts:
        return failed("node_lost", message)
    return failed("node_lost", f"{message}; see `scontrol show node {','.join(hosts)}`", host=hosts[0])


def _unseen_folder(plan: Plan, run_dir: RunDir) -> AttemptResult | None:
    """Return the failure of a node that does not see a folder of the run, as its log tells; None without one."""
    for node in plan.nodes:
        for line in attempt_outcome.last_lines(run_dir.node_log(node.node), LINES):
            if slurm_commands.UNSEEN_SAVES in line:
                return failed("refused", line, host=node.host)
            if slurm_commands.UNSEEN in line or slurm_commands.NO_FOLDER in line:
                return failed("slurm", line, host=node.host)
    return None


def _has_lost_lease(run_dir: RunDir, node: PlannedNode) -> bool:
    """Whether a node agent ended because its lease broke; the supervisor itself returns a lease before ending it."""
    outcome = node_outcome(run_dir, node.node)
    return outcome is not None and outcome.stop_reason == LEASE_LOST


def _out_of_memory(node: PlannedNode, failure: Failure | None, limit: int | None, run_dir: RunDir) -> AttemptResult:
    rank = failure.rank if failure is not None and failure.host == node.host else None
    rank = node.ranks[0] if rank is None and len(node.ranks) == 1 else rank
    names = ranks_text(node.ranks if rank is None else [rank])
    if rank is None and (largest := attempt_outcome.largest_rank(run_dir, node.node)) is not None:
        names += f" (rank {largest} used the most)"
    allowed = "" if limit is None else f" of {size(limit)} per node"
    message = f"{names} on {node.host} ran out of memory: Slurm enforced the job's limit{allowed}; raise slurm.mem"
    return failed("out_of_memory", message, host=node.host, rank=rank)
