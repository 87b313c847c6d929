"""Pure: formats a plan as shell commands to copy and paste."""

from __future__ import annotations

from collections.abc import Sequence

from gputrain_tui.plan.planner import Plan, PlannedNode
from gputrain_tui.shell_words import shell_joined, shell_quoted
from gputrain_tui.tables import printable


def shell_commands(plan: Plan) -> str:
    """Return the command of each node, under a comment that names the node and its ranks."""
    parts = []
    for node in plan.nodes:
        ranks = f"rank{'s' if len(node.ranks) > 1 else ''} {rank_range(node.ranks)} of {plan.world_size}"
        title = printable(
            f"# node {node.node}, {node.host}: {ranks}, {devices_text(node.devices)}"
        )  # one line: the rest would run as a command
        parts.append(f"{title}\n{_command_line(node)}")
    return "\n".join(parts)


def _command_line(node: PlannedNode) -> str:
    """Return a node's environment and command as one line."""
    settings = [f"{key}={shell_quoted(value)}" for key, value in node.env.items()]
    return " ".join([*settings, shell_joined(node.argv)])


def rank_range(ranks: Sequence[int]) -> str:
    """Return consecutive ranks as text: ``4–7``, or ``14`` for one."""
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}–{ranks[-1]}"


def devices_text(devices: Sequence[int | str]) -> str:
    """Return a node's devices as text: ``CPU × 4``, ``GPU 0, 1``."""
    if devices[0] == "cpu":
        return "CPU" if len(devices) == 1 else f"CPU × {len(devices)}"
    shown = [str(name) if isinstance(name, int) else name[:12] for name in devices]
    return f"GPU {', '.join(shown)}"
