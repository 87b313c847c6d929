"""A supervisor that is started before its run, with a warm agent that has torch loaded already.

Once it has its run it is like any other supervisor; a warm agent that does not fit the plan is ended, and a node agent
is started as always.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gputrain_tui.lifecycle.launchers.local import LocalProcess, node_environment
from trainer.contract.record import RunDir
from trainer.contract.record.regular_file import open_to_append
from trainer.contract.warm_pool import WarmRequest
from trainer.host.proc_environ import ROOM, RUN

if TYPE_CHECKING:
    from gputrain_tui.lifecycle.launchers import Launcher, NodeProcess
    from gputrain_tui.plan.planner import PlannedNode
    from trainer.host.process_identity import ProcessIdentity

LATE_ENVIRONMENT = {"CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "MASTER_PORT"}
"""Environment variables of a node that may be set after torch is loaded."""
CLEAN_UP_S = 1.0
"""How long a discarded agent may take to delete the folder of a fork server that is just starting."""
END_S = 5.0
"""How long a killed process may take to end."""
PIPE_BYTES = 1 << 20
"""Size of the pipe, more than an environment: the writer does not wait for a reader that still loads torch."""


class WarmAgent:
    """A node agent that waits for its run."""

    def __init__(self) -> None:
        """Start it; it prints on this process's standard output that it is ready."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trainer.warm_agent"],
            env={**os.environ, RUN: ROOM},
            stdin=subprocess.PIPE,
            pipesize=PIPE_BYTES,
            start_new_session=True,
        )
        self.pidfd = os.pidfd_open(self._process.pid)

    def fits(self, node: PlannedNode) -> bool:
        """Whether the node's command would run as in a process that was started for it."""
        words = node.argv
        # A script's ranks load torch themselves, and a rank that is alone is the node agent itself.
        return (
            words[:3] == [sys.executable, "-m", "trainer"]
            and len(node.ranks) > 1
            and not node.workdir
            and not node.setup
            and "--" not in words
            and not any(word.startswith(("--script", "--start-method")) for word in words)
            and LATE_ENVIRONMENT.issuperset(node.env)
        )

    def take(self, node: PlannedNode, run_dir: RunDir, *, env: Mapping[str, str], leased: bool) -> LocalProcess:
        """Make it the node agent.

        Raises:
            OSError: it has ended.
        """
        environment = node_environment(node, env, leased=leased)
        run_dir.logs.mkdir(parents=True, exist_ok=True)
        request = WarmRequest(words=node.argv[3:], environment=environment, log=str(run_dir.node_log(node.node)))
        pipe = self._process.stdin
        assert pipe is not None
        pipe.write(msgspec.json.encode(request) + b"\n")
        pipe.flush()
        if not leased:
            pipe.close()
        return LocalProcess(node.node, node.host, self._process)

    def discard(self) -> None:
        """End it and what it has started."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGTERM)
            select.select([self.pidfd], [], [], CLEAN_UP_S)
            # Not waited for yet, so the pid is still its own, and its group's.
            if self._process.returncode is None:
                os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()


class WarmFirstLauncher:
    """Launches the first node that fits the warm agent with it, and all others with the launcher of the plan."""

    def __init__(self, warm_agent: WarmAgent, otherwise: Launcher, nodes: Sequence[PlannedNode]) -> None:
        """Discard the warm agent if no node fits it."""
        self._otherwise = otherwise
        self._warm_agent: WarmAgent | None = warm_agent
        if not any(warm_agent.fits(node) for node in nodes):
            warm_agent.discard()
            self._warm_agent = None

    def launch(self, node: PlannedNode, run_dir: RunDir, *, env: Mapping[str, str], leased: bool) -> NodeProcess:
        """Start a node's command.

        Raises:
            OSError: the command cannot be started.
        """
        warm_agent = self._warm_agent
        if warm_agent is not None and warm_agent.fits(node):
            self._warm_agent = None
            try:
                return warm_agent.take(node, run_dir, env=env, leased=leased)
            except BrokenPipeError:
                warm_agent.discard()
        return self._otherwise.launch(node, run_dir, env=env, leased=leased)

    def adopt(
        self, node: PlannedNode, run_dir: RunDir, identity: ProcessIdentity | None, *, leased: bool
    ) -> NodeProcess | None:
        """Take over a node that a killed supervisor started; None when it is gone."""
        return self._otherwise.adopt(node, run_dir, identity, leased=leased)


def wait_for_run(idle_s: float) -> tuple[list[str], WarmAgent] | None:
    """Wait on standard input for a supervisor's command line; return None when none comes.

    Args:
        idle_s: how long to wait since the last line; an empty line only prolongs the wait.
    """
    warm_agent = WarmAgent()
    line = b""
    try:
        line = _read_line(0, warm_agent.pidfd, idle_s)
    finally:
        if not line:
            warm_agent.discard()
    if not line:
        return None
    words = msgspec.json.decode(line, type=list[str])
    with os.fdopen(open_to_append(RunDir(Path(words[0])).logs / "supervisor.log"), "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if "--lease" not in words:
        with Path(os.devnull).open("rb") as nothing:
            os.dup2(nothing.fileno(), 0)
    return words, warm_agent


def _read_line(descriptor: int, ended: int, idle_s: float) -> bytes:
    """Return the first line that is not empty; nothing when the input or the other process ends, or time is up."""
    text = b""
    until = time.monotonic() + idle_s
    while True:
        ready, _, _ = select.select([descriptor, ended], [], [], max(until - time.monotonic(), 0))
        if descriptor not in ready:
            return b""
        part = os.read(descriptor, 1 << 16)
        if not part:
            return b""
        text = (text + part).lstrip(b"\n")
        if text.endswith(b"\n"):
            return text
        until = time.monotonic() + idle_s
