"""Collects over ssh the facts of all hosts of a plan in parallel, and tries the connections between the hosts.

It uses the ssh, folder, line of shell, environment and interpreter of the launch. Each host has one channel, and calls
the functions of ``gputrain_tui.hosts.node_facts``. Afterwards it is idle, and the launch continues on it.
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from gputrain_tui.hosts import environment_facts
from gputrain_tui.hosts.environment_facts import Environment
from gputrain_tui.hosts.first_answers import FirstAnswers
from gputrain_tui.hosts.host_channel import HostChannel, HostError
from gputrain_tui.hosts.host_names import LocalFacts, is_local
from gputrain_tui.hosts.inventory import Inventory
from gputrain_tui.hosts.machine_facts import Folder, Port, RendezvousFile
from gputrain_tui.hosts.ssh import Ssh
from gputrain_tui.plan.planner import Plan, PlannedNode
from gputrain_tui.preflight.collect import rendezvous_of
from gputrain_tui.recipe.model import Recipe
from trainer.contract.backends import is_nccl
from trainer.contract.option_rules import start_option
from trainer.host.resource_limits import ResourceLimits


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a host for one node: the answer of ``facts`` in ``gputrain_tui.hosts.node_facts``; untrusted."""

    machine: str
    """Identity: differs between any two machines, and between containers with their own network."""
    inventory: Inventory
    limits: ResourceLimits
    shm_free_bytes: int | None = None
    folders: tuple[Folder, ...] = ()
    """Folders that ranks write into: temporary files, the record, and on the first node checkpoints."""
    port: Port | None = None
    """Port of the rendezvous; on the first node only."""
    rendezvous: RendezvousFile | None = None
    probe_port: int = 0
    addresses: tuple[str, ...] = ()
    environment: Environment | None = None
    problem: str = ""
    """Reason why there is no environment, in one line."""
    problem_key: str = ""
    """The recipe's key of that problem: ``workdir``, ``setup`` or ``python``."""


class HostAnswer(msgspec.Struct, kw_only=True):
    """Facts of the host of a node, or the reason why there are none, and its connections to the other hosts."""

    node: int
    """The first of the nodes with this host, folder, setup, interpreter and environment."""
    host: str
    is_local: bool = False
    facts: HostFacts | None = None
    problem: str = ""
    """Reason why there are no facts, in one line."""
    changed: tuple[str, ...] = ()
    """Files of code that are not as on this machine, where both have the same folder."""
    clock_offset_s: float = 0.0
    """Lead of its clock over this machine's; negative if it is behind."""
    round_trip_s: float = 0.0
    """Duration of the request for its clock; the error of ``clock_offset_s`` is at most half of it."""
    lost: bool = False
    """Whether it found no route to the first node."""
    first_address: str = ""
    """Address at which it reaches the first node; empty if it found none, and for the first node."""
    knows_first: bool = True
    """Whether the name of the first node has an address there."""
    interface: str = ""
    """Network interface of the route to the other hosts; empty if unknown."""
    token: bool | None = None
    """Whether the token beside the rendezvous file is visible on it; None if no token was written."""
    unreachable: Mapping[int, str] = msgspec.field(default_factory=dict)
    """Address and reason for each node that it cannot reach, in one text."""


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return the files of code that both have, by their digests with different contents."""
    return sorted(name for name, content in one.items() if other.get(name, content) != content)


def address_for_name(answers: Sequence[HostAnswer]) -> str:
    """Return an address of the first node in place of its name; empty if all hosts know that, or none an address."""
    if all(answer.knows_first for answer in answers):
        return ""
    return next((answer.first_address for answer in answers if answer.first_address), "")


HOST_TIMEOUT_S = 40.0
"""Time limit of a host's facts, connecting included: setup alone may take half of it; most hosts need a second."""
REACH_TIMEOUT_S = 4.0
"""Time limit of the connections between hosts: TCP sends its first packet three times in it."""

_CACHE: dict[str, Any] = {}
"""The newest collection: its ``request``, ``time`` (monotonic) and ``answers``."""
_COLLECTING = threading.Lock()
"""Held during a collection: a second one of the same request waits and takes its answers."""


class _Route(msgspec.Struct):
    address: str
    interface: str
    root: str
    named: bool
    interfaces: dict[str, str]
    token: bool


FACTS, CLOCK, ROUTE = msgspec.json.Decoder(HostFacts), msgspec.json.Decoder(float), msgspec.json.Decoder(_Route)
WRITTEN, UNREACHABLE = msgspec.json.Decoder(bool), msgspec.json.Decoder(dict[int, str])
"""Decoders of the hosts' answers, made before any thread."""


