"""Plans the next attempt of a failed run: a new rendezvous address, and the checkpoint to resume from."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gputrain_tui.lifecycle.run_checkpoints import recorded_table, resumable_checkpoint, run_named_by
from gputrain_tui.plan.planner import Plan, with_flags
from trainer.contract.record import Failure, RunDir
from trainer.contract.rendezvous_url import LAST_PORT, parse_rendezvous_url, tcp_url
from trainer.host.addresses import is_loopback
from trainer.host.ports import free_port

INIT_FLAG = "--distributed-init-method"
RESUME_FLAG = "--resume"
RUN_FLAG = "--checkpoint-run"
SCRIPT_FLAG = "--script"


def max_restarts(run_dir: RunDir) -> int:
    """Return ``cluster.max_restarts`` of the run's recipe; 0 if it cannot be read."""
    value = recorded_table(run_dir, "cluster").get("max_restarts", 0)
    return value if isinstance(value, int) else 0


def is_repeated(failure: Failure, before: Failure | None) -> bool:
    """Whether an exception also ended the previous attempt, with the same message after the same step."""
    same = before is not None and (failure.step, failure.message) == (before.step, before.message)
    return same and failure.kind == "exception"


def with_repetition(failure: Failure) -> Failure:
    """Return a repeated failure with a note in its message that the run is not started again."""
    at = f" after step {failure.step}" if failure.step else ""
    return msgspec.structs.replace(
        failure, message=f"{failure.message}; it happened twice{at}, so the run is not restarted"
    )


def next_plan(plan: Plan, run_dir: RunDir) -> Plan:
    """Return the plan of the next attempt: a new init method, and ``--resume`` if there is a checkpoint.

    Scripts get no ``--resume``: they load their checkpoints themselves.
    """
    init_method = fresh_init_method(plan.init_method) if plan.init_method else None
    resume = resumable_checkpoint(run_dir)
    nodes = []
    for node in plan.nodes:
        arguments = _with_flag(node.argv, INIT_FLAG, init_method) if init_method else node.argv
        if resume is not None and SCRIPT_FLAG not in arguments:
            arguments = _with_flag(arguments, RESUME_FLAG, str(resume))
            arguments = _with_flag(arguments, RUN_FLAG, run_named_by(run_dir, resume))
        nodes.append(msgspec.structs.replace(node, argv=list(arguments)))
    return msgspec.structs.replace(plan, nodes=nodes, init_method=init_method)


def fresh_init_method(init_method: str) -> str:
    """Return an init method that no rank of the failed attempt can still use.

    ``tcp`` gets a free port if the address is of this machine, else the next port; ``file`` gets another name.
    """
    url = parse_rendezvous_url(init_method)
    if url is None or url.scheme == "env":
        return init_method
    if url.scheme == "file":
        return init_method + ".again"
    following = url.port + 1 if url.port < LAST_PORT else 1024
    return tcp_url(url.host, free_port() if is_loopback(url.host) else following)


def _with_flag(arguments: Sequence[str], flag: str, value: str) -> list[str]:
    """Return a command with a flag's value replaced, or the flag added after the trainer's own (before ``--``)."""
    changed = list(arguments)
    trainer_argv = changed[: changed.index("--")] if "--" in changed else changed
    if flag in trainer_argv:
        changed[trainer_argv.index(flag) + 1] = value
        return changed
    return with_flags(changed, flag, value)
