"""Pure: checks the hosts of a run over ssh by their facts and their connections; each result has a fix."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from gputrain_tui.hosts.environment_facts import Environment
from gputrain_tui.hosts.host_names import THIS_MACHINE
from gputrain_tui.hosts.inventory import Inventory
from gputrain_tui.hosts.machine_facts import Folder
from gputrain_tui.plan.planner import Plan, PlannedNode
from gputrain_tui.preflight import checks
from gputrain_tui.preflight.collect_hosts import HostAnswer, HostFacts, address_for_name, differing
from gputrain_tui.preflight.facts import SHARES_FIX, START_CHECKS, START_FIXES, PreflightFacts
from gputrain_tui.preflight.result import CheckResult, error, ok, warning
from gputrain_tui.recipe.model import Recipe
from gputrain_tui.recipe.source import dotted
from gputrain_tui.tables import counted, size
from trainer.contract.backends import is_nccl
from trainer.contract.builtin_tasks import BUILT_IN
from trainer.contract.errors import listed
from trainer.contract.option_rules import start_option


def check_hosts(recipe: Recipe, plan: Plan, answers: Sequence[HostAnswer]) -> list[CheckResult]:
    """Run all checks of the hosts of a run over ssh, by the answers of ``collect_hosts``."""
    if not answers:
        return []
    results: list[CheckResult] = []
    environments = [answer.facts.environment for answer in answers if answer.facts is not None]
    # A script may do without torch, but not on some of its hosts only.
    needs_torch = recipe.script is None or any(each is not None and each.torch.version for each in environments)
    for answer in answers:
        if answer.facts is None:
            results.append(_unanswered(recipe, answer))
            continue
        results += _environment(recipe, answer, answer.facts, needs_torch=needs_torch)
        results += _clock(answer)
        if not answer.is_local:
            results += _machine_limits(recipe, plan, answer, answer.facts)
            results += _rendezvous(answer)
    names = list(dict.fromkeys(answer.host for answer in answers if answer.facts is not None))
    if names:
        results.append(ok("hosts", f"{listed(names)} answered"))
    second = _second_names(answers)
    results += _same_machine(second)
    results += _differences(recipe, plan, answers)
    # A second name of a machine is a line of its own, and no connection: it looks for the way to itself.
    results += _connections(plan, [answer for answer in answers if answer.node not in second])
    return [checks.with_location(result, recipe) for result in results]


def _nodes_of(plan: Plan, answer: HostAnswer) -> list[PlannedNode]:
    """Return all nodes on a host for its first answer, none for its other ones: limits are checked once per host."""
    of_host = [node for node in plan.nodes if node.host == answer.host]
    return of_host if of_host and of_host[0].node == answer.node else []


def _key(recipe: Recipe, node: int, name: str) -> str:
    """Return the recipe's key that gives a node's value: its own or the cluster's, else the key of its host."""
    if getattr(recipe.cluster.nodes[node], name):
        return dotted(("cluster", "nodes", node, name))
    return f"cluster.{name}" if getattr(recipe.cluster, name, None) else dotted(("cluster", "nodes", node, "host"))


def _push(recipe: Recipe) -> str:
    return f"gputrain push {shlex.quote(recipe.origin.name)}"


def _correct_or_push(recipe: Recipe, key: str) -> str:
    """Return the fix of a folder or an interpreter: of one that the recipe names, the name may be wrong.

    ``push`` copies into a named folder, but leaves an environment alone whose interpreter the recipe names.
    """
    name = key.rpartition(".")[2]
    if name not in ("python", "workdir"):
        return _push(recipe)
    return f"correct {key}, or {'remove it and ' if name == 'python' else ''}{_push(recipe)}"


def _error(answer: HostAnswer, check: str, what: str, fix: str, key: str = "") -> CheckResult:
    return error(check, what, fix, key=key, host="" if answer.is_local else answer.host)


# --- each host -------------------------------------------------------------------------------------------------------


def _unanswered(recipe: Recipe, answer: HostAnswer) -> CheckResult:
    fix = "" if "`" in answer.problem else f"`ssh {shlex.quote(answer.host)} python3 --version` must work"
    return _error(answer, "ssh", answer.problem, fix, _key(recipe, answer.node, "host"))


