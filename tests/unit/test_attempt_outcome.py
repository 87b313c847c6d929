from __future__ import annotations

from pathlib import Path

import pytest

from gputrain_tui.lifecycle.attempt_outcome import NodeEnd, cause, record_sizes
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


NOTE = "srun: cluster configuration lacks support for cpu binding\n"
EXITED = "srun: error: n1: task 0: Exited with exit code {}\n"
NO_DATA = "/d.txt does not exist"


@pytest.mark.parametrize(
    ("exit_code", "log", "kind", "message"),
    [
        (3, f"{NOTE}trainer: {NO_DATA}\n{EXITED.format(3)}", "refused", NO_DATA),
        (3, f"{NOTE}{EXITED.format(3)}trainer: {NO_DATA}\n", "refused", NO_DATA),
        (
            2,
            f"{NOTE}trainer: --lr is x\n{EXITED.format(2)}slurmstepd-n1: error: *** STEP 5.1\n",
            "request",
            "--lr is x",
        ),
        (1, f"{NOTE}srun: error: Unable to create step\n", "exit", "srun: error: Unable to create step"),
        (3, "", "refused", "node 0 refused to start without a message"),
    ],
)
def test_the_reason_of_a_node_is_its_own_last_line_not_one_of_slurm_or_of_the_attempt_before(
    tmp_path: Path, exit_code: int, log: str, kind: str, message: str
) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.logs.mkdir()
    run_dir.node_log(0).write_text("trainer: of the attempt before\n")
    since = record_sizes(run_dir)
    with run_dir.node_log(0).open("a") as file:
        file.write(log)
    found = cause(run_dir, since, {0: NodeEnd(host="n1", exit_code=exit_code, unfinished=[0])}, now=9.0)
    assert (found.kind, found.host) == (kind, "n1")
    assert found.message.removeprefix("node 0 ended with exit code 1 and rank 0 did not finish: ") == message
