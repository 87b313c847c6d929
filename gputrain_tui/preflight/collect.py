"""Collects the preflight's facts of this machine: files, the port, memory and limits, in milliseconds.

It imports only modules that the start of a run needs anyway, so that the preflight does not slow the start down.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from gputrain_tui import paths
from gputrain_tui.hosts.environment_facts import hiding_files, installed_torch
from gputrain_tui.hosts.host_names import LocalFacts, is_local
from gputrain_tui.hosts.machine_facts import Folder, Port, RendezvousFile, folder_facts, port_facts, rendezvous_file
from gputrain_tui.plan.planner import Plan, rendezvous_port
from gputrain_tui.preflight.facts import SHARES_FIX, START_CHECKS, START_FIXES, PreflightFacts
from gputrain_tui.preflight.result import CheckResult, error
from gputrain_tui.recipe.model import Recipe
from trainer.contract.builtin_tasks import BUILT_IN, check_data, options_schema
from trainer.contract.errors import RequestError
from trainer.contract.option_rules import start_option
from trainer.contract.record.checkpoints import LOCK, foreign_run
from trainer.contract.recorded_shares import recorded_shares
from trainer.contract.rendezvous_url import parse_rendezvous_url
from trainer.contract.start_file import start_problem
from trainer.contract.task_files import require_optimizer
from trainer.host import resource_limits
from trainer.host.cores import usable_cpus
from trainer.host.memory import read_usable_memory

if TYPE_CHECKING:
    from gputrain_tui.hosts.inventory import Inventory


def collect_facts(
    recipe: Recipe,
    plan: Plan,
    local: LocalFacts,
    *,
    inventories: Mapping[str, Inventory],
    queried: frozenset[str] = frozenset(),
) -> PreflightFacts:
    """Collect the facts of this machine that concern a plan; ``inventories`` are of the queried machines, by host."""
    local_nodes = [node for node in plan.nodes if is_local(node.host, local)]
    if not local_nodes:
        home = folder_facts(paths.runs_folder())
        report = _missing_sink(recipe)
        facts = PreflightFacts(report=report, home=home, inventories=inventories, queried=queried)
        if recipe.is_for_slurm:
            return msgspec.structs.replace(facts, data=_data(recipe), script=_script(recipe), hiding=_hiding(recipe))
        return facts
    rendezvous, port = rendezvous_facts(plan, local)
    memory, cpus, limits = read_usable_memory(), usable_cpus(), resource_limits.read_limits()
    first = plan.nodes[0] is local_nodes[0]
    save_dir = recipe.train.save_dir
    return PreflightFacts(
        data=_data(recipe),
        data_checked=recipe.train.task in BUILT_IN,
        optimizer=_missing_optimizer(recipe),
        script=_script(recipe),
        hiding=_hiding(recipe),
        report=_missing_sink(recipe),
        resume=_start_file(recipe) if first else None,
        shares=_recorded_shares(recipe, plan) if first else None,
        port=port,
        rendezvous=rendezvous,
        home=folder_facts(paths.runs_folder()),
        save_dir=_save_dir(save_dir, recipe.train.resume) if save_dir and first else None,
        limits=limits,
        shm_free_bytes=resource_limits.free_bytes(resource_limits.SHM),
        memory_total_bytes=memory.total_bytes,
        memory_available_bytes=memory.available_bytes,
        cores=cpus.usable,
        cores_limit=cpus.limit,
        open_files=limits.files,
        torch=installed_torch() if any("cpu" not in node.devices for node in local_nodes) else None,
        inventories=inventories,
        queried=queried,
    )


# --- files of the recipe ---------------------------------------------------------------------------------------------


def _data(recipe: Recipe) -> CheckResult | None:
    if recipe.train.task not in BUILT_IN:
        return None
    schema: Any = options_schema(recipe.train.task)
    options = msgspec.convert(dict(recipe.task_options), schema)
    message = _data_problem(options)
    if not message:
        return None
    what, _, fix = message.partition("; ")
    key = f"task.{_faulty_option(options, message)}"
    return error("data", what, fix or f"set {key} to its path", key=key)


def _data_problem(options: Any) -> str:
    try:
        check_data(options)
    except RequestError as refused:
        return str(refused)
    except OSError as failure:  # a parent folder without permission, a name that is too long
        return f"{failure.filename} cannot be read: {failure.strerror}; check its path and permissions"
    return ""


def _faulty_option(options: Any, message: str) -> str:
    """Return the option with the bad data: an optional one whose removal changes the message, else a required one."""
    fields = msgspec.structs.fields(options)
    for field in fields:
        if field.default is None and getattr(options, field.name) is not None:
            without = msgspec.structs.replace(options, **{field.name: None})
            if _data_problem(without) != message:
                return field.name
    return next(field.name for field in fields if field.required)


def _script(recipe: Recipe) -> CheckResult | None:
    """Return the problem of the script: missing, unreadable or no Python; None if it can be started."""
    if recipe.script is None:
        return None
    path, key = Path(recipe.script.script), "train.script"
    if recipe.script.module:
        within = Path(*recipe.script.script.split("."))
        path = next((file for file in (within.with_suffix(".py"), within / "__main__.py") if file.is_file()), path)
        if path.name == recipe.script.script:
            return None  # not below this folder: it may be installed
    try:
        if not path.is_file():
            what = "is not a file" if path.exists() else f"does not exist in {Path.cwd()}"
            return error("script", f"{path} {what}", "name a Python file", key=key)
        compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except OSError as failure:
        what = f"{path} cannot be read: {failure.strerror}"
        return error("script", what, "check its path and permissions", key=key)
    except SyntaxError as invalid:
        line = f", line {invalid.lineno}" if invalid.lineno else ""
        return error("script", f"{path}{line} is not valid Python: {invalid.msg}", "fix the script", key=key)
    except ValueError as invalid:
        return error("script", f"{path} is not valid Python: {invalid}", "fix the script", key=key)
    return None


def _hiding(recipe: Recipe) -> Sequence[str]:
    script = recipe.script
    return hiding_files(script.script, is_module=script.module) if script is not None else ()


def _missing_optimizer(recipe: Recipe) -> CheckResult | None:
    try:
        require_optimizer(recipe.train)
    except RequestError as missing:
        what, _, install = str(missing).rpartition(": ")
        return error("optimizer", what, install, key="train.optimizer")
    return None


def _missing_sink(recipe: Recipe) -> CheckResult | None:
    """Return the live sink whose package this interpreter, the supervisor's, cannot import; None if there is none."""
    for name in ("tensorboard", "wandb"):
        if not getattr(recipe.report, name):
            continue
        spec = importlib.util.find_spec(name)
        # A spec without origin is a mere folder of that name, such as the one in which wandb keeps its logs.
        if spec is None or spec.origin is None:
            what = f"{name} is not installed for {sys.executable}"
            return error("report", what, f"{sys.executable} -m pip install {name}", key=f"report.{name}")
    return None