def _environment(recipe: Recipe, answer: HostAnswer, facts: HostFacts, *, needs_torch: bool) -> Iterator[CheckResult]:
    """Check that the node's command can run; this machine too, as its nodes may have another interpreter."""
    if facts.environment is None:
        name = facts.problem_key if facts.problem_key in ("workdir", "setup", "python") else "python"
        key = _key(recipe, answer.node, name)
        fix = f"fix {key}" if name == "setup" else _correct_or_push(recipe, key)
        yield _error(answer, name, facts.problem, fix, key)
        return
    environment, python = facts.environment, _key(recipe, answer.node, "python")
    executable, push = environment.executable, _correct_or_push(recipe, python)
    if not environment.code:
        yield _error(answer, "python", f"{executable} (Python {environment.python}) has no gputrain", push, python)
    elif needs_torch and not environment.torch.version:
        yield _error(answer, "torch", f"{executable} has no torch", push, python)
    if environment.code and environment.missing:
        yield _error(answer, "python", f"{executable} cannot import {environment.missing}", push, python)
    if environment.data_problem and not answer.is_local:
        problem = environment.data_problem
        option = next((f".{name}" for name, value in recipe.task_options.items() if str(value) in problem), "")
        fix = f"copy the data to {answer.host} ({_push(recipe)} leaves it out)"
        yield _error(answer, "data", problem, fix, f"task{option}")
    if environment.start_problem and not answer.is_local:
        start = start_option(recipe.train)
        yield _error(answer, START_CHECKS[start], environment.start_problem, START_FIXES[start], f"train.{start}")
    if environment.shares_problem and not answer.is_local:
        yield _error(answer, "shares", environment.shares_problem, SHARES_FIX, "train.shares_from")
    if environment.own_file and not environment.own_code:
        name = "script" if recipe.script is not None else "task"
        yield _error(answer, name, f"{environment.own_file} is missing", push, f"train.{name}")
    if not answer.is_local:
        yield from checks.hidden_modules(environment.hiding, answer.host)


def _clock(answer: HostAnswer) -> Iterator[CheckResult]:
    # The host read its clock at an unknown moment of the round trip.
    least_offset_s = abs(answer.clock_offset_s) - answer.round_trip_s / 2
    # Offset of a host's clock from which the times of several hosts in one record mislead a reader.
    clock_warning_s = 2.0
    if least_offset_s < clock_warning_s:
        return
    side = "ahead of" if answer.clock_offset_s > 0 else "behind"
    # Offset beyond which the order of files by time is wrong, and tokens or licences with a time are refused.
    clock_error_s = 60.0
    result = error if least_offset_s > clock_error_s else warning
    what = f"its clock is {abs(answer.clock_offset_s):.1f} s {side} this machine's"
    yield result("clock", what, f"ssh {shlex.quote(answer.host)} sudo timedatectl set-ntp true", host=answer.host)


def _machine_limits(recipe: Recipe, plan: Plan, answer: HostAnswer, facts: HostFacts) -> Iterator[CheckResult]:
    """Run ``machine_checks`` on another machine, and check its GPUs and the disks of its folders."""
    nodes = _nodes_of(plan, answer)
    limits = facts.limits
    if facts.environment is not None:  # of the ranks: the line of setup may have raised it
        limits = replace(limits, files=facts.environment.open_files)
    machine_facts = PreflightFacts(
        port=facts.port,
        rendezvous=facts.rendezvous,
        limits=limits,
        shm_free_bytes=facts.shm_free_bytes,
        memory_total_bytes=facts.inventory.memory.total_bytes,
        memory_available_bytes=facts.inventory.memory.available_bytes,
        cores=facts.inventory.cpus.usable,
        cores_limit=facts.inventory.cpus.limit,
        open_files=limits.files,
        torch=facts.environment.torch if facts.environment is not None else None,
        inventories={THIS_MACHINE: facts.inventory},
    )
    for result in checks.machine_checks(recipe, plan, machine_facts, nodes):
        if result.status == "ok":  # those of many hosts would be dozens of lines
            continue
        if result.check == "open files":  # `ulimit` in the user's shell has no effect on another machine
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
    names = {name for gpu in inventory.gpus for name in (gpu.index, gpu.uuid)}
    missing = [
        str(device)
        for device in dict.fromkeys(node.devices)
        if device != "cpu" and device not in names and not str(device).startswith("MIG-")
    ]
    if missing:
        has = ", ".join(str(gpu.index) for gpu in inventory.gpus) or inventory.note or "none"
        what = f"there is no GPU {', '.join(missing)}; it has {has}"
        fix = f"gputrain gpus --hosts {shlex.quote(answer.host)}"
        yield _error(answer, "GPUs", what, fix, checks.ranks_key(recipe, node))


