"""Pure: a plan as commands to copy and paste."""

from __future__ import annotations

from collections.abc import Sequence

from gputrain_tui.plan.planner import Plan, PlannedNode
from gputrain_tui.shell_words import shell_joined, shell_quoted
from gputrain_tui.tables import printable


def shell(plan: Plan) -> str:
    """The commands, each under a comment that says where it belongs."""
    parts = []
    for node in plan.nodes:
        ranks = f"rank{'s' if len(node.ranks) > 1 else ''} {span(node.ranks)} of {plan.world_size}"
        title = printable(
            f"# node {node.node}, {node.host}: {ranks}, {devices(node.devices)}"
        )  # a line, or it would run
        parts.append(f"{title}\n{command(node)}")
    return "\n".join(parts)


def command(node: PlannedNode) -> str:
    """One node's command as a line for the shell."""
    settings = [f"{key}={shell_quoted(value)}" for key, value in node.env.items()]
    return " ".join([*settings, shell_joined(node.argv)])


def span(ranks: Sequence[int]) -> str:
    """Consecutive ranks: ``4–7``, or ``14`` for one."""
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}–{ranks[-1]}"


def devices(names: Sequence[int | str]) -> str:
    """The devices of a node in a few words."""
    if names[0] == "cpu":
        return "CPU" if len(names) == 1 else f"CPU × {len(names)}"
    shown = [str(name) if isinstance(name, int) else name[:12] for name in names]
    return f"GPU {', '.join(shown)}"
