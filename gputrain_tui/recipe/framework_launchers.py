"""The launcher of Lightning Fabric: its flags, and what each means for a recipe; pure."""

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
            command.typed_flags[name] = word.partition("=")[0]
        else:
            command.args.append(word)


LAUNCHERS = {
    **command_launchers.LAUNCHERS,
    "fabric": LauncherFlags(switches=(), short={}, others=_FABRIC_FLAGS, read=_fabric),
}
"""All launchers that are translated, by name."""
