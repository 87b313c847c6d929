"""Result of an attempt whose nodes have ended: finished, stopped by whom, or failed for which cause."""

from __future__ import annotations

from collections.abc import Callable, Collection

from gputrain_tui.lifecycle import attempt_outcome
from gputrain_tui.lifecycle.attempt import Attempt, AttemptResult
from gputrain_tui.plan.planner import Plan
from trainer.contract.outcome import LOST_PEER_KINDS, node_outcome
from trainer.contract.record import Failure, RunDir
from trainer.host.stop_request import StopRequest


def attempt_result(
    attempt: Attempt,
    plan: Plan,
    run_dir: RunDir,
    *,
    stop_request: StopRequest,
    adopting: bool,
    over_before: Collection[int],
    missing_rank: Callable[[], Failure | None],
    now: float,
) -> AttemptResult:
    """Return the result of an attempt, of which no node runs.

    Args:
        attempt: the attempt.
        plan: its plan.
        run_dir: the record.
        stop_request: stop request of the supervisor.
        adopting: whether the supervisor has taken over from one that was killed.
        over_before: nodes that had ended, with unfinished ranks, when it did.
        missing_rank: returns the failure of the rank that the others have lost, by the record of all ranks.
        now: Unix seconds.
    """
    ends = attempt.ended.values()
    if len(ends) == len(plan.nodes) and not any(end.unfinished for end in ends):
        return AttemptResult(status="finished")
    failed_before_stop = _failed_before_stop(attempt, plan, run_dir, stop_request.requested_at, over_before)
    if stop_request.reason is not None and not failed_before_stop:
        return AttemptResult(status="stopped", reason=stop_request.reason)
    if attempt.failure is not None:
        return AttemptResult(status="failed", failure=attempt.failure)
    unasked = not adopting and stop_request.reason is None
    if unasked and (stopped := attempt_outcome.first_stopped_node(attempt.ended)) is not None:
        host = attempt.ended[stopped].host
        return AttemptResult(status="stopped", reason=f"node {stopped} was stopped on {host}")
    failure = attempt_outcome.cause(run_dir, attempt.since, attempt.ended, now)
    failures = attempt_outcome.failures(run_dir, attempt.since)
    recorded = failure in failures
    only_lost = bool(failures) and all(other.kind == "lost_peer" for other in failures)
    # The record of all ranks shows the lost one better than the failure of a node agent.
    if only_lost and failure.kind in LOST_PEER_KINDS and (missing := missing_rank()) is not None:
        failure, recorded = missing, False
    if adopting and attempt_outcome.recorded_cause(run_dir, attempt.since, attempt.ended) is None:
        message = "the run's supervisor was killed, and its ranks ended with it"
        failure = Failure(time=now, kind="signal", message=message)
    return AttemptResult(status="failed", failure=failure, recorded=recorded)


def _failed_before_stop(
    attempt: Attempt, plan: Plan, run_dir: RunDir, requested_at: float | None, over_before: Collection[int]
) -> bool:
    """Whether the attempt had failed before the stop request, so that its result is the cause of that failure."""
    if requested_at is None:
        return False
    outcomes = [node_outcome(run_dir, node) for node in over_before]
    if any(outcome is None or outcome.failure is not None for outcome in outcomes):
        return True
    return attempt_outcome.failed_before(run_dir, attempt.since, [node.node for node in plan.nodes], requested_at)
