"""Slurm's own commands: which hosts an allocation has, submit a job, ask about it, end it."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from trainer.contract.errors import RequestError

COMMAND_TIMEOUT_S = 30.0
"""How long a command may take; Slurm's own time limit for a message is 10 s, and it tries again."""
KILL_TIMEOUT_S = 2.0
"""How long killing a step may take; a host that is there needs hundredths of a second, a lost one 11 s."""
OVER = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "DEADLINE",
    "BOOT_FAIL",
    "PREEMPTED",
)
"""States of a job that does not run again."""
NOT_LAUNCHED = 53
"""Signal that Slurm gives as the end of a job whose output could not be opened."""
WORDS = {
    "CANCELLED": "it was cancelled in Slurm",
    "TIMEOUT": "its time limit in Slurm was over",
    "DEADLINE": "its deadline in Slurm was over",
    "PREEMPTED": "Slurm pre-empted it for another job",
    "NODE_FAIL": "Slurm lost one of its nodes",
    "BOOT_FAIL": "a node of it did not boot",
    "OUT_OF_MEMORY": "it needed more memory than Slurm gave it",
}
"""Why a job ended, in words; COMPLETED and FAILED are what its own exit code says."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job as Slurm describes it."""

    number: int
    state: str
    """``PENDING``, ``RUNNING``, …"""
    reason: str
    """Why it is pending; empty otherwise."""
    starts: float | None
    """When it is expected to start, or has started, Unix seconds."""
    partition: str
    nodes: str
    """Hosts as Slurm abbreviates them: ``n[1-2]``."""
    exit_code: int
    requeue: bool = False
    """Whether Slurm puts it back into the queue when it loses one of its nodes."""
    launched: bool = True
    """False where its node could not even open the file for its output."""

    @property
    def is_over(self) -> bool:
        """Whether it has ended or is being ended."""
        return self.state in OVER


