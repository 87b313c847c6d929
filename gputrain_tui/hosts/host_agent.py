"""The agent of a node on another host: parent of the node's command, alive until that has ended.

The first session (``host_session``) leaves it behind. It shares a folder of the run directory, that of the attempt,
with the sessions. Standard library only, since this file is sent to the host.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gputrain_tui.hosts.host_frames import RefusedCallError
from trainer.contract.home_folder import expand_home
from trainer.host.boot import boot_id
from trainer.host.descendants import adopt_orphans, kill_descendants
from trainer.host.import_path import node_environment
from trainer.host.processes import RUN, read_stat
from trainer.host.stop_request import LEASE, NOW_SIGNAL
from trainer.host.temporary_folder import delete_temporary_folders

LEASE_S = 3.0
"""Time that the node of a leased run goes on once the launching side is gone, if no other one opens a session."""
LEAVE_S = 3.0
"""Time that a node may take to end after the signal to stop at once; then it is killed."""
WATCH_S = 0.25
"""Interval at which the agent checks its lease."""
WAITING = (b'"type":"unheard"', b'"part":"sync"', b'"part":"group"')
"""Parts of the lines by which a rank records that it waits for others."""
READ_BYTES = 1 << 16
"""Maximum size of the lines that are searched for these; a rank that has recorded more since has done something."""
START_S = 10.0
"""Time that an agent may take to start its node and write its file."""
TOKEN, AGENT, STARTED, BEAT, EXIT = "token", "agent.json", "started", "beat", "exit"
"""Files of an attempt's folder. Their writers: the launching side, the agent at its start, the session that starts it,
the newest session, the agent at its end."""
FILE_BYTES = 512
"""Size of these files, filled up with blanks; readers skip a blank one."""
HOME = "GPUTRAIN_HOME"


def home_folder(request: Mapping[str, Any]) -> Path:
    """Return gputrain's folder on this host, set by the recipe, this host's environment or the launching side's."""
    chosen = request["env"].get(HOME) or os.environ.get(HOME) or request["home"]
    if chosen:
        return expand_home(chosen).absolute()
    return expand_home(os.environ.get("XDG_STATE_HOME") or "~/.local/state") / "gputrain"


def node_command(argv: Sequence[str], setup: str) -> list[str]:
    """Return the command line that runs the line of shell ``setup``, if any, and then ``argv`` in its place."""
    if not setup:
        return list(argv)
    shell = shutil.which("bash") or "/bin/sh"
    failed = 'code=$?; [ "$code" = 0 ] || { echo "setup ended with exit code $code" >&2; exit "$code"; }'
    # A login shell, because sites define `module` and `conda` in its start-up files.
    return [shell, "-lc", f'{setup}\n{failed}\nexec "$@"', "setup", *argv]


