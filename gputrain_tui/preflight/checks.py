"""Pure: checks a plan against the facts of its machines; each result has its fix.

A check without its facts gives no result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gputrain_tui.hosts.host_names import THIS_MACHINE, LocalFacts, is_local, is_pending
from gputrain_tui.hosts.machine_facts import Folder
from gputrain_tui.plan.planner import Plan, PlannedNode
from gputrain_tui.preflight.facts import START_CHECKS, PreflightFacts
from gputrain_tui.preflight.result import CheckResult, error, ok, warning
from gputrain_tui.recipe.model import Recipe
from gputrain_tui.recipe.source import dotted
from gputrain_tui.tables import counted, size
from trainer.contract.backends import is_nccl
from trainer.contract.builtin_tasks import BUILT_IN
from trainer.contract.errors import listed
from trainer.contract.option_rules import start_option
from trainer.contract.rendezvous_url import scheme_of
from trainer.host.resource_limits import MIN_SHM_BYTES, RANK_BYTES, SCRIPT_BYTES

if TYPE_CHECKING:
    from gputrain_tui.hosts.inventory import Gpu


MIN_RECORD_BYTES = 4 << 20
RECORD_FILES = 24
"""Files and folders of a run directory besides those of its ranks."""
RECORD_FILES_PER_RANK = 4
"""Files of a rank: events, downsampled record, log and a temporary file."""
LOW_DISK_BYTES = 1 << 30
"""Less free space gives a warning: a few checkpoints use it up."""


def run_checks(recipe: Recipe, plan: Plan, facts: PreflightFacts, *, local: LocalFacts) -> list[CheckResult]:
    """Run all checks of this machine and of the known inventories, in the order of a recipe: what, where, with what."""
    local_nodes = [node for node in plan.nodes if is_local(node.host, local)]
    results = [
        *_inputs(recipe, facts, local_nodes),
        *_devices(recipe, plan, facts, local),
        *gpu_models(recipe, plan, facts, local),
        *machine_checks(recipe, plan, facts, local_nodes),
        *_folders(recipe, plan, facts),
        *_sinks(recipe, facts),
        *_unchecked_hosts(plan, facts, local),
    ]
    return [with_location(result, recipe) for result in results]


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
    parts = result.key.replace("[", ".").replace("]", "").split(".")
    return msgspec.structs.replace(
        result, where=recipe.where(*(int(part) if part.isdigit() else part for part in parts))
    )


# --- task, data and live sinks ---------------------------------------------------------------------------------------


def _inputs(recipe: Recipe, facts: PreflightFacts, nodes: Sequence[PlannedNode]) -> Iterator[CheckResult]:
    if not nodes:
        yield from _inputs_of_a_job(recipe, facts)
        return
    task, script = recipe.train.task, recipe.script
    if script is not None:
        usable = (
            f"{script.script} is run as a module" if script.module else f"{script.script} exists and is valid Python"
        )
        yield facts.script or ok("script", usable, key="train.script")
        yield from hidden_modules(facts.hiding)
    else:
        yield ok("task", f"{task} is {'built in' if task in BUILT_IN else 'found'}", key="train.task")
    if facts.data_checked:
        yield facts.data or ok("data", "all of it can be read")
    elif script is None:
        yield CheckResult(status="note", check="data", what="not checked: the task's own code reads it")
    if facts.optimizer is not None:
        yield facts.optimizer
    start = start_option(recipe.train)
    if start and nodes[0].node == 0:  # rank 0 reads it for all
        exists = ok(START_CHECKS[start], f"{getattr(recipe.train, start)} exists", key=f"train.{start}")
        yield facts.resume or exists
    if recipe.train.shares_from and nodes[0].node == 0:
        repeated = ok("shares", f"those of {recipe.train.shares_from} are repeated", key="train.shares_from")
        yield facts.shares or repeated


def hidden_modules(hiding: Sequence[str], host: str = "") -> Iterator[CheckResult]:
    """Warn of files beside the script that are imported in place of torch or Python's modules; it may want its own."""
    for file in hiding:
        name = Path(file).stem
        module = "torch" if name == "torch" else f"Python's own module {name}, by torch too"
        yield warning("script", f"{file} is imported in place of {module}", "rename it", key="train.script", host=host)


