"""One run from start to end: launches the plan's nodes, watches them, restarts or stops them, says how it ended.

``python -m gputrain_tui.supervisor RUN_DIR [--lease] [--adopt]``, or ``--warm SECONDS`` to wait for these words. One
thread and never torch: the nodes' parents may ask to die with the thread that started them, and the command must be
there at once. With ``--lease`` the run lives as long as the other end of standard input. With ``--adopt`` it takes
over from a supervisor that was killed.
"""

from __future__ import annotations

import fcntl
import math
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Literal

import msgspec

from gputrain_tui.launchers import Launcher, NodeProcess, launcher
from gputrain_tui.plan import Plan, stop_grace
from gputrain_tui.running import leftovers, outcome
from gputrain_tui.running.descendants import adopt_orphans, sweep
from gputrain_tui.running.processes import ProcessIdentity, identify
from gputrain_tui.runs import Status, last_step, read_status, write_status
from trainer.errors import ExitCode, RequestError
from trainer.outcome import SAVE_S, exit_code_of
from trainer.record import Event, Failure, Finding, RunDir, RunEnded, RunStarted, encode_event, write_atomically

if TYPE_CHECKING:
    from gputrain_tui.diagnosis.watch import Watch
    from gputrain_tui.running.standby import Spare

STOP_GRACE_S = 5.0
"""How long the nodes may take to leave when they are stopped at once; when asked in order, besides what the ranks may
take to answer and to save."""
FAILURE_GRACE_S = 1.5
"""How long the other nodes may take once one has failed; all are gone within two seconds."""
SWEEP_S = 5.0
"""How long killed processes may take to disappear."""
TEMPORARY_LENGTH = 60
"""Longest name of a temporary folder in which a Unix socket can still be named (108 bytes with everything)."""
FIRST_LOOK_S = 1.0
"""When a run is first looked at for what is wrong with it; its ranks have better use for the processor till then."""
HELD_BACK = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that who starts a supervisor blocks: they wait until it has its handlers."""
LEASE = 0
"""The descriptor whose end ends a leased run."""


Urgency = Literal[0, 1, 2, 3]
"""How the run is to end: not yet, in order, at once, without asking."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a run, or one attempt at it, ended."""

    status: Literal["finished", "failed", "stopped"]
    failure: Failure | None = None
    recorded: bool = False
    """Whether the failure stands in the record already."""


@dataclass
class Attempt:
    """The nodes of one launch."""

    since: Mapping[str, int]
    """Sizes of the event files when it began."""
    running: dict[int, NodeProcess] = field(default_factory=dict)
    """By descriptor."""
    ended: dict[int, outcome.NodeEnd] = field(default_factory=dict)
    """By node, in the order in which they ended."""
    failure: Failure | None = None
    """What this process itself saw go wrong."""
    stopping: Urgency = 0
    """What the nodes have been asked."""
    deadline: float | None = None
    """When what is still running is killed, monotonic seconds."""


class Launched(msgspec.Struct, kw_only=True):
    """What a supervisor leaves for one that takes over, ``attempt.json``."""

    since: dict[str, int]
    """Sizes of the event files when the attempt began."""
    processes: dict[int, ProcessIdentity]
    """Of each node."""
    tmp: str