def collect_hosts(
    recipe: Recipe,
    plan: Plan,
    local: LocalFacts,
    *,
    env: Mapping[str, str],
    max_age_s: float = 0.0,
    problems: Mapping[str, str] = MappingProxyType({}),
) -> tuple[HostAnswer, ...]:
    """Return the facts of the hosts of a plan that is started over ssh, or the problem of a host that does not answer.

    There is an answer for each host, folder, setup, interpreter and environment, by its first node. An edited form
    repeats a request after every key: ``max_age_s`` is the greatest age of answers to the same request. ``env`` are the
    variables that the launch passes to other hosts; ``problems`` are those of hosts that have just not answered, which
    are not asked again.

    Raises:
        RequestError: ``GPUTRAIN_SSH`` is no command line.
    """
    nodes = _distinct(plan, local)
    commands = [(node.node, node.host, node.workdir, node.setup, node.argv[0], node.env) for node in nodes]
    train = recipe.train
    files = (train.save_dir, _read_by_rank_0(recipe, plan), recipe.script, recipe.task_options)
    request = repr((commands, plan.init_method, train.task, files, env, problems))
    with _COLLECTING:
        if _CACHE.get("request") == request and time.monotonic() - _CACHE["time"] < max_age_s:
            return _CACHE["answers"]  # type: ignore[no-any-return]
        answers = _Collection(recipe, plan, local, env).run(nodes, problems)
        _CACHE.update(request=request, time=time.monotonic(), answers=answers)
    return answers


def require_addresses(addresses: Sequence[str], port: int) -> None:
    """Raise HostError for invalid addresses of a host: other hosts would fail on them, and the error name those."""
    try:
        for text in addresses:
            ipaddress.ip_address(text)
        if not 0 < port < 1 << 16:
            raise ValueError
    except ValueError:
        raise HostError("it sent no valid answer") from None


def _distinct(plan: Plan, local: LocalFacts) -> list[PlannedNode]:
    """Return the first node of each host, folder, setup, interpreter and environment."""
    first: dict[tuple[Any, ...], PlannedNode] = {}
    for node in plan.nodes:
        host = "" if is_local(node.host, local) else node.host
        env = {name: value for name, value in node.env.items() if not name.startswith("CUDA_")}
        first.setdefault((host, node.workdir, node.setup, node.argv[0], json.dumps(env)), node)
    return list(first.values())


def _read_by_rank_0(recipe: Recipe, plan: Plan) -> dict[str, dict[str, Any]]:
    """Return the arguments of ``read_environment`` for what rank 0 alone reads before its first step."""
    train, read = recipe.train, dict[str, dict[str, Any]]()
    if option := start_option(train):
        read["start"] = {"option": option, "path": getattr(train, option)}
    if train.shares_from is not None:
        batch = train.global_batch_size
        read["shares"] = {"folder": train.shares_from, "ranks": plan.world_size, "global_batch_size": batch}
    return read


