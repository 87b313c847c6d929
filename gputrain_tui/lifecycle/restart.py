"""Plans the next attempt of a failed run: a new rendezvous address, and the checkpoint to resume from."""

from __future__ import annotations

from typing import Literal

import msgspec

from gputrain_tui.diagnosis.restart_cause import class_of, code_line, place_of
from gputrain_tui.history.recorded_recipe import recorded_table
from gputrain_tui.lifecycle.run_checkpoints import resumable_checkpoint, run_named_by
from gputrain_tui.plan.planner import INIT_FLAG, Plan, with_flag
from gputrain_tui.recipe.model import ClusterOptions
from trainer.contract.record import Failure, RunDir
from trainer.contract.rendezvous_url import LAST_PORT, parse_rendezvous_url, tcp_url
from trainer.contract.schema import check
from trainer.host.addresses import is_loopback
from trainer.host.ports import free_port

RESUME_FLAG = "--resume"
RUN_FLAG = "--checkpoint-run"
SCRIPT_FLAG = "--script"


def cluster_options(run_dir: RunDir) -> ClusterOptions:
    """Return ``[cluster]`` of the run's recipe, without its nodes; the defaults if it cannot be read."""
    cluster = recorded_table(run_dir, "cluster")
    own = {name: value for name, value in cluster.items() if name in ClusterOptions.__struct_fields__}
    try:
        return check(ClusterOptions, own, where=str)
    except ValueError:
        return ClusterOptions()


def on_stall(options: ClusterOptions) -> Literal["report", "stop", "restart"]:
    """Return what to do when a rank hangs."""
    return options.on_stall or ("restart" if options.max_restarts else "stop")


class Restarts:
    """Decides after each failed attempt whether another one follows."""

    def __init__(self, options: ClusterOptions, *, done: int) -> None:
        """Begin; ``done`` restarts were made before, as by the jobs of a requeued run."""
        self._options = options
        self._left = options.max_restarts - done
        self._places: set[str] = set()
        """Of the failures before."""

    def is_over(self, failure: Failure) -> bool:
        """Whether the failure is the end by ``cluster.on_stall`` and ``cluster.max_restarts``."""
        return self._left <= 0 or (failure.kind == "stalled" and on_stall(self._options) != "restart")

    def lasting(self, failure: Failure) -> Failure | None:
        """Count a restart; return a failure that another attempt does not heal, with a note, else None."""
        self._left -= 1
        cause, place = class_of(failure), place_of(failure)
        if cause == "will_not_heal":
            return not_restarted(failure, "another attempt would end alike")
        if cause == "once" and place in self._places:
            line = code_line(failure).rpartition("/")[2]
            return not_restarted(failure, f"it happened twice{f' at {line}' if line else ''}")
        self._places.add(place)
        return None


def not_restarted(failure: Failure, why: str) -> Failure:
    """Return a failure with a note in its message that no attempt follows."""
    return msgspec.structs.replace(failure, message=f"{failure.message}; {why}, so the run is not restarted")


def next_plan(plan: Plan, run_dir: RunDir, *, restarts: int) -> Plan:
    """Return the plan of the next attempt: a new init method, and ``--resume`` if there is a checkpoint.

    Scripts get no ``--resume``: they load their checkpoints themselves, and see by torchrun's variable that it is one.
    """
    init_method = fresh_init_method(plan.init_method) if plan.init_method else None
    nodes = []
    for node in plan.nodes:
        arguments = with_flag(node.argv, INIT_FLAG, init_method) if init_method else node.argv
        env = {**node.env, "TORCHELASTIC_RESTART_COUNT": str(restarts)} if SCRIPT_FLAG in arguments else node.env
        nodes.append(msgspec.structs.replace(node, argv=list(arguments), env=env))
    return with_resume(msgspec.structs.replace(plan, nodes=nodes, init_method=init_method), run_dir)


def with_resume(plan: Plan, run_dir: RunDir) -> Plan:
    """Return the plan with ``--resume`` if there is a checkpoint and the run is of a task."""
    resume = resumable_checkpoint(run_dir)
    nodes = []
    for node in plan.nodes:
        arguments = node.argv
        if resume is not None and SCRIPT_FLAG not in arguments:
            arguments = with_flag(arguments, RESUME_FLAG, str(resume))
            arguments = with_flag(arguments, RUN_FLAG, run_named_by(run_dir, resume))
        nodes.append(msgspec.structs.replace(node, argv=list(arguments)))
    return msgspec.structs.replace(plan, nodes=nodes)


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
