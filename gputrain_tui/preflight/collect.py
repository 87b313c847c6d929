"""Collects the preflight's facts of this machine: files, the port, memory and limits, in milliseconds.

It imports only modules that the start of a run needs anyway, so that the preflight does not slow the start down.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from gputrain_tui import paths
from gputrain_tui.hosts.environment_facts import installed_torch
from gputrain_tui.hosts.host_names import LocalFacts, is_local
from gputrain_tui.hosts.machine_facts import (
    Folder,
    Port,
    RendezvousFile,
    folder_facts,
    port_facts,
    rendezvous_file,
)
from gputrain_tui.plan.planner import Plan
from gputrain_tui.preflight.facts import MissingInput, PreflightFacts
from gputrain_tui.recipe.model import Recipe
from trainer.contract.builtin_tasks import BUILT_IN, check_data, options_schema
from trainer.contract.errors import RequestError
from trainer.contract.option_rules import start_option
from trainer.contract.record.checkpoints import LOCK, foreign_run
from trainer.contract.rendezvous_url import parse_rendezvous_url
from trainer.host import resource_limits
from trainer.host.cores import usable_cores
from trainer.host.memory import read_usable_memory

if TYPE_CHECKING:
    from gputrain_tui.hosts.inventory import Inventory


def collect_facts(
    recipe: Recipe, plan: Plan, local: LocalFacts, *, inventories: Mapping[str, Inventory]
) -> PreflightFacts:
    """Collect the facts of this machine that concern a plan.

    Args:
        recipe: the recipe.
        plan: its plan.
        local: names and addresses of this machine.
        inventories: by host, of the machines that were queried; ``localhost`` is this one.
    """
    local_nodes = [node for node in plan.nodes if is_local(node.host, local)]
    if not local_nodes:
        home = folder_facts(paths.runs_folder())
        return PreflightFacts(report=_missing_sink(recipe), home=home, inventories=inventories)
    rendezvous, port = rendezvous_facts(plan, local)
    memory, limits = read_usable_memory(), resource_limits.read_limits()
    first = plan.nodes[0] is local_nodes[0]
    save_dir = recipe.train.save_dir
    return PreflightFacts(
        data=_data(recipe),
        data_checked=recipe.train.task in BUILT_IN,
        script=_script(recipe),
        report=_missing_sink(recipe),
        resume=_start_file(recipe) if first else None,
        port=port,
        rendezvous=rendezvous,
        home=folder_facts(paths.runs_folder()),
        save_dir=_save_dir(save_dir, recipe.train.resume) if save_dir and first else None,
        limits=limits,
        shm_free_bytes=resource_limits.free_bytes(resource_limits.SHM),
        memory_total_bytes=memory.total_bytes,
        memory_available_bytes=memory.available_bytes,
        cores=usable_cores(),
        open_files=limits.files,
        torch=installed_torch() if any("cpu" not in node.devices for node in local_nodes) else None,
        inventories=inventories,
    )


# --- files of the recipe ---------------------------------------------------------------------------------------------


def _data(recipe: Recipe) -> MissingInput | None:
    if recipe.train.task not in BUILT_IN:
        return None
    schema: Any = options_schema(recipe.train.task)
    options = msgspec.convert(dict(recipe.task_options), schema)
    message = _data_problem(options)
    if not message:
        return None
    what, _, fix = message.partition("; ")
    key = f"task.{_faulty_option(options, message)}"
    return MissingInput(key=key, what=what, fix=fix or f"set {key} to its path")


def _data_problem(options: Any) -> str:
    try:
        check_data(options)
    except RequestError as error:
        return str(error)
    except OSError as error:  # a parent folder without permission, a name that is too long
        return f"{error.filename} cannot be read: {error.strerror}; check its path and permissions"
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


def _script(recipe: Recipe) -> MissingInput | None:
    """Return the problem of the script: missing, unreadable or no Python; None if it can be started."""
    if recipe.script is None:
        return None
    path = Path(recipe.script.script)
    if recipe.script.module:
        within = Path(*recipe.script.script.split("."))
        path = next((file for file in (within.with_suffix(".py"), within / "__main__.py") if file.is_file()), path)
        if path.name == recipe.script.script:
            return None  # not below this folder: it may be installed
    try:
        if not path.is_file():
            what = "is not a file" if path.exists() else f"does not exist in {Path.cwd()}"
            return MissingInput(key="train.script", what=f"{path} {what}", fix="name a Python file")
        compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except OSError as error:
        return MissingInput(
            key="train.script", what=f"{path} cannot be read: {error.strerror}", fix="check its path and permissions"
        )
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        return MissingInput(
            key="train.script", what=f"{path}{line} is not valid Python: {reason}", fix="fix the script"
        )
    return None


def _missing_sink(recipe: Recipe) -> MissingInput | None:
    """Return the live sink whose package this interpreter, the supervisor's, cannot import; None if there is none."""
    for name in ("tensorboard", "wandb"):
        spec = importlib.util.find_spec(name) if getattr(recipe.report, name) else None
        # A spec without origin is a mere folder of that name, such as the one in which wandb keeps its logs.
        if getattr(recipe.report, name) and (spec is None or spec.origin is None):
            what = f"{name} is not installed for {sys.executable}"
            return MissingInput(key=f"report.{name}", what=what, fix=f"{sys.executable} -m pip install {name}")
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


def _start_file(recipe: Recipe) -> MissingInput | None:
    """Return the checkpoint or the weights from which the run starts, if they cannot be read."""
    name = start_option(recipe.train)
    if not name:
        return None
    key, path = f"train.{name}", Path(getattr(recipe.train, name))
    takes_folder = name != "finetune_from"
    fix = "name a checkpoint or a folder of them" if takes_folder else "name a file of weights"
    try:
        if not path.exists():
            return MissingInput(key=key, what=f"{path} does not exist", fix=fix)
        if path.is_dir() and not takes_folder:
            return MissingInput(key=key, what=f"{path} is a folder", fix=fix)
        if path.is_dir() and not any(path.glob("*.pt")):
            return MissingInput(key=key, what=f"{path} holds no checkpoint", fix="name another folder")
    except OSError as error:
        what = f"{path} cannot be read: {error.strerror}"
        return MissingInput(key=key, what=what, fix="check its path and permissions")
    return None


# --- rendezvous ------------------------------------------------------------------------------------------------------


def rendezvous_facts(plan: Plan, local: LocalFacts) -> tuple[RendezvousFile | None, Port | None]:
    """Return the facts of the rendezvous file, or of the port if rank 0 is on this machine; None for the others."""
    url = parse_rendezvous_url(plan.init_method or "")
    if url is None:
        return None, None
    if url.scheme == "file":
        return rendezvous_file(url.path), None
    host, number = url.host, url.port
    if url.scheme == "env":
        env = plan.nodes[0].env
        host, number = env.get("MASTER_ADDR", ""), int(env.get("MASTER_PORT", "0"))
    if not number or not is_local(plan.nodes[0].host, local):
        return None, None
    return None, port_facts(number, host, is_own=is_local(host, local) or None)