def _save_dir(name: str, resume: str | None) -> Folder:
    """Return the facts of the folder for checkpoints, with those that it holds and this run does not continue."""
    folder = folder_facts(Path(name))
    path = Path(folder.path)
    try:
        lock = path / LOCK
        if os.path.lexists(lock) and (lock.is_symlink() or not lock.is_file()):
            return replace(folder, problem=f"{lock} is a link, a folder or a device, and no lock of a training")
        if resume is not None and path.resolve() in (Path(resume).resolve(), Path(resume).resolve().parent):
            return folder
        owner, names = foreign_run(path, "")
    except OSError:
        return folder
    return replace(folder, checkpoints=len(names), owner=owner)


def _start_file(recipe: Recipe) -> CheckResult | None:
    """Return the checkpoint or the weights from which the run starts, if they cannot be read."""
    name = start_option(recipe.train)
    if not name or not (problem := start_problem(name, Path(getattr(recipe.train, name)))):
        return None
    return error(START_CHECKS[name], problem, START_FIXES[name], key=f"train.{name}")


def _recorded_shares(recipe: Recipe, plan: Plan) -> CheckResult | None:
    """Return why the shares of another run cannot be repeated; None if they can, or need not be."""
    train = recipe.train
    if train.shares_from is None:
        return None
    try:
        recorded_shares(train.shares_from, ranks=plan.world_size, global_batch_size=train.global_batch_size)
    except RequestError as refused:
        return error("shares", str(refused), SHARES_FIX, key="train.shares_from")
    return None


# --- rendezvous ------------------------------------------------------------------------------------------------------


def rendezvous_of(plan: Plan) -> tuple[Path | None, str, int]:
    """Return the rendezvous file of a plan, or the host and the port on which rank 0 listens; 0 for no fixed port."""
    url = parse_rendezvous_url(plan.init_method or "")
    if url is None or url.scheme == "file":
        return None if url is None else url.path, "", 0
    host = plan.nodes[0].env.get("MASTER_ADDR", "") if url.scheme == "env" else url.host
    return None, host, 0 if plan.finds_port else rendezvous_port(plan) or 0


def rendezvous_facts(plan: Plan, local: LocalFacts) -> tuple[RendezvousFile | None, Port | None]:
    """Return the facts of the rendezvous file, or of the port if rank 0 is on this machine; None for the others."""
    file, host, port = rendezvous_of(plan)
    if file is not None:
        return rendezvous_file(file), None
    if not port or not is_local(plan.nodes[0].host, local):
        return None, None
    return None, port_facts(port, host, is_own=is_local(host, local) or None)
