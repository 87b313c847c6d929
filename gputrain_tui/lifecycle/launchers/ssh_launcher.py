"""Starts nodes on other hosts over ssh, and copies their record into the run directory of this machine.

Each node has one channel, served by a thread, to a session of ``gputrain_tui.hosts.host_session``. A broken connection
is opened again; host agent and node continue meanwhile. Nodes on this machine are started by the local launcher.
"""

from __future__ import annotations

import errno
import math
import os
import random
import secrets
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from gputrain_tui.history.recorded_recipe import recorded_table
from gputrain_tui.hosts.host_agent import HOME, LEAVE_S, TOKEN
from gputrain_tui.hosts.host_channel import HostChannel, HostError, HostRefusedError, decoded
from gputrain_tui.hosts.host_names import is_local
from gputrain_tui.hosts.host_session import DISK_STANDS, is_of_node, replaced_files
from gputrain_tui.hosts.local_facts import local_facts
from gputrain_tui.hosts.ssh import Ssh
from gputrain_tui.lifecycle.attempt_outcome import disk_is_full
from gputrain_tui.lifecycle.launchers import Launcher
from gputrain_tui.lifecycle.launchers.local_launcher import LocalLauncher
from gputrain_tui.lifecycle.launchers.uncopied import UncopiedSteps
from gputrain_tui.lifecycle.node_process import NodeProcess
from gputrain_tui.lifecycle.remote_nodes import RemoteNode, attempt_folders, write_remote_node
from gputrain_tui.output import log_line
from gputrain_tui.plan.planner import distributed_timeout
from gputrain_tui.recipe.model import ClusterOptions
from trainer.contract.errors import ExitCode
from trainer.contract.record import RunDir, read_stack_request, write_atomically
from trainer.contract.record.regular_file import open_regular, read_tail, size_of
from trainer.contract.rendezvous_url import LAST_PORT
from trainer.contract.stop_level import StopLevel
from trainer.host.import_path import ASIDE
from trainer.host.process_identity import ProcessIdentity

if TYPE_CHECKING:
    from gputrain_tui.history.run_folders import Run
    from gputrain_tui.hosts.host_names import LocalFacts
    from gputrain_tui.plan.planner import Plan, PlannedNode
    from gputrain_tui.preflight.collect_hosts import HostAnswer
    from gputrain_tui.recipe.model import Recipe
    from trainer.host.stop_request import StopRequest

FORWARDED_PREFIXES = ("GPUTRAIN_", "NCCL_", "GLOO_", "OMP_", "HF_", "CUDA_")
"""Prefixes of the environment variables that nodes on other hosts get."""
NOT_FORWARDED = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "GPUTRAIN_SSH",
    "GPUTRAIN_RUN",
    "GPUTRAIN_SUPERVISOR",
    ASIDE,
    HOME,
)
"""Variables with these prefixes that concern this machine only."""
ROOM_S = 1.0
"""Time between two looks for room on a disk that was full."""
HELLO_S = 30.0
"""Time limit from the start of ssh until the node is started, start-up files of the host included."""
BEAT_S = 1.0
"""Time between two heartbeats to a host agent, which ends a node without heartbeats and new events."""
RETRY_S = (0.1, 0.5, 1.0, 2.0)
"""Pauses before a broken connection is opened again; the last one repeats."""
FIRST_TRIES = 3
"""Maximum number of connection attempts to a host that has not answered yet."""
KILL_TIMEOUT_S = 5.0
"""Time to wait for the end of a killed node on a host that does not answer."""


class _Started(msgspec.Struct):
    shared: bool
    """Whether the host sees the run directory of this machine."""
    run_dir: str
    """Run directory on the host."""
    agent: ProcessIdentity


STARTED, EXIT_CODE, CLOCK = msgspec.json.Decoder(_Started), msgspec.json.Decoder(int), msgspec.json.Decoder(float)
BEAT_ANSWER = msgspec.json.Decoder(str)
PORT = msgspec.json.Decoder(Annotated[int, msgspec.Meta(ge=1, le=LAST_PORT)])
"""Created before any thread: msgspec crashes if several threads decode a type for the first time at once."""