def _inputs_of_a_job(recipe: Recipe, facts: PreflightFacts) -> Iterator[CheckResult]:
    """Check what Slurm's nodes will read. A job starts in this folder, whose script must be there before it waits.

    Any other path may be on a disk that only the nodes have.
    """
    if facts.script is not None and recipe.script is not None:
        is_here = not recipe.script.script.startswith("/")
        yield facts.script if is_here else _perhaps_elsewhere(facts.script)
    yield from hidden_modules(facts.hiding)
    if facts.data is not None:
        yield _perhaps_elsewhere(facts.data)


def _perhaps_elsewhere(problem: CheckResult) -> CheckResult:
    return msgspec.structs.replace(problem, status="warning", what=f"{problem.what}, on this machine")


def _sinks(recipe: Recipe, facts: PreflightFacts) -> Iterator[CheckResult]:
    if recipe.report.tensorboard or recipe.report.wandb:
        yield facts.report or ok("report", "the packages that it needs are installed")


# --- rendezvous ------------------------------------------------------------------------------------------------------


def _rendezvous(recipe: Recipe, facts: PreflightFacts) -> Iterator[CheckResult]:
    file, port = facts.rendezvous, facts.port
    if file is not None and file.problem:
        yield error("rendezvous", file.problem, file.fix, key="cluster.init_method")
    elif file is not None:
        yield ok("rendezvous", f"{file.path} can be created", key="cluster.init_method")
    if port is None:
        return
    named = scheme_of(recipe.cluster.init_method) == "tcp"
    key = "cluster.init_method" if named else "cluster.port"
    choose_another = "name another one" if named else "set cluster.port to another one"
    if port.state == "root":
        yield error("port", f"port {port.number} needs root", f"{choose_another}, above 1023", key=key)
    elif port.state == "busy":
        what = f"port {port.number} is in use by {port.holder}"
        yield error("port", what, f"{choose_another}, or end that process", key=key)
    else:
        yield ok("port", f"port {port.number} is free", key=key)
    if not port.is_own:
        yield warning(
            "address",
            f"{port.address} is not an address of this machine, on which rank 0 listens",
            "name an address that `gputrain gpus` shows, unless this one is forwarded to this machine",
            key="cluster.init_method" if named else "cluster.nodes[0].host",
        )


# --- devices and limits ----------------------------------------------------------------------------------------------


def _devices(recipe: Recipe, plan: Plan, facts: PreflightFacts, local: LocalFacts) -> Iterator[CheckResult]:
    """Check that the GPUs of every node are free, if there is an inventory of its machine."""
    for node, host, gpus in _gpus_of(plan, facts, local):
        key = ranks_key(recipe, node)
        problems = [problem for gpu in gpus if (problem := _gpu(gpu, recipe, key, host)) is not None]
        count = len(set(node.devices))
        yield from problems or [ok("GPUs", f"{counted(count, 'free GPU')} for node {node.node}", key=key, host=host)]


def _gpus_of(plan: Plan, facts: PreflightFacts, local: LocalFacts) -> Iterator[tuple[PlannedNode, str, Sequence[Gpu]]]:
    """Yield the nodes on GPUs whose machine has an inventory, with its name in results and the GPUs of the node."""
    for node in plan.nodes:
        machine = THIS_MACHINE if is_local(node.host, local) else node.host
        inventory = facts.inventories.get(machine)
        if inventory is not None and "cpu" not in node.devices:
            gpus = [gpu for gpu in inventory.gpus if gpu.uuid in node.devices or gpu.index in node.devices]
            yield node, "" if machine == THIS_MACHINE else machine, gpus


def device_models(plan: Plan, facts: PreflightFacts, local: LocalFacts) -> list[str]:
    """Return the model of each rank's GPU; empty if one is not known, or ranks compute on a CPU."""
    models: list[str] = []
    for node in plan.nodes:
        inventory = facts.inventories.get(THIS_MACHINE if is_local(node.host, local) else node.host)
        names = {key: gpu.name for gpu in (inventory.gpus if inventory else ()) for key in (gpu.uuid, gpu.index)}
        models += [names.get(device, "") for device in node.devices]
    return models if all(models) else []


