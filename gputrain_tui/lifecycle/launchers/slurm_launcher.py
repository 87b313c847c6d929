"""Launcher of nodes as steps of a Slurm job, one ``srun`` each; outside of a job it submits the run as one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gputrain_tui.history.plan_file import SlurmJob, read_job
from gputrain_tui.history.status_file import read_status
from gputrain_tui.hosts import slurm_commands
from gputrain_tui.hosts.host_agent import node_command
from gputrain_tui.hosts.host_names import address_of, is_pending
from gputrain_tui.lifecycle.launchers.local_launcher import ChildProcess, LocalLauncher, LocalProcess, node_environment
from gputrain_tui.plan.batch_script import GPU_REQUESTS, SLURM_VARIABLES
from gputrain_tui.plan.planner import Plan, PlannedNode, with_rendezvous
from gputrain_tui.preflight.result import CheckResult, error, ok, warning
from trainer.contract.errors import ExitCode, RequestError, listed
from trainer.contract.home_folder import expand_home
from trainer.contract.record import RunDir, write_atomically
from trainer.contract.record.regular_file import open_to_append
from trainer.contract.rendezvous_url import parse_rendezvous_url, tcp_url
from trainer.contract.stop_level import StopLevel
from trainer.host.stop_request import LEASE_RETURNED

if TYPE_CHECKING:
    from gputrain_tui.history.run_folders import Run
    from gputrain_tui.lifecycle.attempt import AttemptResult
    from gputrain_tui.recipe.model import Recipe

FIRST_PORT, PORTS = 12_000, 18_000
"""Ports 12000 to 29999, below Linux's ephemeral ports, one of which a job gets by its number: jobs may share a host."""
IN_FOLDER = f"""if ! [ -e "$0/plan.json" ]; then
  echo "$(hostname) {slurm_commands.UNSEEN} $0: GPUTRAIN_HOME must be on a disk that all nodes share"
elif cd -- "$1"; then
  if [ -n "$2" ] && ! [ -e "$2" ]; then
    echo "$(hostname) {slurm_commands.UNSEEN_SAVES} $(dirname -- "$2"): slurm.requeue needs one that all nodes see;" \
      "remove train.save_dir, or name a shared one"
    exit {ExitCode.REFUSED}
  fi
  shift 2
  exec "$@"
else
  echo "$(hostname) {slurm_commands.NO_FOLDER} $1, the workdir of its node"
fi
exit {ExitCode.REFUSED}
"""
"""Shell script that executes a node's command in a folder, if its host sees that, the run directory and a file."""


def place_on_allocation(plan: Plan, environ: Mapping[str, str] = os.environ, *, follows: bool = False) -> Plan:
    """Return a plan on the hosts of this process's allocation; unless its port is fixed, the job's number gives it.

    ``follows``: another job of the run was before, so that the plan has its hosts.
    """
    named = {node.host for node in plan.nodes}
    given = [host for host, _ in slurm_commands.allocation(environ)]
    free = [host for host in given if host not in named]
    moved = follows or slurm_commands.is_requeued(environ)  # a requeued job may get other hosts
    pending = [node.host for node in plan.nodes if is_pending(node.host) or (moved and node.host not in given)]
    if len(pending) > len(free):
        raise RequestError(f"the plan needs {len(pending)} hosts, but Slurm has allocated {len(free)}")
    hosts = dict(zip(pending, free, strict=False))
    before = after = plan.init_method
    url = parse_rendezvous_url(before) if before is not None else None
    if url is not None and url.scheme == "tcp":
        after = tcp_url(hosts.get(url.host, url.host), url.port)
    nodes = []
    for node in plan.nodes:
        arguments = [str(after) if word == before else word for word in node.argv]
        env = {key: hosts.get(value, value) for key, value in node.env.items() if key not in SLURM_VARIABLES}
        nodes.append(msgspec.structs.replace(node, host=hosts.get(node.host, node.host), argv=arguments, env=env))
    placed = msgspec.structs.replace(plan, init_method=after, nodes=nodes)
    job = environ.get("SLURM_JOB_ID", "")
    if not (plan.finds_port and job.isdecimal()):
        return placed
    return with_rendezvous(placed, port=FIRST_PORT + int(job) % PORTS)