class Supervisor:
    """The one process that answers for a run."""

    def __init__(
        self,
        run_dir: RunDir,
        *,
        leased: bool,
        adopting: bool = False,
        spare: Spare | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.dir = run_dir
        self._spare = spare
        self.leased = leased
        self._adopting = adopting
        self._now = now
        self._stop_reason: str | None = None
        self._urgency: Urgency = 0
        """How somebody wants the run to end."""
        self._asked = False
        """Whether a person asked for it; the next time is not to be waited for."""
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._wake_read, select.POLLIN)
        if leased:
            self._poll.register(LEASE, select.POLLIN)
        self._plan = msgspec.json.decode(run_dir.plan.read_bytes(), type=Plan)
        self._status = read_status(run_dir) or Status(
            run=run_dir.path.name, recipe="", world_size=self._plan.world_size
        )
        self._remark = ""
        """What is to be known of the record besides how the run ended."""
        self._tmp: Path | None = None
        self._diagnosis: Watch | None = None
        self._look_at = time.monotonic() + FIRST_LOOK_S

    def run(self) -> ExitCode:
        """Take the run from start to end; return its exit code."""
        self._catch_signals()
        adopt_orphans()
        try:
            ended = self._adopted() if self._adopting else self._attempts()
        except BaseException as error:
            left = self._sweep()
            what = f"the supervisor failed: {type(error).__name__}: {error}"
            self._close(Ended(status="failed", failure=self._failure("launch", what)), left)
            raise
        return self._close(ended, self._sweep())

    # ------------------------------------------------------------------------------------------------ attempts

    def _attempts(self) -> Ended:
        plan = self._plan
        try:
            way = launcher(plan.launcher)
        except RequestError as error:
            return Ended(status="failed", failure=self._failure("request", str(error)))
        if self._spare is not None and plan.launcher == "local":
            from gputrain_tui.running.standby import SpareFirst

            way = SpareFirst(self._spare, way, plan.nodes)
        env = self._environment()
        restarts: int | None = None
        while True:
            attempt = self._launch(plan, way, env)
            if restarts is None:  # the nodes are on their way: nothing before them delays the first step
                self._started()
            self._leave_word(attempt)
            self._watch(attempt)
            ended = self._judge(attempt)
            if ended.failure is None or exit_code_of(ended.failure) != ExitCode.FAILED:
                return ended
            from gputrain_tui.running import restart  # a healthy run does not wait for it

            restarts = restart.max_restarts(self.dir) if restarts is None else restarts
            if not restarts or self._stop_reason is not None or self._sweep():
                return ended
            restarts -= 1
            if not ended.recorded:
                self._record(ended.failure)
            plan = restart.again(plan, self.dir)

    def _launch(self, plan: Plan, way: Launcher, env: Mapping[str, str]) -> Attempt:
        attempt = Attempt(since=outcome.sizes(self.dir))
        for node in plan.nodes:
            if self._stop_reason is not None:
                break
            self.dir.node_result(node.node).unlink(missing_ok=True)
            try:
                process = way.launch(node, self.dir, env=env, leased=self.leased)
            except OSError as error:
                what = f"node {node.node}: cannot start {node.argv[0]}: {error.strerror or error}"
                attempt.failure = self._failure("launch", what, host=node.host)
                self._stop(attempt, 2, FAILURE_GRACE_S)
                break
            attempt.running[process.fileno()] = process
            self._poll.register(process.fileno(), select.POLLIN)
        return attempt

    def _adopted(self) -> Ended:
        """Watch the nodes that a killed supervisor launched; those of a leased run have gone with it."""
        try:
            launched = msgspec.json.decode(self.dir.attempt.read_bytes(), type=Launched)
        except (OSError, msgspec.MsgspecError):  # it was killed before it left word: what it started is swept
            launched = Launched(since={}, processes={}, tmp=str(self.dir.tmp))
        self._tmp = Path(launched.tmp)
        self._answer()
        way = launcher(self._plan.launcher)
        attempt = Attempt(since=launched.since)
        for node in self._plan.nodes:
            identity = launched.processes.get(node.node)
            process = way.adopt(node, self.dir, identity) if identity is not None else None
            if process is not None:
                attempt.running[process.fileno()] = process
                self._poll.register(process.fileno(), select.POLLIN)
                continue
            missing = outcome.unfinished(self.dir, node.ranks, attempt.since)
            attempt.ended[node.node] = outcome.NodeEnd(host=node.host, exit_code=ExitCode.FAILED, unfinished=missing)
        if any(end.unfinished for end in attempt.ended.values()):
            self._stop(attempt, 2, FAILURE_GRACE_S)
        self._watch(attempt)
        return self._judge(attempt)

    def _leave_word(self, attempt: Attempt) -> None:
        processes = {process.node: process.identity for process in attempt.running.values()}
        launched = Launched(since=dict(attempt.since), processes=processes, tmp=str(self._tmp))
        try:
            write_atomically(self.dir.attempt, msgspec.json.encode(launched))
        except OSError as error:
            print(f"cannot write {self.dir.attempt}: {error.strerror}", file=sys.stderr, flush=True)

    def _answer(self) -> None:
        """Become the one who answers for the run."""
        self._status.status = "running"
        self._status.supervisor = identify()
        self._write_status()

    def _started(self) -> None:
        self._answer()
        status = self._status
        self._record(
            RunStarted(
                time=self._now(),
                run=status.run,
                recipe=status.recipe,
                world_size=self._plan.world_size,
                run_dir=str(self.dir.path),
            )
        )

    def _watch(self, attempt: Attempt) -> None:
        """Wait until no node is left, passing on the wish to stop and the first failure."""
        while attempt.running:
            if self._urgency > attempt.stopping:
                self._stop(attempt, self._urgency, self._grace_s())
            for descriptor in self._wait(attempt.deadline, look=not attempt.stopping):
                process = attempt.running.get(descriptor)
                code = process.poll() if process is not None else None
                if process is not None and code is not None:
                    self._node_ended(attempt, descriptor, process, code)
            if not attempt.stopping and time.monotonic() >= self._look_at:
                self._diagnose()
            if attempt.deadline is not None and time.monotonic() >= attempt.deadline:
                attempt.deadline = None
                for process in attempt.running.values():
                    process.kill()

    def _diagnose(self) -> None:
        """Look at the record, and write down what is found."""
        try:
            if self._diagnosis is None:
                from gputrain_tui.diagnosis.watch import Watch  # the nodes are under way before it is imported

                self._diagnosis = Watch(self.dir, now=self._now)
            for finding in self._diagnosis.look():
                self._record(finding)
            self._look_at = time.monotonic() + self._diagnosis.due_in_s()
        except Exception as error:  # noqa: BLE001 - whatever is wrong with looking must not end what is looked at
            traceback.print_exc()
            self._look_at = math.inf
            what = f"this run is no longer diagnosed: {type(error).__name__}: {error}"
            self._record(Finding(time=self._now(), kind="not_diagnosed", severity="info", message=what))

    def _node_ended(self, attempt: Attempt, descriptor: int, process: NodeProcess, code: int) -> None:
        del attempt.running[descriptor]
        self._poll.unregister(descriptor)
        process.close()
        ranks = next(node.ranks for node in self._plan.nodes if node.node == process.node)
        missing = outcome.unfinished(self.dir, ranks, attempt.since)
        if missing and code == ExitCode.FINISHED and outcome.is_full(self.dir):
            missing = []  # their parent has heard what they could not write down
            self._remark = "the disk of the run directory is full: the end of the record is missing"
        attempt.ended[process.node] = outcome.NodeEnd(host=process.host, exit_code=code, unfinished=missing)
        if missing and not attempt.stopping:
            self._stop(attempt, 2, FAILURE_GRACE_S)

    def _grace_s(self) -> float:
        """How long the nodes may take to leave, as somebody wants the run to end; they look after their ranks."""
        if self._urgency == 3:
            return 0.0
        patience = max(stop_grace(node.argv) for node in self._plan.nodes) + SAVE_S if self._urgency == 1 else 0.0
        return patience + STOP_GRACE_S

    def _stop(self, attempt: Attempt, urgency: Urgency, grace_s: float) -> None:
        attempt.stopping = urgency
        deadline = time.monotonic() + grace_s
        attempt.deadline = deadline if attempt.deadline is None else min(deadline, attempt.deadline)
        for process in attempt.running.values():
            process.stop(at_once=urgency > 1)
        if self._stop_reason is not None:
            self._status.status = "stopping"
            self._write_status()

    def _judge(self, attempt: Attempt) -> Ended:
        ends = attempt.ended.values()
        if len(ends) == len(self._plan.nodes) and not any(end.unfinished for end in ends):
            return Ended(status="finished")
        if self._stop_reason is not None:
            return Ended(status="stopped")
        if attempt.failure is not None:
            return Ended(status="failed", failure=attempt.failure)
        if not self._adopting and (stopped := outcome.stopped_first(attempt.ended)) is not None:
            self._stop_reason = f"node {stopped} was stopped on {attempt.ended[stopped].host}"
            return Ended(status="stopped")
        failure = outcome.cause(self.dir, attempt.since, attempt.ended, self._now())
        recorded = failure in outcome.failures(self.dir, attempt.since)
        if self._adopting and not recorded:
            failure = self._failure("signal", "the run's supervisor was killed, and its ranks ended with it")
        return Ended(status="failed", failure=failure, recorded=recorded)

    # ------------------------------------------------------------------------------------------------- waiting

    def _wait(self, deadline: float | None, *, look: bool) -> list[int]:
        """Sleep until a node ends, a signal, the end of the lease or the deadline; return the descriptors of nodes.

        Args:
            deadline: monotonic seconds.
            look: wake also when the record is to be looked at.
        """
        due = min(math.inf if deadline is None else deadline, self._look_at if look else math.inf)
        timeout = None if due == math.inf else max(0, math.ceil((due - time.monotonic()) * 1000))
        nodes = []
        for descriptor, _ in self._poll.poll(timeout):
            if descriptor == self._wake_read:
                with suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
            elif descriptor == LEASE and self.leased:
                if not os.read(LEASE, 4096):
                    self._poll.unregister(LEASE)
                    self._ask_to_stop("the command that started it is gone", 2)
            else:
                nodes.append(descriptor)
        return nodes

    def _catch_signals(self) -> None:
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only to wake
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        # A terminal that is closed hangs up more than once, and means only one thing by it.
        again = self._asked and number != signal.SIGHUP
        self._asked |= number != signal.SIGHUP
        self._ask_to_stop(f"stopped by {signal.Signals(number).name}", 3 if again else 1)

    def _ask_to_stop(self, reason: str, urgency: Urgency) -> None:
        self._urgency = max(urgency, self._urgency)
        self._stop_reason = self._stop_reason or reason

    def _sweep(self) -> list[int]:
        """Leave nothing of the run behind; return the pids of what would not go."""
        left = sweep(SWEEP_S, self._nap)
        return left or (leftovers.end(self.dir.path) if self._adopting else [])

    def _nap(self, seconds: float) -> None:
        select.select([self._wake_read], [], [], seconds)
        with suppress(BlockingIOError):
            os.read(self._wake_read, 4096)

    # --------------------------------------------------------------------------------------------- the record

    def _close(self, ended: Ended, left: list[int]) -> ExitCode:
        """Write how the run ended; readers take these as its last words."""
        if self._tmp is not None:
            shutil.rmtree(self._tmp, ignore_errors=True)
        if not left:
            outcome.clear_unfinished(self.dir)
        message = None
        if ended.status == "stopped":
            kept = outcome.kept(self.dir, [node.node for node in self._plan.nodes])
            message = " ".join(filter(None, [self._stop_reason, kept]))
        message = "; ".join(filter(None, [message, self._remark])) or None
        code = ExitCode.STOPPED if ended.status == "stopped" else ExitCode.FINISHED
        if ended.failure is not None:
            if not ended.recorded:
                self._record(ended.failure)
            message, code = ended.failure.message, exit_code_of(ended.failure)
        if left:
            message = "; ".join(filter(None, [message, f"processes left: {', '.join(map(str, left))}"]))
        status = self._status
        status.status, status.exit_code, status.message = ended.status, int(code), message
        status.ended = self._now()
        last = [step for rank in range(self._plan.world_size) if (step := last_step(self.dir, rank)) is not None]
        if last:
            status.step = min(step.step for step in last)
            losses = [step.loss for step in last if step.loss is not None]
            status.loss = sum(losses) / len(losses) if losses else None
        self._record(RunEnded(time=status.ended, status=ended.status, exit_code=int(code), message=message))
        self._write_status()
        return code

    def _failure(self, kind: str, message: str, *, host: str | None = None) -> Failure:
        return Failure(time=self._now(), kind=kind, message=message, host=host)

    def _record(self, event: Event) -> None:
        """Append to the run's own events; a full disk does not end the run."""
        try:
            with self.dir.run_events.open("ab") as file:
                file.write(encode_event(event))
        except OSError as error:
            print(f"cannot record {type(event).__name__}: {error.strerror}", file=sys.stderr, flush=True)

    def _write_status(self) -> None:
        try:
            write_status(self.dir, self._status)
        except OSError as error:
            print(f"cannot write {self.dir.status}: {error.strerror}", file=sys.stderr, flush=True)

    def _environment(self) -> dict[str, str]:
        """What all nodes of the run share: its mark, by which its processes are found, and a temporary folder."""
        self._tmp = self.dir.tmp
        if len(str(self._tmp)) > TEMPORARY_LENGTH:
            self._tmp = Path(tempfile.mkdtemp(prefix="gputrain-"))
        self._tmp.mkdir(mode=0o700, exist_ok=True)
        return {leftovers.MARK: str(self.dir.path), "TMPDIR": str(self._tmp)}


def main() -> int:
    """Supervise the run of a directory, unless another process does."""
    words = sys.argv[1:]
    if words[0] != "--warm":
        return _supervise(words)
    from gputrain_tui.running import standby

    asked = standby.wait_for_run(float(words[1]))
    if asked is None:
        return ExitCode.FINISHED
    words, spare = asked
    try:
        return _supervise(words, spare)
    finally:
        spare.discard()


def _supervise(words: Sequence[str], spare: Spare | None = None) -> int:
    run_dir = RunDir(Path(words[0]).absolute())
    with run_dir.lock.open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another supervisor answers for {run_dir.path}", file=sys.stderr)
            return ExitCode.REFUSED
        leased, adopting = "--lease" in words[1:], "--adopt" in words[1:]
        return Supervisor(run_dir, leased=leased, adopting=adopting, spare=spare).run()


if __name__ == "__main__":
    sys.exit(main())
