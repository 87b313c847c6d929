"""Launchers, the ways of a plan to its nodes: their interface, and one module for each."""

from __future__ import annotations

import importlib
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, cast

import msgspec

from gputrain_tui.history.plan_file import read_job
from gputrain_tui.plan.planner import with_rendezvous
from trainer.contract.errors import RequestError
from trainer.contract.record import write_atomically
from trainer.host.ports import free_port

if TYPE_CHECKING:
    from gputrain_tui.history.run_folders import Run
    from gputrain_tui.hosts.host_names import LocalFacts
    from gputrain_tui.lifecycle.attempt import AttemptResult
    from gputrain_tui.lifecycle.node_process import NodeProcess
    from gputrain_tui.plan.planner import Plan, PlannedNode
    from gputrain_tui.preflight.collect_hosts import HostAnswer
    from gputrain_tui.preflight.result import CheckResult
    from gputrain_tui.recipe.model import Recipe
    from trainer.contract.record import RunDir
    from trainer.host.process_identity import ProcessIdentity
    from trainer.host.stop_request import StopRequest

LAUNCHERS: dict[str, tuple[str, str]] = {
    "local": ("gputrain_tui.lifecycle.launchers.local_launcher", "LocalLauncher"),
    "ssh": ("gputrain_tui.lifecycle.launchers.ssh_launcher", "SshLauncher"),
    "slurm": ("gputrain_tui.lifecycle.launchers.slurm_launcher", "SlurmLauncher"),
}
"""Module and class of each launcher, by its name in a plan."""


class Launcher(ABC):
    """Way of a plan to its nodes: checks, start, placement, node processes, and the cause of an end that only it knows.

    Unless it differs, the run has a supervisor on this machine, and the plan names the hosts.
    """

    # --- before the run, in the command or the console ----------------------------------------------------------

    def check(self, recipe: Recipe, plan: Plan) -> list[CheckResult]:
        return []

    def query_hosts(
        self, recipe: Recipe, plan: Plan, local: LocalFacts, *, max_age_s: float, problems: Mapping[str, str]
    ) -> tuple[HostAnswer, ...]:
        """Return the facts of the other hosts of a run; none if the launcher cannot ask them.

        ``problems`` are those of hosts that have just not answered, which are not asked again.
        """
        return ()

    def start(self, run: Run, recipe: Recipe, plan: Plan, *, leased: bool) -> subprocess.Popen[bytes]:
        """Start a run whose directory is written; return its supervisor, or the process in its place.

        Closing the standard input, a pipe, of the process of a leased run ends the run.

        Raises:
            NotReadyError: the run cannot be started; its directory is deleted.
        """
        from gputrain_tui.lifecycle.supervisor_process import start_supervisor

        return start_supervisor(run.dir, leased=leased)

    def start_detached(self, run: Run, recipe: Recipe, plan: Plan) -> None:
        """Start a run whose directory is written, to continue without this process; return once it has started.

        Raises:
            NotReadyError: the run cannot be started; its directory is deleted.
            RequestError: the supervisor did not start.
        """
        from gputrain_tui.lifecycle.supervisor_process import await_supervisor

        supervisor = self.start(run, recipe, plan, leased=False)
        await_supervisor(run, supervisor, previous=run.status.supervisor)

    def take_over(self, run: Run) -> subprocess.Popen[bytes]:
        """Start a new supervisor for a leased run whose previous one was killed."""
        from gputrain_tui.lifecycle.supervisor_process import start_supervisor

        return start_supervisor(run.dir, leased=True, adopting=True)

    # --- in the supervisor --------------------------------------------------------------------------------------

    has_successor = True
    """Whether the supervisor of a detached run is replaced when it is killed."""

    @property
    def is_requeued(self) -> bool:
        """Whether a scheduler has started this run again, which has a recorded end from before."""
        return False

    def place(self, plan: Plan, run_dir: RunDir) -> Plan:
        """Return the plan on the hosts and with the port that it gets; write it into the run directory if it changes.

        Raises:
            RequestError: there are too few hosts.
        """
        placed = self.with_free_port(plan)
        if placed is not plan:
            try:
                write_atomically(run_dir.plan, msgspec.json.encode(placed))
            except OSError as error:  # a full disk must not end the run
                print(f"cannot write {run_dir.plan}: {error.strerror}", file=sys.stderr, flush=True)
        return placed

    def with_free_port(self, plan: Plan) -> Plan:
        """Return a plan with a port that is free on the first node's host, unless its port is fixed."""
        return with_rendezvous(plan, port=self.free_port(plan)) if plan.finds_port else plan

    def free_port(self, plan: Plan) -> int:
        """Return a port for the rendezvous: one that is free on this machine."""
        return free_port()

    def begin_attempt(self, run_dir: RunDir) -> None:
        """Prepare for the launch of an attempt's nodes; without one, nothing is prepared."""
        return

    @abstractmethod
    def launch(self, node: PlannedNode, run_dir: RunDir, *, env: Mapping[str, str], leased: bool) -> NodeProcess:
        """Start a node's command; the node of a leased run ends when this process does. May raise OSError."""

    @abstractmethod
    def adopt(
        self, node: PlannedNode, run_dir: RunDir, identity: ProcessIdentity | None, *, leased: bool
    ) -> NodeProcess | None:
        """Take over a node of a killed supervisor; None if it has ended.

        Its exit code is read from the node's outcome, as the kernel reports it to the parent process only.
        ``identity`` is its process in ``attempt.json``, None if not recorded.
        """

    def probe_network(self, plan: Plan) -> Mapping[tuple[str, str], bool]:
        """Return for each host of a plan and each other one whether it can connect to it; unknown pairs are absent."""
        return {}

    def await_hosts(self, plan: Plan, *, wait_s: float, stop_request: StopRequest) -> dict[str, str]:
        """Wait until all hosts of a plan answer; return those that do not, each with the reason."""
        return {}

    def await_network(self, plan: Plan, *, wait_s: float, stop_request: StopRequest) -> str:
        """Wait until all hosts of a plan reach each other; return which do not, empty if all do."""
        return ""

    def request_stacks(self, running: Iterable[NodeProcess], request: str) -> None:
        """Pass a request for the stacks of all ranks on to node agents that cannot see this run directory."""
        return

    def continues(self, ended: AttemptResult, run_dir: RunDir) -> bool:
        """Whether a scheduler, or ``requeue``, starts a run again that was stopped, as after its time limit."""
        return False

    def requeue(
        self, ended: AttemptResult, run_dir: RunDir, *, saving_s: float | None, record: Callable[[str], None]
    ) -> str:
        """Put a run that ``continues`` back into the queue; return why the scheduler refuses, empty if it does not.

        It is called last, as the scheduler may then end this process.

        Args:
            ended: result of the run so far.
            run_dir: of the run.
            saving_s: time from the stop request to the end of all ranks, seconds; None if none was asked to stop.
            record: writes into the status and the record that the run is queued, with a note on how.
        """
        return ""

    def refusal(self, run_dir: RunDir) -> str:
        """Return why this process may not be the run's supervisor; empty if it may."""
        return ""

    def explain(self, ended: AttemptResult, plan: Plan, run_dir: RunDir) -> AttemptResult:
        """Return the result of a run with the cause that only the launcher knows."""
        return ended


