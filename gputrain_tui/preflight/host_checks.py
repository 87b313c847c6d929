"""Pure: checks the hosts of a run over ssh by what they say of themselves and of each other; each result has a fix."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import msgspec

from gputrain_tui.hosts.environment_facts import Environment
from gputrain_tui.hosts.host_names import THIS_MACHINE
from gputrain_tui.hosts.inventory import Inventory
from gputrain_tui.hosts.machine_facts import Folder
from gputrain_tui.plan.planner import Plan, PlannedNode
from gputrain_tui.preflight.checks import (
    LOW_DISK_BYTES,
    MIN_RECORD_BYTES,
    RECORD_FILES,
    RECORD_FILES_PER_RANK,
    machine_checks,
    ranks_key,
    with_location,
)
from gputrain_tui.preflight.facts import PreflightFacts
from gputrain_tui.preflight.host_facts import HostAnswer, HostFacts
from gputrain_tui.preflight.result import CheckResult, CheckStatus
from gputrain_tui.recipe.model import Recipe
from gputrain_tui.recipe.source import dotted
from gputrain_tui.tables import size
from trainer.contract.builtin_tasks import BUILT_IN

CLOCK_WARNING_S = 2.0
"""From here on times of several hosts in one record mislead a reader."""
CLOCK_ERROR_S = 60.0
"""Beyond this, files look newer or older than they are, and signatures of a token or a licence are refused."""
MAX_NAMES = 4
"""Hosts that are named in one line."""
MAX_PAIRS = 6
"""Pairs of hosts that are named; a firewall between sixteen hosts makes 240."""


def check_hosts(recipe: Recipe, plan: Plan, answers: Sequence[HostAnswer]) -> list[CheckResult]:
    """Run all checks.

    Args:
        recipe: the recipe.
        plan: its plan.
        answers: for each host and place on it, in the order of the plan; none where nobody was asked.
    """
    if not answers:
        return []
    found: list[CheckResult] = []
    for answer in answers:
        nodes = _nodes_of(plan, answer)
        if answer.facts is None:
            found.append(_silent(recipe, answer))
            continue
        found += _environment(recipe, answer, answer.facts)
        found += _clock(answer)
        if not answer.here:
            found += _machine(recipe, plan, answer, answer.facts, nodes)
            found += _rendezvous(answer)
    names = list(dict.fromkeys(answer.host for answer in answers if answer.facts is not None))
    if names:
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        found.append(_ok("hosts", f"{', '.join(names[:MAX_NAMES])}{more} answered"))
    found += _same_machine(answers)
    found += _different(recipe, plan, answers)
    found += _ways(plan, answers)
    return [with_location(result, recipe) for result in found]


def _nodes_of(plan: Plan, answer: HostAnswer) -> list[PlannedNode]:
    """Return the nodes whose ranks are on a host, once for all places on it."""
    of_host = [node for node in plan.nodes if node.host == answer.host]
    return of_host if of_host and of_host[0].node == answer.node else []


def _key(recipe: Recipe, node: int, name: str) -> str:
    """Return the recipe's key that holds for a node: its own or the cluster's, else the one of its host."""
    if getattr(recipe.cluster.nodes[node], name):
        return dotted(("cluster", "nodes", node, name))
    return f"cluster.{name}" if getattr(recipe.cluster, name, None) else dotted(("cluster", "nodes", node, "host"))


def _push(recipe: Recipe) -> str:
    return f"gputrain push {shlex.quote(recipe.source)}"


def _error(answer: HostAnswer, check: str, what: str, fix: str, key: str = "") -> CheckResult:
    return CheckResult(
        status="error", check=check, what=what, fix=fix, key=key, host="" if answer.here else answer.host
    )


def _ok(check: str, what: str) -> CheckResult:
    return CheckResult(status="ok", check=check, what=what)


# --- each host -------------------------------------------------------------------------------------------------------


def _silent(recipe: Recipe, answer: HostAnswer) -> CheckResult:
    fix = "" if "`" in answer.problem else f"`ssh {shlex.quote(answer.host)} python3 --version` must work"
    return _error(answer, "ssh", answer.problem, fix, _key(recipe, answer.node, "host"))


def _environment(recipe: Recipe, answer: HostAnswer, facts: HostFacts) -> Iterator[CheckResult]:
    """Check that the node's command can run; for this machine too, whose interpreter the plan may not use."""
    if facts.environment is None:
        name = facts.problem_key if facts.problem_key in ("workdir", "setup", "python") else "python"
        key = _key(recipe, answer.node, name)
        fix = f"mend {key}" if name == "setup" else _push(recipe)
        yield _error(answer, name, facts.problem, fix, key)
        return
    found = facts.environment
    python = _key(recipe, answer.node, "python")
    if not found.code:
        what = f"{found.executable} (Python {found.python}) has no gputrain"
        yield _error(answer, "python", what, _push(recipe), python)
    elif not found.torch.version and recipe.script is None:
        yield _error(answer, "torch", f"{found.executable} has no torch", _push(recipe), python)
    if found.code and found.missing:
        yield _error(answer, "python", f"{found.executable} cannot import {found.missing}", _push(recipe), python)
    if found.data_problem and not answer.here:
        yield _error(answer, "data", found.data_problem, f"{_push(recipe)} leaves data out: copy it there", "task")
    if found.own_file and not found.own_code:
        name = "script" if recipe.script is not None else "task"
        what = f"{found.own_file} is not there"
        yield _error(answer, name, what, _push(recipe), f"train.{name}")


