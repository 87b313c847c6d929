"""Request for the Python stacks of all ranks of a run, through a file that the node agents and the supervisor read."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from gputrain_tui.history.run_folders import Run
from gputrain_tui.history.run_reader import RunReader
from gputrain_tui.history.status_file import ENDED, read_status
from gputrain_tui.lifecycle.attempt_outcome import event_file_sizes
from trainer.contract.errors import RecordError, RequestError
from trainer.contract.outcome import RESTARTED
from trainer.contract.record import NATIVE, Finding, RankStacks, RunDir, write_atomically

TIMEOUT_S = 5.0
"""Time for all answers: a second each for supervisor and node agent, then twice the time of a rank."""
NATIVE_TIMEOUT_S = 30.0
"""Time for the native frames, which a program of the host reads from each rank, four at once."""
POLL_S = 0.05
"""Time between two readings of the record."""


def request_stacks(run_dir: RunDir, *, native: bool = False) -> str:
    """Ask all ranks for their stacks; return the request, which their answers repeat.

    With ``native``, a second answer of each rank has the native frames as well; reading them stops its process briefly.

    It is a time, so that an answer to a later request, as of the supervisor at a stall, counts as well.

    Raises:
        OSError: the run directory cannot be written.
    """
    request = f"{time.time_ns()}{NATIVE if native else ''}"
    write_atomically(run_dir.stack_request, request.encode())
    return request


def collect_stacks(run: Run, ranks: Collection[int], *, native: bool = False) -> list[RankStacks]:
    """Ask a run for the stacks of its ranks; return the answers that came, one per rank.

    Args:
        run: a running run.
        ranks: the ranks whose answers are waited for.
        native: wait for the native frames of those that answer, too.

    Raises:
        RequestError: the run directory cannot be written.
    """
    reader = RunReader(run.dir, begin=event_file_sizes(run.dir))
    try:
        try:
            request = request_stacks(run.dir, native=native)
        except OSError as error:
            raise RequestError(f"{run.dir.stack_request} cannot be written: {error.strerror}") from None
        answers: dict[int, RankStacks] = {}
        begun = time.monotonic()
        while True:
            missing = not answers.keys() >= set(ranks)
            late = native and any(not (each.native or each.native_problem) for each in answers.values())
            waited_s = time.monotonic() - begun
            if not (missing and waited_s < TIMEOUT_S) and not (late and waited_s < NATIVE_TIMEOUT_S):
                break
            time.sleep(POLL_S)
            # The nodes of a lost run may go on; they answer without a supervisor.
            status = read_status(run.dir)
            over = status is not None and status.status in ENDED  # without a supervisor there is no status
            for event in reader.poll():
                if not isinstance(event, RankStacks) or event.request < request:
                    continue
                before = answers.get(event.rank)
                if before is None or not before.native or event.native:  # another's request may have none
                    answers[event.rank] = event
            if over:
                break
        return [answers[rank] for rank in sorted(answers.keys() & set(ranks))]
    finally:
        reader.close()


def recorded_stacks(run: Run, ranks: Collection[int]) -> tuple[list[RankStacks], str]:
    """Return the newest recorded stacks of each rank of an ended run, and when they were recorded.

    That is a text, such as ``at 2026-11-28 13:05:10, in attempt 2 of 3``; empty without any.

    Raises:
        RecordError: the record cannot be read.
    """
    reader = RunReader(run.dir)
    answers: dict[int, RankStacks] = {}
    restarts: list[float] = []
    try:
        while events := reader.poll():
            for event in events:
                if isinstance(event, Finding) and event.kind == RESTARTED:
                    restarts.append(event.time)
                if isinstance(event, RankStacks) and event.request >= getattr(answers.get(event.rank), "request", ""):
                    answers[event.rank] = event
    except OSError as error:
        raise RecordError(f"{run.dir.events} cannot be read: {error.strerror}") from None
    finally:
        reader.close()
    chosen = [answers[rank] for rank in sorted(answers.keys() & set(ranks))]
    return chosen, _recorded_when([answer.time for answer in chosen], restarts)


def _recorded_when(times: Sequence[float], restarts: Sequence[float]) -> str:
    if not times:
        return ""
    first, last = (time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each)) for each in (min(times), max(times)))
    at = f"at {first}" if first == last else f"from {first} to {last}"
    attempts = sorted({1 + sum(restart < each for restart in restarts) for each in times})
    named = f"attempt{'s' * (len(attempts) > 1)} {' and '.join(map(str, attempts))} of {len(restarts) + 1}"
    return f"{at}, in {named}" if restarts else at