def launcher(name: str) -> Launcher:
    """Return the launcher of a plan by its name."""
    module, attribute = LAUNCHERS[name]
    return cast(Launcher, getattr(importlib.import_module(module), attribute)())


def stop_job(run: Run, origin: int, *, timeout_s: float) -> Run | None:
    """Stop a run through the scheduler that holds its job; return the ended run, None if it is not to be asked.

    ``origin`` is a signal that names the origin of the request to the supervisor, one of ``STOP_REASONS``.

    Raises:
        RequestError: the scheduler does not answer, or the run does not end.
    """
    from gputrain_tui.history.status_file import ENDED
    from gputrain_tui.lifecycle.leftovers import supervisors_of

    job = read_job(run.dir)
    if job is None or not (job.batch or (run.state not in ENDED and not supervisors_of(run.dir.path))):
        return None
    from gputrain_tui.lifecycle.launchers import slurm_submission

    return slurm_submission.stop(run, job, origin, timeout_s=timeout_s)


def refresh(run: Run) -> Run:
    """Return a run with its current status; if its job is over without a recorded end, record one first."""
    if read_job(run.dir) is None:
        return run
    from gputrain_tui.lifecycle.launchers import slurm_submission

    return slurm_submission.refresh(run)


def has_job(run: Run) -> bool:
    """Whether a scheduler has a job with the supervisor of a run that is not over, or does not answer."""
    job = read_job(run.dir)
    if job is None or not job.batch:
        return False
    from gputrain_tui.hosts import slurm_commands

    try:
        now = slurm_commands.job(job.number)
    except RequestError:
        return True
    return now is not None and not now.is_over
