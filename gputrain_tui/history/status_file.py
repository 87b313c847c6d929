"""Reads and writes ``status.json`` of a run directory.

The state of a run is that of its status, unless its supervisor is dead.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from gputrain_tui.history.plan_file import read_plan
from gputrain_tui.history.record_tail import first_time, newest_loss_of, newest_states
from gputrain_tui.state.best_validation import BestValidation
from gputrain_tui.state.elapsed import elapsed_s
from trainer.contract.errors import ExitCode, RecordError
from trainer.contract.outcome import exit_code_of, node_outcome, root_cause
from trainer.contract.record import (
    MAX_RANKS,
    Failure,
    Finding,
    RankState,
    RunDir,
    RunStatusName,
    Validation,
    write_atomically,
)
from trainer.contract.record.numbers import Count, ExitStatus, FiniteFloat, Rank, UnixSeconds, WorldSize
from trainer.contract.record.regular_file import open_regular, read_json
from trainer.host.boot import BootMoment, boot_id
from trainer.host.process_identity import ProcessIdentity, is_alive
from trainer.host.processes import exists

RunStateName = RunStatusName | Literal["lost"]
"""``lost``: its status is no end, but its supervisor is dead."""

ENDED = ("finished", "failed", "stopped")
PLANNED = "planned, not started: nobody has run the commands of its nodes"
"""Message of a run by hand without a record."""


class Status(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Contents of ``status.json``: replaced atomically, by the supervisor alone once it has taken over.

    An ended status is written after the ``run_ended`` event: a reader that sees it can read the whole record.
    """

    run: str
    recipe: str
    world_size: WorldSize
    """Ranks of the newest attempt."""
    most_ranks: Count = 0
    """Ranks of the attempt with the most of them; 0: all had ``world_size``."""
    status: RunStatusName = "starting"
    by_hand: bool = False
    """Whether its commands were typed by a user: without a supervisor its end is read from its record."""
    supervisor: ProcessIdentity | None = None
    """Process responsible for the run: its creator until the supervisor has taken over."""
    workdir: str = ""
    """Folder in which it was started, where relative paths of its recipe begin; empty if not known."""
    inode: Count | None = None
    """Inode of the run directory; a copy of it has another one."""
    started: UnixSeconds = 0.0
    """Unix seconds."""
    started_after_boot: BootMoment | None = None
    """The same moment by the time since the boot of the supervisor's machine, from which durations are taken."""
    ended: UnixSeconds | None = None
    """Unix seconds."""
    elapsed_s: FiniteFloat | None = None
    """From ``started`` to ``ended`` by a monotonic clock; None where it was not measured."""
    exit_code: ExitStatus | None = None
    restarts: Count = 0
    jobs: Count = 0
    """Jobs of Slurm that have begun; 0: it does not run in one."""
    message: str | None = None
    """One line: why it failed, or which processes were left when it stopped."""
    failed_rank: Rank | None = None
    """Rank whose failure the message is about; None where it is of a host or the run."""
    failed_host: str | None = None
    failed_step: Count | None = None
    """The step in which that rank failed, which is not done; None where it failed outside of one."""
    step: Count | None = None
    loss: FiniteFloat | None = None
    """Mean over the ranks at that step, in nats."""
    valid: FiniteFloat | Literal["nan"] | None = None
    """The newest validation loss, in nats; ``nan`` if it is not finite, since JSON has no such number."""
    best_valid: BestValidation | None = None
    """The best validation so far, by ``train.best_metric``; None without one."""
    lr: FiniteFloat | None = None
    """Learning rate of the last step; written at the end."""
    tokens: Count | None = None
    """Tokens that all ranks read; None where the task counts none; written at the end."""
    steps_per_s: FiniteFloat | None = None
    """Per second of stepping, over the whole run; written at the end."""
    samples_per_s: FiniteFloat | None = None
    """Likewise of all ranks together; None where no rank counts samples."""
    tokens_per_s: FiniteFloat | None = None
    """Tokens likewise; None where the task counts none."""
    mfu: FiniteFloat | None = None
    """Model FLOPs utilization since the ranks were last started, 0 to 1; None where it is not known."""
    noise_scale: FiniteFloat | None = None
    """Gradient noise scale, samples, by its newest event; None where it is not known; written at the end."""
    metrics: dict[str, FiniteFloat | Literal["nan"]] = {}
    """The user's own, newest values over the ranks, of a validation where there is one; ``nan`` as above."""
    shares: list[Count] | None = None
    """Samples of a micro-step of each rank, where shares are balanced."""
    tested: Validation | None = None
    """The last test, or the result of a run of ``eval``; written at the end."""
    findings: list[Finding] = []
    """Findings that mark the run, the most urgent first: at its end they stood, or had for most steps; written then."""
    archived: UnixSeconds | None = None
    """When this copy of the run was made for an archive, Unix seconds; the copy never changes."""

    @property
    def recorded_ranks(self) -> int:
        """Number of ranks that have a record, from 0 on: those of all attempts."""
        return max(self.world_size, min(self.most_ranks, MAX_RANKS))


_encode = msgspec.json.Encoder()
_status = msgspec.json.Decoder(Status)