def _clock(answer: HostAnswer) -> Iterator[CheckResult]:
    # The answer may have been given at any moment of the round trip.
    surely_s = abs(answer.clock_offset_s) - answer.round_trip_s / 2
    if surely_s < CLOCK_WARNING_S:
        return
    side = "ahead of" if answer.clock_offset_s > 0 else "behind"
    yield CheckResult(
        status="error" if surely_s > CLOCK_ERROR_S else "warning",
        check="clock",
        what=f"its clock is {abs(answer.clock_offset_s):.1f} s {side} this machine's",
        fix=f"ssh {shlex.quote(answer.host)} sudo timedatectl set-ntp true",
        host=answer.host,
    )


def _machine(
    recipe: Recipe, plan: Plan, answer: HostAnswer, facts: HostFacts, nodes: Sequence[PlannedNode]
) -> Iterator[CheckResult]:
    """Check what one machine must have, as for this one."""
    limits = facts.limits
    if facts.environment is not None:  # the line of setup may have raised it
        limits = replace(limits, files=facts.environment.open_files)
    known = PreflightFacts(
        port=facts.port,
        rendezvous=facts.rendezvous,
        limits=limits,
        shm_free_bytes=facts.shm_free_bytes,
        memory_total_bytes=facts.inventory.memory.total_bytes,
        memory_available_bytes=facts.inventory.memory.available_bytes,
        cores=facts.inventory.cpus.usable,
        open_files=limits.files,
        torch=facts.environment.torch if facts.environment is not None else None,
        inventories={THIS_MACHINE: facts.inventory},
    )
    for result in machine_checks(recipe, plan, known, nodes):
        if result.status == "ok":  # lines about what is in order would be dozens
            continue
        if result.check == "open files":  # the shell in which the command is typed is another one
            setup = "cluster.setup" if recipe.cluster.setup else dotted(("cluster", "nodes", answer.node, "setup"))
            result = msgspec.structs.replace(result, key=setup, fix=f"put `{result.fix}` into {setup}")
        yield msgspec.structs.replace(result, host=answer.host)
    for node in nodes:
        yield from _missing_gpus(recipe, answer, node, facts.inventory)
    if nodes:
        ranks = sum(len(node.ranks) for node in nodes)
        for folder in facts.folders:
            yield from _folder(answer, folder, ranks)


def _missing_gpus(recipe: Recipe, answer: HostAnswer, node: PlannedNode, inventory: Inventory) -> Iterator[CheckResult]:
    there = {name for gpu in inventory.gpus for name in (gpu.index, gpu.uuid)}
    missing = [
        str(device)
        for device in dict.fromkeys(node.devices)
        if device != "cpu" and device not in there and not str(device).startswith("MIG-")
    ]
    if missing:
        has = ", ".join(str(gpu.index) for gpu in inventory.gpus) or inventory.note or "none"
        what = f"GPU {', '.join(missing)} is not there; it has {has}"
        fix = f"gputrain gpus --hosts {shlex.quote(answer.host)}"
        yield _error(answer, "GPUs", what, fix, ranks_key(recipe, node))


def _folder(answer: HostAnswer, folder: Folder, ranks: int) -> Iterator[CheckResult]:
    status: CheckStatus = "error"
    what, need = folder.problem, RECORD_FILES + RECORD_FILES_PER_RANK * ranks
    if not what and folder.free_bytes is not None and folder.free_bytes < LOW_DISK_BYTES:
        full = folder.free_bytes < MIN_RECORD_BYTES
        status = "error" if full else "warning"
        what = f"the disk of {folder.path} {'is full' if full else 'is nearly full'}: {size(folder.free_bytes)} free"
    elif not what and folder.free_files is not None and folder.free_files < need:
        what = f"the file system of {folder.path} takes {folder.free_files} more files, but ranks need about {need}"
    if what:
        fix = f"ssh {shlex.quote(answer.host)} df -h {shlex.quote(folder.path)}"
        yield CheckResult(status=status, check="disk", what=what, fix=fix, host=answer.host)


def _rendezvous(answer: HostAnswer) -> Iterator[CheckResult]:
    if answer.token is False and answer.facts is not None and answer.facts.rendezvous is not None:
        what = f"the folder of {answer.facts.rendezvous.path} is another one than on the first node"
        fix = "name a folder on a disk that all nodes share, or set cluster.init_method to auto"
        yield _error(answer, "meeting file", what, fix, "cluster.init_method")


# --- hosts against each other ----------------------------------------------------------------------------------------


