"""Pure: checks a plan against the facts of its machines; each result has its fix.

A check without its facts gives no result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from gputrain_tui.hosts.host_names import THIS_MACHINE, LocalFacts, is_local, is_pending
from gputrain_tui.hosts.machine_facts import Folder
from gputrain_tui.plan.planner import Plan, PlannedNode
from gputrain_tui.preflight.facts import MissingInput, PreflightFacts
from gputrain_tui.preflight.result import CheckResult, CheckStatus
from gputrain_tui.recipe.model import Recipe
from gputrain_tui.recipe.source import dotted
from gputrain_tui.tables import size
from trainer.contract.builtin_tasks import BUILT_IN
from trainer.contract.option_rules import start_option
from trainer.contract.options import Script
from trainer.contract.rendezvous_url import scheme_of
from trainer.host.resource_limits import MIN_SHM_BYTES, RANK_BYTES, SCRIPT_BYTES

if TYPE_CHECKING:
    from gputrain_tui.hosts.inventory import Gpu, Inventory

MIB = 1 << 20
GIB = 1 << 30

MIN_RECORD_BYTES = 4 * MIB
"""Least free space for a run's record."""
RECORD_FILES = 24
"""Files and folders of a run directory besides those of its ranks."""
RECORD_FILES_PER_RANK = 4
"""Files of a rank: events, downsampled record, log and a temporary file."""
LOW_DISK_BYTES = GIB
"""Less free space gives a warning: a few checkpoints use it up."""


def run_checks(recipe: Recipe, plan: Plan, facts: PreflightFacts, *, local: LocalFacts) -> list[CheckResult]:
    """Run all checks of this machine and of the known inventories, in the order of a recipe: what, where, with what."""
    local_nodes = [node for node in plan.nodes if is_local(node.host, local)]
    found = [
        *_inputs(recipe, facts, local_nodes),
        *_devices(recipe, plan, facts, local),
        *machine_checks(recipe, plan, facts, local_nodes),
        *_folders(recipe, plan, facts),
        *_sinks(recipe, facts),
        *_unchecked_hosts(plan, facts, local),
    ]
    return [with_location(result, recipe) for result in found]


def machine_checks(
    recipe: Recipe, plan: Plan, facts: PreflightFacts, nodes: Sequence[PlannedNode]
) -> Iterator[CheckResult]:
    """Check rendezvous, torch, memory, cores, /dev/shm and open files of one machine, ``localhost`` in its facts."""
    yield from _rendezvous(recipe, facts)
    yield from _torch(facts, nodes)
    yield from _processors(recipe, facts, nodes)
    yield from _shared_memory(recipe, plan, facts, nodes)
    yield from _open_files(recipe, facts, nodes)


def with_location(result: CheckResult, recipe: Recipe) -> CheckResult:
    """Return a result with the location of its key in the recipe."""
    if not result.key:
        return result
    parts: list[str | int] = []
    for part in result.key.replace("[", ".").replace("]", "").split("."):
        parts.append(int(part) if part.isdigit() else part)
    return msgspec.structs.replace(result, where=recipe.where(*parts))


# --- task, data and live sinks ---------------------------------------------------------------------------------------


def _script_text(script: Script) -> str:
    return f"{script.script} is run as a module" if script.module else f"{script.script} exists and is valid Python"


def _inputs(recipe: Recipe, facts: PreflightFacts, nodes: Sequence[PlannedNode]) -> Iterator[CheckResult]:
    if not nodes:
        return
    task = recipe.train.task
    if recipe.script is not None:
        yield _missing_result("script", facts.script) or CheckResult(
            status="ok", check="script", what=_script_text(recipe.script), key="train.script"
        )
    elif task in BUILT_IN:
        yield CheckResult(status="ok", check="task", what=f"{task} is built in", key="train.task")
    else:
        yield CheckResult(status="ok", check="task", what=f"{task} is found", key="train.task")
    if facts.data_checked:
        yield _missing_result("data", facts.data) or CheckResult(
            status="ok", check="data", what="all of it can be read"
        )
    elif recipe.script is None:
        yield CheckResult(status="note", check="data", what="not checked: the task's own code reads it")
    start = start_option(recipe.train)
    if start and nodes[0].node == 0:  # rank 0 reads it for all
        check = {"resume": "resume", "eval_only": "checkpoint", "finetune_from": "weights"}[start]
        yield _missing_result(check, facts.resume) or CheckResult(
            status="ok", check=check, what=f"{getattr(recipe.train, start)} exists", key=f"train.{start}"
        )


