"""Starts nodes on other hosts over ssh, and keeps their record here.

Each node has one connection, served by a thread, to a session of ``gputrain_tui.hosts.host_agent``. A connection that
breaks is opened again; the agent on the host and the node go on meanwhile. Nodes that are this machine are started as
the local launcher does.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from gputrain_tui.hosts.host_agent import HOME, TOKEN, is_of_node, replaced_files
from gputrain_tui.hosts.host_names import is_local
from gputrain_tui.hosts.inventory_program import packed_program
from gputrain_tui.hosts.local_facts import local_facts
from gputrain_tui.hosts.ssh import Ssh, kill_session
from gputrain_tui.hosts.ssh_failure import SSH_FAILED, explain_failure
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

MODULES = (
    "trainer.contract.home_folder",
    "trainer.contract.stop_level",
    "trainer.host.proc_files",
    "trainer.host.boot",
    "trainer.host.processes",
    "trainer.host.descendants",
    "trainer.host.prctl",
    "trainer.host.proc_environ",
    "trainer.host.stop_request",
    "gputrain_tui.hosts.host_agent",
)
"""Of the program that runs on the host, in import order; they use the standard library only."""
READER = "'import os;exec(b\"\".join(iter(lambda:os.read(0,1)or bytes(1),bytes(1))))'"
"""Runs what comes on standard input up to a zero byte; the rest of it is the program's own input. One word to every
shell: quoted, and without a character that one of them changes."""
TRAVELLING = ("GPUTRAIN_", "NCCL_", "GLOO_", "OMP_", "HF_", "CUDA_")
"""Beginnings of the environment variables that go along to other hosts."""
STAYING = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "GPUTRAIN_SSH", "GPUTRAIN_RUN", "GPUTRAIN_SUPERVISOR", HOME)
"""Those of them that are about this machine."""
BEAT_S = 1.0
"""Time between two words to a session, from which the agent knows that somebody waits for its node."""
HELLO_S = 30.0
"""From the start of ssh to the session's first frame, start-up files of the host included."""
RETRY_S = (0.1, 0.5, 1.0, 2.0)
"""Pauses before a broken connection is opened again; the last one repeats."""
FIRST_TRIES = 3
"""Connections that are tried to a host that has not answered yet."""
KILLED_S = 5.0
"""How long a node that is to be killed is waited for on a host that cannot be reached."""
EXIT_S = 2.0
"""How long ssh may take to end once its output has."""
MAX_NOISE_BYTES = 1 << 20
"""What a host's start-up files may print."""
MAX_LINE_BYTES = 1 << 16
MAX_OUTCOME_BYTES = 1 << 24
"""Of the host's own words: what is longer was not written by the agent."""


class SshLauncher:
    """Starts nodes on their hosts over ssh, and those that are this machine here."""

    def __init__(self) -> None:
        self._local = LocalLauncher()

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
        return _started(SshProcess(node, run_dir, folder.name, start=True, leased=leased))

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

    def __init__(self, node: PlannedNode, run_dir: RunDir, attempt: str, *, start: bool, leased: bool) -> None:
        self.node = node.node
        self.host = node.host
        self.why = ""
        self.identity: ProcessIdentity | None = None
        """Of the agent on the host, once that has answered."""
        self._planned = node
        self._run_dir = run_dir
        self._attempt = attempt
        self._start = start
        self._leased = leased
        self._ssh = Ssh()
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
            self.why = f"{type(error).__name__}: {error}"
            code = ExitCode.FAILED
        if self.why:
            print(f"node {self.node} on {self.host}: {self.why}", file=sys.stderr, flush=True)
        self._code = code
        os.eventfd_write(self._changed, 1)

    def _serve(self) -> int:
        """Connect, again and again, until the node has ended or cannot be started; return its exit code."""
        failures = 0
        while True:
            request = session_request(
                self._planned, self._run_dir, self._attempt, start=self._start, leased=self._leased
            )
            connection = Connection(self.host, self._ssh, request)
            try:
                code = self._talk(connection)
            except RefusedError as refused:
                self.why = str(refused)
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
                self.why = why
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
        told = StopLevel.NONE
        beat_at = 0.0
        self._unwritten.clear()
        while True:
            now = time.monotonic()
            if now >= self._give_up_at:
                raise ConnectionError("it does not answer; its agent ends the node once its ranks make no steps")
            if connection.answered and self._level > told:
                told = self._level
                connection.send(word="stop", level=int(told))
            if connection.answered and now >= beat_at:
                beat_at = now + BEAT_S
                connection.send(word="beat")
            for frame, data in connection.frames(self._asked, BEAT_S / 2):
                self._heard_at = time.monotonic()
                match frame["word"]:
                    case "hello":
                        self._said_hello(frame)
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

    def _said_hello(self, frame: Mapping[str, Any]) -> None:
        self.identity = msgspec.convert(frame["agent"], ProcessIdentity)
        if not frame["shared"]:
            write_remote_node(self._run_dir, self._attempt, RemoteNode(host=self.host, run_dir=str(frame["run_dir"])))
        os.eventfd_write(self._changed, 1)

    def _append(self, name: str, offset: int, data: bytes) -> None:
        """Write a part of a file where it belongs; what is there already is the same."""
        if not is_of_node(name, self.node, self._planned.ranks):
            raise ConnectionError(f"it sent {name!r}, which is no file of node {self.node}")
        path = self._run_dir.path / name
        if name in self._unwritten:
            return
        if offset > size_of(path):
            raise ConnectionError(f"it sent {name} from byte {offset}, but {size_of(path)} are here")
        try:
            if name.startswith("digest/"):
                path.parent.mkdir(mode=0o700, exist_ok=True)
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
    """Return what a session of the host agent is told first."""
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
        "env": {**travelling(os.environ), **node.env},
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


