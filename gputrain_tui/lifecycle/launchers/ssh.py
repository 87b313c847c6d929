"""Starts nodes on other hosts over ssh, and keeps their record here.

Each node has one connection, served by a thread, to a session of ``gputrain_tui.hosts.host_agent``. A connection that
breaks is opened again; the agent on the host and the node go on meanwhile. Nodes that are this machine are started as
the local launcher does.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from gputrain_tui.hosts.agent_connection import Connection, RefusedError
from gputrain_tui.hosts.host_agent import HOME, TOKEN, is_of_node, replaced_files
from gputrain_tui.hosts.host_names import is_local
from gputrain_tui.hosts.local_facts import local_facts
from gputrain_tui.hosts.open_connections import OpenConnection
from gputrain_tui.hosts.ssh import Ssh
from gputrain_tui.lifecycle.launchers.local import LocalLauncher
from gputrain_tui.lifecycle.remote_nodes import RemoteNode, attempt_folders, write_remote_node
from trainer.contract.errors import ExitCode
from trainer.contract.options import Distributed
from trainer.contract.record import RunDir, write_atomically
from trainer.contract.record.regular_file import open_regular, size_of
from trainer.contract.stop_level import StopLevel
from trainer.host.process_identity import ProcessIdentity

if TYPE_CHECKING:
    from gputrain_tui.lifecycle.launchers import NodeProcess
    from gputrain_tui.plan.planner import PlannedNode

FORWARDED_PREFIXES = ("GPUTRAIN_", "NCCL_", "GLOO_", "OMP_", "HF_", "CUDA_")
"""Beginnings of the environment variables that go along to other hosts."""
NOT_FORWARDED = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "GPUTRAIN_SSH",
    "GPUTRAIN_RUN",
    "GPUTRAIN_SUPERVISOR",
    HOME,
)
"""Those of them that are about this machine."""
BEAT_S = 1.0
"""Time between two words to a session, from which the agent knows that somebody waits for its node."""
RETRY_S = (0.1, 0.5, 1.0, 2.0)
"""Pauses before a broken connection is opened again; the last one repeats."""
FIRST_TRIES = 3
"""Connections that are tried to a host that has not answered yet."""
KILLED_S = 5.0
"""How long a node that is to be killed is waited for on a host that cannot be reached."""


IDENTITY = msgspec.json.Decoder(ProcessIdentity)
"""Made before any thread is: msgspec crashes where several threads decode a type for the first time."""


class SshLauncher:
    """Starts nodes on their hosts over ssh, and those that are this machine here."""

    def __init__(self, opened: Mapping[int, OpenConnection] | None = None) -> None:
        """Take over the connections of the preflight, by node."""
        self._local = LocalLauncher()
        self._opened = dict(opened or {})

    def launch(self, node: PlannedNode, run_dir: RunDir, *, env: Mapping[str, str], leased: bool) -> NodeProcess:
        """Start a node's command; what keeps it from being started becomes its end.

        Raises:
            OSError: the run directory cannot be written.
        """
        if is_local(node.host, local_facts((node.host,))):
            return self._local.launch(node, run_dir, env=env, leased=leased)
        number = len(attempt_folders(run_dir, node.node)) + 1
        folder = run_dir.agents / f"{node.node}.{number}.{secrets.token_hex(8)}"
        folder.mkdir(mode=0o700, parents=True)
        (folder / TOKEN).touch(mode=0o600)
        opened = self._opened.pop(node.node, None)
        return _started(SshProcess(node, run_dir, folder.name, start=True, leased=leased, opened=opened))

    def adopt(
        self, node: PlannedNode, run_dir: RunDir, identity: ProcessIdentity | None, *, leased: bool
    ) -> NodeProcess | None:
        """Take over a node that a killed supervisor started; None where it started none."""
        folders = attempt_folders(run_dir, node.node)
        if not folders:  # it was started on the machine of that supervisor, or not at all
            return self._local.adopt(node, run_dir, identity, leased=leased)
        return _started(SshProcess(node, run_dir, folders[-1].name, start=False, leased=leased))


def _started(process: SshProcess) -> SshProcess:
    process.start()
    return process


class SshProcess:
    """A node on another host, and the connection to its agent."""

    def __init__(
        self,
        node: PlannedNode,
        run_dir: RunDir,
        attempt: str,
        *,
        start: bool,
        leased: bool,
        opened: OpenConnection | None = None,
    ) -> None:
        self.node = node.node
        self.host = node.host
        self.host_error = ""
        self.identity: ProcessIdentity | None = None
        """Of the agent on the host, once that has answered."""
        self._planned = node
        self._run_dir = run_dir
        self._attempt = attempt
        self._start = start
        self._leased = leased
        self._ssh = Ssh()
        self._opened = opened
        """Connection to go on with; None once it was used."""
        self._changed = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._asked = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._level = StopLevel.NONE
        self._give_up_at = float("inf")
        self._heard_at = time.monotonic()
        self._code: int | None = None
        self._unwritten: set[str] = set()
        """Files that this disk does not take, until the next connection."""
        self._thread = threading.Thread(target=self._run, name=f"node-{node.node}", daemon=True)

    def start(self) -> None:
        """Begin to connect."""
        self._thread.start()

    def fileno(self) -> int:
        """A descriptor that becomes readable when the agent has answered, and when the node has ended."""
        return self._changed

    def poll(self) -> int | None:
        """Exit code, a signal's number negated, or None while it runs."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._changed)
        return self._code

    def stop(self, level: StopLevel) -> None:
        """Ask the node agent to end its ranks and leave; returns immediately."""
        self._level = max(level, self._level)
        os.eventfd_write(self._asked, 1)

    def kill(self) -> None:
        """End it without asking; on a host that cannot be reached its agent does that by itself."""
        self._give_up_at = min(self._give_up_at, time.monotonic() + KILLED_S)
        self.stop(StopLevel.KILL)

    def close(self) -> None:
        """Wait for the thread, which has nothing left to do, and close the descriptors."""
        self._thread.join()
        os.close(self._changed)
        os.close(self._asked)

    def silent_s(self) -> float:
        """Return for how many seconds its host has not answered."""
        return time.monotonic() - self._heard_at

    # --- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            code = self._serve()
        except Exception as error:  # noqa: BLE001 - the supervisor waits for this node
            self.host_error = f"{type(error).__name__}: {error}"
            code = ExitCode.FAILED
        if self.host_error:
            print(f"node {self.node} on {self.host}: {self.host_error}", file=sys.stderr, flush=True)
        self._code = code
        os.eventfd_write(self._changed, 1)

    def _serve(self) -> int:
        """Connect, again and again, until the node has ended or cannot be started; return its exit code."""
        failures = 0
        while True:
            request = session_request(
                self._planned, self._run_dir, self._attempt, start=self._start, leased=self._leased
            )
            opened, self._opened = self._opened, None
            connection = Connection(self.host, self._ssh, request, opened)
            try:
                code = self._talk(connection)
            except RefusedError as refused:
                self.host_error = str(refused)
                return ExitCode.FAILED
            except ConnectionError as error:
                code, why = None, str(error)
            else:
                why = "the connection ended"
            finally:
                connection.close()
            if code is not None:
                return code
            failures = failures + 1 if not connection.answered else 1
            if (self.identity is None and failures >= FIRST_TRIES) or time.monotonic() >= self._give_up_at:
                self.host_error = why
                return ExitCode.FAILED
            print(f"node {self.node} on {self.host}: {why}; connecting again", file=sys.stderr, flush=True)
            self._pause(RETRY_S[min(failures, len(RETRY_S)) - 1])

    def _pause(self, seconds: float) -> None:
        """Wait; a word to be passed on is left for the next connection."""
        time.sleep(min(seconds, max(self._give_up_at - time.monotonic(), 0.0)))

    def _talk(self, connection: Connection) -> int | None:
        """Serve one connection; return the node's exit code, None where the connection ended before.

        Raises:
            RefusedError: the node cannot be started there.
            ConnectionError: the connection broke.
        """
        sent_level = StopLevel.NONE
        beat_at = 0.0
        self._unwritten.clear()
        while True:
            now = time.monotonic()
            if now >= self._give_up_at:
                raise ConnectionError("it does not answer; its agent ends the node once its ranks make no steps")
            if connection.answered and self._level > sent_level:
                sent_level = self._level
                connection.send(word="stop", level=int(sent_level))
            if connection.answered and now >= beat_at:
                beat_at = now + BEAT_S
                connection.send(word="beat")
            for frame, data in connection.frames(self._asked, BEAT_S / 2):
                self._heard_at = time.monotonic()
                match frame["word"]:
                    case "hello":
                        self._accept_hello(frame)
                    case "refused":
                        raise RefusedError(str(frame["why"]))
                    case "file":
                        self._append(str(frame["name"]), int(frame["offset"]), data)
                    case "whole":
                        self._replace(str(frame["name"]), data)
                    case "exit":
                        return int(frame["code"])
            with suppress(BlockingIOError):
                os.eventfd_read(self._asked)
            if connection.ended:
                return None

    def _accept_hello(self, frame: Mapping[str, Any]) -> None:
        self.identity = IDENTITY.decode(msgspec.json.encode(frame["agent"]))
        if not frame["shared"]:
            write_remote_node(self._run_dir, self._attempt, RemoteNode(host=self.host, run_dir=str(frame["run_dir"])))
        os.eventfd_write(self._changed, 1)

    def _append(self, name: str, offset: int, data: bytes) -> None:
        """Write a part of a file where it belongs; what is there already is the same."""
        if not is_of_node(name, self.node, self._planned.ranks):
            raise ConnectionError(f"it sent {name!r}, which is no file of node {self.node}")
        path = f"{self._run_dir.path}/{name}"  # not a Path per frame
        if name in self._unwritten:
            return
        if offset > size_of(path):
            raise ConnectionError(f"it sent {name} from byte {offset}, but {size_of(path)} are here")
        try:
            if name.startswith("digest/"):
                self._run_dir.digest.mkdir(mode=0o700, exist_ok=True)
            descriptor = open_regular(path, os.O_WRONLY | os.O_CREAT)
            try:
                while data:
                    written = os.pwrite(descriptor, data, offset)
                    data, offset = data[written:], offset + written
            finally:
                os.close(descriptor)
        except OSError as error:  # a full disk, or the run directory was deleted: no run is lost for that
            self._unwritten.add(name)
            print(f"{path} cannot be written: {error.strerror}", file=sys.stderr, flush=True)

    def _replace(self, name: str, data: bytes) -> None:
        """Write a file that does not grow."""
        if name not in replaced_files(self.node, self._planned.ranks):
            raise ConnectionError(f"it sent {name!r}, which is no file of node {self.node}")
        with suppress(OSError):
            write_atomically(self._run_dir.path / name, data)