class StepProcess(ChildProcess):
    """``srun`` of one node's step, which forwards signals to the step."""

    def poll(self) -> int | None:
        code = super().poll()
        if code is not None and code > 128 and code != ExitCode.STOPPED:
            return 128 - code  # 128 + signal number, as in a shell
        return code

    def stop(self, level: StopLevel) -> None:
        """Send the node agent a stop request: srun forwards SIGUSR1, and its standard input, the lease, to the step."""
        if level <= StopLevel.SAVE:
            self._process.send_signal(signal.SIGUSR1)
        elif self._process.stdin is not None:
            self._end_lease()
        else:
            self._process.send_signal(signal.SIGTERM)  # at which srun ends the step

    def kill(self) -> None:
        with suppress(RequestError, ValueError):
            job = int(os.environ.get("SLURM_JOB_ID", ""))
            slurm_commands.kill_step(job, self._run_dir.path.name, address_of(self.host))
        super().kill()

    def _end_lease(self) -> None:
        stdin = self._process.stdin
        if stdin is not None and not stdin.closed:
            with suppress(OSError):  # srun has ended
                stdin.write(LEASE_RETURNED)
                stdin.flush()
        with suppress(OSError):
            super()._end_lease()


class AdoptedStep(LocalProcess):
    """``srun`` of a step that a killed supervisor started."""

    def stop(self, level: StopLevel) -> None:
        self._signal(signal.SIGUSR1 if level <= StopLevel.SAVE else signal.SIGTERM)


LIMIT_SIGNAL = "stopped by SIGUSR1"
"""Reason of a stop on the signal that a job with ``slurm.requeue`` asks for before its time limit."""