class RefusedError(Exception):
    """The node cannot be started on its host."""


class Connection:
    """One run of ssh, with a session of the host agent at its other end."""

    def __init__(self, host: str, ssh: Ssh, request: Mapping[str, Any]) -> None:
        """Start ssh.

        Raises:
            ConnectionError: there is no such program.
        """
        self.answered = False
        """Whether the session has sent its first frame."""
        self.ended = False
        self._host = host
        self._mark = f"gputrain-{secrets.token_hex(8)}:".encode()
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the connection
        self._until = time.monotonic() + HELLO_S
        self._buffer = bytearray()
        try:
            self._process = subprocess.Popen(
                ssh.command_line(host, "python3", "-c", READER, self._mark.decode(), own=True),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                start_new_session=True,
            )
        except OSError as error:
            self._stderr.close()
            raise ConnectionError(f"ssh cannot be run: {error.strerror}") from None
        self._first = packed_program(MODULES) + b"\0" + json.dumps(request).encode() + b"\n"
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)

    def send(self, **fields: Any) -> None:
        """Send one word; what a stuck connection does not take is said again on the next one."""
        self._first += json.dumps(fields).encode() + b"\n"
        self._write()

    def _write(self) -> None:
        assert self._process.stdin is not None
        with suppress(BlockingIOError, BrokenPipeError):
            written = os.write(self._process.stdin.fileno(), self._first)
            self._first = self._first[written:]

    def frames(self, other: int | None, timeout_s: float) -> list[tuple[dict[str, Any], bytes]]:
        """Return the frames that have come, after waiting for one, or for another descriptor.

        Raises:
            ConnectionError: what comes is none of the session's.
            RefusedError: ssh or the host says why there is no session.
        """
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        stdin, stdout = self._process.stdin.fileno(), self._process.stdout.fileno()
        watched = [stdout] if other is None else [stdout, other]
        readable, writable, _ = select.select(watched, [stdin] if self._first else [], [], timeout_s)
        if writable:
            self._write()
        if os.fstat(self._stderr.fileno()).st_size > MAX_NOISE_BYTES:
            raise RefusedError(f"it says more than {MAX_NOISE_BYTES >> 20} MiB on its standard error")
        if stdout in readable:
            part = os.read(stdout, 1 << 18)
            self._buffer += part
            self.ended = not part
        found = list(self._take())
        if not self.answered and (self.ended or time.monotonic() > self._until):
            raise self._failure()
        return found

    def _take(self) -> Any:
        while True:
            begin = self._buffer.find(self._mark)
            if begin < 0:
                if len(self._buffer) > MAX_NOISE_BYTES:
                    raise RefusedError(f"it says more than {MAX_NOISE_BYTES >> 20} MiB, and nothing of the agent's")
                return
            del self._buffer[:begin]
            end = self._buffer.find(b"\n", 0, MAX_LINE_BYTES)
            if end < 0:
                if len(self._buffer) >= MAX_LINE_BYTES:
                    raise ConnectionError("what it sent is no frame")
                return
            try:
                frame = json.loads(self._buffer[len(self._mark) : end])
                size = int(frame["bytes"])
                frame["word"]
            except (ValueError, TypeError, KeyError):
                raise ConnectionError("what it sent is no frame") from None
            if not 0 <= size <= MAX_OUTCOME_BYTES:
                raise ConnectionError("what it sent is no frame")
            if len(self._buffer) < end + 1 + size:
                return
            data = bytes(self._buffer[end + 1 : end + 1 + size])
            del self._buffer[: end + 1 + size]
            self.answered = True
            yield frame, data

    def _failure(self) -> Exception:
        """Return why there is no session: a reason that stays is a refusal, one that may pass is not."""
        if not self.ended:
            return ConnectionError(f"it did not answer within {HELLO_S:g} s")
        try:
            code = self._process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            return RefusedError("it closes its standard output, and says nothing of the agent's")
        self._stderr.seek(0)
        why = explain_failure(self._host, code, self._stderr.read(1 << 16).decode("utf-8", "replace"))
        return ConnectionError(why) if code == SSH_FAILED else RefusedError(why)

    def close(self) -> None:
        """End ssh; the session on the host ends with it."""
        kill_session(self._process)
        for pipe in (self._process.stdin, self._process.stdout, self._stderr):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        self._process.wait()


def travelling(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of this process that go along to other hosts."""
    return {name: value for name, value in environ.items() if name.startswith(TRAVELLING) and name not in STAYING}


def distributed_timeout(node: PlannedNode) -> float:
    """Return ``--distributed-timeout`` of a node's command, seconds."""
    flag = "--distributed-timeout"
    return float(node.argv[node.argv.index(flag) + 1]) if flag in node.argv else Distributed().distributed_timeout