def gpu_models(recipe: Recipe, plan: Plan, facts: PreflightFacts, local: LocalFacts) -> Iterator[CheckResult]:
    """Check that all GPUs compute in the training's precision, and note several models in one run."""
    models: dict[str, int] = {}
    for node, host, gpus in _gpus_of(plan, facts, local):
        for gpu in gpus:
            memory = "" if gpu.memory_total_bytes is None else f" of {size(gpu.memory_total_bytes)}"
            model = (gpu.name or "GPU of an unknown model") + memory
            models[model] = models.get(model, 0) + 1
        # Tensor cores for bf16 came with compute capability 8.0; before, torch emulates it, slower than fp32.
        lacking = [gpu for gpu in gpus if gpu.capability is not None and gpu.capability < (8, 0)]
        if lacking and recipe.script is None and recipe.train.precision == "bf16":
            names = [f"GPU {gpu.index} ({gpu.name}, compute capability {_dotted(gpu.capability)})" for gpu in lacking]
            what = f"precision is bf16, which {listed(names, most=3)} cannot compute: that needs 8.0"
            leave_out = f"leave {'it' if len(lacking) == 1 else 'them'} out of {ranks_key(recipe, node)}"
            fix = f'train.precision = "fp16" is fast on all, or {leave_out}'
            yield error("precision", what, fix, key="train.precision", host=host)
    if len(models) > 1:
        counts = ", ".join(f"{count} x {model}" for model, count in models.items())
        balanced = recipe.script is not None or recipe.train.batch_size == "balanced"
        slowest = "" if balanced else ': a step takes as long as the slowest needs; train.batch_size = "balanced" helps'
        yield CheckResult(status="note", check="GPU models", what=f"{counts}{slowest}")


def _dotted(capability: tuple[int, int] | None) -> str:
    return ".".join(map(str, capability or ()))


def _gpu(gpu: Gpu, recipe: Recipe, key: str, host: str) -> CheckResult | None:
    from gputrain_tui.hosts.inventory import why_busy  # imported only when ranks use GPUs: starting a run is fast

    why = why_busy(gpu)
    if not why:
        return None
    take_others = 'gpus = "free" takes others'
    working = [process for process in gpu.processes or () if process.kind == "compute"]
    if gpu.claim is not None or working:
        names = [
            f"{process.name or 'a process'} (pid {process.pid}{f' of {process.user}' if process.user else ''})"
            for process in working
        ]
        users = gpu.claim.text if gpu.claim is not None else listed(names, most=3)
        result = warning if recipe.launch.share_devices else error
        fix = f"{take_others}; train.share_devices = true uses it anyway"
        return result("GPUs", f"GPU {gpu.index} is in use by {users}", fix, key=key, host=host)
    if gpu.mig:
        fix = "name an instance by its UUID"
        return error("GPUs", f"GPU {gpu.index} is {why}", fix, key=key, host=host)
    if gpu.prohibited:
        return error("GPUs", f"GPU {gpu.index} cannot be used: {why}", take_others, key=key, host=host)
    return warning("GPUs", f"GPU {gpu.index} is not free: {why}", take_others, key=key, host=host)


def _torch(facts: PreflightFacts, nodes: Sequence[PlannedNode]) -> Iterator[CheckResult]:
    torch, on_gpus = facts.torch, [node for node in nodes if "cpu" not in node.devices]
    if torch is None or not on_gpus:
        return
    key = f"cluster.nodes[{on_gpus[0].node}].gpus"
    inventory = facts.inventories.get(THIS_MACHINE)
    driver = inventory.cuda if inventory is not None else None
    if not torch.version:
        yield error("torch", "the interpreter that would run the ranks has no torch", "pip install torch")
    elif torch.cuda is None and torch.hip is None:
        fix = "install a CUDA build of torch, or use cpu_ranks"
        yield error("torch", f"torch {torch.version} is built for CPUs only", fix, key=key)
    elif torch.cuda is not None and driver and _major(driver) < _major(torch.cuda):
        what = f"torch {torch.version} needs CUDA {torch.cuda}, but the driver supports CUDA up to {driver}"
        yield warning("torch", what, f"install a torch for CUDA {_major(driver)}, or a newer driver", key=key)
    else:
        yield ok("torch", f"{torch.version}, built for GPUs")


def _major(version: str) -> int:
    first = version.partition(".")[0]
    return int(first) if first.isdigit() else 0