def _folder(answer: HostAnswer, folder: Folder, ranks: int) -> Iterator[CheckResult]:
    result, what = error, folder.problem
    if not what and folder.free_bytes is not None and folder.free_bytes < checks.LOW_DISK_BYTES:
        full = folder.free_bytes < checks.MIN_RECORD_BYTES
        result = error if full else warning
        what = f"the disk of {folder.path} {'is full' if full else 'is nearly full'}: {size(folder.free_bytes)} free"
    what = what or checks.too_few_files(folder, ranks, "ranks need")
    if what:
        fix = f"ssh {shlex.quote(answer.host)} df -h {shlex.quote(folder.path)}"
        if folder.problem:
            fix = 'name another folder there by env = { GPUTRAIN_HOME = "FOLDER" } of the node'
        yield result("disk", what, fix, host=answer.host)


def _rendezvous(answer: HostAnswer) -> Iterator[CheckResult]:
    if answer.token is False and answer.facts is not None and answer.facts.rendezvous is not None:
        what = f"the folder of {answer.facts.rendezvous.path} is not the same as on the first node"
        fix = "name a folder on a disk that all nodes share, or set cluster.init_method to auto"
        yield _error(answer, "rendezvous", what, fix, "cluster.init_method")


# --- comparison of hosts ---------------------------------------------------------------------------------------------


def _second_names(answers: Sequence[HostAnswer]) -> dict[int, tuple[HostAnswer, HostAnswer]]:
    """Return the answers under another name of a machine that has answered before, each with that one, by node."""
    first: dict[str, HostAnswer] = {}
    pairs = [(each, first.setdefault(each.facts.machine, each)) for each in answers if each.facts is not None]
    return {
        answer.node: (answer, other)
        for answer, other in pairs
        if other.host != answer.host and not (other.is_local and answer.is_local)
    }


def _same_machine(second: Mapping[int, tuple[HostAnswer, HostAnswer]]) -> Iterator[CheckResult]:
    for answer, other in second.values():
        what = f"it is the same machine as {'this one, ' if other.is_local else ''}{other.host}"
        fix = f"write {other.host} in both nodes, or name another machine"
        yield _error(answer, "hosts", what, fix, dotted(("cluster", "nodes", answer.node, "host")))


def _differences(recipe: Recipe, plan: Plan, answers: Sequence[HostAnswer]) -> Iterator[CheckResult]:
    """Compare versions, code and data of the ranks with those of the first host that has the trainer."""
    for answer in answers:
        yield from _changed(recipe, answer, answer.changed, "this machine")
    environments = [(answer, answer.facts.environment) for answer in answers if answer.facts is not None]
    hosts = [
        (answer, environment) for answer, environment in environments if environment is not None and environment.code
    ]
    if len(hosts) < 2:
        return
    (first, one), *others = hosts
    results: list[CheckResult] = []
    for answer, other in others:
        key = _key(recipe, answer.node, "python")
        on_gpus = all("cpu" not in plan.nodes[node].devices for node in (first.node, answer.node))
        for check, value in _versions(on_gpus=on_gpus, nccl=is_nccl(plan.backend)):
            if (expected := value(one)) and (actual := value(other)) and actual != expected:
                what = f"{check} {expected} on {first.host}, {actual} on {answer.host}"
                results.append(_error(answer, check, what, _correct_or_push(recipe, key), key))
        if one.gputrain == other.gputrain and one.code != other.code:
            what = f"the code of trainer differs: {one.code} on {first.host}, {other.code} on {answer.host}"
            results.append(_error(answer, "code", what, _push(recipe), _key(recipe, answer.node, "workdir")))
        if one.own_code and other.own_code and one.own_code != other.own_code:
            name = "script" if recipe.script is not None else "task"
            what = f"{other.own_file} differs: {one.own_code} on {first.host}, {other.own_code} on {answer.host}"
            results.append(_error(answer, name, what, _push(recipe), f"train.{name}"))
        beside = [name for name in differing(one.beside, other.beside) if name != Path(other.own_file).name]
        results += _changed(recipe, answer, beside, first.host)
        results += _data(recipe, first, one, answer, other)
    yield from results
    if not results:
        torch = f", torch {one.torch.version}" if one.torch.version else ""
        yield ok("versions", f"Python {one.python}{torch}, and the same code on {len(hosts)} hosts")


