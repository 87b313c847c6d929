"""Dispatch: the ranks that ``python -m trainer`` starts, from flags, environment and device count; pure.

The order is a contract: explicit init method, a launcher's environment, Slurm, several devices of this node, one
device. A request that cannot be met raises; values that may differ between nodes are never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping

from trainer.contract.errors import RequestError, nearest, quoted
from trainer.contract.options import Distributed
from trainer.contract.rendezvous_url import SCHEMES, Scheme, parse_rendezvous_url, scheme_of, tcp_url
from trainer.environments import slurm_step
from trainer.environments.decision import (
    Decision,
    check_device,
    decide_node,
    decide_rank,
    gpu_text,
    parse_integer,
    require_devices,
)

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment of a rank that a launcher such as torchrun starts."""
SINGLE_NODE_INIT = "tcp://127.0.0.1:0"
"""Init method with port 0, which the agent replaces by a free one: finding one is not pure."""


def decide(options: Distributed, environ: Mapping[str, str], device_count: int) -> Decision:
    """Decide which ranks start on this node, on which of the visible GPUs, and with which init method.

    Raises:
        RequestError: the request contradicts itself, the environment or the machine.
    """
    if options.cpu:
        device_count = 0
    if options.distributed_init_method is not None:
        if _scheme(options.distributed_init_method) == "env":
            return _decide_env_url(options, environ, device_count)
        return _decide_explicit(options, environ, device_count, options.distributed_init_method)
    if _from_launcher(environ):
        return _decide_launched(options, environ, device_count)
    if slurm_step.is_task(environ):
        return slurm_step.decide(options, environ, device_count)
    return _decide_single_node(options, device_count)


# --- an explicit init method ---------------------------------------------------------------------------------------


def _scheme(url: str) -> Scheme:
    """Return the scheme of an init method; raise ``RequestError`` if it is malformed."""
    scheme, parsed = scheme_of(url), parse_rendezvous_url(url)
    where = f"--distributed-init-method is {quoted(url)}"
    if scheme is None:
        start, separator, _ = url.partition("://")
        guess = nearest(start, SCHEMES) if separator else ""
        raise RequestError(f"{where}, but must be tcp://HOST:PORT, file:///PATH or env://{guess}")
    if scheme == "tcp" and (parsed is None or not parsed.has_port):
        raise RequestError(f"{where}, but must be tcp://HOST:PORT with a port from 1 to 65535")
    if parsed is None:
        raise RequestError(f"{where}, but must be file:// and an absolute path, such as file:///shared/rendezvous")
    return scheme


def _decide_explicit(options: Distributed, environ: Mapping[str, str], device_count: int, url: str) -> Decision:
    world, first = options.distributed_world_size or device_count, options.distributed_rank
    if world == 0:
        raise RequestError("--distributed-init-method needs --distributed-world-size: the number of ranks on all nodes")
    if world == 1:
        raise RequestError(
            f"--distributed-init-method {url} is for several ranks, but the world size is 1: "
            "give --distributed-world-size, or leave the init method out"
        )
    require_devices(options, device_count, world)
    _check_port(options, url)
    if options.distributed_no_spawn:
        nprocs = 1
    elif options.distributed_gpus is not None:
        nprocs = options.distributed_gpus
    elif device_count:
        nprocs = max(1, min(device_count, world - first))
    elif world - first <= 1:
        nprocs = 1
    else:
        raise RequestError(
            f"--distributed-gpus is missing: how many of the {world} ranks run on this node, from rank {first} on; "
            "on CPUs there is no default"
        )
    _check_ranks(first, nprocs, world)
    why = f"ranks {_rank_range(first, nprocs)} of {world}, rendezvous at {url}"
    if nprocs > 1:
        return decide_node(
            "explicit", options, device_count, world=world, first=first, count=nprocs, init_method=url, why=why
        )
    return decide_rank(
        "explicit",
        options,
        device_count,
        rank=first,
        world=world,
        local_rank=_local_rank(environ, options.device_id or 0),
        local_world=options.distributed_gpus or 1,
        init_method=url,
        why=why,
        own_device=_one_visible(environ),
    )


def _check_port(options: Distributed, url: str) -> None:
    parsed = parse_rendezvous_url(url)
    port = parsed.port if parsed is not None and parsed.scheme == "tcp" else None
    if options.distributed_port not in (None, port):
        raise RequestError(
            f"--distributed-port {options.distributed_port} contradicts --distributed-init-method {url}: "
            "it is used only if the init method is inferred"
        )


def _check_ranks(first: int, nprocs: int, world: int) -> None:
    if first >= world:
        raise RequestError(
            f"--distributed-rank is {first}, but with a world size of {world} ranks are 0 to {world - 1}"
        )
    if first + nprocs > world:
        raise RequestError(
            f"ranks {_rank_range(first, nprocs)} would start here, but the world size is {world}: "
            f"--distributed-rank {first} plus --distributed-gpus {nprocs} must not exceed it"
        )


def _decide_env_url(options: Distributed, environ: Mapping[str, str], device_count: int) -> Decision:
    """Decide for ``env://``: a launcher's rank if it is set, else the flags' ranks at MASTER_ADDR and MASTER_PORT."""
    if _from_launcher(environ):
        return _decide_launched(options, environ, device_count)
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if missing:
        raise RequestError(
            f"--distributed-init-method is env://, but the environment has no {' and no '.join(missing)}"
        )
    return _decide_explicit(options, environ, device_count, tcp_url(environ["MASTER_ADDR"], _port(environ)))