def _processors(recipe: Recipe, facts: PreflightFacts, nodes: Sequence[PlannedNode]) -> Iterator[CheckResult]:
    """Check resource limits for all ranks of a machine, memory and cores for those on the CPU."""
    all_ranks = sum(len(node.ranks) for node in nodes)
    rank_bytes = RANK_BYTES if recipe.script is None else SCRIPT_BYTES
    if facts.limits is not None and facts.limits.missing:
        what, _, fix = facts.limits.missing.partition(": ")
        yield error("kernel", what, fix)
        return
    if facts.limits is not None and (refusal := facts.limits.refusal(all_ranks, rank_bytes=rank_bytes)):
        key = ranks_key(recipe, max(nodes, key=lambda node: len(node.ranks)))
        yield error("limits", refusal, "ask for fewer ranks", key=key)
        return
    on_cpu = [node for node in nodes if "cpu" in node.devices]
    ranks = sum(len(node.ranks) for node in on_cpu)
    if not ranks:
        return
    key = ranks_key(recipe, max(on_cpu, key=lambda node: len(node.ranks)))
    ranks_text = counted(ranks, "CPU rank")
    total, available, cores = facts.memory_total_bytes, facts.memory_available_bytes, facts.cores
    # Private memory of a CPU rank with a small model: 92 MiB measured, torch 2.13 from the fork server. Other models
    # need more; less available memory than this gives a warning.
    cpu_rank_bytes = 90 << 20
    need = ranks * (cpu_rank_bytes if recipe.script is None else SCRIPT_BYTES)
    if available is not None and need > available:
        text = (
            f"{ranks_text} need{'s' * (ranks == 1)} {size(need)} or more, "
            f"but {size(available)} of {size(total)} are available"
        )
        yield warning("memory", text, "use fewer ranks, or end the processes that use the memory", key=key)
    elif available is not None:
        yield ok("memory", f"{size(available)} available for {ranks_text}")
    because = f" ({facts.cores_limit})" if facts.cores_limit else ""
    if cores is not None and ranks > cores:
        what = f"{ranks_text} share {counted(cores, 'core')}{because}: each step takes longer than with {cores}"
        yield CheckResult(status="note", check="cores", what=what, key=key)
    elif cores is not None:
        yield ok("cores", f"{cores}{because} for {ranks_text}")


def _shared_memory(
    recipe: Recipe, plan: Plan, facts: PreflightFacts, nodes: Sequence[PlannedNode]
) -> Iterator[CheckResult]:
    free, ranks = facts.shm_free_bytes, sum(len(node.ranks) for node in nodes)
    if free is None:
        return
    check, workers = "/dev/shm", ranks * recipe.train.num_workers
    enlarge = "start the container with --shm-size=2g" + (", or set train.num_workers = 0" if workers else "")
    key = "train.num_workers" if workers else ""
    if free < MIN_SHM_BYTES and (workers or recipe.script is not None):
        what = f"/dev/shm is full: {size(free)} free, and data loading processes share batches there"
        result = error if workers else warning
        yield result(check, what, f"remove files from it, or {enlarge}", key=key)
        return
    on_gpus = ranks if is_nccl(plan.backend) and ranks > 1 else 0
    # Shared memory of a data loading process: two batches in flight of some tens of MiB.
    shm_per_worker_bytes = 64 << 20
    shm_per_gpu_bytes = 32 << 20  # shared memory of one rank for the buffers of NCCL's SHM transport
    need = max(workers * shm_per_worker_bytes, on_gpus * shm_per_gpu_bytes)
    if not need:
        return
    if free >= need:
        yield ok(check, f"{size(free)} free")
        return
    users = f"{workers} data loading processes" if workers else f"{on_gpus} ranks on GPUs"
    what = f"/dev/shm has {size(free)} free for {users}, which die of a bus error when it is full"
    yield warning(check, what, enlarge, key=key)


def _open_files(recipe: Recipe, facts: PreflightFacts, nodes: Sequence[PlannedNode]) -> Iterator[CheckResult]:
    ranks = max((len(node.ranks) for node in nodes), default=0)
    if facts.open_files is None or not ranks:
        return
    open_files_per_rank = 16  # pipes and sockets of a rank in the node agent and in itself: 11 to 29 in all, measured
    base_open_files = 64  # open files of a node agent without ranks
    need = base_open_files + ranks * open_files_per_rank + 4 * recipe.train.num_workers
    if facts.open_files >= need:
        yield ok("open files", f"{facts.open_files} per process")
        return
    what = f"a process may have {facts.open_files} files open, but {counted(ranks, 'rank')} on a node may need {need}"
    yield warning("open files", what, f"ulimit -n {max(need, 4096)}")