def is_requeued(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether Slurm has started the job that this process is in before."""
    return environ.get("SLURM_RESTART_COUNT", "0") != "0"


def allocation(environ: Mapping[str, str] = os.environ) -> list[tuple[str, int | None]]:
    """Return the hosts of the allocation that this process is in, each with its component of a heterogeneous job.

    Raises:
        RequestError: Slurm's own command fails.
    """
    if not environ.get("SLURM_JOB_ID"):
        return []
    components = int(environ.get("SLURM_HET_SIZE") or 0)
    if not components:
        return [(host, None) for host in _hosts(environ.get("SLURM_JOB_NODELIST", ""))]
    lists = [environ.get(f"SLURM_JOB_NODELIST_HET_GROUP_{group}", "") for group in range(components)]
    return [(host, group) for group, hosts in enumerate(lists) for host in _hosts(hosts)]


def _hosts(abbreviated: str) -> list[str]:
    if not re.search(r"[\[,]", abbreviated):
        return [abbreviated] if abbreviated else []
    return _call(["scontrol", "show", "hostnames", abbreviated]).split()


def submit(words: Sequence[str], script: str) -> int:
    """Submit a batch script; return the job's number.

    Raises:
        RequestError: Slurm's words in one line.
    """
    return int(_call(["sbatch", "--parsable", *words], script).partition(";")[0])


def test(words: Sequence[str], script: str) -> str:
    """Ask whether Slurm would take a batch script; return its estimate of when and where.

    Raises:
        RequestError: Slurm's words in one line.
    """
    return _call(["sbatch", "--test-only", *words], script, said_on_stderr=True)


def job(number: int) -> Job | None:
    """Return what Slurm knows of a job; None where it has forgotten it.

    Raises:
        RequestError: Slurm does not answer.
    """
    try:
        text = _call(["scontrol", "--oneliner", "show", "job", str(number)])
    except RequestError as error:
        if "invalid job id" in str(error).lower():
            return None
        raise
    return parse_job(text)


def parse_job(text: str) -> Job:
    """Read what ``scontrol --oneliner show job`` prints: a line for each component of a heterogeneous job."""
    lines = [dict(re.findall(r"(?:^|\s)(\w+)=(\S*)", line)) for line in text.splitlines() if line.strip()]
    first = lines[0]
    reason = first.get("Reason", "None")
    starts = None
    with suppress(ValueError):
        starts = time.mktime(time.strptime(first.get("StartTime", ""), "%Y-%m-%dT%H:%M:%S"))
    nodes = [line["NodeList"] for line in lines if line.get("NodeList") not in (None, "", "(null)")]
    return Job(
        number=int(first["JobId"]),
        state=first.get("JobState", ""),
        reason="" if reason == "None" or first.get("JobState") != "PENDING" else reason,
        starts=starts,
        partition=first.get("Partition", ""),
        nodes=",".join(nodes),
        exit_code=int(first.get("ExitCode", "0:0").partition(":")[0]),
        requeue=first.get("Requeue") == "1",
        launched=reason != "JobLaunchFailure" and not first.get("ExitCode", "").endswith(f":{NOT_LAUNCHED}"),
    )


def lost_hosts(abbreviated: str) -> list[str]:
    """Return those of these hosts that Slurm has lost: they are down, or do not answer.

    Raises:
        RequestError: Slurm does not answer.
    """
    words = ["sinfo", "--noheader", "--Node", f"--nodes={abbreviated}", "--states=down,fail,no_respond", "--format=%N"]
    return sorted(set(_call(words).split()))


def cancel(number: int) -> None:
    """End a job as ``scancel`` does: its processes may save first, for as long as Slurm's KillWait.

    Raises:
        RequestError: Slurm's words in one line.
    """
    _call(["scancel", str(number)])


def signal_script(number: int, name: str) -> None:
    """Send a signal to what a job's script has become, and to nothing else of it."""
    with suppress(RequestError):  # it has ended meanwhile
        _call(["scancel", "--batch", f"--signal={name}", str(number)])


def signal_steps(number: int, step_name: str, name: str) -> None:
    """Send a signal to the steps of this name of a job.

    Raises:
        RequestError: Slurm does not answer.
    """
    steps = _call(["squeue", "--noheader", "--steps", f"--jobs={number}", "--format=%i %j"]).splitlines()
    ours = [line.split()[0] for line in steps if line.split()[1:] == [step_name]]
    if ours:
        with suppress(RequestError):  # they have ended meanwhile
            _call(["scancel", f"--signal={name}", *ours])


def kill_step(number: int, step_name: str, host: str) -> None:
    """Kill the step of this name on a host; where the host does not answer, leave that to the controller.

    Raises:
        RequestError: Slurm does not answer.
    """
    steps = _call(["squeue", "--noheader", "--steps", f"--jobs={number}", "--format=%i %j %N"]).splitlines()
    ours = [line.split()[0] for line in steps if line.split()[1:] == [step_name, host]]
    if ours:
        try:
            _call(["scancel", "--signal=KILL", *ours], timeout_s=KILL_TIMEOUT_S)  # sent to the host itself
        except RequestError:
            with suppress(RequestError):  # it has ended meanwhile
                _call(["scancel", *ours])


def _call(
    words: Sequence[str],
    script: str | None = None,
    *,
    said_on_stderr: bool = False,
    timeout_s: float = COMMAND_TIMEOUT_S,
) -> str:
    try:
        done = subprocess.run(
            words, input=script or "", capture_output=True, text=True, errors="replace", timeout=timeout_s
        )
    except FileNotFoundError:
        raise RequestError(f"there is no {words[0]} on this machine: type this where Slurm's commands are") from None
    except subprocess.TimeoutExpired:
        raise RequestError(f"{words[0]} does not answer within {timeout_s:.0f} s") from None
    said = done.stderr.strip().splitlines()
    if done.returncode:
        # "sbatch: error: Batch job submission failed: Invalid partition name": the last line has the reason.
        lines = [line.removeprefix(f"{words[0]}: ").removeprefix("error: ") for line in said if line.strip()]
        raise RequestError(f"{words[0]}: {'; '.join(lines) or f'exit code {done.returncode}'}")
    return " ".join(said) if said_on_stderr else done.stdout.strip()
