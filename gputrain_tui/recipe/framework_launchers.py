"""The launchers of Lightning Fabric, Composer and Colossal-AI: their flags, and what each means for a recipe; pure."""

from __future__ import annotations

from typing import Any

from gputrain_tui.recipe import command_launchers
from gputrain_tui.recipe.command_launchers import (
    Context,
    LaunchCommand,
    LauncherFlags,
    leave_out,
    parse_devices,
    parse_number,
    pop_flag,
    set_endpoint,
    set_nodes,
)
from trainer.contract.errors import RequestError, quoted

_FABRIC_FLAGS = (
    *("accelerator", "strategy", "devices", "num_nodes", "node_rank", "main_address", "main_port", "precision"),
)
_FABRIC_VARIABLES = ("accelerator", "strategy", "precision")


def _fabric(command: LaunchCommand, flags: dict[str, str], _: Context) -> None:
    """Set what Fabric's launcher sets: ranks, and variables with ``LT_`` that ``Fabric()`` in the script reads."""
    _take_later_flags(command, flags)
    leave_out(command, flags, ("node_rank",))
    nodes = parse_number(pop_flag(flags, "num_nodes") or "1", "num-nodes")
    accelerator = flags.get("accelerator", "auto")
    if accelerator not in ("cpu", "gpu", "cuda", "auto"):
        raise RequestError(
            f"--accelerator is {quoted(accelerator)}, but gputrain has ranks on NVIDIA GPUs and CPUs only"
        )
    if flags.get("strategy") == "dp":
        raise RequestError("--strategy dp is one process for all GPUs: give it --strategy ddp")
    devices = (pop_flag(flags, "devices") or "1").strip("[] ")
    count: int | str
    ranks: dict[str, Any]
    if devices == "-1":
        count, ranks = "-1", {"gpus": "all"}
    elif "," in devices:
        listed = parse_devices(devices.rstrip(","), "devices")
        count, ranks = len(listed), {"gpus": listed}
    else:
        count = 1 if devices == "auto" else parse_number(devices, "devices")
        ranks = {"gpus" if accelerator in ("gpu", "cuda") else "cpu_ranks" if accelerator == "cpu" else "ranks": count}
    address, port = pop_flag(flags, "main_address"), pop_flag(flags, "main_port")
    set_nodes(command, nodes, address, ranks)
    set_endpoint(command, address, port, nodes)
    variables = {f"LT_{name.upper()}": value for name in _FABRIC_VARIABLES if (value := pop_flag(flags, name))}
    command.env |= {"LT_CLI_USED": "1", **variables, "LT_DEVICES": str(count), "LT_NUM_NODES": str(nodes)}


def _take_later_flags(command: LaunchCommand, flags: dict[str, str]) -> None:
    """Move Fabric's flags from the script's arguments to the launcher's, which reads them there too."""
    args = list(command.args)
    command.args = []
    while args:
        word = args.pop(0)
        name, equals, _ = word.removeprefix("--").replace("-", "_").partition("=")
        if word.startswith("--") and name in _FABRIC_FLAGS:
            flags[name] = word.partition("=")[2] if equals else args.pop(0) if args else ""
        else:
            command.args.append(word)


def _composer(command: LaunchCommand, flags: dict[str, str], _: Context) -> None:
    if pop_flag(flags, "command_mode") is not None:
        raise RequestError(
            "composer --command_mode starts another program than a Python script, which gputrain cannot do"
        )
    if pop_flag(flags, "module_mode") is not None:
        command.module = True
    leave_out(command, flags, ("node_rank", "base_rank", "stdout", "stderr"))
    per_node = pop_flag(flags, "nproc")
    world = pop_flag(flags, "world_size")
    ranks: dict[str, Any] = {"gpus": "all"} if per_node is None else {"ranks": parse_number(per_node, "nproc")}
    nodes = 1
    if world is not None and parse_number(world, "world_size") != ranks.get("ranks", 0):
        if per_node is None or int(world) % int(per_node):
            raise RequestError(f"--world_size is {world}, but must be a multiple of --nproc, the ranks of each node")
        nodes = int(world) // int(per_node)
    address, port = pop_flag(flags, "master_addr"), pop_flag(flags, "master_port")
    set_nodes(command, nodes, address, ranks)
    set_endpoint(command, address, port, nodes)
    # Composer's launcher sets it besides torchrun's variables, and composer.utils.dist reads it.
    command.nodes = [{**node, "env": {"NODE_RANK": str(index)}} for index, node in enumerate(command.nodes)]
    command.env = {name: value for name, value in command.env.items() if name != "NODE_RANK"}


def _colossalai(command: LaunchCommand, flags: dict[str, str], context: Context) -> None:
    for name in ("exclude", "extra_launch_args"):
        if pop_flag(flags, name):
            raise RequestError(f"--{name} cannot be translated: leave it out, and name the hosts with --host")
    leave_out(command, flags, ("ssh_port",))
    per_node = pop_flag(flags, "nproc_per_node")
    if per_node is None:
        raise RequestError("colossalai run needs --nproc_per_node")
    ranks = {"ranks": parse_number(per_node, "nproc_per_node")}
    hosts = [host for host in (pop_flag(flags, "host") or "").split(",") if host]
    if (file := pop_flag(flags, "hostfile")) is not None:
        try:
            hosts = [line.strip() for line in context.read_file(file).splitlines() if line.strip()]
        except OSError as error:
            raise RequestError(f"--hostfile {file} cannot be read: {error.strerror}") from None
    if (include := pop_flag(flags, "include")) is not None:
        hosts = [host for host in include.split(",") if host]
    if (count := pop_flag(flags, "num_nodes")) not in (None, "-1"):
        hosts = hosts[: parse_number(str(count), "num_nodes")]
    address, port = pop_flag(flags, "master_addr"), pop_flag(flags, "master_port")
    command.nodes = [{"host": host, **ranks} for host in hosts] or [ranks]
    set_endpoint(command, address, port, len(command.nodes))


LAUNCHERS = {
    **command_launchers.LAUNCHERS,
    "fabric": LauncherFlags(switches=(), short={}, others=_FABRIC_FLAGS, read=_fabric),
    "composer": LauncherFlags(
        switches=("verbose", "module_mode", "command_mode", "version"),
        short={"-n": "nproc", "-v": "verbose", "-m": "module_mode", "-c": "command_mode"},
        others=("nproc", "stdout", "stderr", "world_size", "base_rank", "node_rank", "master_addr", "master_port"),
        read=_composer,
    ),
    "colossalai": LauncherFlags(
        switches=("module",),
        short={"-H": "host", "-host": "host", "-m": "module"},
        others=(
            *("host", "hostfile", "include", "exclude", "num_nodes", "nproc_per_node", "master_port", "master_addr"),
            *("extra_launch_args", "ssh_port"),
        ),
        read=_colossalai,
    ),
}
"""All launchers that are translated, by name."""