def _sinks(recipe: Recipe, facts: PreflightFacts) -> Iterator[CheckResult]:
    if recipe.report.tensorboard or recipe.report.wandb:
        yield _missing_result("report", facts.report) or CheckResult(
            status="ok", check="report", what="the packages that it needs are installed"
        )


def _missing_result(check: str, missing: MissingInput | None) -> CheckResult | None:
    if missing is None:
        return None
    return CheckResult(status="error", check=check, what=missing.what, fix=missing.fix, key=missing.key)


# --- rendezvous ------------------------------------------------------------------------------------------------------


def _rendezvous(recipe: Recipe, facts: PreflightFacts) -> Iterator[CheckResult]:
    if facts.rendezvous is not None:
        yield CheckResult(
            status="error" if facts.rendezvous.problem else "ok",
            check="rendezvous",
            what=facts.rendezvous.problem or f"{facts.rendezvous.path} can be created",
            fix=facts.rendezvous.fix,
            key="cluster.init_method",
        )
    port = facts.port
    if port is None:
        return
    named = scheme_of(recipe.cluster.init_method) == "tcp"
    key = "cluster.init_method" if named else "cluster.port"
    choose_another = "name another one" if named else "set cluster.port to another one"
    if port.state == "root":
        fix = f"{choose_another}, above 1023"
        yield CheckResult(status="error", check="port", what=f"port {port.number} needs root", fix=fix, key=key)
    elif port.state == "busy":
        what = f"port {port.number} is in use by {port.holder}"
        yield CheckResult(
            status="error", check="port", what=what, fix=f"{choose_another}, or end that process", key=key
        )
    else:
        yield CheckResult(status="ok", check="port", what=f"port {port.number} is free", key=key)
    if not port.is_own:
        yield CheckResult(
            status="warning",
            check="address",
            what=f"{port.address} is not an address of this machine, on which rank 0 listens",
            fix="name an address that `gputrain gpus` shows, unless this one is forwarded to this machine",
            key="cluster.init_method" if named else "cluster.nodes[0].host",
        )


# --- devices and limits ----------------------------------------------------------------------------------------------


def _devices(recipe: Recipe, plan: Plan, facts: PreflightFacts, local: LocalFacts) -> Iterator[CheckResult]:
    """Check that the GPUs of every node are free, if there is an inventory of its machine."""
    for node in plan.nodes:
        machine = THIS_MACHINE if is_local(node.host, local) else node.host
        inventory = facts.inventories.get(machine)
        if inventory is None or "cpu" in node.devices:
            continue
        host = "" if machine == THIS_MACHINE else machine
        key = ranks_key(recipe, node)
        problems = [result for gpu in _gpus_of(node, inventory) for result in _gpu(gpu, recipe, key, host)]
        count = len(set(node.devices))
        free = CheckResult(
            status="ok",
            check="GPUs",
            what=f"{count} free GPU{'s' * (count != 1)} for node {node.node}",
            key=key,
            host=host,
        )
        yield from problems or [free]


def _gpus_of(node: PlannedNode, inventory: Inventory) -> list[Gpu]:
    return [gpu for gpu in inventory.gpus if gpu.uuid in node.devices or gpu.index in node.devices]


