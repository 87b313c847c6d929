"""Launcher of nodes as steps of a Slurm job; outside of a job it submits the run as one."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from gputrain_tui.history.plan_file import SlurmJob, read_job
from gputrain_tui.history.status_file import read_status
from gputrain_tui.hosts import slurm_commands
from gputrain_tui.lifecycle.launchers.local_launcher import LocalLauncher
from gputrain_tui.lifecycle.launchers.slurm_steps import AdoptedStep, StepProcess, launch_step, place_on_allocation
from gputrain_tui.preflight.result import CheckResult, NotReadyError
from trainer.contract.errors import RequestError
from trainer.contract.record import RunDir, write_atomically

if TYPE_CHECKING:
    from gputrain_tui.history.run_folders import Run
    from gputrain_tui.hosts.open_connections import OpenConnections
    from gputrain_tui.lifecycle.attempt import AttemptResult
    from gputrain_tui.plan.planner import Plan, PlannedNode
    from gputrain_tui.recipe.model import Recipe


class SlurmLauncher(LocalLauncher):
    """Launcher of nodes as steps of this process's job, which it submits if there is none."""

    adopted_as = AdoptedStep

    def __init__(self) -> None:
        self._log_sizes: Mapping[str, int] = {}
        """Sizes of the logs that Slurm prints into, at the start of the last attempt."""

    @property
    def is_requeued(self) -> bool:
        """Whether Slurm has requeued the job of this process."""
        return slurm_commands.is_requeued()

    def check(self, recipe: Recipe, plan: Plan) -> list[CheckResult]:
        """Return whether Slurm would accept the job."""
        if _in_job():
            return [CheckResult(status="ok", check="Slurm", what=f"in job {os.environ.get('SLURM_JOB_ID')}")]
        from gputrain_tui.lifecycle.launchers import slurm_submission

        return [slurm_submission.check(recipe, plan)]

    def start(
        self, run: Run, recipe: Recipe, plan: Plan, *, leased: bool, connections: OpenConnections | None
    ) -> subprocess.Popen[bytes]:
        """Submit the job and start a process that follows it; in a job, start the supervisor.

        Raises:
            NotReadyError: Slurm refuses the job; the run directory is deleted.
        """
        if _in_job():
            return super().start(run, recipe, plan, leased=leased, connections=connections)
        from gputrain_tui.lifecycle.launchers import slurm_submission

        _submit(run, recipe, plan)
        return slurm_submission.watch(run.dir, leased=leased)

    def start_detached(self, run: Run, recipe: Recipe, plan: Plan, *, connections: OpenConnections | None) -> None:
        """Submit the job without following it; in a job, start the supervisor.

        Raises:
            NotReadyError: Slurm refuses the job; the run directory is deleted.
            RequestError: the supervisor did not start.
        """
        if _in_job():
            super().start_detached(run, recipe, plan, connections=connections)
            return
        from gputrain_tui.lifecycle.launchers import slurm_submission

        slurm_submission.record_queued(run.dir, _submit(run, recipe, plan))

    def take_over(self, run: Run) -> subprocess.Popen[bytes]:
        """Start a new follower of the job; in a job, a new supervisor."""
        if _in_job():
            return super().take_over(run)
        from gputrain_tui.lifecycle.launchers import slurm_submission

        return slurm_submission.watch(run.dir, leased=True)

    def place(self, plan: Plan, run_dir: RunDir) -> Plan:
        """Return the plan on the hosts of this process's allocation; write it and the hosts into the run directory.

        Raises:
            RequestError: the allocation has too few hosts.
        """
        chosen = place_on_allocation(plan)
        if self.is_requeued:
            run_dir.on_end_log.unlink(missing_ok=True)  # of the end before the requeue, so that ``on_end`` runs again
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

    def begin_attempt(self, run_dir: RunDir) -> None:
        """Take the sizes of the logs, whose later lines are of this attempt."""
        from gputrain_tui.lifecycle.launchers import slurm_cause

        self._log_sizes = slurm_cause.log_sizes(run_dir)

    def launch(self, node: PlannedNode, run_dir: RunDir, *, env: Mapping[str, str], leased: bool) -> StepProcess:
        """Start a node's command as a step on its host.

        Raises:
            OSError: there is no srun.
        """
        return launch_step(node, run_dir, env=env, leased=leased)

    def explain(self, ended: AttemptResult, plan: Plan, run_dir: RunDir) -> AttemptResult:
        """Return the result of a run with the cause that Slurm printed into its logs."""
        from gputrain_tui.lifecycle.launchers import slurm_cause

        return slurm_cause.with_slurm_cause(ended, plan, run_dir, since=self._log_sizes)


def _in_job() -> bool:
    return "SLURM_JOB_ID" in os.environ


def _submit(run: Run, recipe: Recipe, plan: Plan) -> slurm_commands.Job | None:
    from gputrain_tui.lifecycle.launchers import slurm_submission

    try:
        return slurm_submission.submit(run, recipe, plan)
    except RequestError as error:
        shutil.rmtree(run.dir.path, ignore_errors=True)
        raise NotReadyError([CheckResult(status="error", check="Slurm", what=str(error))]) from None