def _same_machine(answers: Sequence[HostAnswer]) -> Iterator[CheckResult]:
    first: dict[str, HostAnswer] = {}
    for answer in answers:
        if answer.facts is None:
            continue
        other = first.setdefault(answer.facts.machine, answer)
        if other.host != answer.host and not (other.here and answer.here):
            what = f"it is the same machine as {'this one, ' if other.here else ''}{other.host}"
            fix = f"write {other.host} in both nodes, or name another machine"
            yield _error(answer, "hosts", what, fix, dotted(("cluster", "nodes", answer.node, "host")))


def _different(recipe: Recipe, plan: Plan, answers: Sequence[HostAnswer]) -> Iterator[CheckResult]:
    """Compare what all ranks must import and read with the first host that has it."""
    known = [(answer, answer.facts.environment) for answer in answers if answer.facts is not None]
    hosts = [(answer, found) for answer, found in known if found is not None and found.code]
    if len(hosts) < 2:
        return
    (first, one), *others = hosts
    found: list[CheckResult] = []
    for answer, other in others:
        key = _key(recipe, answer.node, "python")
        on_gpus = all("cpu" not in plan.nodes[node].devices for node in (first.node, answer.node))
        for check, value in _versions(on_gpus=on_gpus, nccl=plan.backend == "nccl"):
            if (mine := value(one)) and (its := value(other)) and mine != its:
                what = f"{check} {mine} on {first.host}, {its} on {answer.host}"
                found.append(_error(answer, check, what, _push(recipe), key))
        if one.gputrain == other.gputrain and one.code != other.code:
            what = f"the code of trainer differs: {one.code} on {first.host}, {other.code} on {answer.host}"
            found.append(_error(answer, "code", what, _push(recipe), _key(recipe, answer.node, "workdir")))
        if one.own_code and other.own_code and one.own_code != other.own_code:
            name = "script" if recipe.script is not None else "task"
            what = f"{other.own_file} differs: {one.own_code} on {first.host}, {other.own_code} on {answer.host}"
            found.append(_error(answer, name, what, _push(recipe), f"train.{name}"))
        found += _data(recipe, first, one, answer, other)
    yield from found
    if not found:
        torch = f", torch {one.torch.version}" if one.torch.version else ""
        yield _ok("versions", f"Python {one.python}{torch}, and the same code on {len(hosts)} hosts")


def _versions(*, on_gpus: bool, nccl: bool) -> list[tuple[str, Callable[[Environment], str | None]]]:
    """Return the versions that must be equal, by name, and how to read each."""
    return [
        ("Python", lambda found: ".".join(found.python.split(".")[:2])),
        # Builds for CPUs and for GPUs of one version may train together.
        ("torch", lambda found: found.torch.version.partition("+")[0]),
        *([("CUDA", lambda found: found.torch.cuda)] if on_gpus else []),
        *([("NCCL", lambda found: found.nccl)] if nccl else []),
        ("gputrain", lambda found: found.gputrain),
    ]


def _data(
    recipe: Recipe, first: HostAnswer, one: Environment, answer: HostAnswer, other: Environment
) -> Iterator[CheckResult]:
    """Compare the files that options of the task name: a first look, the ranks compare contents."""
    if other.data_problem or one.data_problem:
        return
    for option, (files, total) in one.data.items():
        if (its := other.data.get(option)) == (files, total):
            continue
        # A folder may hold caches, and what an option of a user's own task names need not be read.
        sure = recipe.train.task in BUILT_IN and files == 1
        told = f"{size(its[1])} in {its[0]} file{'s' * (its[0] != 1)}" if its is not None else "nothing"
        yield CheckResult(
            status="error" if sure else "warning",
            check="data",
            what=f"{option} differs: {size(total)} in {files} file{'s' * (files != 1)} on {first.host}, "
            f"{told} on {answer.host}",
            fix=f"copy the data of {first.host} to {answer.host}",
            key=f"task.{option}",
            host=answer.host,
        )


def _ways(plan: Plan, answers: Sequence[HostAnswer]) -> Iterator[CheckResult]:
    """Check that every pair of hosts connects, on ports that nobody has opened for it."""
    by_node = {answer.node: answer for answer in answers}
    lost = [answer for answer in answers if answer.facts is not None and answer.lost]
    for answer in lost:
        yield _error(
            answer,
            "network",
            f"there is no way from {answer.host} to the first node {plan.nodes[0].host}",
            "name an address of the first node that all others reach",
            "cluster.nodes[0].host",
        )
    pairs = [
        (answer, by_node[other], why)
        for answer in answers
        for other, why in answer.unreachable.items()
        if other in by_node and not (answer.lost and other == 0)
    ]
    for answer, other, why in islice(pairs, MAX_PAIRS):
        more = f", and {len(pairs) - MAX_PAIRS} more pairs" if len(pairs) > MAX_PAIRS else ""
        yield _error(
            answer,
            "network",
            f"{answer.host} cannot reach {other.host} at {why}{more}",
            "let the machines through to each other on all ports, or name the interface that leads there in "
            "cluster.env: NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME",
            dotted(("cluster", "nodes", other.node, "host")),
        )
    asked = [answer for answer in answers if answer.facts is not None]
    if len(asked) == len(answers) > 1 and not lost and not pairs:
        yield _ok("network", f"all {len(answers)} hosts reach each other")