def _gpu(gpu: Gpu, recipe: Recipe, key: str, host: str) -> Iterator[CheckResult]:
    from gputrain_tui.hosts.inventory import why_busy  # imported only when ranks use GPUs: starting a run is fast

    why = why_busy(gpu)
    if not why:
        return
    working = [process for process in gpu.processes or () if process.kind == "compute"]
    if gpu.claim is not None or working:
        users = (
            gpu.claim.text
            if gpu.claim is not None
            else ", ".join(
                f"{process.name or 'a process'} (pid {process.pid}{f' of {process.user}' if process.user else ''})"
                for process in working[:3]
            )
        )
        more = f" and {len(working) - 3} more" if len(working) > 3 and gpu.claim is None else ""
        yield CheckResult(
            status="warning" if recipe.launch.share_devices else "error",
            check="GPUs",
            what=f"GPU {gpu.index} is in use by {users}{more}",
            fix='gpus = "free" takes others; train.share_devices = true uses it anyway',
            key=key,
            host=host,
        )
        return
    status: CheckStatus = "error" if gpu.mig or gpu.prohibited else "warning"
    fix = "name an instance by its UUID" if gpu.mig else 'gpus = "free" takes others'
    state = f"is {why}" if gpu.mig else f"cannot be used: {why}" if gpu.prohibited else f"is not free: {why}"
    yield CheckResult(status=status, check="GPUs", what=f"GPU {gpu.index} {state}", fix=fix, key=key, host=host)


def _torch(facts: PreflightFacts, nodes: Sequence[PlannedNode]) -> Iterator[CheckResult]:
    torch, on_gpus = facts.torch, [node for node in nodes if "cpu" not in node.devices]
    if torch is None or not on_gpus:
        return
    key = f"cluster.nodes[{on_gpus[0].node}].gpus"
    if not torch.version:
        what = "the interpreter that would run the ranks has no torch"
        yield CheckResult(status="error", check="torch", what=what, fix="pip install torch")
    elif torch.cuda is None and torch.hip is None:
        what = f"torch {torch.version} is built for CPUs only"
        fix = "install a CUDA build of torch, or use cpu_ranks"
        yield CheckResult(status="error", check="torch", what=what, fix=fix, key=key)
    elif torch.cuda is not None and (driver := _driver_cuda(facts)) and _major(driver) < _major(torch.cuda):
        what = f"torch {torch.version} needs CUDA {torch.cuda}, but the driver supports CUDA up to {driver}"
        fix = f"install a torch for CUDA {_major(driver)}, or a newer driver"
        yield CheckResult(status="warning", check="torch", what=what, fix=fix, key=key)
    else:
        yield CheckResult(status="ok", check="torch", what=f"{torch.version}, built for GPUs")


def _driver_cuda(facts: PreflightFacts) -> str | None:
    inventory = facts.inventories.get(THIS_MACHINE)
    return inventory.cuda if inventory is not None else None


def _major(version: str) -> int:
    first = version.partition(".")[0]
    return int(first) if first.isdigit() else 0


def _processors(recipe: Recipe, facts: PreflightFacts, nodes: Sequence[PlannedNode]) -> Iterator[CheckResult]:
    """Check resource limits for all ranks of a machine, memory and cores for those on the CPU."""
    all_ranks = sum(len(node.ranks) for node in nodes)
    rank_bytes = RANK_BYTES if recipe.script is None else SCRIPT_BYTES
    if facts.limits is not None and facts.limits.missing:
        what, _, fix = facts.limits.missing.partition(": ")
        yield CheckResult(status="error", check="kernel", what=what, fix=fix)
        return
    if facts.limits is not None and (refusal := facts.limits.refusal(all_ranks, rank_bytes=rank_bytes)):
        key = ranks_key(recipe, max(nodes, key=lambda node: len(node.ranks)))
        yield CheckResult(status="error", check="limits", what=refusal, fix="ask for fewer ranks", key=key)
        return
    on_cpu = [node for node in nodes if "cpu" in node.devices]
    ranks = sum(len(node.ranks) for node in on_cpu)
    if not ranks:
        return
    key = ranks_key(recipe, max(on_cpu, key=lambda node: len(node.ranks)))
    ranks_text = f"{ranks} CPU rank{'s' * (ranks != 1)}"
    total, available = facts.memory_total_bytes, facts.memory_available_bytes
    # Private memory of a CPU rank with a small model: 92 MiB measured, torch 2.13 from the fork server. Other models
    # need more; less available memory than this gives a warning.
    cpu_rank_bytes = 90 * MIB
    need = ranks * (cpu_rank_bytes if recipe.script is None else SCRIPT_BYTES)
    if available is not None and need > available:
        yield CheckResult(
            status="warning",
            check="memory",
            what=f"{ranks_text} need{'s' * (ranks == 1)} {size(need)} or more, "
            f"but {size(available)} of {size(total)} are available",
            fix="use fewer ranks, or end the processes that use the memory",
            key=key,
        )
    elif available is not None:
        yield CheckResult(status="ok", check="memory", what=f"{size(available)} available for {ranks_text}")
    if facts.cores is not None and ranks > facts.cores:
        cores = f"{facts.cores} core{'s' * (facts.cores != 1)}"
        what = f"{ranks_text} share {cores}: each step takes longer than with {facts.cores}"
        yield CheckResult(status="note", check="cores", what=what, key=key)
    elif facts.cores is not None:
        yield CheckResult(status="ok", check="cores", what=f"{facts.cores} for {ranks_text}")


