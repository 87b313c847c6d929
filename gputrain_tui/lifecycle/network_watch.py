"""Asks the hosts of a run whether they still reach each other, once its ranks have lost each other."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from gputrain_tui.diagnosis.cut_network import SUSPECT_KINDS, network_failure
from trainer.contract.errors import RequestError
from trainer.contract.record import Failure

if TYPE_CHECKING:
    from gputrain_tui.lifecycle.launchers import Launcher
    from gputrain_tui.plan.planner import Plan


class NetworkWatch:
    """The network between the hosts of a run."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._answer: list[Mapping[tuple[str, str], bool]] | None = None
        """Filled by a thread with what the hosts answer; None while they are not asked."""
        self._due = 0.0
        """Time before which hosts that reached each other are not asked again, monotonic seconds."""

    def cause(self, failure: Failure, plan: Plan) -> Failure:
        """Return the network's failure if ranks have lost each other because of it, else the given one.

        Only if the cause is not evident the hosts are asked, which takes seconds where they do not reach each other.
        """
        if failure.kind not in SUSPECT_KINDS:
            return failure
        self._answer = None
        return network_failure(failure, self._probe(plan)) or failure

    def cut(self, plan: Plan, *, waited_s: float, timeout_s: float) -> Failure | None:
        """Return the network's failure if hosts do not reach each other while no rank makes progress.

        Args:
            plan: of the attempt.
            waited_s: time since the last progress of any rank.
            timeout_s: ``cluster.host_timeout``, for which an interruption is waited out.
        """
        if waited_s < timeout_s:
            self._answer = None  # it would be of a stall that is over
            return None
        if self._answer is None and time.monotonic() >= self._due:
            answer = self._answer = []
            threading.Thread(target=lambda: answer.append(self._probe(plan)), name="network", daemon=True).start()
        if not self._answer:
            return None
        (reach,) = self._answer
        self._answer, self._due = None, time.monotonic() + timeout_s
        failure = network_failure(Failure(time=time.time(), kind="stalled", message=""), reach)
        if failure is None:
            return None
        message = f"{failure.message}; no rank made a step for {int(waited_s)} s"
        return msgspec.structs.replace(failure, message=message)

    def _probe(self, plan: Plan) -> Mapping[tuple[str, str], bool]:
        try:
            return self._launcher.probe_network(plan)
        except (OSError, RuntimeError, RequestError) as error:  # as without a descriptor or thread left
            print(f"the network between the hosts cannot be asked: {error}", file=sys.stderr, flush=True)
            return {}
