from __future__ import annotations

import time
from pathlib import Path

import pytest
from made_runs import make_run

from gputrain_tui.lifecycle import delete
from gputrain_tui.lifecycle.remote_nodes import RemoteNode, write_remote_node

HOSTS = 4
LIMIT_S = 1.0


@pytest.mark.timing
def test_hosts_that_do_not_answer_delay_the_deletion_of_a_run_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUTRAIN_SSH", "sh -c 'exec sleep 60'")
    monkeypatch.setattr(delete, "ANSWER_S", LIMIT_S)
    run = make_run(tmp_path / "runs", world_size=4)
    for node in range(HOSTS):
        attempt = f"{node}.1.0123456789abcdef"
        (run.dir.agents / attempt).mkdir(parents=True)
        write_remote_node(run.dir, attempt, RemoteNode(host=f"far{node}", run_dir=f"/there/runs/{run.id}"))
    began = time.monotonic()
    delete.delete_refused(run)
    assert LIMIT_S <= time.monotonic() - began < HOSTS * LIMIT_S
    assert not run.dir.path.exists()