def start_agent(folder: Path, run_dir: Path, request: Mapping[str, Any]) -> None:
    """Start an agent that outlives this process, unless another session of this attempt has done so.

    Raises:
        RefusedCallError: the node's folder or interpreter is missing.
        OSError: the run directory cannot be made or written.
    """
    run_dir.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for part in (".", "events", "logs", "checkpoints", "nodes", "gaps", "agents", folder):
        (run_dir / part).mkdir(mode=0o700, exist_ok=True)
    try:
        os.close(os.open(folder / STARTED, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return
    (run_dir / "nodes" / f"{request['node']}.json").unlink(missing_ok=True)
    launch = node_launch(request, run_dir)
    (folder / EXIT).write_bytes(b" " * FILE_BYTES)  # so that the node's end can be told on a full disk
    write_heartbeat(folder, leased=request["leased"])
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    try:
        _run_agent(folder, run_dir, request, *launch)
    finally:
        os._exit(0)


def await_agent(folder: Path) -> dict[str, Any]:
    """Return the identity of the agent's process and, as ``node``, of the node's, once the agent has written them."""
    deadline = time.monotonic() + START_S
    while (agent := read_object(folder / AGENT)) is None:
        if not (folder / STARTED).exists() or time.monotonic() > deadline:
            raise RefusedCallError("there is no agent of this run on this host")
        time.sleep(0.005)
    if "why" in agent:
        raise RefusedCallError(agent["why"])
    return agent


def node_launch(request: Mapping[str, Any], run_dir: Path) -> tuple[list[str], dict[str, str], str]:
    """Return the command, the environment and the folder of a node; refuse one without folder or interpreter."""
    old_dir = str(request["run_dir"])  # of the launching side
    argv = [
        str(run_dir) + word[len(old_dir) :] if word == old_dir or word.startswith(f"{old_dir}/") else word
        for word in request["argv"]
    ]
    argv[0] = str(expand_home(argv[0]))
    workdir = expand_home(request["workdir"])
    env = node_environment(os.environ, request["env"] | {RUN: str(run_dir), LEASE: "stdin"}, str(workdir))
    if not workdir.is_dir():
        raise RefusedCallError(f"there is no folder {workdir}")
    if not request["setup"] and shutil.which(argv[0], path=env.get("PATH")) is None:
        raise RefusedCallError(f"there is no interpreter {argv[0]}")
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
        adopt_orphans()
        with (run_dir / "logs" / f"node-{request['node']}.log").open("ab") as log:
            # The node ends at the end of its standard input, which the death of this process causes too.
            node = subprocess.Popen(
                argv, cwd=workdir, env=env, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
    except OSError as error:
        _write(folder / AGENT, {"why": f"{error.filename or argv[0]}: {error.strerror}"})
        return
    signal.signal(signal.SIGTERM, lambda *_: _kill_session(node))
    _write(folder / AGENT, {**identity_of(os.getpid()), "node": identity_of(node.pid)})
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
    delete_temporary_folders(run_dir, [request["node"]])
    _write(folder / EXIT, {"code": code, "cut_off": code != 0 and kill_at is not None})


def _kill_session(node: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(node.pid, signal.SIGKILL)


class _Lease:
    """The right of a node to go on: a live session for a leased run, and beats or events of work for every run."""

    def __init__(self, folder: Path, run_dir: Path, request: Mapping[str, Any]) -> None:
        self._heartbeat = folder / BEAT
        self._events = [run_dir / "events" / f"{rank}.ndjson" for rank in request["ranks"]]
        self._session_s: float = request["session_s"]
        self._idle_s: float = request["idle_s"]
        self._last_heartbeat: dict[str, Any] = {"leased": request["leased"]}
        self._sizes = dict.fromkeys(self._events, 0)
        self._active_at = self._session_at = time.monotonic()

    def is_over(self) -> bool:
        """Whether a leased run has no session for too long, or neither beats nor events of work came for ``idle_s``.

        Too long: ``LEASE_S`` if the launching side is gone, ``session_s`` if the connection broke: it is opened again.
        While a disk stands still neither beats nor events can be written or read: that time does not count.
        """
        now = time.monotonic()
        heartbeat = read_object(self._heartbeat)
        if heartbeat is not None and heartbeat != self._last_heartbeat:
            self._last_heartbeat, self._active_at = heartbeat, now
        if "pid" not in self._last_heartbeat or is_alive(self._last_heartbeat):
            self._session_at = now
        worked = [self._has_work(path) for path in self._events]
        if any(worked) or _waits_for_disk(self._last_heartbeat):
            self._active_at = now
        lease_s = LEASE_S if self._last_heartbeat.get("gone") else self._session_s
        lease_ended = self._last_heartbeat["leased"] and now - self._session_at > lease_s
        is_over = lease_ended or now - self._active_at > self._idle_s
        read_s = time.monotonic() - now
        self._active_at += read_s
        self._session_at += read_s
        return is_over

    def _has_work(self, path: Path) -> bool:
        """Whether a rank has recorded anything since the last call, but that it waits for others."""
        before, self._sizes[path] = self._sizes[path], _size(path)
        added = self._sizes[path] - before
        if not 0 < added <= READ_BYTES:
            return added != 0
        with suppress(OSError), path.open("rb") as file:
            file.seek(before)
            return any(not any(part in line for part in WAITING) for line in file.read(added).splitlines())
        return True


# --- files and processes --------------------------------------------------------------------------------------------


def write_heartbeat(folder: Path, *, leased: bool, gone: bool = False) -> None:
    """Record in an attempt's folder that the launching side is connected to this process, or gone."""
    _write(folder / BEAT, {"time": time.monotonic(), "leased": leased, "gone": gone, **identity_of(os.getpid())})


def identity_of(pid: int) -> dict[str, Any]:
    """Return what tells a process from all others, on this host and any."""
    stat = read_stat(pid)
    ticks = 0 if stat is None else stat.start_ticks
    return {"pid": pid, "start_ticks": ticks, "boot_id": boot_id(), "host": socket.gethostname()}


def is_alive(process: Mapping[str, Any]) -> bool:
    """Whether a process given by its identity lives."""
    stat = read_stat(process["pid"])
    same = stat is not None and stat.alive and stat.start_ticks == process["start_ticks"]
    return same and process["boot_id"] == boot_id()


def _waits_for_disk(process: Mapping[str, Any]) -> bool:
    """Whether a process given by its identity is in a system call that no signal ends, as one that writes to a disk."""
    stat = read_stat(process.get("pid", 0))
    return stat is not None and stat.state == "D" and stat.start_ticks == process["start_ticks"]


def send_signals(process: Mapping[str, Any], *numbers: int) -> None:
    """Send signals to a process if it lives and its number was not reused."""
    try:
        descriptor = os.pidfd_open(process["pid"])
    except OSError:
        return
    try:
        if is_alive(process):  # checked after pidfd_open: the descriptor is of this process
            for number in numbers:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, number)
    finally:
        os.close(descriptor)


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file; None if the file is missing or holds none."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _write(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a small file; on a full disk overwrite what is there in place, which needs no more space."""
    data = json.dumps(value).encode().ljust(FILE_BYTES)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        with path.open("r+b", buffering=0) as file:
            file.write(data)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
