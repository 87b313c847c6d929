"""Ranks that a script starts itself, from the node agent's side.

A process that has joined a process group connects to a socket of the agent, and gets the place of its rank in the
record. From then on the connection takes its reports, as the pipe of a launched rank does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from trainer.agent.assignment import STARTS_RANKS, RankAssignment
from trainer.agent.started_group import GroupMember, Place, PlannedRanks, Verdict, verdict
from trainer.agent.worker_process import StartedProcess, WorkerProcess
from trainer.contract.errors import ranks_text
from trainer.contract.outcome import RankReport
from trainer.contract.record import EventWriter, Failure, Finding, World
from trainer.contract.record.regular_file import size_of

REPLACED_S = 60.0
"""Time for another process to take the rank of one that has failed, where the script's launcher restarts ranks."""
ADVICE = (
    "set starts_ranks = true in [train]: the script is then started once on each node, and gpus or cpu_ranks of a node "
    "is the number of ranks that it starts there"
)


@contextlib.contextmanager
def socket_name(address: Path) -> Iterator[str]:
    """Yield a short name of a socket's file: its path may be longer than the address of a socket may be."""
    folder = os.open(address.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{address.name}"
    finally:
        os.close(folder)


class StartedRanks:
    """Processes of this node's script that are ranks, the newest process of each rank."""

    def __init__(
        self,
        folder: Path,
        planned: Sequence[RankAssignment],
        *,
        processes: int,
        writer: EventWriter,
        pids: MutableMapping[int, int],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Listen at a socket.

        Args:
            folder: the node's temporary folder.
            planned: the ranks of this node by the plan.
            processes: number of processes of the script that the node agent starts.
            writer: writer of the node's events.
            pids: rank to process id, of running ranks; changed by this class.
            now: seconds of a monotonic clock.
        """
        self._now = now
        self.address = folder / "ranks"
        self.ranks: dict[int, WorkerProcess] = {}
        self._planned = planned
        self._plan = PlannedRanks(
            world_size=planned[0].world_size, ranks=[each.rank for each in planned], processes=processes
        )
        self._writer = writer
        self._pids = pids
        self._asking: list[tuple[Connection, int]] = []
        """Connections without a message so far, each with the pid of its process."""
        self._groups: dict[int, tuple[int, int]] = {}
        """Rank and world size in its own group, by the rank by the plan, of processes started by the node agent."""
        self._training: set[int] = set()
        """Those of them that train themselves, by their rank by the plan."""
        self._failures: dict[int, tuple[int, Failure, float]] = {}
        """By rank: time of the report in ns, failure, and time of its receipt on the monotonic clock."""
        self._died: dict[int, int] = {}
        """Ranks that ended without a report, in order, each with the time in ns."""
        self._world_size = planned[0].world_size
        """Number of ranks that readers know of."""
        self._told: set[Verdict] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with socket_name(self.address) as name:
            self._listener.bind(name)
        self._listener.listen(socket.SOMAXCONN)
        self._listener.setblocking(False)

    @property
    def living(self) -> list[WorkerProcess]:
        return [rank for rank in self.ranks.values() if not rank.ended]

    @property
    def sources(self) -> list[object]:
        """What becomes readable when there is something to do."""
        reports = [rank.reports for rank in self.living if not rank.reports.closed]
        ends = [rank.process.sentinel for rank in self.living]
        return [self._listener, *(connection for connection, _ in self._asking), *reports, *ends]

    def close(self) -> None:
        self._listener.close()
        for connection, _ in self._asking:
            connection.close()
        for rank in self.living:
            rank.reports.close()

    def has_displaced(self, rank: WorkerProcess) -> bool:
        """Whether a process of the script has left its place in the record to processes that it has started."""
        return bool(self.ranks) and rank.assignment.rank not in self._groups

    # --- joining --------------------------------------------------------------------------------------------------

    def note(self, rank: WorkerProcess, report: RankReport) -> None:
        """Take the report of a process that the node agent has started, that it is in a group or trains itself."""
        if report.group is not None:
            self._groups[rank.assignment.rank] = report.group
        if report.trains:
            self._training.add(rank.assignment.rank)

    def accept(self, launched: Sequence[WorkerProcess]) -> None:
        """Answer the processes that have joined a group, descendants of those that the node agent has launched."""
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:  # none waits, or there is no descriptor left
                break
            credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            peer.setblocking(True)
            self._asking.append((Connection(peer.detach()), struct.unpack("3i", credentials)[0]))
        for connection, pid in list(self._asking):
            try:
                if not connection.poll():
                    continue
                member = msgspec.json.decode(connection.recv_bytes(), type=GroupMember)
                self._asking.remove((connection, pid))
                parent = next((each for each in launched if each.process.pid == member.plan_pid), None)
                place = None if parent is None else self._place(connection, pid, member, parent)
                connection.send_bytes(msgspec.json.encode(place or Place(is_rank=False)))
            except (OSError, EOFError, msgspec.MsgspecError):  # the process has ended, or is none of ours
                self._asking = [each for each in self._asking if each[0] is not connection]
                place = None
            if place is None:
                connection.close()

    def _place(self, connection: Connection, pid: int, member: GroupMember, parent: WorkerProcess) -> Place | None:
        """Return the place of a process; None if it is no rank of the run."""
        plan_rank = parent.assignment.rank
        living = self.living
        found = verdict(
            self._plan,
            member,
            plan_rank=plan_rank,
            own_group=self._groups.get(plan_rank),
            trains=plan_rank in self._training,
            living=[rank.assignment.rank for rank in living],
            living_world_size=living[0].assignment.world_size if living else 0,
        )
        if found != "rank":
            self._tell(found, member, parent.assignment)
            return None
        process = StartedProcess(pid)
        local_rank = member.local_rank if member.local_rank is not None else member.rank - self._plan.ranks[0]
        assignment = dataclasses.replace(
            parent.assignment,
            rank=member.rank,
            local_rank=max(local_rank, 0),
            world_size=member.world_size,
            local_world_size=member.world_size if self._plan.is_whole else len(self._plan.ranks),
            device=self._device(local_rank),
        )
        log = assignment.log
        log_size = 0 if log is None else size_of(log)
        before = self.ranks.get(member.rank)
        rank = WorkerProcess(assignment, process, connection, log_size, stack_requests=connection, by_script=True)
        if plan_rank not in self._groups:
            with contextlib.suppress(OSError):
                parent.reports.send_bytes(STARTS_RANKS)
            if self._pids.get(plan_rank) == parent.process.pid:
                del self._pids[plan_rank]
        if self._plan.is_whole and member.world_size != self._world_size:
            self._world_size = member.world_size
            self._writer.write(World(time=time.time(), world_size=member.world_size))
        if before is not None:  # a rank of an earlier group, or of a restart by the script's launcher
            self._writer.write(assignment.state("spawned", pid=pid))
        self._writer.write(assignment.state("ready", pid=pid))
        self.ranks[member.rank] = rank
        self._pids[member.rank] = pid
        self._failures.pop(member.rank, None)
        self._died.pop(member.rank, None)
        parent_log = parent.assignment.log
        return Place(
            is_rank=True,
            local_rank=assignment.local_rank,
            local_world_size=assignment.local_world_size,
            node=assignment.node,
            host=assignment.host,
            device=assignment.device,
            run_dir=assignment.run_dir or "",
            log="" if parent_log is None else str(parent_log),
            agent_pid=os.getpid(),
        )

    def _device(self, local_rank: int) -> str:
        """Return the label of a rank's device; of the first one on CPUs, and empty where it is not known."""
        if 0 <= local_rank < len(self._planned):
            return self._planned[local_rank].device
        first = self._planned[0].device
        return first if first == "cpu" else ""

    def _tell(self, found: Verdict, member: GroupMember, parent: RankAssignment) -> None:
        """Record once why processes of the script are no ranks of the run, if that is a mistake."""
        if found == "helper" or found in self._told:
            return
        self._told.add(found)
        if found == "nested":
            what = f"the plan has {self._plan.processes} ranks on this node, and the script of each starts ranks itself"
        else:
            here = f"{ranks_text(self._plan.ranks)} {'is' if len(self._plan.ranks) == 1 else 'are'}"
            what = f"the plan has {self._plan.world_size} ranks, of which {here} on this node"
        self._writer.write(
            Finding(
                time=time.time(),
                kind="not_measured",
                rank=parent.rank,
                host=parent.host,
                cause="started_ranks",
                message=f"rank {parent.rank} has started rank {member.rank} of a group of {member.world_size}, which "
                f"is not measured: {what}",
                advice=ADVICE,
            )
        )

    # --- ends -----------------------------------------------------------------------------------------------------

    def fail(self, rank: WorkerProcess, report: RankReport) -> None:
        """Take a rank's report of its failure: the script decides whether it goes on without it."""
        if report.failure is not None:
            self._failures[rank.assignment.rank] = report.time_ns, report.failure, self._now()

    def end(self, rank: WorkerProcess) -> None:
        """Note that the process of a rank has ended, after its last report."""
        number = rank.assignment.rank
        rank.ended = True
        rank.reports.close()
        os.close(rank.process.sentinel)
        if self._pids.get(number) == rank.process.pid:
            del self._pids[number]
        if rank.unreported:
            self._died[number] = time.time_ns()

    def lasting_failures(self) -> list[tuple[int, Failure]]:
        """Return the failures of ranks that no other process has replaced in time, with their times in ns."""
        now = self._now()
        return [(ns, failure) for ns, failure, since in self._failures.values() if now > since + REPLACED_S]

    def causes(self, failure: Failure | None = None, lost_pid: int | None = None) -> list[tuple[int, Failure]]:
        """Return the failures of ranks that stand when the script's process ends, with their times in ns.

        If none has reported one, that of the rank whose process has ended without a report, which is recorded.

        Args:
            failure: failure of the script's process; None if it ended well, whatever became of ranks without reports.
            lost_pid: the process for whose end it failed, if that is known.
        """
        reported = [(ns, found) for ns, found, _ in self._failures.values()]
        if failure is None or any(found.kind != "lost_peer" for _, found in reported) or not self._died:
            return reported
        by_pid = (number for number in self._died if self.ranks[number].process.pid == lost_pid)
        number = next(by_pid, next(iter(self._died)))
        assignment = self.ranks[number].assignment
        message = f"the process ended before its training was complete: {failure.message}"
        died = msgspec.structs.replace(assignment.failure("exit", message), time=self._died[number] / 1e9)
        self._writer.write(died)
        self._writer.write(assignment.state("failed", message=message))
        return [*reported, (self._died[number], died)]

    def finish(self) -> None:
        """Record the success of ranks that have ended without a report, once the script has ended well."""
        for number in self._died:
            self._writer.write(self.ranks[number].assignment.state("finished"))