class _Collection:
    """One collection, from the first connection to the last answer.

    A thread writes the answer and the route of its own host only, and reads those of others after all have written.
    """

    def __init__(self, recipe: Recipe, plan: Plan, local: LocalFacts, env: Mapping[str, str]) -> None:
        self._recipe, self._plan, self._local, self._env, self._ssh = recipe, plan, local, env, Ssh()
        self._channels: dict[int, HostChannel] = {}
        self._answers: dict[int, HostAnswer] = {}
        self._routes: dict[int, _Route] = {}
        self._file, self._host, self._port = rendezvous_of(plan)
        self._first = FirstAnswers(0)
        script = recipe.script
        own = environment_facts.own_file(
            recipe.train.task, script.script if script is not None else "", is_module=bool(script and script.module)
        )
        self._code = {} if own is None else environment_facts.files_beside(own)
        self._token = str(self._file.with_name(f".gputrain-{secrets.token_hex(8)}")) if self._file else ""

    def run(self, nodes: Sequence[PlannedNode], problems: Mapping[str, str]) -> tuple[HostAnswer, ...]:
        for node in nodes:
            if node.host in problems:
                self._answers[node.node] = HostAnswer(node=node.node, host=node.host, problem=problems[node.host])
        asked = [node for node in nodes if node.node not in self._answers and not is_local(node.host, self._local)]
        self._first = FirstAnswers(len(asked))
        self._on_all(nodes, self._facts)
        if self._file is not None:
            self._on_all(nodes[:1], self._write_token)
        for step in (self._route, self._reach, self._close):
            self._on_all(nodes, step)
        return tuple(self._answers[node.node] for node in nodes)

    def _on_all(self, nodes: Sequence[PlannedNode], step: Callable[[PlannedNode], None]) -> None:
        """Take one step in parallel with all hosts that have no problem so far, and wait for the end of it."""

        def guarded(node: PlannedNode) -> None:
            answer = self._answers.get(node.node)
            if answer is not None and answer.problem:
                return
            try:
                step(node)
            except HostError as error:
                self._answers[node.node] = HostAnswer(node=node.node, host=node.host, problem=str(error))
                channel = self._channels.pop(node.node, None)
                if channel is not None:
                    channel.close(at_once=True)

        self._ssh.on_all(guarded, nodes)

    # --- the steps ------------------------------------------------------------------------------------------------

    def _facts(self, node: PlannedNode) -> None:
        on_this_machine = is_local(node.host, self._local)
        channel = self._channels[node.node] = self._ssh.channel(node.host, here=on_this_machine)
        if not on_this_machine:
            channel.first_answer(self._first, HOST_TIMEOUT_S)
        first, train, script = node.node == 0, self._recipe.train, self._recipe.script
        facts = channel.call(
            "facts",
            FACTS,
            HOST_TIMEOUT_S,
            workdir=node.workdir or str(Path.cwd()),
            setup=node.setup,
            python=node.argv[0],
            env={**({} if on_this_machine else self._env), **node.env},
            home=os.environ.get("GPUTRAIN_HOME", ""),
            folders=[train.save_dir] if first and train.save_dir else [],
            port={"number": self._port, "host": self._host} if first and self._port and not on_this_machine else None,
            rendezvous=None if on_this_machine or self._file is None else str(self._file),
            program=Path(environment_facts.__file__).read_text(encoding="utf-8"),
            environment={
                "task": train.task,
                "script": script.script if script is not None else "",
                "is_module": script is not None and script.module,
                "options": dict(self._recipe.task_options),
                **(_read_by_rank_0(self._recipe, self._plan) if first else {}),
            },
        )
        require_addresses(facts.addresses, facts.probe_port)
        answer = HostAnswer(node=node.node, host=node.host, is_local=on_this_machine, facts=facts)
        if facts.environment is not None and node.workdir in (None, "", str(Path.cwd())):
            answer.changed = tuple(differing(self._code, facts.environment.beside))
        self._answers[node.node] = answer

    def _write_token(self, node: PlannedNode) -> None:
        if not self._channels[node.node].call("token", WRITTEN, token=self._token):
            self._token = ""

    def _route(self, node: PlannedNode) -> None:
        root, answer, channel = self._answers[0].facts, self._answers[node.node], self._channels[node.node]
        sent_at = time.time()
        clock_call = channel.send("clock")
        route_call = channel.send(
            "route",
            token=self._token,
            root={
                "host": self._host,
                "own": node.node == 0,
                "addresses": list(root.addresses) if root is not None else [],
                "port": root.probe_port if root is not None else 0,
            },
        )
        host_time = channel.answer(clock_call, CLOCK)
        received_at = time.time()
        route = channel.answer(route_call, ROUTE)
        require_addresses([text for text in (route.address, route.root, *route.interfaces) if text], 1)
        self._routes[node.node] = route
        answer.clock_offset_s = host_time - (sent_at + received_at) / 2
        answer.round_trip_s = received_at - sent_at
        answer.interface = route.interface
        answer.first_address, answer.knows_first = route.root, route.named
        answer.lost = node.node != 0 and not route.root and not self._answers[0].problem
        answer.token = route.token if self._token else None

    def _reach(self, node: PlannedNode) -> None:
        endpoints = {
            number: (address, answer.facts.probe_port)
            for number, answer in self._answers.items()
            if number != node.node and answer.facts is not None and (address := self._address(number))
        }
        request = {"endpoints": endpoints, "timeout_s": REACH_TIMEOUT_S}
        failed = self._channels[node.node].call("reach", UNREACHABLE, **request)
        answer = self._answers[node.node]
        answer.unreachable = {
            number: f"{endpoints[number][0]} ({why})" for number, why in failed.items() if number in endpoints
        }
        # The first node needs no route to itself: its interface is that of the address that the others connect to.
        if not answer.interface:
            answer.interface = self._routes[node.node].interfaces.get(self._address(node.node), "")

    def _address(self, number: int) -> str:
        """Return the address at which the ranks of other hosts connect to a node's host; empty if there is none.

        Gloo is bound to the interface on the route, of which it takes the first address, IPv4 before IPv6: it may be
        another one than that of the route. NCCL_SOCKET_FAMILY chooses between those of NCCL.
        """
        if number not in self._routes:
            return ""
        route = self._routes[number]
        of_root = (each.root for index, each in self._routes.items() if index and each.root)
        address = route.address if number else next(of_root, "")
        if is_nccl(self._plan.backend):
            return address
        interface = route.interfaces.get(address)
        return next((text for text, name in route.interfaces.items() if name == interface), address)

    def _close(self, node: PlannedNode) -> None:
        channel = self._channels[node.node]
        if self._answers[node.node].is_local:
            channel.close()
        else:
            channel.send("release")
            self._ssh.keep(channel)