class SshLauncher(Launcher):
    """Launcher of nodes on their hosts over ssh, and of nodes on this machine as local processes."""

    def __init__(self) -> None:
        self._local = LocalLauncher()

    def query_hosts(
        self, recipe: Recipe, plan: Plan, local: LocalFacts, *, max_age_s: float, problems: Mapping[str, str]
    ) -> tuple[HostAnswer, ...]:
        if all(is_local(node.host, local) for node in plan.nodes):
            return ()
        from gputrain_tui.preflight.collect_hosts import collect_hosts

        env = forwarded_environment(os.environ)
        return collect_hosts(recipe, plan, local, env=env, max_age_s=max_age_s, problems=problems)

    def start(self, run: Run, recipe: Recipe, plan: Plan, *, leased: bool) -> subprocess.Popen[bytes]:
        """Start the supervisor, which inherits the idle channels to the hosts of the plan."""
        from gputrain_tui.lifecycle.supervisor_process import start_supervisor

        channels = Ssh().take_idle(node.host for node in plan.nodes)
        return start_supervisor(run.dir, leased=leased, channels=channels)

    def free_port(self, plan: Plan) -> int:
        """Ask the first node's host for a free port; if it does not answer, which the launch reports, draw one here."""
        host = plan.nodes[0].host
        if not is_local(host, local_facts((host,))):
            with suppress(HostError), Ssh().shared_channel(host) as channel:
                port: int = channel.call("free_port", PORT)
                return port
        return super().free_port(plan)

    def launch(self, node: PlannedNode, run_dir: RunDir, *, env: Mapping[str, str], leased: bool) -> NodeProcess:
        """Start a node's command; errors of its host or connection appear later, as ``host_error`` of the process."""
        if is_local(node.host, local_facts((node.host,))):
            return self._local.launch(node, run_dir, env=env, leased=leased)
        number = len(attempt_folders(run_dir, node.node)) + 1
        folder = run_dir.agents / f"{node.node}.{number}.{secrets.token_hex(8)}"
        folder.mkdir(mode=0o700, parents=True)
        (folder / TOKEN).touch(mode=0o600)
        return SshProcess(node, run_dir, folder.name, start=True, leased=leased)

    def probe_network(self, plan: Plan) -> Mapping[tuple[str, str], bool]:
        from gputrain_tui.preflight.host_network import probe_network  # imported only when ranks have lost each other

        return probe_network(plan, local_facts([node.host for node in plan.nodes]))

    def await_hosts(self, plan: Plan, *, wait_s: float, stop_request: StopRequest) -> dict[str, str]:
        """Wait until all hosts of a plan answer, with growing pauses; return those that do not, with the reasons."""
        silent: dict[str, str] = {}
        deadline = time.monotonic() + wait_s
        local = local_facts([node.host for node in plan.nodes])
        for host in dict.fromkeys(node.host for node in plan.nodes if not is_local(node.host, local)):
            for _ in _tries(deadline, stop_request):
                try:
                    with Ssh().shared_channel(host) as channel:
                        channel.call("clock", CLOCK, HELLO_S)
                    silent.pop(host, None)
                    break
                except HostError as error:
                    silent[host] = f"{host} did not answer within {wait_s:g} s: {error}"
        return silent

    def await_network(self, plan: Plan, *, wait_s: float, stop_request: StopRequest) -> str:
        from gputrain_tui.diagnosis.cut_network import describe_cut  # imported only for a restart

        cut = ""
        for _ in _tries(time.monotonic() + wait_s, stop_request):
            cut = describe_cut(self.probe_network(plan))
            if not cut:
                return ""
        return f"after {wait_s:g} s still {cut}"

    def request_stacks(self, running: Iterable[NodeProcess], request: str) -> None:
        """Pass on a request for the stacks of all ranks."""
        for process in running:
            if isinstance(process, SshProcess):
                process.request_stacks(request)

    def adopt(
        self, node: PlannedNode, run_dir: RunDir, identity: ProcessIdentity | None, *, leased: bool
    ) -> NodeProcess | None:
        folders = attempt_folders(run_dir, node.node)
        if not folders:  # started as a local process, or not at all
            return self._local.adopt(node, run_dir, identity, leased=leased)
        return SshProcess(node, run_dir, folders[-1].name, start=False, leased=leased)


def _tries(deadline: float, stop_request: StopRequest) -> Iterator[None]:
    """Yield for each try until the deadline or a stop request, at least once, with growing pauses between them."""
    pause_s = 1.0
    yield
    while stop_request.reason is None and (left_s := deadline - time.monotonic()) > 0:
        stop_request.wait(min(pause_s * random.uniform(1.0, 1.5), left_s))
        pause_s = min(2 * pause_s, 30.0)
        yield