def session_request(
    node: PlannedNode, run_dir: RunDir, attempt: str, *, start: bool = False, leased: bool = False
) -> dict[str, Any]:
    """Return what a session of the host agent is sent_level first."""
    sizes = {}
    for folder in (run_dir.events, run_dir.logs, run_dir.digest):
        for path in folder.glob("*"):
            name = f"{folder.name}/{path.name}"
            if is_of_node(name, node.node, node.ranks):
                sizes[name] = size_of(path)
    return {
        "node": node.node,
        "ranks": node.ranks,
        "argv": node.argv,
        "env": {**forwarded_environment(os.environ), **node.env},
        "workdir": node.workdir or str(Path.cwd()),
        "setup": node.setup,
        "home": os.environ.get(HOME, ""),
        "run_dir": str(run_dir.path),
        "attempt": attempt,
        "start": start,
        "leased": leased,
        "idle_s": distributed_timeout(node),
        "sizes": sizes,
    }


def request_stacks(node: PlannedNode, run_dir: RunDir, pid: int) -> bool:
    """Ask a rank on another host to print its stacks into its log; return whether the process is there.

    Raises:
        ConnectionError: the host does not answer.
        RefusedError: it has no agent of this run.
    """
    attempt = attempt_folders(run_dir, node.node)[-1].name
    connection = Connection(node.host, Ssh(), session_request(node, run_dir, attempt))
    try:
        while not connection.ended:
            for frame, _ in connection.frames(None, BEAT_S):
                if frame["word"] == "hello":
                    connection.send(word="stacks", pid=pid)
                elif frame["word"] == "stacks":
                    return bool(frame["found"])
                elif frame["word"] == "refused":
                    raise RefusedError(str(frame["why"]))
    finally:
        connection.close()
    return False


def forwarded_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of this process that go along to other hosts."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(FORWARDED_PREFIXES) and name not in NOT_FORWARDED
    }


def distributed_timeout(node: PlannedNode) -> float:
    """Return ``--distributed-timeout`` of a node's command, seconds."""
    flag = "--distributed-timeout"
    return float(node.argv[node.argv.index(flag) + 1]) if flag in node.argv else Distributed().distributed_timeout
