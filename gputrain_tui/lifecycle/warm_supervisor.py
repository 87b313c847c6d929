"""Supervisor that is started before its run, with a warm agent: a node agent that has loaded torch.

Once it has a run it is like any other supervisor. A warm agent that does not fit the plan is discarded, and node agents
are started as usual.
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
"""Environment variables of a node that take effect even if set after torch is loaded."""
CLEAN_UP_S = 1.0
"""Time for a discarded agent to delete the folder of a fork server that is just starting."""
END_S = 5.0
"""Time for a killed process to end."""
PIPE_BYTES = 1 << 20
"""Size of the pipe, larger than an environment: a write does not block on an agent that is still loading torch."""


class WarmAgent:
    """Node agent that waits for its run."""

    def __init__(self) -> None:
        """Start the agent; once ready, it prints ``ready`` on this process's standard output."""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "trainer.warm_agent"],
            env={**os.environ, RUN: ROOM},
            stdin=subprocess.PIPE,
            pipesize=PIPE_BYTES,
            start_new_session=True,
        )
        self.pidfd = os.pidfd_open(self._process.pid)

    def fits(self, node: PlannedNode) -> bool:
        """Whether the agent can run the node's command with the same effect as a process started for it."""
        words = node.argv
        # A script's ranks load torch themselves; a single rank runs in the node agent, without a fork server.
        return (
            words[:4] == [sys.executable, "-P", "-m", "trainer"]
            and len(node.ranks) > 1
            and not node.workdir
            and not node.setup
            and "--" not in words
            and not any(word.startswith(("--script", "--start-method")) for word in words)
            and LATE_ENVIRONMENT.issuperset(node.env)
        )

    def take(self, node: PlannedNode, run_dir: RunDir, *, env: Mapping[str, str], leased: bool) -> LocalProcess:
        """Send the agent its run; return it as the process of the node.

        Raises:
            OSError: the agent has ended.
        """
        environment = node_environment(node, env, leased=leased)
        run_dir.logs.mkdir(parents=True, exist_ok=True)
        request = WarmRequest(words=node.argv[4:], environment=environment, log=str(run_dir.node_log(node.node)))
        pipe = self._process.stdin
        assert pipe is not None
        pipe.write(msgspec.json.encode(request) + b"\n")
        pipe.flush()
        if not leased:
            pipe.close()
        return LocalProcess(node.node, node.host, self._process)

    def discard(self) -> None:
        """End the agent and its process group."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGTERM)
            select.select([self.pidfd], [], [], CLEAN_UP_S)
            # Not reaped yet, so pid and process group are still its own.
            if self._process.returncode is None:
                os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()


class WarmFirstLauncher:
    """Launcher that uses the warm agent for the first node that fits it, and another launcher for all other nodes."""

    def __init__(self, warm_agent: WarmAgent, fallback: Launcher, nodes: Sequence[PlannedNode]) -> None:
        """Discard the warm agent if no node fits it."""
        self._fallback = fallback
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
        return self._fallback.launch(node, run_dir, env=env, leased=leased)

    def adopt(
        self, node: PlannedNode, run_dir: RunDir, identity: ProcessIdentity | None, *, leased: bool
    ) -> NodeProcess | None:
        """Take over a node of a killed supervisor; None if it has ended."""
        return self._fallback.adopt(node, run_dir, identity, leased=leased)


def wait_for_run(idle_s: float) -> tuple[list[str], WarmAgent] | None:
    """Read a supervisor's command line from standard input; return it with the warm agent, None without a line.

    Args:
        idle_s: time limit since the last line; an empty line extends the wait.
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
    """Return the first non-empty line; empty at the end of the input, of the process or of ``idle_s``.

    Args:
        descriptor: file descriptor of the input.
        ended: pidfd of the process.
        idle_s: time limit since the last line.
    """
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