class SshProcess(NodeProcess):
    """Node on another host, and the connection to its host agent."""

    def __init__(self, node: PlannedNode, run_dir: RunDir, attempt: str, *, start: bool, leased: bool) -> None:
        """Start the thread that connects; without ``start`` the host agent must run already."""
        super().__init__(node.node, node.host, None)
        self._planned = node
        self._run_dir = run_dir
        self._attempt = attempt
        self._start = start
        self._leased = leased
        self._ssh = Ssh()
        self._changed = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._level = StopLevel.NONE
        self._stack_request = read_stack_request(run_dir)
        self._give_up_at = float("inf")
        self._heard_at = time.monotonic()
        self._stood_at = -math.inf
        """When its host said last that its disk stands still, monotonic seconds."""
        self._code: int | None = None
        self._unwritten: set[str] = set()
        """Files that could not be written here; skipped until the next connection."""
        self._uncopied = {f"events/{rank}.ndjson": UncopiedSteps(run_dir, rank) for rank in node.ranks}
        self._room_at = 0.0
        """Time of the next look for room for them, monotonic seconds."""
        self._thread = threading.Thread(target=self._run, name=f"node-{node.node}", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        return self._changed

    def poll(self) -> int | None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._changed)
        return self._code

    def stop(self, level: StopLevel) -> None:
        self._level = max(level, self._level)
        os.eventfd_write(self._wake_event, 1)

    def request_stacks(self, request: str) -> None:
        """Pass on a request for the stacks of all ranks."""
        if request != self._stack_request:
            self._stack_request = request
            os.eventfd_write(self._wake_event, 1)

    def kill(self) -> None:
        """Kill the node; on a host that cannot be reached, its host agent ends the node later."""
        self._give_up_at = min(self._give_up_at, time.monotonic() + KILL_TIMEOUT_S)
        self.stop(StopLevel.KILL)

    def close(self) -> None:
        self._thread.join()
        os.close(self._changed)
        os.close(self._wake_event)

    def silent_s(self) -> float:
        return time.monotonic() - self._heard_at

    def lost_s(self) -> float:
        return time.monotonic() - max(self._heard_at, self._stood_at)

    def count_silence_anew(self) -> None:
        self._heard_at = time.monotonic()

    # --- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            code = self._serve()
        except Exception as error:  # noqa: BLE001 - the supervisor waits for this node
            self.host_error = f"{type(error).__name__}: {error}"
            code = ExitCode.FAILED
        if self.host_error:
            log_line(f"node {self.node} on {self.host}: {self.host_error}")
        self._code = code
        os.eventfd_write(self._changed, 1)

    def _serve(self) -> int:
        """Connect and reconnect until the node has ended or cannot be started; return its exit code."""
        failures = 0
        while True:
            request = session_request(
                self._planned, self._run_dir, self._attempt, start=self._start, leased=self._leased
            )
            channel = None
            try:
                channel = self._ssh.channel(self.host)
                code = self._talk(channel, request)
                if code != ExitCode.FINISHED:  # the network may be asked, and the next attempt started, on it
                    self._ssh.keep(channel)
                    channel = None
                return code
            except HostRefusedError as refused:
                self.host_error = str(refused)
                return ExitCode.FAILED
            except HostError as error:
                why = self.problem = str(error)
            finally:
                if channel is not None:
                    channel.close(at_once=True)
            reached = channel is not None and channel.answered and self.identity is not None
            failures = 1 if reached else failures + 1
            if (self.identity is None and failures >= FIRST_TRIES) or time.monotonic() >= self._give_up_at:
                self.host_error = why
                return ExitCode.FAILED
            log_line(f"node {self.node} on {self.host}: {why}; connecting again")
            # The next connection sends a stop request that comes meanwhile.
            pause_s = RETRY_S[min(failures, len(RETRY_S)) - 1]
            time.sleep(min(pause_s, max(self._give_up_at - time.monotonic(), 0.0)))

    def _talk(self, channel: HostChannel, request: Mapping[str, Any]) -> int:
        """Serve one connection; return the node's exit code."""
        call, is_started, sent_level = channel.send("node", **request), False, StopLevel.NONE
        sent_request = self._stack_request
        beat, beat_at, hello_deadline = 0, 0.0, time.monotonic() + HELLO_S
        self._unwritten.clear()
        for uncopied in self._uncopied.values():
            uncopied.clear()
        while True:
            now = time.monotonic()
            if now >= self._room_at:
                self._await_room()
            if now >= self._give_up_at:
                why = self.problem or "it does not answer"
                raise HostError(f"{why}; its agent stops the node when its ranks record no more steps")
            if not is_started and now > hello_deadline:
                raise HostError(f"it did not answer within {HELLO_S:g} s")
            if is_started and self._level > sent_level:
                sent_level = self._level
                channel.send("stop", level=int(sent_level))
            if is_started and self._stack_request != sent_request:
                sent_request = self._stack_request
                channel.send("stacks", request=sent_request)
            if is_started and now >= beat_at:
                beat_at = now + BEAT_S
                beat = channel.send("beat")
            for arrived in channel.frames(BEAT_S / 2, self._wake_event):
                if arrived.kind == DISK_STANDS:
                    self._stood_at = time.monotonic()
                    continue
                self._heard_at = time.monotonic()
                if arrived.call == beat:
                    self.unwritable = decoded(arrived, BEAT_ANSWER)
                if arrived.call != call:
                    continue
                match arrived.kind:
                    case "started":
                        started, is_started, self.problem = decoded(arrived, STARTED), True, ""
                        self.identity = started.agent
                        if not started.shared:
                            remote = RemoteNode(host=self.host, run_dir=started.run_dir)
                            write_remote_node(self._run_dir, self._attempt, remote)
                        os.eventfd_write(self._changed, 1)
                    case "file":
                        self._append(arrived.name, arrived.offset, arrived.data)
                    case "whole":
                        self._replace(arrived.name, arrived.data)
                    case _:
                        self._await_room()
                        return decoded(arrived, EXIT_CODE)
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake_event)

    def _await_room(self) -> None:
        """Tell the steps that could not be copied; raise if there is room for them again, to get them once more."""
        self._room_at = time.monotonic() + ROOM_S
        standing = [uncopied for uncopied in self._uncopied.values() if uncopied.stands]
        if standing and not disk_is_full(self._run_dir):
            raise HostError("the disk of the run directory has room again for the rest of its record")
        for uncopied in standing:
            uncopied.tell()

    def _append(self, name: str, offset: int, data: bytes) -> None:
        """Write a part of a file of the node at its offset; repeated parts overwrite equal bytes, gaps are refused."""
        if not is_of_node(name, self.node, self._planned.ranks):
            raise HostError(f"it sent {name!r}, which is not a file of node {self.node}")
        path = f"{self._run_dir.path}/{name}"  # a string: a Path per frame is slow
        part, uncopied = data, self._uncopied.get(name)
        if name in self._unwritten:
            if uncopied is not None and uncopied.stands:
                uncopied.add(part)
            return
        if offset > size_of(path):
            raise HostError(f"it sent {name} from byte {offset}, but only {size_of(path)} bytes are here")
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
        except OSError as error:  # a full disk or a deleted run directory must not end the run
            self._unwritten.add(name)
            if uncopied is not None and error.errno in (errno.ENOSPC, errno.EDQUOT):
                uncopied.begin(part, len(part) - len(data))
            log_line(f"{path} cannot be written: {error.strerror}")

    def _replace(self, name: str, data: bytes) -> None:
        if name not in replaced_files(self.node, self._planned.ranks):
            raise HostError(f"it sent {name!r}, which is not a file of node {self.node}")
        with suppress(OSError):
            if name.startswith("gaps/"):
                self._run_dir.gaps.mkdir(mode=0o700, exist_ok=True)
            write_atomically(self._run_dir.path / name, data)


