"""Prepares the next attempt of a failed run: a fresh port, and the checkpoint it resumes from."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from urllib.parse import urlsplit

import msgspec

from gputrain_tui.hosts.addresses import free_port
from gputrain_tui.hosts.host_names import is_loopback
from gputrain_tui.lifecycle import checkpoints
from gputrain_tui.plan.planner import Plan, with_flags
from gputrain_tui.recipe.source import MAX_RECIPE_BYTES as RECIPE_BYTES
from trainer.contract.record import RunDir
from trainer.contract.record.regular_file import read_whole

INIT_FLAG = "--distributed-init-method"
RESUME_FLAG = "--resume"
SCRIPT_FLAG = "--script"


def max_restarts(run_dir: RunDir) -> int:
    """Return how often the recipe allows to start again."""
    try:
        recipe = tomllib.loads(read_whole(run_dir.recipe, RECIPE_BYTES).decode("utf-8"))
    except (OSError, ValueError, RecursionError):
        return 0
    cluster = recipe.get("cluster")
    value = cluster.get("max_restarts", 0) if isinstance(cluster, dict) else 0
    return value if isinstance(value, int) else 0


def again(plan: Plan, run_dir: RunDir) -> Plan:
    """Return the plan for all nodes once more, from the last checkpoint where there is one.

    A script looks for its checkpoint itself.
    """
    init_method = fresh_init_method(plan.init_method) if plan.init_method else None
    resume = checkpoints.to_resume(run_dir)
    nodes = []
    for node in plan.nodes:
        words = _with_flag(node.argv, INIT_FLAG, init_method) if init_method else node.argv
        if resume is not None and SCRIPT_FLAG not in words:
            words = _with_flag(words, RESUME_FLAG, str(resume))
        nodes.append(msgspec.structs.replace(node, argv=list(words)))
    return msgspec.structs.replace(plan, nodes=nodes, init_method=init_method)


def fresh_init_method(init_method: str) -> str:
    """Return an address that no rank of the failed attempt can still hold.

    On this machine a free port is asked for; elsewhere the next one is taken, which every node can compute.
    """
    parts = urlsplit(init_method)
    if parts.scheme == "file":
        return init_method + ".again"
    if parts.scheme != "tcp" or parts.port is None or parts.hostname is None:
        return init_method
    following = parts.port + 1 if parts.port < 65535 else 1024
    port = free_port() if is_loopback(parts.hostname) else following
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"tcp://{host}:{port}"


def _with_flag(words: Sequence[str], flag: str, value: str) -> list[str]:
    """Set a flag's value, in place where it stands, else at the end of the trainer's flags."""
    changed = list(words)
    ours = changed[: changed.index("--")] if "--" in changed else changed
    if flag in ours:
        changed[ours.index(flag) + 1] = value
        return changed
    return with_flags(changed, flag, value)