def _shared_memory(
    recipe: Recipe, plan: Plan, facts: PreflightFacts, nodes: Sequence[PlannedNode]
) -> Iterator[CheckResult]:
    free, ranks = facts.shm_free_bytes, sum(len(node.ranks) for node in nodes)
    workers = ranks * recipe.train.num_workers
    if free is not None and free < MIN_SHM_BYTES and (workers or recipe.script is not None):
        yield CheckResult(
            status="error" if workers else "warning",
            check="/dev/shm",
            what=f"/dev/shm is full: {size(free)} free, and data loading processes share batches there",
            fix="remove files from it, or start the container with --shm-size=2g"
            + (", or set train.num_workers = 0" if workers else ""),
            key="train.num_workers" if workers else "",
        )
        return
    on_gpus = ranks if plan.backend == "nccl" and ranks > 1 else 0
    # Shared memory of a data loading process: two batches in flight of some tens of MiB.
    shm_per_worker_bytes = 64 * MIB
    shm_per_gpu_bytes = 32 * MIB  # shared memory of one rank for the buffers of NCCL's SHM transport
    need = max(workers * shm_per_worker_bytes, on_gpus * shm_per_gpu_bytes)
    if free is None or not need:
        return
    if free >= need:
        yield CheckResult(status="ok", check="/dev/shm", what=f"{size(free)} free")
        return
    users = f"{workers} data loading processes" if workers else f"{on_gpus} ranks on GPUs"
    yield CheckResult(
        status="warning",
        check="/dev/shm",
        what=f"/dev/shm has {size(free)} free for {users}, which die of a bus error when it is full",
        fix="start the container with --shm-size=2g" + (", or set train.num_workers = 0" if workers else ""),
        key="train.num_workers" if workers else "",
    )


def _open_files(recipe: Recipe, facts: PreflightFacts, nodes: Sequence[PlannedNode]) -> Iterator[CheckResult]:
    ranks = max((len(node.ranks) for node in nodes), default=0)
    if facts.open_files is None or not ranks:
        return
    open_files_per_rank = 16  # pipes and sockets of a rank in the node agent and in itself: 11 to 29 in all, measured
    base_open_files = 64  # open files of a node agent without ranks
    need = base_open_files + ranks * open_files_per_rank + 4 * recipe.train.num_workers
    if facts.open_files >= need:
        yield CheckResult(status="ok", check="open files", what=f"{facts.open_files} per process")
        return
    yield CheckResult(
        status="warning",
        check="open files",
        what=f"a process may have {facts.open_files} files open, but {ranks} rank{'s' * (ranks != 1)} on a node "
        f"may need {need}",
        fix=f"ulimit -n {max(need, 4096)}",
    )


# --- disk space -------------------------------------------------------------------------------------------------------