def session_request(
    node: PlannedNode, run_dir: RunDir, attempt: str, *, start: bool = False, leased: bool = False
) -> dict[str, Any]:
    """Return the request that opens a session of the host agent."""
    sizes, torn = {}, []
    for folder in (run_dir.events, run_dir.logs, run_dir.digest):
        for path in folder.glob("*"):
            name = f"{folder.name}/{path.name}"
            if is_of_node(name, node.node, node.ranks):
                sizes[name] = size_of(path)
                if start and sizes[name] and not read_tail(path, 1).endswith(b"\n"):
                    torn.append(name)
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
        "session_s": host_timeout(run_dir),
        "idle_s": min(distributed_timeout(node.argv), 2 * host_timeout(run_dir) - LEAVE_S - BEAT_S),
        "sizes": sizes,
        "torn": torn,
    }


def host_timeout(run_dir: RunDir) -> float:
    """Return ``cluster.host_timeout`` of a run, seconds."""
    value = recorded_table(run_dir, "cluster").get("host_timeout", ClusterOptions().host_timeout)
    return float(value) if isinstance(value, int | float) else ClusterOptions().host_timeout


def forwarded_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an environment that nodes on other hosts get."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(FORWARDED_PREFIXES) and name not in NOT_FORWARDED
    }
