from __future__ import annotations

from pathlib import Path

import pytest

from gputrain_tui.lifecycle.attempt_outcome import NodeEnd, cause
from trainer.contract.record import Failure, RunDir, encode_event


@pytest.mark.parametrize(
    ("first", "exit_code", "by_us", "host_error", "kind", "message"),
    [
        (1, -9, False, "", "signal", "node 1 was killed by SIGKILL before ranks 2, 3 finished"),
        (0, -9, False, "", "signal", "node 1 was killed by SIGKILL before ranks 2, 3 finished"),
        (1, 1, False, "", "lost_peer", "Connection closed by peer"),
        (0, -9, True, "", "lost_peer", "Connection closed by peer"),
        (1, 1, False, "there is no folder /x", "launch", "node 1 on b: there is no folder /x"),
    ],
    ids=["killed first", "killed and seen later", "failed first", "killed by the supervisor", "not started"],
)
def test_a_killed_node_comes_before_the_ranks_that_lost_it(
    tmp_path: Path, first: int, exit_code: int, by_us: bool, host_error: str, kind: str, message: str
) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.events.mkdir()
    failure = Failure(time=5.0, kind="lost_peer", rank=0, message="Connection closed by peer")
    run_dir.rank_events(0).write_bytes(encode_event(failure))
    ends = {
        0: NodeEnd(host="a", exit_code=1, unfinished=[0, 1]),
        1: NodeEnd(host="b", exit_code=exit_code, unfinished=[2, 3], killed_by_us=by_us, host_error=host_error),
    }
    found = cause(run_dir, {}, {node: ends[node] for node in (first, 1 - first)}, now=9.0)
    assert (found.kind, found.message) == (kind, message)