class SlurmLauncher(LocalLauncher):
    """Launcher of nodes as steps of this process's job, which it submits if there is none."""

    adopted_as = AdoptedStep
    has_successor = False  # the job's steps end with the process that started them

    def __init__(self) -> None:
        self._log_sizes: Mapping[str, int] = {}
        """Sizes of the logs that Slurm prints into, at the start of the last attempt."""
        self._seen_by_all = ""
        """File in the save folder that all nodes must see, relative to the workdir or absolute; empty for none."""
        self._lost_hosts: list[str] = []
        """Hosts that failed, known at the end."""

    @property
    def is_requeued(self) -> bool:
        return slurm_commands.is_requeued()

    def check(self, recipe: Recipe, plan: Plan) -> list[CheckResult]:
        if _in_job():
            job = f"in job {os.environ.get('SLURM_JOB_ID')}"
            if slurm_commands.is_in_step() and (task := os.environ.get("SLURM_PROCID", "0")) != "0":
                what = f"this is task {task} of a step {job}, each task of which would start a run of its own"
                return [error("Slurm", what, "start gputrain without srun, or by srun --ntasks=1")]
            given = [host for host, _ in slurm_commands.allocation()]
            hosts = [address_of(node.host) for node in plan.nodes if not is_pending(node.host)]
            if away := [host for host in dict.fromkeys(hosts) if host not in given]:
                what = f"{listed(away)} {'is' if len(away) == 1 else 'are'} not {job}, which has {listed(given)}"
                fix = 'name hosts of the job, or set cluster.launcher = "ssh"'
                return [error("Slurm", what, fix, key="cluster.launcher")]
            if recipe.slurm is not None and recipe.slurm.requeue:
                what = f"{job}, which is not put back into the queue: slurm.requeue is for a run that is submitted"
                return [warning("Slurm", what, "type the command on a login node", key="slurm.requeue")]
            if not slurm_commands.is_in_step() and (holding := _steps_of_others()):
                what = f"{job}, where this run waits for the hosts of step {listed(holding)}"
                return [warning("Slurm", what, "wait, stop what runs there, or start gputrain in another job")]
            return [ok("Slurm", job)]
        from gputrain_tui.lifecycle.launchers import slurm_submission

        return [slurm_submission.check(recipe, plan)]

    def start(self, run: Run, recipe: Recipe, plan: Plan, *, leased: bool) -> subprocess.Popen[bytes]:
        """Submit the job and start a process that follows it; in a job, start the supervisor."""
        if _in_job():
            return super().start(run, recipe, plan, leased=leased)
        from gputrain_tui.lifecycle.launchers import slurm_submission

        slurm_submission.submit(run, recipe, plan)
        return slurm_submission.watch(run.dir, leased=leased)

    def start_detached(self, run: Run, recipe: Recipe, plan: Plan) -> None:
        if _in_job():
            super().start_detached(run, recipe, plan)
            return
        from gputrain_tui.lifecycle.launchers import slurm_submission, slurm_successor

        slurm_successor.record_queued(run.dir, slurm_submission.submit(run, recipe, plan))

    def take_over(self, run: Run) -> subprocess.Popen[bytes]:
        if _in_job():
            return super().take_over(run)
        from gputrain_tui.lifecycle.launchers import slurm_submission

        return slurm_submission.watch(run.dir, leased=True)

    def place(self, plan: Plan, run_dir: RunDir) -> Plan:
        """Return the plan on the hosts of this process's allocation; write it and the hosts into the run directory."""
        before, status = read_job(run_dir), read_status(run_dir)
        if follows := before is not None and bool(before.earlier):
            from gputrain_tui.lifecycle.restart import with_resume

            plan = with_resume(plan, run_dir)  # a requeued job's node agents do that themselves
        chosen = place_on_allocation(plan, follows=follows)
        if self.is_requeued:
            run_dir.on_end_log.unlink(missing_ok=True)  # of the end before the requeue, so that ``on_end`` runs again
        job = SlurmJob(
            number=int(os.environ.get("SLURM_JOB_ID", "0")),
            partition=os.environ.get("SLURM_JOB_PARTITION", ""),
            nodes=[node.host for node in chosen.nodes],
            batch=before.batch if before is not None else status is not None and status.status == "queued",
            earlier=[] if before is None else before.earlier,
            excluded=[] if before is None else before.excluded,
        )
        if not job.batch:  # other runs may be in this job, with the same first host
            chosen = self.with_free_port(chosen)
        write_atomically(run_dir.slurm, msgspec.json.encode(job))
        write_atomically(run_dir.plan, msgspec.json.encode(chosen))
        from gputrain_tui.lifecycle.launchers import slurm_successor

        if slurm_successor.asks_for_requeue(run_dir, job):
            goes_on = follows or self.is_requeued
            self._seen_by_all = slurm_successor.file_seen_by_all(run_dir, chosen.nodes[0].workdir, make=not goes_on)
        return chosen

    def begin_attempt(self, run_dir: RunDir) -> None:
        from gputrain_tui.lifecycle.launchers import slurm_cause

        self._log_sizes = slurm_cause.log_sizes(run_dir)

    def launch(self, node: PlannedNode, run_dir: RunDir, *, env: Mapping[str, str], leased: bool) -> StepProcess:
        # A job ends with its script: if that is this process, no other supervisor can adopt the step.
        leased = leased or os.environ.get("SLURM_TASK_PID") == str(os.getpid())
        host = address_of(node.host)
        groups = dict(slurm_commands.allocation())
        arguments = ["srun", "--nodes=1", "--ntasks=1", f"--nodelist={host}", "--cpu-bind=none"]
        arguments += [f"--job-name={run_dir.path.name}"]
        if groups.get(host) is not None:
            arguments.append(f"--het-group={groups[host]}")
        if gpus := len({device for device in node.devices if device != "cpu"}):
            arguments.append(f"--gpus={gpus}")
        python = sys.executable if node.argv[0] == "python" else str(expand_home(node.argv[0]))
        workdir = expand_home(node.workdir) if node.workdir else Path()
        command = node_command([python, *node.argv[1:]], node.setup)
        environment = node_environment(node, env, leased=leased)
        for name in ("TMPDIR", *GPU_REQUESTS):  # the first may exist on this machine only
            environment.pop(name, None)
        if slurm_commands.is_in_step():
            environment["SLURM_OVERLAP"] = "1"  # else srun waits without a word for the step in which it is typed
        with os.fdopen(open_to_append(run_dir.node_log(node.node)), "ab") as log:
            process = subprocess.Popen(
                [*arguments, "sh", "-c", IN_FOLDER, str(run_dir.path), str(workdir), self._seen_by_all, *command],
                env=environment,
                stdin=subprocess.PIPE if leased else subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return StepProcess(node, process, run_dir)

    def explain(self, ended: AttemptResult, plan: Plan, run_dir: RunDir) -> AttemptResult:
        from gputrain_tui.lifecycle.launchers import slurm_cause, slurm_successor

        asks = slurm_successor.asks_for_requeue(run_dir, read_job(run_dir))
        if ended.status == "stopped" and ended.reason == LIMIT_SIGNAL and asks:
            return replace(ended, reason=slurm_cause.LIMIT_IS_NEAR)
        self._lost_hosts = slurm_cause.lost_hosts(plan, run_dir, since=self._log_sizes)
        explained = slurm_cause.with_slurm_cause(ended, plan, run_dir, since=self._log_sizes)
        if self._seen_by_all and not self.continues(explained, run_dir):
            with suppress(OSError):
                (expand_home(plan.nodes[0].workdir) / self._seen_by_all).unlink()
        return explained

    def continues(self, ended: AttemptResult, run_dir: RunDir) -> bool:
        """Whether the run goes on by ``slurm.requeue`` after its time limit, a pre-emption or a lost node."""
        from gputrain_tui.lifecycle.launchers import slurm_cause, slurm_successor

        by_slurm = ended.status == "stopped" and slurm_cause.is_for_slurm(ended.reason or "")
        node_lost = ended.failure is not None and ended.failure.kind == "node_lost"
        return (by_slurm or node_lost) and slurm_successor.asks_for_requeue(run_dir, read_job(run_dir))

    def requeue(
        self, ended: AttemptResult, run_dir: RunDir, *, saving_s: float | None, record: Callable[[str], None]
    ) -> str:
        """Put the job back into the queue, unless Slurm does, or submit its successor; return why Slurm refuses."""
        from gputrain_tui.lifecycle.launchers import slurm_cause, slurm_successor

        job = read_job(run_dir)
        assert job is not None  # else it does not continue
        lost = self._lost_hosts
        if slurm_cause.is_put_back(ended.reason or ""):
            record(slurm_successor.leave_out(run_dir, job, lost))
            return ""
        return slurm_successor.go_on(run_dir, job, lost, saving_s=saving_s, record=record)

    def refusal(self, run_dir: RunDir) -> str:
        """Return that the run has another job by now, if so: a job that is started by hand again must not train it."""
        job, own = read_job(run_dir), os.environ.get("SLURM_JOB_ID", "")
        if job is None or not job.batch or own == str(job.number):
            return ""
        return f"job {own} may not train {run_dir.path.name}, whose job is {job.number} now"


def _in_job() -> bool:
    return "SLURM_JOB_ID" in os.environ


def _steps_of_others() -> list[str]:
    """Return the names of the steps of this job that run now; none where Slurm does not tell."""
    with suppress(RequestError, ValueError):
        return list(dict.fromkeys(slurm_commands.step_names(int(os.environ["SLURM_JOB_ID"]))))
    return []
