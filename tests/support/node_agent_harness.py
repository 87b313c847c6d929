"""Process of a node agent for test_node_agent.py; its ranks run a function of node_agent_targets.py."""

from __future__ import annotations

import os
import sys

from trainer.agent import forkserver, node_agent, shutdown
from trainer.agent.assignment import RankAssignment
from trainer.contract.options import Distributed
from trainer.contract.outcome import RankReport


def _unreported(_: RankReport) -> None:
    raise AssertionError("run_node replaces this function")


def main(target: str, run_dir: str, start_method: str = "light", init_method: str = "", kind: str = "task") -> int:
    """Run two ranks; ``light`` is a fork server without torch, which most targets do not need."""
    world = 2
    light = ("trainer.agent.preload_first", "node_agent_targets")
    assignments = [
        RankAssignment(
            rank=rank,
            local_rank=rank,
            world_size=world,
            local_world_size=world,
            node=0,
            host="here",
            device_id=None,
            device="cpu",
            init_method=init_method or None,
            backend="gloo",
            parent_pid=None,
            distributed=Distributed(stop_grace=3600.0),
            run_dir=run_dir,
            run_id="test",
            report=_unreported,
            script_argv=("script.py",) if kind == "script" else (),
        )
        for rank in range(world)
    ]
    shutdown.PROCESS_EXIT_S = 0.5
    node_agent.OWN_SIGNAL_S = 5.0  # the test that sends it may have to wait for the machine
    outcome = node_agent.run_node(
        assignments,
        start_method="spawn" if start_method == "spawn" else "forkserver",
        environ=os.environ,
        target=f"node_agent_targets:{target}",
        preloaded=light if start_method == "light" else forkserver.PRELOADED,
    )
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
