"""Starts a node's command on a host, survives lost connections, and sends the node's record over ssh.

A *session* serves one connection: it reads messages and sends frames. The *agent* is the process that the first session
leaves behind: parent of the node's command, alive until that has ended. They share a folder of the run directory, so
that any later session, of this supervisor or of another one, continues where the last one broke off. Standard library
only, since this file is sent to the host.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from trainer.contract.home_folder import expand_home
from trainer.contract.stop_level import StopLevel
from trainer.host.boot import boot_id
from trainer.host.descendants import kill_descendants
from trainer.host.import_path import node_environment
from trainer.host.prctl import PR_SET_CHILD_SUBREAPER, prctl
from trainer.host.proc_environ import RUN
from trainer.host.processes import environ_value, read_stat
from trainer.host.stop_request import LEASE, NOW_SIGNAL, STACK_SIGNAL, signal_of
from trainer.host.temporary_folder import SHORT, delete_temporary_folders, system_folder

POLL_S = 0.5
"""Interval at which a session sends the growth of the record; each costs the launching side time per rank."""
LEASE_S = 3.0
"""Time that the node of a leased run goes on without a session: long enough to reopen a broken connection."""
LEAVE_S = 3.0
"""Time that a node may take to end after the signal to stop at once; then it is killed."""
WATCH_S = 0.25
"""Interval at which the agent checks its lease."""
START_S = 10.0
"""Time that an agent may take to start its node and write its file."""
FRAME_BYTES = 1 << 18
"""Most bytes of a file in one frame."""
ROUND_BYTES = 1 << 20
"""Most bytes of the record that are sent before messages are read again."""
MAX_DATA_BYTES = 1 << 24
"""Limit of a frame's data. A larger replaced file, such as a collectives dump with a huge buffer, stays on the host."""
TOKEN, AGENT, STARTED, BEAT, EXIT = "token", "agent.json", "started", "beat", "exit"
"""Files of an attempt's folder. Their writers: the launching side, the agent at its start, the session that starts it,
the newest session, the agent at its end."""
HOME = "GPUTRAIN_HOME"
RECORD_FILE = re.compile(r"(?:events|logs|digest)/[A-Za-z0-9._-]{1,255}")


def is_of_node(name: str, node: int, ranks: Sequence[int]) -> bool:
    """Whether one of a node's processes writes a file of the run directory, given as ``folder/file``."""
    if not RECORD_FILE.fullmatch(name):
        return False
    folder, _, file = name.partition("/")
    if not file.endswith(".log" if folder == "logs" else ".ndjson"):
        return False
    if file.startswith("machine-"):
        return True
    writer = file.partition(".")[0]
    return writer == f"node-{node}" or (writer.isdecimal() and int(writer) in ranks)


def replaced_files(node: int, ranks: Sequence[int]) -> list[str]:
    """Return the files of a node's processes that are replaced as a whole: their last collectives and the outcome."""
    collectives = [f"logs/collectives_{rank}{suffix}" for rank in ranks for suffix in ("", ".json")]
    return [*collectives, f"nodes/{node}.json"]


def node_command(argv: Sequence[str], setup: str) -> list[str]:
    """Return the command line that runs the line of shell ``setup``, if any, and then ``argv`` in its place."""
    if not setup:
        return list(argv)
    shell = shutil.which("bash") or "/bin/sh"
    failed = 'code=$?; [ "$code" = 0 ] || { echo "setup ended with exit code $code" >&2; exit "$code"; }'
    # A login shell, because sites define `module` and `conda` in its start-up files.
    return [shell, "-lc", f'{setup}\n{failed}\nexec "$@"', "setup", *argv]


class NodeRefusedError(Exception):
    """The node cannot be started on this host; the message is one line."""


