"""Runs whose nodes are stand-ins without torch, for tests of the supervisor."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from gputrain_tui.history.run_folders import Run, create
from gputrain_tui.plan.planner import Plan, PlannedNode, with_run_dir

STAND_IN = Path(__file__).parents[1] / "faults" / "stand_in.py"
PORT = "tcp://127.0.0.1:29999"


def stand_in_run(
    root: Path, *modes: str, ranks_per_node: int = 2, name: str = "stand-in", recipe: str = "", steps: int = 2
) -> Run:
    """Create the directory of a run with one node per mode of ``stand_in.py``."""
    nodes = []
    for index, mode in enumerate(modes):
        ranks = list(range(index * ranks_per_node, (index + 1) * ranks_per_node))
        nodes.append(
            PlannedNode(
                node=index,
                host="localhost",
                first_rank=ranks[0],
                ranks=ranks,
                devices=["cpu"] * len(ranks),
                argv=[
                    *(sys.executable, str(STAND_IN), mode, ",".join(map(str, ranks))),
                    *("--distributed-init-method", PORT, "--stop-grace", "3600", "--steps", str(steps)),
                ],
                env={},
            )
        )
    world_size = len(modes) * ranks_per_node
    plan = Plan(world_size=world_size, init_method=PORT, backend="gloo", launcher="local", nodes=nodes)
    return create(
        name,
        world_size=world_size,
        recipe_toml=recipe,
        plan=lambda run_dir: msgspec.json.encode(with_run_dir(plan, str(run_dir.path))),
        root=root,
    )