def _folders(recipe: Recipe, plan: Plan, facts: PreflightFacts) -> Iterator[CheckResult]:
    if facts.save_dir is not None:
        yield from _save_dir(recipe, facts.save_dir)
    home = facts.home
    if home is None:
        return
    choose_another = "choose another folder with GPUTRAIN_HOME=FOLDER"
    if home.problem:
        what = f"cannot make a run directory in {home.path}: {home.problem}"
        yield CheckResult(status="error", check="run folder", what=what, fix=choose_another)
    elif home.free_files is not None and home.free_files < (
        need := RECORD_FILES + RECORD_FILES_PER_RANK * plan.world_size
    ):
        what = (
            f"the file system of {home.path} has room for {home.free_files} more files, but this run needs about {need}"
        )
        yield CheckResult(status="error", check="run folder", what=what, fix=f"delete files, or {choose_another}")
    elif home.free_bytes is not None and home.free_bytes < MIN_RECORD_BYTES:
        what = f"the disk of {home.path} is full: {size(home.free_bytes)} free"
        yield CheckResult(status="error", check="run folder", what=what, fix=f"make room, or {choose_another}")
    elif home.free_bytes is not None and home.free_bytes < LOW_DISK_BYTES:
        what = f"only {size(home.free_bytes)} free for records and checkpoints in {home.path}"
        yield CheckResult(status="warning", check="run folder", what=what, fix=f"make room, or {choose_another}")
    else:
        limits = f", {size(home.free_bytes)} free" if home.free_bytes is not None else ""
        yield CheckResult(status="ok", check="run folder", what=f"{home.path}{limits}")


def _save_dir(recipe: Recipe, folder: Folder) -> Iterator[CheckResult]:
    key, check = "train.save_dir", "save folder"
    if folder.problem:
        what = f"no checkpoint can be written: {folder.problem}"
        yield CheckResult(status="error", check=check, what=what, fix="name a writable folder", key=key)
        return
    if folder.free_bytes is not None and folder.free_bytes < MIN_RECORD_BYTES:
        what = f"the disk of {folder.path} is full: {size(folder.free_bytes)} free"
        yield CheckResult(status="error", check=check, what=what, fix="make room, or name another folder", key=key)
        return
    scarce = folder.free_bytes is not None and folder.free_bytes < LOW_DISK_BYTES
    if scarce:
        what = f"only {size(folder.free_bytes)} free for checkpoints"
        yield CheckResult(status="warning", check=check, what=what, fix="make room, or name another folder", key=key)
    train = recipe.train
    saves = train.save and not train.eval_only
    holds_others = saves and folder.checkpoints and not _resumes_from(train.resume, folder.path)
    if holds_others:
        files = f"{folder.checkpoints} checkpoint{'s' * (folder.checkpoints != 1)}"
        what = f"{folder.path} holds {files} of {folder.owner or 'another run'}, which this run does not continue"
        fix = f'name another folder, or continue that run with train.resume = "{folder.path}"'
        yield CheckResult(status="error", check=check, what=what, fix=fix, key=key)
    if not scarce and not holds_others:
        limits = f", {size(folder.free_bytes)} free" if folder.free_bytes is not None else ""
        yield CheckResult(status="ok", check=check, what=f"{folder.path}{limits}", key=key)


def _resumes_from(resume: str | None, folder: str) -> bool:
    """Whether a training resumes from a folder, or from a file in it."""
    return resume is not None and (resume.rstrip("/") == folder.rstrip("/") or resume.rpartition("/")[0] == folder)


# --- other machines --------------------------------------------------------------------------------------------------


def _unchecked_hosts(plan: Plan, facts: PreflightFacts, local: LocalFacts) -> Iterator[CheckResult]:
    """Note the hosts without inventory, except for a run over ssh, whose hosts are all queried."""
    if plan.launcher == "ssh":
        return
    unknown = dict.fromkeys(
        node.host
        for node in plan.nodes
        if not is_local(node.host, local) and node.host not in facts.inventories and not is_pending(node.host)
    )
    if unknown:
        names = list(unknown)
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        what = f"not checked: {shown}; the recipe is used as written"
        yield CheckResult(status="note", check="other hosts", what=what)


def ranks_key(recipe: Recipe, node: PlannedNode) -> str:
    """Return the recipe key that sets the number of a node's ranks."""
    asked = recipe.cluster.nodes[node.node]
    name = next((name for name in ("gpus", "cpu_ranks", "ranks") if getattr(asked, name) is not None), "gpus")
    return dotted(("cluster", "nodes", node.node, name))
