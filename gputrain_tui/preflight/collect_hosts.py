"""Collects the facts of every host of a plan over ssh, side by side, and what the hosts say of each other.

It takes the way of the launch: the same ssh, folder, line of shell, environment and interpreter. Each host has one
connection, with ``gputrain_tui.hosts.node_facts`` at its other end, which is gone when the collection is over.
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from gputrain_tui.hosts import environment_facts
from gputrain_tui.hosts.host_names import LocalFacts, is_local
from gputrain_tui.hosts.inventory_program import MODULES as INVENTORY_MODULES, packed_program
from gputrain_tui.hosts.ssh import Ssh, kill_session
from gputrain_tui.hosts.ssh_failure import explain_failure
from gputrain_tui.hosts.survey import is_bounded
from gputrain_tui.plan.planner import Plan, PlannedNode
from gputrain_tui.preflight.host_facts import HostAnswer, HostFacts
from gputrain_tui.recipe.model import Recipe
from trainer.contract.errors import RequestError
from trainer.contract.rendezvous_url import parse_rendezvous_url

MODULES = (
    "trainer.contract.errors",
    "trainer.contract.home_folder",
    "trainer.contract.stop_level",
    *INVENTORY_MODULES[:-1],
    "trainer.host.descendants",
    "trainer.host.prctl",
    "trainer.host.proc_environ",
    "trainer.host.stop_request",
    "trainer.host.ports",
    "trainer.host.reachability",
    "trainer.host.resource_limits",
    INVENTORY_MODULES[-1],
    "gputrain_tui.hosts.host_names",
    "gputrain_tui.hosts.machine_facts",
    "gputrain_tui.hosts.host_agent",
    "gputrain_tui.hosts.node_facts",
)
"""Of the program that runs on the hosts, in import order; they use the standard library only."""

HOST_TIMEOUT_S = 40.0
"""For a host's facts, from connecting on: a line of setup alone may take half of it; most hosts need a second."""
QUESTION_TIMEOUT_S = 15.0
"""For each further answer; connections that nobody answers are among them."""
REACH_TIMEOUT_S = 4.0
"""For the connections between hosts; TCP sends its first packet three times in it."""
MAX_ANSWER_BYTES = 1 << 22
"""An answer has a few KiB; a host that prints forever is given up."""
MAX_HOSTS_AT_ONCE = 64
"""Each costs a thread and an ssh process here; more wait for their turn."""

T = TypeVar("T")

_LAST: dict[str, Any] = {}
"""The last questions, when they were asked, and their answers."""
_ASKING = threading.Lock()
"""Held while hosts are asked: who asks the same meanwhile takes the answers."""


class HostError(Exception):
    """A host does not answer as it should; the message is one line."""