# --- disk space ------------------------------------------------------------------------------------------------------


def _folders(recipe: Recipe, plan: Plan, facts: PreflightFacts) -> Iterator[CheckResult]:
    if facts.save_dir is not None:
        yield from _save_dir(recipe, facts.save_dir)
    home, check = facts.home, "run folder"
    if home is None:
        return
    choose_another = "choose another folder with GPUTRAIN_HOME=FOLDER"
    if home.problem:
        yield error(check, f"cannot make a run directory in {home.path}: {home.problem}", choose_another)
    elif few_files := too_few_files(home, plan.world_size, "this run needs"):
        yield error(check, few_files, f"delete files, or {choose_another}")
    elif home.free_bytes is not None and home.free_bytes < MIN_RECORD_BYTES:
        what = f"the disk of {home.path} is full: {size(home.free_bytes)} free"
        yield error(check, what, f"make room, or {choose_another}")
    elif home.free_bytes is not None and home.free_bytes < LOW_DISK_BYTES:
        what = f"only {size(home.free_bytes)} free for records and checkpoints in {home.path}"
        yield warning(check, what, f"make room, or {choose_another}")
    else:
        yield ok(check, _with_space(home))


def too_few_files(folder: Folder, ranks: int, who: str) -> str:
    """Return in words that a file system lacks inodes for the record of some ranks; empty if it has enough."""
    need = RECORD_FILES + RECORD_FILES_PER_RANK * ranks
    if folder.free_files is None or folder.free_files >= need:
        return ""
    return f"the file system of {folder.path} has room for {folder.free_files} more files, but {who} about {need}"


def _with_space(folder: Folder) -> str:
    return folder.path + (f", {size(folder.free_bytes)} free" if folder.free_bytes is not None else "")


def _save_dir(recipe: Recipe, folder: Folder) -> Iterator[CheckResult]:
    key, check, make_room = "train.save_dir", "save folder", "make room, or name another folder"
    if folder.problem:
        yield error(check, f"no checkpoint can be written: {folder.problem}", "name a writable folder", key=key)
        return
    if folder.free_bytes is not None and folder.free_bytes < MIN_RECORD_BYTES:
        what = f"the disk of {folder.path} is full: {size(folder.free_bytes)} free"
        yield error(check, what, make_room, key=key)
        return
    scarce = folder.free_bytes is not None and folder.free_bytes < LOW_DISK_BYTES
    if scarce:
        yield warning(check, f"only {size(folder.free_bytes)} free for checkpoints", make_room, key=key)
    train = recipe.train
    saves = train.save and not train.eval_only
    holds_others = saves and folder.checkpoints and not _resumes_from(train.resume, folder.path)
    if holds_others:
        files = counted(folder.checkpoints, "checkpoint")
        what = f"{folder.path} holds {files} of {folder.owner or 'another run'}, which this run does not continue"
        fix = f'name another folder, or continue that run with train.resume = "{folder.path}"'
        yield error(check, what, fix, key=key)
    if not scarce and not holds_others:
        yield ok(check, _with_space(folder), key=key)


def _resumes_from(resume: str | None, folder: str) -> bool:
    """Whether a training resumes from a folder, or from a file in it."""
    return resume is not None and (resume.rstrip("/") == folder.rstrip("/") or resume.rpartition("/")[0] == folder)


# --- other machines --------------------------------------------------------------------------------------------------


def _unchecked_hosts(plan: Plan, facts: PreflightFacts, local: LocalFacts) -> Iterator[CheckResult]:
    """Note the hosts of which nothing is known, neither an inventory nor an answer to the launcher."""
    unknown = dict.fromkeys(
        node.host
        for node in plan.nodes
        if not is_local(node.host, local)
        and node.host not in facts.inventories
        and node.host not in facts.queried
        and not is_pending(node.host)
    )
    if unknown:
        what = f"not checked: {listed(list(unknown))}; the recipe is used as written"
        yield CheckResult(status="note", check="other hosts", what=what)


def ranks_key(recipe: Recipe, node: PlannedNode) -> str:
    """Return the recipe key that sets the number of a node's ranks."""
    wanted = recipe.cluster.nodes[node.node]
    name = next((name for name in ("gpus", "cpu_ranks", "ranks") if getattr(wanted, name) is not None), "gpus")
    return dotted(("cluster", "nodes", node.node, name))