# --- the environment of a launcher ----------------------------------------------------------------------------------


def _from_launcher(environ: Mapping[str, str]) -> bool:
    """Return whether a launcher such as torchrun started this process as one rank."""
    missing = [name for name in LAUNCHER_VARIABLES if not environ.get(name)]
    if missing and environ.get("RANK") and environ.get("WORLD_SIZE"):
        raise RequestError(
            f"the environment has RANK and WORLD_SIZE, as a launcher sets them, but no {' and no '.join(missing)}: "
            "set them too, or unset RANK and WORLD_SIZE"
        )
    return not missing


def _port(environ: Mapping[str, str]) -> int:
    port = parse_integer("MASTER_PORT", environ["MASTER_PORT"], low=1)
    if port > 65535:
        raise RequestError(f"the environment's MASTER_PORT is {port}, but must be at most 65535")
    return port


def _decide_launched(options: Distributed, environ: Mapping[str, str], device_count: int) -> Decision:
    world = parse_integer("WORLD_SIZE", environ["WORLD_SIZE"], low=1)
    rank = parse_integer("RANK", environ["RANK"])
    _port(environ)
    if rank >= world:
        raise RequestError(f"the environment's RANK is {rank}, but with WORLD_SIZE {world} ranks are 0 to {world - 1}")
    _require_equal("--distributed-world-size", options.distributed_world_size, "WORLD_SIZE", world)
    _require_equal("--distributed-rank", options.distributed_rank or None, "RANK", rank)
    require_devices(options, device_count, world)
    local_world = options.distributed_gpus or 1
    if environ.get("LOCAL_WORLD_SIZE"):
        local_world = parse_integer("LOCAL_WORLD_SIZE", environ["LOCAL_WORLD_SIZE"], low=1)
        _require_equal("--distributed-gpus", options.distributed_gpus, "LOCAL_WORLD_SIZE", local_world)
    # Without LOCAL_RANK, rank modulo GPUs is right only if all nodes have equally many; --device-id is always right.
    guess = rank % device_count if device_count else 0
    local_rank = _local_rank(environ, guess if options.device_id is None else options.device_id)
    if (
        options.device_id is not None
        and device_count
        and environ.get("LOCAL_RANK")
        and local_world > 1
        and options.device_id != local_rank
        and not options.share_devices
    ):
        raise RequestError(
            f"--device-id is {options.device_id}, but the launcher's LOCAL_RANK is {local_rank}: leave --device-id "
            "out, or several ranks would use one GPU"
        )
    return decide_rank(
        "environment",
        options,
        device_count,
        rank=rank,
        world=world,
        local_rank=local_rank,
        local_world=local_world,
        init_method="env://",
        why=f"rank {rank} of {world}, started by a launcher",
        # torchrun does not give each rank its own CUDA_VISIBLE_DEVICES: one visible GPU is all that its ranks have.
        own_device=_one_visible(environ) and not environ.get("TORCHELASTIC_RUN_ID"),
    )


def _require_equal(flag: str, requested: int | None, variable: str, given: int) -> None:
    if requested not in (None, given):
        raise RequestError(f"{flag} is {requested}, but the launcher's {variable} is {given}: leave the flag out")


def _local_rank(environ: Mapping[str, str], default: int) -> int:
    text = environ.get("LOCAL_RANK")
    return parse_integer("LOCAL_RANK", text) if text else default


def _one_visible(environ: Mapping[str, str]) -> bool:
    return len([entry for entry in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()]) == 1


# --- this machine alone ---------------------------------------------------------------------------------------------


def _decide_single_node(options: Distributed, device_count: int) -> Decision:
    requested, nprocs = options.distributed_world_size, options.distributed_gpus
    if options.distributed_rank > 0:
        raise RequestError(
            f"--distributed-rank {options.distributed_rank} needs --distributed-init-method, "
            "the rendezvous of all ranks"
        )
    if requested is not None and nprocs is not None and nprocs != requested:
        raise RequestError(
            f"--distributed-gpus {nprocs} of --distributed-world-size {requested} means that there are other nodes: "
            "give --distributed-init-method, the rendezvous of all ranks"
        )
    wanted = requested or nprocs
    if options.distributed_no_spawn and (wanted or 1) > 1:
        raise RequestError(
            f"--distributed-no-spawn starts one of {wanted} ranks: give --distributed-init-method, their rendezvous"
        )
    if nprocs is not None and not options.cpu and device_count == 0:
        raise RequestError(f"--distributed-gpus is {nprocs}, but no GPU is visible here: add --cpu to train on CPUs")
    require_devices(options, device_count, wanted or 1)
    if options.device_id is not None and not options.cpu:
        check_device(options.device_id, device_count)
    alone = options.distributed_no_spawn or options.device_id is not None
    world = wanted or (1 if alone else max(device_count, 1))
    if world > 1:
        init = tcp_url("127.0.0.1", options.distributed_port) if options.distributed_port else SINGLE_NODE_INIT
        why = f"{world} ranks on this node, on {gpu_text(device_count) if device_count else 'the CPU'}"
        return decide_node(
            "single_node", options, device_count, world=world, first=0, count=world, init_method=init, why=why
        )
    device = "one GPU" if device_count else "the CPU" + ("" if options.cpu else ": no GPU here")
    text = f"one process on {device}"
    return decide_node("single_process", options, device_count, world=1, first=0, count=1, init_method=None, why=text)


def _rank_range(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first} to {first + count - 1}"