def _changed(recipe: Recipe, answer: HostAnswer, files: Sequence[str], host: str) -> Iterator[CheckResult]:
    """Warn of code that differs from that of a host: it may have files of its own, which nothing imports."""
    most = 3  # files that are named
    names = listed([*files[:most], *([f"{len(files) - most} more"] if len(files) > most else [])])
    if files:
        what = f"{names} {'is' if len(files) == 1 else 'are'} not as on {host}"
        key = f"train.{'script' if recipe.script is not None else 'task'}"
        yield warning("code", what, _push(recipe), key=key, host=answer.host)


def _versions(*, on_gpus: bool, nccl: bool) -> list[tuple[str, Callable[[Environment], str | None]]]:
    """Return the names of the versions that must be equal, each with the function that reads it."""
    return [
        ("Python", lambda host: ".".join(host.python.split(".")[:2])),
        # Builds for CPUs and for GPUs of one version may train together.
        ("torch", lambda host: host.torch.version.partition("+")[0]),
        *([("CUDA", lambda host: host.torch.cuda)] if on_gpus else []),
        *([("NCCL", lambda host: host.nccl)] if nccl else []),
        ("gputrain", lambda host: host.gputrain),
    ]


def _data(
    recipe: Recipe, first: HostAnswer, one: Environment, answer: HostAnswer, other: Environment
) -> Iterator[CheckResult]:
    """Compare number and size of the files that the task's options name; the ranks compare the contents."""
    if other.data_problem or one.data_problem:
        return
    for option, (files, total) in one.data.items():
        if (there := other.data.get(option)) == (files, total):
            continue
        # A folder may hold caches, and a user's own task may not read the files that its options name.
        result = error if recipe.train.task in BUILT_IN and files == 1 else warning
        size_there = f"{size(there[1])} in {counted(there[0], 'file')}" if there is not None else "nothing"
        size_here = f"{size(total)} in {counted(files, 'file')}"
        what = f"{option} differs: {size_here} on {first.host}, {size_there} on {answer.host}"
        fix = f"copy the data of {first.host} to {answer.host}"
        yield result("data", what, fix, key=f"task.{option}", host=answer.host)


def _connections(plan: Plan, answers: Sequence[HostAnswer]) -> Iterator[CheckResult]:
    """Check that every pair of hosts connects on an arbitrary port, as NCCL and gloo choose them."""
    by_node = {answer.node: answer for answer in answers}
    lost = [answer for answer in answers if answer.facts is not None and answer.lost]
    for answer in lost:
        what = f"{answer.host} cannot reach the first node {plan.nodes[0].host}"
        fix = "name an address of the first node that all others reach"
        yield _error(answer, "network", what, fix, "cluster.nodes[0].host")
    pairs = [
        (answer, by_node[other], why)
        for answer in answers
        for other, why in answer.unreachable.items()
        if other in by_node and not (answer.lost and other == 0)
    ]
    max_pairs = 6  # unreachable pairs of hosts that get a line; a firewall between sixteen hosts makes 240 of them
    more = f", and {len(pairs) - max_pairs} more pairs" if len(pairs) > max_pairs else ""
    fix = (
        "open all ports between the machines, or name the interface that connects them in "
        "cluster.env: NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME"
    )
    for answer, other, why in pairs[:max_pairs]:
        what = f"{answer.host} cannot reach {other.host} at {why}{more}"
        yield _error(answer, "network", what, fix, dotted(("cluster", "nodes", other.node, "host")))
    all_answered = all(answer.facts is not None for answer in answers)
    if all_answered and len(answers) > 1 and not lost and not pairs:
        address = address_for_name(answers)
        about = f"; not all know the name {plan.nodes[0].host}, so they meet at {address}" if address else ""
        yield ok("network", f"all {len(answers)} hosts reach each other{about}")
