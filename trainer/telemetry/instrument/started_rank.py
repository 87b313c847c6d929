"""Process of a script that has joined a process group, and gets the place of its rank in the record."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import socket
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trainer.agent import end_signal
from trainer.agent.assignment import PipeSink, RankAssignment
from trainer.agent.code_position import report_position
from trainer.agent.rank_failure import error_line, failure_of, last_error
from trainer.agent.script import kind_of, write_state
from trainer.agent.script_environment import RANK_PID
from trainer.agent.started_group import GroupMember, Place
from trainer.agent.started_ranks import socket_name
from trainer.contract.options import Distributed
from trainer.contract.outcome import is_lost_peer, lost_peer_text
from trainer.contract.record import Failure, RunDir
from trainer.contract.record.regular_file import open_to_append, size_of
from trainer.host import process_guard
from trainer.host.user_code import innermost_user_line
from trainer.telemetry import instrument

ANSWER_S = 30.0
"""Maximum time to wait for the node agent's answer."""
EXIT_S = 5.0
"""Maximum time that ``os._exit`` waits for the end to be recorded."""

_asked_pid = 0
"""Process that has asked for its rank; another one is forked from it."""


def join(address: str, plan_pid: int, rank: int, world_size: int, *, at_once: bool) -> None:
    """Ask the node agent for the place of this process; without ``at_once`` only when it trains.

    A group of one may be that of any library; ``at_once`` is for others, and for a script that must start its ranks.
    """
    global _asked_pid
    if _asked_pid == os.getpid():
        return  # another group of the same process
    _asked_pid = os.getpid()
    # A launcher in the script sets both; otherwise they are those of the script's process.
    given = os.environ.get("LOCAL_RANK", "") if os.environ.get("RANK") == str(rank) and world_size > 1 else ""
    local_rank = int(given) if given.isdecimal() else None
    member = GroupMember(plan_pid=plan_pid, rank=rank, world_size=world_size, local_rank=local_rank)
    if at_once:
        _ask(Path(address), member)
        return

    def before_step(*_: Any) -> None:
        handle.remove()
        try:
            _ask(Path(address), member)
        except Exception as error:  # noqa: BLE001 - the script goes on
            _print_fault(error)

    handle = register_optimizer_step_pre_hook(before_step)


def _ask(address: Path, member: GroupMember) -> None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with socket_name(address) as name:
        connection.connect(name)
    pipe = Connection(connection.detach())
    pipe.send_bytes(msgspec.json.encode(member))
    if not pipe.poll(ANSWER_S):
        raise TimeoutError("the node agent did not answer")
    place = msgspec.json.decode(pipe.recv_bytes(), type=Place)
    if place.is_rank:
        _begin(place, member, pipe)
    else:
        pipe.close()


def _begin(place: Place, member: GroupMember, pipe: Connection) -> None:
    """Take the place: output, reports, measurement and end as those of a rank that the node agent has started."""
    process_guard.kill_at_end_of(place.agent_pid)
    os.environ[RANK_PID] = str(os.getpid())
    assignment = RankAssignment(
        rank=member.rank,
        local_rank=place.local_rank,
        world_size=member.world_size,
        local_world_size=place.local_world_size,
        node=place.node,
        host=place.host,
        device_id=None,
        device=place.device,
        init_method=None,
        backend="gloo",
        parent_pid=place.agent_pid,
        distributed=Distributed(),
        run_dir=place.run_dir,
        run_id="",
        report=PipeSink(pipe),
    )
    log = RunDir(place.run_dir).rank_log(member.rank)
    if _prints_to(Path(place.log)):
        _redirect_output(log)
    end = _End(assignment, log, size_of(log))
    report_position(assignment.report, pipe, end.stop)
    write_state(assignment, "training")
    instrument.install(RunDir(place.run_dir).rank_events(member.rank), member.rank)


def _prints_to(log: Path) -> bool:
    """Whether both outputs of this process are the log of the script's process, and nothing else takes them."""
    try:
        status = log.stat()
        return all(os.path.samestat(os.fstat(number), status) for number in (1, 2))
    except OSError:
        return False


def _redirect_output(log: Path) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # it may be any object of the script
            stream.flush()
    descriptor = open_to_append(log)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    process_guard.print_by_line()
    process_guard.print_stacks_on_signal()
    process_guard.print_stacks_of_forks()


class _End:
    """The end of the process: by an exception, ``sys.exit``, ``os._exit`` or the end of its code."""

    def __init__(self, assignment: RankAssignment, log: Path, log_from: int) -> None:
        self._assignment = assignment
        self._log = log
        self._log_from = log_from
        self._pid = os.getpid()
        self._stopped = False
        self._code = 0
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._is_over = False
        self._excepthook = sys.excepthook
        sys.excepthook = self._on_exception
        self._patch_exits()
        atexit.register(self._record)

    def stop(self) -> None:
        """Take the node agent's stop request: SIGTERM comes next."""
        self._stopped = True
        end_signal.write_record()

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._code, self._error = 1, error
        self._excepthook(kind, error, trace)

    def _patch_exits(self) -> None:
        leave = sys.exit

        @functools.wraps(leave)
        def exit(status: Any = None, /) -> None:
            # torch ends a process by it while it handles the exception, and multiprocessing then with the same code.
            self._code = status if isinstance(status, int) else int(status is not None)
            self._error = sys.exception() or self._error
            leave(status)

        def record_at_once(status: int) -> None:
            self._code = status
            self._record()

        sys.exit = exit  # type: ignore[assignment]
        instrument.before_os_exit(record_at_once, EXIT_S)

    def _record(self) -> None:
        with self._lock:
            if self._is_over or os.getpid() != self._pid:
                return
            self._is_over = True
        failure = None if self._code == 0 or self._stopped else self._failure()
        not_recorded = instrument.finish(failed=self._code != 0)
        assignment = self._assignment
        if failure is not None:
            not_recorded = write_state(assignment, "failed", failure) or not_recorded
            assignment.failed(failure, not_recorded=not_recorded)
        elif self._stopped:
            assignment.stopped(None, None, not_recorded=not_recorded)
        else:
            not_recorded = write_state(assignment, "finished") or not_recorded
            assignment.finished(not_recorded=not_recorded)

    def _failure(self) -> Failure:
        error, assignment = self._error, self._assignment
        if error is not None and not isinstance(error, SystemExit):
            where = innermost_user_line(error.__traceback__)
            text = lost_peer_text(error_line(error)) + (where and f" ({where})")
            return failure_of(error, kind=kind_of(error), message=text, rank=assignment.rank, host=assignment.host)
        line = last_error(self._log, since=self._log_from)
        message = f"the process ended with exit code {self._code} before its training was complete"
        kind = "lost_peer" if is_lost_peer(line) else "exit"
        return assignment.failure(kind, f"{message}: {lost_peer_text(line)}" if line else message)


def _print_fault(error: Exception) -> None:
    print(f"gputrain: not measured: {type(error).__name__}: {error}", file=sys.stderr)