class Session:
    """One connection: its request, and the size of each file that it has sent."""

    def __init__(self, mark: bytes, request: Mapping[str, Any]) -> None:
        """Find the run directory: the launching side's path if its token is visible there, else one in this home."""
        self._mark = mark
        self._request = request
        self._node: int = request["node"]
        self._ranks: list[int] = request["ranks"]
        self._sizes: dict[str, int] = dict(request["sizes"])
        self._replaced: dict[str, tuple[int, int]] = {}
        """Modification time in ns and size of each replaced file when it was last sent."""
        path = Path(request["run_dir"])
        self.shared = (path / "agents" / request["attempt"] / TOKEN).exists()
        self.run_dir = path if self.shared else _home(request) / "runs" / path.name
        self.folder = self.run_dir / "agents" / request["attempt"]
        self._input = b""
        self._stop_level = int(StopLevel.NONE)

    # --- frames and messages ------------------------------------------------------------------------------------

    def send(self, data: bytes = b"", **fields: Any) -> None:
        """Send one frame."""
        self._write(self._frame(data, **fields))

    def _frame(self, data: bytes = b"", **fields: Any) -> bytes:
        """Return a frame: the mark, a line of JSON, and bytes."""
        return self._mark + json.dumps(fields | {"bytes": len(data)}).encode() + b"\n" + data

    @staticmethod
    def _write(frames: bytes) -> None:
        while frames:
            frames = frames[os.write(1, frames) :]

    def messages(self, timeout_s: float) -> Iterator[dict[str, Any]]:
        """Yield the messages that arrive within a time limit; end this process at the end of its input."""
        if select.select([0], [], [], timeout_s)[0]:
            part = os.read(0, 1 << 16)
            if not part:
                sys.exit(0)
            self._input += part
        *lines, self._input = self._input.split(b"\n")
        for line in lines:
            yield json.loads(line)

    # --- one connection -----------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Start the node unless that was done before, and serve the connection until the node has ended."""
        try:
            if self._request["start"]:
                self._start()
            agent = self._agent()
        except NodeRefusedError as refused:
            self.send(word="refused", why=str(refused))
            return
        except OSError as error:
            self.send(word="refused", why=f"{error.filename or self.run_dir}: {error.strerror}")
            return
        self.send(word="hello", shared=self.shared, run_dir=str(self.run_dir), agent=agent)
        while True:
            code = self._exit_code(agent)  # read before the record, so that all of an ended node's record is sent
            sent = self.send_record()
            if code is not None and not sent:
                self.send(word="exit", code=code)
                return
            for message in self.messages(POLL_S if code is None and sent < ROUND_BYTES else 0):
                self._handle(message, agent)

    def _handle(self, message: Mapping[str, Any], agent: Mapping[str, Any]) -> None:
        if message["word"] == "beat":
            self._beat()
            self.send(word="beat")
        elif message["word"] == "stop" and message["level"] > self._stop_level:
            self._stop_level = message["level"]
            if self._stop_level >= StopLevel.KILL:
                _signal(agent, signal.SIGTERM)
            else:
                _signal(agent["node"], signal_of(StopLevel(self._stop_level)), signal.SIGCONT)
        elif message["word"] == "stacks":
            # Pids are reused: the mark in its environment proves that the process is this run's.
            found = environ_value(message["pid"], RUN) == os.fsencode(self.run_dir)
            if found:
                os.kill(message["pid"], STACK_SIGNAL)
            self.send(word="stacks", found=found)

    def _beat(self) -> None:
        """Record in the beat file that the launching side is connected."""
        beat = {"time": time.monotonic(), "leased": self._request["leased"], **_identity(os.getpid())}
        with suppress(OSError):  # on a full disk the node goes on while its ranks make steps
            _replace(self.folder / BEAT, beat)

    def _exit_code(self, agent: Mapping[str, Any]) -> int | None:
        """Return the node's exit code; None while it runs."""
        ended = _read(self.folder / EXIT)
        if ended is not None:
            return int(ended["code"])
        if _is_alive(agent) or _is_alive(agent["node"]):
            return None
        ended = _read(self.folder / EXIT)  # it may have ended since the first read
        return -signal.SIGKILL if ended is None else int(ended["code"])

    # --- the record ---------------------------------------------------------------------------------------------

    def send_record(self) -> int:
        """Send the growth of the node's files unless the launching side shares them; return the number of bytes."""
        if self.shared:
            return 0
        sent = 0
        frames = []
        # Digests are listed first and sent last: the launching side has no digest of events that it does not have yet.
        found = [(name, size) for folder in ("digest", "events", "logs") for name, size in self._files(folder)]
        for name, size in reversed(found):
            begin = self._sizes.get(name, 0)
            if name not in self._sizes and not size:
                frames.append(self._frame(word="file", name=name, offset=0))
            while begin < size and sent < ROUND_BYTES:
                data = _part(self.run_dir / name, begin, min(size - begin, FRAME_BYTES))
                if not data:
                    break
                frames.append(self._frame(data, word="file", name=name, offset=begin))
                begin += len(data)
                sent += len(data)
            self._sizes[name] = begin
        self._write(b"".join(frames))  # in one write: the launching side wakes up once
        if not sent:
            sent += sum(self._send_replaced(name) for name in replaced_files(self._node, self._ranks))
        return sent

    def _send_replaced(self, name: str) -> bool:
        try:
            stat = (self.run_dir / name).stat()
        except OSError:
            return False
        if (stat.st_mtime_ns, stat.st_size) == self._replaced.get(name) or stat.st_size > MAX_DATA_BYTES:
            return False
        self._replaced[name] = stat.st_mtime_ns, stat.st_size
        self.send(_part(self.run_dir / name, 0, stat.st_size), word="whole", name=name)
        return True

    def _files(self, folder: str) -> Iterator[tuple[str, int]]:
        try:
            with os.scandir(self.run_dir / folder) as entries:
                for entry in entries:
                    name = f"{folder}/{entry.name}"
                    if is_of_node(name, self._node, self._ranks):
                        yield name, entry.stat().st_size
        except OSError:
            return

    # --- the start ----------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start an agent that outlives this session, unless another session of this attempt has done so.

        Raises:
            NodeRefusedError: the node's folder or interpreter is missing.
            OSError: the run directory cannot be made or written.
        """
        self.run_dir.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for part in (".", "events", "logs", "checkpoints", "nodes", "agents", self.folder):
            (self.run_dir / part).mkdir(mode=0o700, exist_ok=True)
        try:
            os.close(os.open(self.folder / STARTED, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return
        (self.run_dir / "nodes" / f"{self._node}.json").unlink(missing_ok=True)
        launch = node_launch(self._request, self.run_dir)
        self._beat()
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            return
        os.setsid()
        if os.fork():
            os._exit(0)
        try:
            _run_agent(self.folder, self.run_dir, self._request, *launch)
        finally:
            os._exit(0)

    def _agent(self) -> dict[str, Any]:
        """Return the identity of the agent's process and, as ``node``, of the node's, once the agent has written them.

        Raises:
            NodeRefusedError: there is no agent, or it could not start the node.
        """
        deadline = time.monotonic() + START_S
        while (agent := _read(self.folder / AGENT)) is None:
            if not (self.folder / STARTED).exists() or time.monotonic() > deadline:
                raise NodeRefusedError("there is no agent of this run on this host")
            time.sleep(0.005)
        if "why" in agent:
            raise NodeRefusedError(agent["why"])
        return agent


def node_launch(request: Mapping[str, Any], run_dir: Path) -> tuple[list[str], dict[str, str], str]:
    """Return the command, the environment and the working folder of a node.

    Raises:
        NodeRefusedError: the folder or the interpreter is missing.
    """
    old_dir = str(request["run_dir"])  # of the launching side
    argv = [
        str(run_dir) + word[len(old_dir) :] if word == old_dir or word.startswith(f"{old_dir}/") else word
        for word in request["argv"]
    ]
    argv[0] = str(expand_home(argv[0]))
    workdir = expand_home(request["workdir"])
    env = node_environment(os.environ, request["env"] | {RUN: str(run_dir), LEASE: "stdin"}, str(workdir))
    if not workdir.is_dir():
        raise NodeRefusedError(f"there is no folder {workdir}")
    if not request["setup"] and shutil.which(argv[0], path=env.get("PATH")) is None:
        raise NodeRefusedError(f"there is no interpreter {argv[0]}")
    return node_command(argv, request["setup"]), env, str(workdir)


# --- the agent ------------------------------------------------------------------------------------------------------


def _run_agent(
    folder: Path, run_dir: Path, request: Mapping[str, Any], argv: list[str], env: dict[str, str], workdir: str
) -> None:
    """Start the node's command, wait until it or its lease ends, kill its remaining processes, write the exit code."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, lambda *_: None)  # an ignored one would stay ignored in the node
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.closerange(3, 1024)
    try:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        with (run_dir / "logs" / f"node-{request['node']}.log").open("ab") as log:
            # The node ends at the end of its standard input, which the death of this process causes too.
            node = subprocess.Popen(
                argv, cwd=workdir, env=env, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
    except OSError as error:
        _replace(folder / AGENT, {"why": f"{error.filename or argv[0]}: {error.strerror}"})
        return
    signal.signal(signal.SIGTERM, lambda *_: _kill_session(node))
    _replace(folder / AGENT, {**_identity(os.getpid()), "node": _identity(node.pid)})
    lease = _Lease(folder, run_dir, request)
    waiter = select.poll()
    waiter.register(os.pidfd_open(node.pid), select.POLLIN)
    kill_at: float | None = None
    while not waiter.poll(WATCH_S * 1000):
        if kill_at is None and lease.is_over():
            kill_at = time.monotonic() + LEAVE_S
            node.send_signal(NOW_SIGNAL)
            node.send_signal(signal.SIGCONT)  # a stopped process runs no handler
        elif kill_at is not None and time.monotonic() >= kill_at:
            _kill_session(node)
    code = node.wait()
    kill_descendants(run=str(run_dir))
    for within in {system_folder(), SHORT}:
        delete_temporary_folders(run_dir, [request["node"]], within)
    _replace(folder / EXIT, {"code": code})


def _kill_session(node: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(node.pid, signal.SIGKILL)


class _Lease:
    """The right of a node to go on: a live session for a leased run, and beats or growing events for every run."""

    def __init__(self, folder: Path, run_dir: Path, request: Mapping[str, Any]) -> None:
        self._beat = folder / BEAT
        self._events = [run_dir / "events" / f"{rank}.ndjson" for rank in request["ranks"]]
        self._idle_s: float = request["idle_s"]
        self._last_beat: dict[str, Any] = {"leased": request["leased"]}
        self._event_bytes = -1
        self._active_at = self._session_at = time.monotonic()

    def is_over(self) -> bool:
        """Whether a leased run has no session for ``LEASE_S``, or neither beats nor events came for ``idle_s``."""
        now = time.monotonic()
        beat = _read(self._beat)
        if beat is not None and beat != self._last_beat:
            self._last_beat, self._active_at = beat, now
        if "pid" not in self._last_beat or _is_alive(self._last_beat):
            self._session_at = now
        event_bytes = sum(_size(path) for path in self._events)
        if event_bytes != self._event_bytes:
            self._event_bytes, self._active_at = event_bytes, now
        lease_ended = self._last_beat["leased"] and now - self._session_at > LEASE_S
        return lease_ended or now - self._active_at > self._idle_s


# --- files and processes --------------------------------------------------------------------------------------------


def _home(request: Mapping[str, Any]) -> Path:
    """Return gputrain's folder on this host, set by the recipe, this host's environment or the launching side's."""
    chosen = request["env"].get(HOME) or os.environ.get(HOME) or request["home"]
    if chosen:
        return expand_home(chosen).absolute()
    return expand_home(os.environ.get("XDG_STATE_HOME") or "~/.local/state") / "gputrain"


def _identity(pid: int) -> dict[str, Any]:
    stat = read_stat(pid)
    ticks = 0 if stat is None else stat.start_ticks
    return {"pid": pid, "start_ticks": ticks, "boot_id": boot_id(), "host": socket.gethostname()}


def _is_alive(process: Mapping[str, Any]) -> bool:
    stat = read_stat(process["pid"])
    same = stat is not None and stat.alive and stat.start_ticks == process["start_ticks"]
    return same and process["boot_id"] == boot_id()


def _signal(process: Mapping[str, Any], *numbers: int) -> None:
    """Send signals to a process if it lives and its number was not reused."""
    try:
        descriptor = os.pidfd_open(process["pid"])
    except OSError:
        return
    try:
        if _is_alive(process):  # checked after pidfd_open: the descriptor is of this process
            for number in numbers:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, number)
    finally:
        os.close(descriptor)


def _read(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file; None if the file is missing or holds none."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _replace(path: Path, value: Mapping[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value))
    temporary.replace(path)


def _part(path: Path, begin: int, count: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(begin)
            return file.read(count)
    except OSError:
        return b""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def main(words: list[str]) -> None:
    """Serve one connection; the only word is the frames' mark, and the first line of standard input the request."""
    line = b"".join(iter(lambda: os.read(0, 1) or b"\n", b"\n"))
    if line:
        serve_session(words[0].encode(), json.loads(line))


def serve_session(mark: bytes, request: Mapping[str, Any]) -> NoReturn:
    """Serve one connection and end this process."""
    with suppress(BrokenPipeError):
        Session(mark, request).serve()
    os._exit(0)
