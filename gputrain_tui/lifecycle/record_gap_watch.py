"""Reads what ranks tell of the gaps of their records, and makes findings of it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

import msgspec

from gputrain_tui.history.record_tail import last_step
from gputrain_tui.lifecycle.node_process import NodeProcess
from gputrain_tui.lifecycle.remote_nodes import remote_node
from gputrain_tui.plan.planner import Plan
from gputrain_tui.state.record_gaps import gap_finding, is_news, unwritable_finding
from trainer.contract.record import Finding, RunDir
from trainer.contract.record.unrecorded import read_unrecorded

CHECK_S = 0.5


class RecordGaps:
    """The gaps that the ranks of a run have told."""

    def __init__(self, run_dir: RunDir, plan: Plan) -> None:
        self._dir = run_dir
        self._node_of = {rank: node.node for node in plan.nodes for rank in node.ranks}
        self._seen: dict[str, int] = {}
        """Modification time of each file when it was last read, ns."""
        self._told: dict[int, Finding] = {}
        """What was recorded last, as the rank told it."""
        self.findings: dict[int, Finding] = {}
        """The newest finding of each rank that had a gap."""
        self._unwritable: dict[int, int] = {}
        """First rank of each node whose run directory cannot be written, by node."""
        self.due = 0.0
        """Time of the next check, monotonic seconds."""

    def change_plan(self, plan: Plan) -> None:
        """Let ranks be on the nodes of another plan; those that it does not have keep theirs."""
        self._node_of |= {rank: node.node for node in plan.nodes for rank in node.ranks}

    def check(self, *, is_last: bool = False) -> list[Finding]:
        """Return new findings; at the end of the run (``is_last``) also those whose counts alone have changed."""
        self.due = time.monotonic() + CHECK_S
        new = []
        for rank in sorted(self._changed(is_last)):
            try:
                told = read_unrecorded(self._dir.gaps / f"{rank}.json")
            except OSError:
                continue
            if told is None or told.rank != rank or not is_news(told, self._told.get(rank), is_last=is_last):
                continue
            self._told[rank] = told
            self.findings[rank] = gap_finding(told, self._host(rank), self._first_of(self._node_of[rank], rank))
            new.append(self.findings[rank])
        return new

    def check_hosts(self, running: Iterable[NodeProcess]) -> list[Finding]:
        """Return new findings of hosts whose run directory cannot be written, so that their ranks can tell nothing."""
        new = []
        for process in running:
            node, rank = process.node, self._unwritable.get(process.node)
            if bool(process.unwritable) == (rank is not None):
                continue
            if rank is None:
                rank = self._unwritable[node] = min(
                    each for each, its_node in self._node_of.items() if its_node == node
                )
            else:
                del self._unwritable[node]
            newest = last_step(self._dir, rank)
            step = 0 if newest is None else newest.step
            self.findings[rank] = unwritable_finding(rank, process.host, process.unwritable, step)
            new.append(self.findings[rank])
        return new

    def begin_attempt(self) -> list[Finding]:
        """Return findings that the record goes on after the gaps that stand: other processes write it now.

        A host whose disk could not be written may not be one of the attempt: nothing is known of its disk any more.
        """
        new = []
        for rank in self._unwritable.values():
            stood = self.findings[rank]
            message = f"{stood.message}, until its attempt ended"
            self.findings[rank] = msgspec.structs.replace(
                stood, time=time.time(), state="cleared", message=message, advice=""
            )
            new.append(self.findings[rank])
        self._unwritable.clear()
        for rank, told in self._told.items():
            if told.state == "raised" and told.message:
                severity = self.findings[rank].severity
                over = gap_finding(msgspec.structs.replace(told, message=""), self._host(rank))
                self.findings[rank] = msgspec.structs.replace(over, severity=severity)
                new.append(self.findings[rank])
        return new

    def standing(self) -> list[str]:
        """Return the messages of the gaps that stand, each once."""
        stands = [each for each in self.findings.values() if each.state == "raised"]
        return list(dict.fromkeys(each.message for each in stands if each.severity != "info"))

    def _host(self, rank: int) -> str:
        """Return the host of a rank if it has a run directory of its own; else empty."""
        remote = remote_node(self._dir, self._node_of[rank])
        return "" if remote is None else remote.host

    def _first_of(self, node: int, rank: int) -> Finding | None:
        """Return the finding that tells of the node's disk already, if it is not that of the rank itself."""
        told = [each for other, each in self.findings.items() if self._node_of[other] == node and other != rank]
        return next((each for each in told if each.state == "raised" and each.severity != "info"), None)

    def _changed(self, is_last: bool) -> Iterable[int]:
        try:
            with os.scandir(self._dir.gaps) as entries:
                for entry in entries:
                    stem = entry.name.removesuffix(".json")
                    if not stem.isdecimal() or int(stem) not in self._node_of:
                        continue
                    changed = entry.stat().st_mtime_ns
                    if is_last or changed != self._seen.get(stem):
                        self._seen[stem] = changed
                        yield int(stem)
        except OSError:
            return
