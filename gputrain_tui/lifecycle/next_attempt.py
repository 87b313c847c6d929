"""Decides after a failed attempt whether another one follows, and on which hosts and at which port its ranks meet."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import msgspec

from gputrain_tui.lifecycle import attempt_outcome
from gputrain_tui.lifecycle.attempt import AttemptResult
from gputrain_tui.lifecycle.diagnosis_watch import RunDiagnosis
from gputrain_tui.lifecycle.launchers import Launcher
from gputrain_tui.lifecycle.restart import Restarts, cluster_options, next_plan, not_restarted
from gputrain_tui.lifecycle.run_status import RunStatusWriter
from gputrain_tui.lifecycle.spare_hosts import SpareHosts
from gputrain_tui.plan.planner import Plan, rendezvous_port
from gputrain_tui.state.ended_attempts import is_left_standing
from trainer.contract.errors import ExitCode, RequestError
from trainer.contract.outcome import AWAITS_HOSTS, PORT_TAKEN, exit_code_of
from trainer.contract.record import Failure, Finding, RunDir
from trainer.host.stop_request import StopRequest

MAX_TAKEN_PORTS = 3
"""How often an attempt is made at another port because another program took the one that was free."""


class NextAttempt:
    """The attempts of a run after the first: their number, their hosts and their port."""

    def __init__(
        self,
        run_dir: RunDir,
        launcher: Launcher,
        status_writer: RunStatusWriter,
        stop_request: StopRequest,
        diagnosis: RunDiagnosis,
    ) -> None:
        self._dir = run_dir
        self._launcher = launcher
        self._status_writer = status_writer
        self._stop_request = stop_request
        self._diagnosis = diagnosis
        self._options = cluster_options(run_dir)
        self._restarts = Restarts(self._options, done=status_writer.status.restarts)
        self._spare_hosts = SpareHosts(run_dir, self._options)
        self._taken_ports = 0
        """Attempts that ended because their port was taken before the ranks met there."""

    def plan(self, plan: Plan, ended: AttemptResult, since: Mapping[str, int]) -> Plan | AttemptResult:
        """Return the plan of the next attempt, or the result of the run if none follows.

        ``ended`` is the failed attempt, ``plan`` its plan, ``since`` the sizes of the event files when it began.
        """
        failure = ended.failure
        assert failure is not None
        if self._taken_ports < MAX_TAKEN_PORTS and self._has_lost_port(plan, since):
            self._taken_ports += 1
            return self._at_another_port(plan)
        if exit_code_of(failure) != ExitCode.FAILED or self._restarts.is_over(failure):
            return ended
        if (lasting := self._restarts.lasting(failure)) is not None:
            return replace(ended, failure=lasting)
        if not ended.recorded:
            self._status_writer.record(failure)
        lost = self._await_hosts(plan, failure)
        cut = "" if lost else self._await_network(plan, failure)
        if self._stop_request.reason is not None:
            return AttemptResult(status="stopped", reason=self._stop_request.reason)
        if cut:
            return replace(ended, failure=not_restarted(failure, cut), recorded=True)
        changes: list[str] = []
        if lost:
            try:
                plan, changes = self._spare_hosts.replace(plan, lost)
            except RequestError as error:
                return replace(ended, failure=not_restarted(failure, str(error)), recorded=True)
        self._status_writer.restarting(failure, *changes)
        self._clear_findings()
        self._status_writer.change_plan(plan)
        again = next_plan(plan, self._dir, restarts=self._status_writer.status.restarts)
        return self._launcher.with_free_port(again)

    def _has_lost_port(self, plan: Plan, since: Mapping[str, int]) -> bool:
        """Whether an attempt failed because another program took the port that the launch had found free."""
        port = rendezvous_port(plan) if plan.finds_port else None
        return port is not None and attempt_outcome.is_port_in_use(self._dir, since, port)

    def _at_another_port(self, plan: Plan) -> Plan:
        again = self._launcher.with_free_port(plan)
        where = f"port {rendezvous_port(plan)} of {plan.nodes[0].host} was taken before the ranks met there"
        self._tell(PORT_TAKEN, f"{where}; starting again at port {rendezvous_port(again)}")
        return again

    def _await_hosts(self, plan: Plan, failure: Failure) -> dict[str, str]:
        """Wait until all hosts of the next attempt answer; return those that do not, each with the reason."""
        if failure.kind != "node_lost" and not self._launcher.await_hosts(
            plan, wait_s=0.0, stop_request=self._stop_request
        ):
            return {}
        self._tell(AWAITS_HOSTS, f"waiting up to {self._wait_s:g} s until all hosts answer, to start again")
        return self._launcher.await_hosts(plan, wait_s=self._wait_s, stop_request=self._stop_request)

    def _await_network(self, plan: Plan, failure: Failure) -> str:
        """Wait until all hosts reach each other, if that was the failure; return which do not, empty if all do."""
        if failure.kind != "network":
            return ""
        self._tell(AWAITS_HOSTS, f"waiting up to {self._wait_s:g} s until all hosts reach each other, to start again")
        return self._launcher.await_network(plan, wait_s=self._wait_s, stop_request=self._stop_request)

    def _clear_findings(self) -> None:
        """Clear the findings of the attempt that has ended which nothing else clears."""
        self._diagnosis.follow()  # also those of a supervisor that was killed
        for finding in list(self._diagnosis.state.findings.values()):
            if is_left_standing(finding):
                self._status_writer.record(msgspec.structs.replace(finding, time=time.time(), state="cleared"))

    @property
    def _wait_s(self) -> float:
        return self._options.restart_wait

    def _tell(self, kind: str, text: str) -> None:
        self._status_writer.record(Finding(time=time.time(), kind=kind, severity="info", message=text))