class HostDialog:
    """One connection to a host: questions and answers, a line each."""

    def __init__(self, host: str, words: Callable[[Sequence[str]], list[str]]) -> None:
        """Start the program on the host.

        Args:
            host: for messages.
            words: turns the words of a Python program into those of a process of this machine.

        Raises:
            HostError: there is no such program as ssh.
        """
        self.host = host
        # Start-up files and login banners may print as well: only what follows this mark counts.
        self._mark = f"gputrain-{secrets.token_hex(8)}:".encode()
        self._output, self._said = bytearray(), 0
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the connection
        program = packed_program(MODULES)
        reader = f"import sys;exec(sys.stdin.buffer.read({len(program)}))"
        try:
            self._process = subprocess.Popen(
                words(["-c", reader, self._mark.decode()]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                start_new_session=True,  # no terminal to ask for a password, and no Ctrl-C
            )
        except OSError as error:
            self._stderr.close()
            raise HostError(f"{error.filename} cannot be run: {error.strerror}") from None
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)  # ssh reads nothing before it is connected
        self._unsent = program

    def ask(self, question: str, **fields: Any) -> None:
        """Ask one question."""
        self._unsent += json.dumps({"ask": question, **fields}).encode() + b"\n"
        self._send()

    def answer(self, kind: type[T], timeout_s: float) -> T:
        """Return the next answer.

        Raises:
            HostError: there is none, or it is something else.
        """
        line = self._line(time.monotonic() + timeout_s, timeout_s)
        try:
            value = msgspec.json.decode(line, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise HostError("what it answered are no facts of a host") from None
        if not is_bounded(msgspec.to_builtins(value)):
            raise HostError("what it answered are no facts of a host")
        return value

    def close(self) -> None:
        """End the program there and the process here."""
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            kill_session(self._process)
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._stderr.close()

    def kill(self) -> None:
        """End the process here at once."""
        kill_session(self._process)

    def _send(self) -> None:
        assert self._process.stdin is not None
        try:
            self._unsent = self._unsent[os.write(self._process.stdin.fileno(), self._unsent) :]
        except BlockingIOError:
            return
        except OSError:  # it has ended: the missing answer tells why
            self._unsent = b""

    def _line(self, deadline: float, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        pipe, stdin = self._process.stdout.fileno(), self._process.stdin.fileno()
        while True:
            begin = self._output.find(self._mark)
            end = self._output.find(b"\n", begin) if begin >= 0 else -1
            if end >= 0:
                line = bytes(self._output[begin + len(self._mark) : end])
                del self._output[: end + 1]
                return line
            left = deadline - time.monotonic()
            if left <= 0:
                raise HostError(f"it did not answer within {timeout_s:g} s")
            ready, writable, _ = select.select([pipe], [stdin] if self._unsent else [], [], min(left, 0.2))
            if writable:
                self._send()
            chunk = os.read(pipe, 1 << 16) if ready else b""
            self._output += chunk
            self._said += len(chunk)
            if self._said + os.fstat(self._stderr.fileno()).st_size > MAX_ANSWER_BYTES:
                raise HostError(f"it says more than {MAX_ANSWER_BYTES >> 20} MiB, and no facts")
            if ready and not chunk:
                code = self._process.wait(10)
                self._stderr.seek(0)
                stderr = self._stderr.read(1 << 16).decode("utf-8", "replace")
                if code == 0:
                    raise HostError("what it answered are no facts of a host")
                raise HostError(explain_failure(self.host, code, stderr).replace("its inventory failed", "it failed"))


class _Clock(msgspec.Struct):
    time: float


class _Route(msgspec.Struct):
    address: str
    interface: str
    root: str
    interfaces: dict[str, str]
    token: bool


def collect_hosts(
    recipe: Recipe, plan: Plan, local: LocalFacts, *, env: Mapping[str, str], max_age_s: float = 0.0
) -> tuple[HostAnswer, ...]:
    """Ask the hosts of a plan that is started over ssh; one that does not answer is a problem in its place.

    Args:
        recipe: the recipe.
        plan: its plan.
        local: names and addresses of this machine.
        env: variables that go along to other hosts.
        max_age_s: how old answers to the same questions may be: a form that is edited asks after every key.

    Returns:
        An answer for each host and place on it, by its first node.
    """
    nodes = _distinct(plan, local)
    places = [(node.node, node.host, node.workdir, node.setup, node.argv[0], node.env) for node in nodes]
    asked = repr((places, plan.init_method, recipe.train.task, recipe.script, recipe.task_options, env))
    with _ASKING:
        if _LAST.get("asked") == asked and time.monotonic() - _LAST["time"] < max_age_s:
            return _LAST["answers"]  # type: ignore[no-any-return]
        answers = _ask(recipe, plan, local, env, nodes)
        _LAST.update(asked=asked, time=time.monotonic(), answers=answers)
    return answers


def _ask(
    recipe: Recipe, plan: Plan, local: LocalFacts, env: Mapping[str, str], nodes: Sequence[PlannedNode]
) -> tuple[HostAnswer, ...]:
    try:
        ssh = Ssh()
    except RequestError as error:
        return tuple(
            HostAnswer(node=node.node, host=node.host, problem=str(error))
            for node in nodes
            if not is_local(node.host, local)
        )
    return _Collection(recipe, plan, local, env, ssh).run(nodes)


def _require_addresses(addresses: Sequence[str], port: int) -> None:
    """Refuse what the other hosts could not connect to: they would fail of it, and be blamed.

    Raises:
        HostError: an address or the port is none.
    """
    try:
        for text in addresses:
            ipaddress.ip_address(text)
        if not 0 < port < 1 << 16:
            raise ValueError
    except ValueError:
        raise HostError("what it answered are no facts of a host") from None


def _distinct(plan: Plan, local: LocalFacts) -> list[PlannedNode]:
    """Return the first node of each host, folder, shell line, interpreter and environment."""
    found: dict[tuple[Any, ...], PlannedNode] = {}
    for node in plan.nodes:
        host = "" if is_local(node.host, local) else node.host
        named = {name: value for name, value in node.env.items() if not name.startswith("CUDA_")}
        found.setdefault((host, node.workdir, node.setup, node.argv[0], json.dumps(named)), node)
    return list(found.values())


class _Collection:
    """One collection, from the first connection to the last answer."""

    def __init__(self, recipe: Recipe, plan: Plan, local: LocalFacts, env: Mapping[str, str], ssh: Ssh) -> None:
        self._recipe, self._plan, self._local, self._env, self._ssh = recipe, plan, local, env, ssh
        self._dialogs: dict[int, HostDialog] = {}
        self._found: dict[int, HostAnswer] = {}
        self._lock = threading.Lock()
        self._routes: dict[int, _Route] = {}
        self._over = False
        """Whether nobody waits for answers any more."""
        url = parse_rendezvous_url(plan.init_method or "")
        self._file = str(url.path) if url is not None and url.scheme == "file" else None
        self._host, self._port = "", 0
        if url is not None and url.scheme == "tcp":
            self._host, self._port = url.host, url.port
        elif url is not None and url.scheme == "env":
            first = plan.nodes[0].env
            self._host, self._port = first.get("MASTER_ADDR", ""), int(first.get("MASTER_PORT", "0"))
        self._token = str(Path(self._file).with_name(f".gputrain-{secrets.token_hex(8)}")) if self._file else ""

    def run(self, nodes: Sequence[PlannedNode]) -> tuple[HostAnswer, ...]:
        with ThreadPoolExecutor(min(len(nodes), MAX_HOSTS_AT_ONCE), thread_name_prefix="preflight") as pool:
            try:
                self._each(pool, nodes, self._facts)
                root = nodes[0].node
                if self._file is not None and root in self._dialogs:
                    self._each(pool, nodes[:1], self._leave_token)
                self._each(pool, nodes, self._route)
                self._each(pool, nodes, self._reach)
                self._each(pool, nodes, self._close)
            except BaseException:  # also Ctrl-C
                self._over = True
                for dialog in list(self._dialogs.values()):
                    dialog.kill()  # leaving the pool waits for its threads
                raise
        return tuple(self._found[node.node] for node in nodes)

    def _each(
        self, pool: ThreadPoolExecutor, nodes: Sequence[PlannedNode], step: Callable[[PlannedNode], None]
    ) -> None:
        """Take one step with all hosts that have answered so far, and wait for all."""

        def guarded(node: PlannedNode) -> None:
            if self._found and node.node in self._found and self._found[node.node].problem:
                return
            try:
                step(node)
            except HostError as error:
                answer = HostAnswer(node=node.node, host=node.host, problem=str(error))
                with self._lock:
                    self._found[node.node] = answer
                    dialog = self._dialogs.pop(node.node, None)
                if dialog is not None:
                    dialog.kill()
                    dialog.close()

        list(pool.map(guarded, nodes))

    # --- the steps ------------------------------------------------------------------------------------------------

    def _facts(self, node: PlannedNode) -> None:
        here = is_local(node.host, self._local)

        def words(command: Sequence[str]) -> list[str]:
            if here:
                return [sys.executable, *command]
            # One word to every shell: in single quotes, and without a character that a shell changes there.
            program = (command[0], f"'{command[1]}'", *command[2:])
            return self._ssh.command_line(node.host, "python3", *program, own=True)

        dialog = HostDialog(node.host, words)
        with self._lock:
            self._dialogs[node.node] = dialog
        if self._over:
            dialog.kill()
        first = node.node == 0
        save_dir = self._recipe.train.save_dir
        dialog.ask(
            "facts",
            workdir=node.workdir or str(Path.cwd()),
            setup=node.setup,
            python=node.argv[0],
            env={**({} if here else self._env), **node.env},
            home=os.environ.get("GPUTRAIN_HOME", ""),
            folders=[save_dir] if first and save_dir else [],
            port={"number": self._port, "host": self._host} if first and self._port and not here else None,
            rendezvous=None if here else self._file,
            program=Path(environment_facts.__file__).read_text(encoding="utf-8"),
            environment={
                "task": self._recipe.train.task,
                "script": self._recipe.script.script if self._recipe.script is not None else "",
                "options": dict(self._recipe.task_options),
            },
        )
        facts = dialog.answer(HostFacts, HOST_TIMEOUT_S)
        _require_addresses(facts.addresses, facts.probe_port)
        with self._lock:
            self._found[node.node] = HostAnswer(node=node.node, host=node.host, here=here, facts=facts)

    def _leave_token(self, node: PlannedNode) -> None:
        dialog = self._dialogs[node.node]
        dialog.ask("token", token=self._token)
        if not dialog.answer(dict[str, bool], QUESTION_TIMEOUT_S).get("written"):
            self._token = ""

    def _route(self, node: PlannedNode) -> None:
        first = self._found.get(0)
        root = first.facts if first is not None else None
        dialog = self._dialogs[node.node]
        asked = time.time()
        dialog.ask(
            "route",
            token=self._token,
            root={
                "host": self._host,
                "own": node.node == 0,
                "addresses": list(root.addresses) if root is not None else [],
                "port": root.probe_port if root is not None else 0,
            },
        )
        there = dialog.answer(_Clock, QUESTION_TIMEOUT_S).time
        answered = time.time()
        route = dialog.answer(_Route, QUESTION_TIMEOUT_S)
        _require_addresses([text for text in (route.address, route.root) if text], 1)
        with self._lock:
            self._routes[node.node] = route
            self._found[node.node] = msgspec.structs.replace(
                self._found[node.node],
                clock_offset_s=there - (asked + answered) / 2,
                round_trip_s=answered - asked,
                interface=route.interface,
                lost=node.node != 0 and not route.root and 0 in self._found and not self._found[0].problem,
                token=route.token if self._token else None,
            )

    def _reach(self, node: PlannedNode) -> None:
        endpoints = {
            number: (address, answer.facts.probe_port)
            for number, answer in self._found.items()
            if number != node.node and answer.facts is not None and (address := self._address(number))
        }
        dialog = self._dialogs[node.node]
        dialog.ask("reach", endpoints=endpoints, timeout_s=REACH_TIMEOUT_S)
        failed = dialog.answer(dict[int, str], QUESTION_TIMEOUT_S)
        unreachable = {other: f"{endpoints[other][0]} ({why})" for other, why in failed.items() if other in endpoints}
        interface = self._found[node.node].interface
        if not interface and node.node in self._routes:  # of the first node: that of the address that others have
            interface = self._routes[node.node].interfaces.get(self._address(node.node), "")
        with self._lock:
            self._found[node.node] = msgspec.structs.replace(
                self._found[node.node], unreachable=unreachable, interface=interface
            )

    def _address(self, number: int) -> str:
        """Return the address under which the others know a host."""
        route = self._routes.get(number)
        if route is None:
            return ""
        if number:
            return route.address
        return next((other.root for index, other in self._routes.items() if index and other.root), "")

    def _close(self, node: PlannedNode) -> None:
        self._dialogs[node.node].close()