def write_status(run: RunDir, status: Status) -> None:
    """Replace ``status.json`` atomically; on a full disk overwrite it, which needs no more space.

    Raises:
        OSError: it cannot be written at all.
    """
    data = _encode.encode(status) + b"\n"
    try:
        write_atomically(run.status, data)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        with os.fdopen(open_regular(run.status, os.O_RDWR), "r+b", buffering=0) as file:
            file.write(data)
            file.truncate()


def read_status(run: RunDir) -> Status | None:
    """Read ``status.json``; None when it is missing or damaged."""
    try:
        return require_status(run)
    except RecordError:
        return None


def require_status(run: RunDir) -> Status:
    """Read ``status.json``.

    Raises:
        RecordError: it is missing or damaged.
    """
    status = read_json(run.status, _status)
    return as_recorded(run, status) if status.by_hand else status


def as_recorded(run: RunDir, status: Status) -> Status:
    """Return the status of a run without a supervisor: begin and outcome as its nodes, or else its ranks, record them.

    Ranks that torchrun has started have no node agent in common.
    """
    began = first_time(run)
    if began is not None:
        status = msgspec.structs.replace(status, started=began)
    numbers = sorted(int(path.stem) for path in run.nodes.glob("*.json") if path.stem.isdecimal())
    ranks = {} if numbers else newest_states(run)
    end = _end_of_nodes(run, numbers) if numbers else _end_of_ranks(ranks, max(status.world_size, 1))
    if end is not None:
        return _ended(run, status, end)
    if (gone := _gone_rank(ranks)) is not None:
        status = msgspec.structs.replace(status, supervisor=gone)
    if began is None:
        return msgspec.structs.replace(status, status="starting", message=PLANNED)
    return msgspec.structs.replace(status, status="running")


class _RunEnd(NamedTuple):
    """End of a run, as its nodes or ranks have recorded it."""

    exit_code: int
    """The highest of the nodes; that of a failure says more."""
    time: float
    """Unix seconds."""
    failures: list[Failure]


def _end_of_nodes(run: RunDir, numbers: Sequence[int]) -> _RunEnd | None:
    """Return the end of a run from the outcomes of its nodes; None before the last one."""
    ends = [end for number in numbers if (end := node_outcome(run, number)) is not None]
    try:
        count = len(read_plan(run).nodes)
    except RecordError:
        count = len(numbers)
    if not ends or len(ends) < count:
        return None
    return _RunEnd(
        max(end.exit_code for end in ends),
        max(run.node_result(end.node).stat().st_mtime for end in ends),
        [end.failure for end in ends if end.failure is not None],
    )


def _end_of_ranks(states: Mapping[int, RankState | Failure], world_size: int) -> _RunEnd | None:
    """Return the end of a run from the newest events of its ranks; None while one goes on."""
    if len(states) < world_size or _going(states):
        return None
    failures = [state for state in states.values() if isinstance(state, Failure)]
    return _RunEnd(ExitCode.FINISHED, max(state.time for state in states.values()), failures)


def _going(states: Mapping[int, RankState | Failure]) -> list[RankState]:
    return [state for state in states.values() if isinstance(state, RankState) and state.state != "finished"]


def _gone_rank(states: Mapping[int, RankState | Failure]) -> ProcessIdentity | None:
    """Return a rank that is gone without an end, as after Ctrl-C or a kill, if all that go on are.

    It stands for the supervisor, so that the run is lost.
    """
    going, host = _going(states), socket.gethostname()
    if not going or any(each.host != host or exists(each.pid or 0) for each in going):
        return None
    return ProcessIdentity(pid=going[0].pid or 1, start_ticks=0, boot_id=boot_id(), host=host)


def _ended(run: RunDir, status: Status, end: _RunEnd) -> Status:
    failure = root_cause((int(each.time * 1e9), each) for each in end.failures)
    code = end.exit_code if failure is None else exit_code_of(failure)
    step, loss = newest_loss_of(run, status.world_size)
    outcome: RunStatusName = "finished" if code == 0 else "stopped" if code == ExitCode.STOPPED else "failed"
    return msgspec.structs.replace(
        status,
        status=outcome,
        exit_code=int(code),
        ended=end.time,
        message=None if failure is None else failure.message,
        failed_rank=None if failure is None else failure.rank,
        failed_host=None if failure is None else failure.host,
        failed_step=None if failure is None else failure.in_step,
        step=step,
        loss=loss,
    )


def state_of(status: Status) -> RunStateName:
    """Return a run's state: its status, or ``lost`` if that is no end and the supervisor is dead or it is archived."""
    if status.archived is not None and status.status not in ENDED:
        return "lost"
    if status.status in ENDED or status.supervisor is None or is_alive(status.supervisor) is not False:
        return status.status
    return "lost"


def elapsed_of(status: Status, now: float) -> float:
    """Return how long a run has taken until now, or until its end, seconds."""
    if status.ended is not None:
        return elapsed_s(started=status.started, until=status.ended, measured_s=status.elapsed_s)
    moment = status.started_after_boot
    return elapsed_s(started=status.started, until=now, measured_s=None if moment is None else moment.since_s())


def is_over(run: RunDir) -> bool:
    """Whether the run's record is complete: it has ended, or its supervisor is dead."""
    status = read_status(run)
    return status is not None and (status.status in ENDED or state_of(status) == "lost")
