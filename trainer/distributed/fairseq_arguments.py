"""Read and set the launch settings of fairseq's and HetSeq's programs, which pass them to every function in one object.

It is ``args`` of their parsers, or in later versions of fairseq a configuration that has them in
``distributed_training``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.contract.errors import RequestError
from trainer.contract.options import Distributed
from trainer.environments import slurm_step
from trainer.environments.decision import Decision
from trainer.environments.dispatch import LAUNCHER_VARIABLES


def settings_of(args: Any) -> Any:
    """Return the object that has the attributes ``distributed_*``."""
    return getattr(args, "distributed_training", args)


def runs_on_cpu(args: Any, device_count: int) -> bool:
    """Return whether ranks run on CPUs: by ``cpu``, or by gloo on a machine without a GPU where there is no ``cpu``."""
    cpu = getattr(args, "cpu", getattr(getattr(args, "common", None), "cpu", None))
    if cpu is None:
        return device_count == 0 and getattr(settings_of(args), "distributed_backend", None) == "gloo"
    return bool(cpu)


def rank_of(args: Any) -> int:
    """Return ``distributed_rank``.

    Raises:
        RequestError: it is None, as between fairseq's start of processes and the assignment of their ranks.
    """
    rank = settings_of(args).distributed_rank
    if rank is None:
        raise RequestError(
            "args.distributed_rank is None: a started process sets it to the first rank of its node plus its own index"
        )
    return int(rank)


def options_of(args: Any, environ: Mapping[str, str], device_count: int) -> Distributed:
    """Return the settings as options.

    The parsers fill in a world size, a rank 0 and a device 0 that nobody has asked for, so that a launcher's
    environment wins over them, as in fairseq.
    """
    if isinstance(args, Distributed):
        return args
    settings = settings_of(args)
    launched = all(environ.get(name) for name in LAUNCHER_VARIABLES) or slurm_step.is_task(environ)
    port = getattr(settings, "distributed_port", None) or 0
    return Distributed(
        distributed_world_size=None if launched else settings.distributed_world_size,
        distributed_backend=getattr(settings, "distributed_backend", None) or "auto",
        distributed_port=port if port > 0 else None,
        distributed_no_spawn=bool(getattr(settings, "distributed_no_spawn", False)),
        device_id=getattr(settings, "device_id", None) or None,
        cpu=runs_on_cpu(args, device_count),
    )


def set_decision(args: Any, decision: Decision, init_method: str | None) -> None:
    """Set the attributes ``distributed_*`` that follow from a decision; in a world of one rank none."""
    if init_method is None:
        return
    settings = settings_of(args)
    settings.distributed_init_method = init_method
    settings.distributed_world_size = decision.world_size
    settings.distributed_rank = decision.first_rank
    settings.distributed_no_spawn = not decision.spawn
    if not decision.spawn:
        settings.device_id = decision.device_ids[0] or 0
    for name in ("distributed_gpus", "distributed_num_procs"):  # HetSeq's and fairseq's ranks of this node
        if hasattr(settings, name):
            setattr(settings, name, len(decision.ranks))
