"""Slurm's own commands: hosts of an allocation, submission, state and end of a job, signals to its steps.

All raise RequestError if Slurm refuses, with its message in one line, or does not answer.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from trainer.contract.errors import RequestError
from trainer.host.stop_request import signals_blocked

COMMAND_TIMEOUT_S = 30.0
"""Time limit of a command; Slurm's own for a message is 10 s, and it retries."""
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
"""Signal in the exit code of a job whose output file could not be opened."""
WORDS = {
    "CANCELLED": "it was cancelled in Slurm",
    "TIMEOUT": "it reached its time limit in Slurm",
    "DEADLINE": "it reached its deadline in Slurm",
    "PREEMPTED": "Slurm pre-empted it for another job",
    "NODE_FAIL": "Slurm lost one of its nodes",
    "BOOT_FAIL": "one of its nodes did not boot",
    "OUT_OF_MEMORY": "it needed more memory than Slurm gave it",
}
"""Reason for the end of a job by its state; for COMPLETED and FAILED the exit code has it."""

UNSEEN = "does not see the run directory"
"""Message of a host of a job whose file system is another one."""
UNSEEN_SAVES = "does not see the save folder"
"""Message of a host that does not see the checkpoints of another one, from which ``slurm.requeue`` continues."""
NO_FOLDER = "has no folder"
"""Message of a host of a job without the folder in which its ranks are to start."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job as Slurm describes it."""

    number: int
    state: str
    reason: str
    """Why it is pending; empty otherwise."""
    starts: float | None
    """Expected or actual start, Unix seconds; None if unknown."""
    partition: str
    nodes: str
    """Hosts as Slurm abbreviates them: ``n[1-2]``."""
    exit_code: int
    requeue: bool = False
    """Whether Slurm puts it back into the queue if it loses one of its nodes."""
    launched: bool = True
    """False if its node could not even open the file for its output."""

    @property
    def is_over(self) -> bool:
        return self.state in OVER


def is_requeued(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the job of this process is not on its first start: Slurm has requeued it."""
    return environ.get("SLURM_RESTART_COUNT", "0") != "0"


def is_in_step(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is in a step, as of ``srun --pty bash``, which holds what the job has."""
    step = environ.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) < 0xFFFF_FFF0  # reserved: batch scripts and the shells of salloc


def allocation(environ: Mapping[str, str] = os.environ) -> list[tuple[str, int | None]]:
    """Return the hosts of this process's allocation, each with its component of a heterogeneous job, if any."""
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


def submit(argv: Sequence[str], script: str, environ: Mapping[str, str] | None = None) -> int:
    """Submit a batch script, with another environment if given; return the job's number."""
    return int(_call(["sbatch", "--parsable", *argv], script, environ=environ).partition(";")[0])


def submitter_environment() -> dict[str, str]:
    """Return the environment in which a job submits another one: without Slurm's variables about itself."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SLURM_") or name == "SLURM_CONF"}


def test(argv: Sequence[str], script: str) -> str:
    """Test a batch script without submitting it; return Slurm's estimate of its start and hosts."""
    return _call(["sbatch", "--test-only", *argv], script, from_stderr=True)


def requeue(number: int) -> None:
    """Put a batch job back into the queue; Slurm ends it first.

    Raises:
        RequestError: Slurm refuses, with its message in one line.
    """
    # Slurm ends the job's processes, its own command too, at times before that has the answer: it would be taken for a
    # refusal, and the job would get a successor besides.
    with signals_blocked([signal.SIGTERM]):
        _call(["scontrol", "requeue", str(number)])


def exclude(number: int, hosts: str) -> None:
    """Have a pending job leave out hosts, given as Slurm abbreviates them."""
    _call(["scontrol", "update", f"JobId={number}", f"ExcNodeList={hosts}"])


def job(number: int) -> Job | None:
    """Return a job; None if Slurm has forgotten it."""
    try:
        text = _call(["scontrol", "--oneliner", "show", "job", str(number)])
    except RequestError as error:
        if "invalid job id" in str(error).lower():
            return None
        raise
    return parse_job(text)


def parse_job(text: str) -> Job:
    """Parse the output of ``scontrol --oneliner show job``: one line per component of a heterogeneous job."""
    lines = [dict(re.findall(r"(?:^|\s)(\w+)=(\S*)", line)) for line in text.splitlines() if line.strip()]
    first = lines[0]
    reason = first.get("Reason", "None")
    starts = None
    with suppress(ValueError):
        if "held" not in reason.lower():  # such a job starts when somebody releases it
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
    """Return the hosts that are down or do not answer, of a list as Slurm abbreviates it."""
    argv = ["sinfo", "--noheader", "--Node", f"--nodes={abbreviated}", "--states=down,fail,no_respond", "--format=%N"]
    return sorted(set(_call(argv).split()))


def drained_hosts(partition: str | None) -> list[str]:
    """Return the hosts that are down or drained, of a partition or of all."""
    argv = ["sinfo", "--noheader", "--Node", "--states=down,drained,draining,fail,maint,no_respond", "--format=%N"]
    return sorted(set(_call(argv + ([f"--partition={partition}"] if partition else [])).split()))


def cancel(number: int) -> None:
    """Cancel a job by ``scancel``: its processes have Slurm's KillWait to save."""
    _call(["scancel", str(number)])


def signal_script(number: int, name: str) -> None:
    """Send a signal to the process of a job's batch script, which may have replaced itself, and to no step."""
    with suppress(RequestError):  # it has ended meanwhile
        _call(["scancel", "--batch", f"--signal={name}", str(number)])


def signal_steps(number: int, step_name: str, name: str) -> None:
    """Send a signal to the steps of a job that have this name."""
    named = [step for step, its_name, _ in _steps(number) if its_name == step_name]
    if named:
        with suppress(RequestError):  # they have ended meanwhile
            _call(["scancel", f"--signal={name}", *named])


def kill_step(number: int, step_name: str, host: str) -> None:
    """Kill the step of this name on a host; if the host does not answer, the controller cancels it."""
    named = [step for step, *name_and_host in _steps(number) if name_and_host == [step_name, host]]
    kill_timeout_s = 2.0  # time limit for killing a step; a live host needs hundredths of a second, a lost one 11 s
    if named:
        try:
            _call(["scancel", "--signal=KILL", *named], timeout_s=kill_timeout_s)  # sent to the host itself
        except RequestError:
            with suppress(RequestError):  # it has ended meanwhile
                _call(["scancel", *named])


def step_names(number: int) -> list[str]:
    """Return the names of the steps of a job that hold its hosts, without those of Slurm itself; runs have theirs."""
    return [name for step, name, _ in _steps(number) if step.rpartition(".")[2].isdecimal()]


def _steps(number: int) -> list[list[str]]:
    """Return number, name and hosts of each step of a job."""
    lines = _call(["squeue", "--noheader", "--steps", f"--jobs={number}", "--format=%i %j %N"]).splitlines()
    return [words for line in lines if len(words := line.split()) == 3]


def _call(
    argv: Sequence[str],
    script: str | None = None,
    *,
    from_stderr: bool = False,
    timeout_s: float = COMMAND_TIMEOUT_S,
    environ: Mapping[str, str] | None = None,
) -> str:
    try:
        done = subprocess.run(
            argv, input=script or "", capture_output=True, text=True, errors="replace", timeout=timeout_s, env=environ
        )
    except FileNotFoundError:
        raise RequestError(f"there is no {argv[0]} on this machine; use a machine that has Slurm's commands") from None
    except subprocess.TimeoutExpired:
        raise RequestError(f"{argv[0]} does not answer within {timeout_s:.0f} s") from None
    stderr_lines = done.stderr.strip().splitlines()
    if done.returncode:
        # "sbatch: error: Batch job submission failed: Invalid partition name": the last line has the reason.
        lines = [line.removeprefix(f"{argv[0]}: ").removeprefix("error: ") for line in stderr_lines if line.strip()]
        raise RequestError(f"{argv[0]}: {'; '.join(lines) or f'exit code {done.returncode}'}")
    return " ".join(stderr_lines) if from_stderr else done.stdout.strip()
