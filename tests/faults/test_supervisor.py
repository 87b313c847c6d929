from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from lone_kill import kill_without_successor
from signals import is_pending, traced
from stand_in_runs import stand_in_run
from waiting import LIMIT_S, until

from gputrain_tui.history.run_folders import Run, open_run
from gputrain_tui.history.run_reader import RunReader
from gputrain_tui.history.status_file import read_status
from gputrain_tui.lifecycle import leftovers
from gputrain_tui.lifecycle.supervisor_process import adopt, start_supervisor
from gputrain_tui.plan.planner import Plan
from gputrain_tui.state import RunState
from trainer.contract.record import Event, Failure, Finding, RunEnded, RunStarted, encode_event

MakeRun = Callable[..., Run]
NONE = "none found"
"""Processes left where not all may be known, as of a run that was taken over: a stand-in records no agent's end."""


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[MakeRun]:
    made: list[Run] = []

    def make(*modes: str, ranks_per_node: int = 2, recipe: str = "") -> Run:
        run = stand_in_run(tmp_path / "runs", *modes, ranks_per_node=ranks_per_node, recipe=recipe)
        made.append(run)
        return run

    yield make
    for run in made:  # of a test that failed
        for pid in leftovers.supervisors_of(run.dir.path):
            os.kill(pid, signal.SIGKILL)
        assert leftovers.kill_processes(run.dir.path) == []


def events_of(run: Run) -> list[Event]:
    reader = RunReader(run.dir)
    try:
        return list(reader.poll())
    finally:
        reader.close()


def supervise(run: Run) -> RunState:
    supervisor = start_supervisor(run.dir, leased=False)
    try:
        code = supervisor.wait(LIMIT_S)
    finally:
        supervisor.kill()
        supervisor.wait()
    state = RunState()
    state.apply_all(events_of(run))  # type: ignore[arg-type]
    status = read_status(run.dir)
    assert status is not None
    assert status.exit_code == code
    assert state.ended is not None
    assert (state.ended.status, state.ended.exit_code) == (status.status, code)
    assert processes_of(run) == []
    return state


def processes_of(run: Run) -> list[int]:
    return leftovers.processes_of(run.dir.path)


def status_of(run: Run) -> str | None:
    status = read_status(run.dir)
    return status.status if status is not None else None


def waiting_run(run: Run) -> subprocess.Popen[bytes]:
    """Start a detached run; return its supervisor once the node is known and waits."""
    supervisor = start_supervisor(run.dir, leased=False)
    until((run.dir.path / "waiting").exists)
    until(run.dir.attempt.exists)
    return supervisor


def begin_stop(run: Run) -> subprocess.Popen[str]:
    return begin("stop", run)


def begin(command: str, run: Run) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "gputrain_tui", command, run.id],
        env={**os.environ, "GPUTRAIN_HOME": str(run.dir.path.parent.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def stop(run: Run) -> subprocess.CompletedProcess[str]:
    process = begin_stop(run)
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def waits_for_a_process(pid: int) -> bool:
    """Whether a process sleeps with a pidfd open, as ``stop`` does once it has signalled the supervisor."""
    try:
        opened = [str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()]
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state == "S" and any("pidfd" in path for path in opened)


def killed_supervisor(run: Run) -> None:
    """Start a detached run and kill its supervisor once the node is at work."""
    supervisor = start_supervisor(run.dir, leased=False)
    until(run.dir.attempt.exists)
    until(lambda: processes_of(run))
    kill_without_successor(supervisor.pid)
    supervisor.wait()
    found = open_run(run.dir.path)
    assert found is not None
    assert found.state == "lost"


def test_a_run_whose_ranks_finished_is_finished(make_run: MakeRun) -> None:
    run = make_run("finish", "finish")
    state = supervise(run)
    assert state.status == "finished"
    assert state.ended is not None
    assert state.ended.exit_code == 0
    events = events_of(run)
    assert [type(events[0]), type(events[-1])] == [RunStarted, RunEnded]


def test_a_rank_that_aborts_after_it_finished_has_finished(make_run: MakeRun) -> None:
    assert supervise(make_run("abort", "finish")).status == "finished"


def test_exit_code_0_without_having_finished_is_a_failure(make_run: MakeRun) -> None:
    state = supervise(make_run("vanish"))
    assert state.root_cause is not None
    assert (state.status, state.root_cause.kind) == ("failed", "exit")
    assert "ranks 0, 1 did not finish" in state.root_cause.message


def test_the_first_failure_stops_all_nodes_and_is_the_root_cause(make_run: MakeRun) -> None:
    run = make_run("peer", "hang", "fail")
    state = supervise(run)
    assert state.root_cause is not None
    assert (state.root_cause.rank, state.root_cause.message) == (5, "ValueError: bad batch")
    assert sum(isinstance(e, Failure) and e.kind == "exception" for e in events_of(run)) == 1
    status = read_status(run.dir)
    assert status is not None
    assert (status.status, status.exit_code, status.message) == ("failed", 1, "ValueError: bad batch")


def test_a_node_that_dies_without_a_report_is_explained_by_its_log(make_run: MakeRun) -> None:
    state = supervise(make_run("mute"))
    assert state.root_cause is not None
    assert "exit code 7" in state.root_cause.message
    assert state.root_cause.message.endswith("Segmentation fault in a kernel")


def test_a_wrong_request_keeps_its_exit_code_and_its_words(make_run: MakeRun) -> None:
    state = supervise(make_run("request"))
    assert state.ended is not None
    assert state.ended.exit_code == 2
    assert state.ended.message == "--batch-size is 0, but must be an integer >= 1"


def test_a_command_that_cannot_be_started_is_a_failure(make_run: MakeRun) -> None:
    run = make_run("finish")
    plan = msgspec.json.decode(run.dir.plan.read_bytes(), type=Plan)
    plan.nodes[0].argv[0] = "/nowhere/python"
    run.dir.plan.write_bytes(msgspec.json.encode(plan))
    state = supervise(run)
    assert state.root_cause is not None
    assert state.root_cause.kind == "launch"
    assert "/nowhere/python: No such file or directory" in state.root_cause.message


def test_a_killed_node_is_named_with_its_signal(make_run: MakeRun) -> None:
    run = make_run("hang", ranks_per_node=1)
    supervisor = start_supervisor(run.dir, leased=False)
    until((run.dir.path / "hanging-0").exists)
    node = next(pid for pid in processes_of(run) if b"stand_in" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(node, signal.SIGKILL)
    assert supervisor.wait(LIMIT_S) == 1
    status = read_status(run.dir)
    assert status is not None
    assert status.message is not None
    assert "killed by SIGKILL before rank 0 finished" in status.message
    assert processes_of(run) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_stops_everything(make_run: MakeRun, number: signal.Signals) -> None:
    run = make_run("wait", "wait")
    supervisor = start_supervisor(run.dir, leased=False)
    until(lambda: len(processes_of(run)) == 2)
    until(lambda: status_of(run) == "running")
    supervisor.send_signal(number)
    assert supervisor.wait(LIMIT_S) == 130
    status = read_status(run.dir)
    assert status is not None
    assert (status.status, status.message) == ("stopped", f"stopped by {number.name}")
    assert processes_of(run) == []


def test_a_second_ctrl_c_does_not_wait_for_those_that_hang(make_run: MakeRun) -> None:
    run = make_run("hang")
    supervisor = start_supervisor(run.dir, leased=False)
    until((run.dir.path / "hanging-0").exists)
    supervisor.send_signal(signal.SIGINT)
    until(lambda: status_of(run) == "stopping")
    supervisor.send_signal(signal.SIGINT)
    assert supervisor.wait(LIMIT_S) == 130
    assert processes_of(run) == []


@pytest.mark.parametrize(
    ("first", "second"),
    [(signal.SIGTERM, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT), (signal.SIGINT, signal.SIGTERM)],
)
def test_no_other_second_signal_costs_a_stopping_run_its_work(
    make_run: MakeRun, first: signal.Signals, second: signal.Signals
) -> None:
    run = make_run("saves")
    supervisor = waiting_run(run)
    supervisor.send_signal(first)
    until(lambda: status_of(run) == "stopping")
    supervisor.send_signal(second)
    until(lambda: not is_pending(supervisor.pid, second))
    (run.dir.path / "go").touch()
    assert supervisor.wait(LIMIT_S) == 130
    assert (run.dir.path / "saved").exists()


def test_two_that_stop_a_run_at_once_both_wait_until_it_has_saved(make_run: MakeRun) -> None:
    run = make_run("saves")
    supervisor = waiting_run(run)
    both = [begin_stop(run), begin_stop(run)]
    until(lambda: all(waits_for_a_process(process.pid) for process in both))
    (run.dir.path / "go").touch()
    for process in both:
        out, err = process.communicate(timeout=LIMIT_S)
        assert (process.returncode, out) == (0, f"{run.id} is stopped; processes left: none\n"), err
    assert supervisor.wait(LIMIT_S) == 130
    assert (run.dir.path / "saved").exists()


def test_the_end_of_the_lease_ends_the_run(make_run: MakeRun) -> None:
    run = make_run("wait")
    supervisor = start_supervisor(run.dir, leased=True)
    until(lambda: len(processes_of(run)) == 1)
    assert supervisor.stdin is not None
    supervisor.stdin.close()
    assert supervisor.wait(LIMIT_S) == 130
    assert processes_of(run) == []


def test_a_hang_up_is_ignored_where_it_was_ignored(make_run: MakeRun) -> None:
    run = make_run("wait")
    words = ["nohup", sys.executable, "-m", "gputrain_tui.lifecycle.supervisor", str(run.dir.path)]
    supervisor = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: status_of(run) == "running")
    ignored = int(
        next(
            line.split()[1]
            for line in Path(f"/proc/{supervisor.pid}/status").read_text().splitlines()
            if line.startswith("SigIgn")
        ),
        16,
    )
    assert ignored & 1 << (signal.SIGHUP - 1)
    supervisor.terminate()
    assert supervisor.wait(LIMIT_S) == 130


def test_a_failed_attempt_is_started_again_as_often_as_allowed(make_run: MakeRun) -> None:
    state = supervise(make_run("once", "finish", recipe="[cluster]\nmax_restarts = 1\n"))
    assert state.status == "finished"
    assert [failure.message for failure in state.failures] == ["ValueError: bad batch"]
    assert state.ranks[1].totals.steps == 4


def test_the_restarts_come_to_an_end(make_run: MakeRun) -> None:
    state = supervise(make_run("mute", recipe="[cluster]\nmax_restarts = 2\n"))
    assert state.status == "failed"
    assert len(state.failures) == 3


def test_the_cause_of_a_restarted_run_is_that_of_its_last_attempt(make_run: MakeRun) -> None:
    run = make_run("fails", recipe="[cluster]\nmax_restarts = 2\n")
    state = supervise(run)
    assert [failure.message for failure in state.failures] == [f"ended by SIGKILL {n}" for n in (1, 2, 3)]
    assert state.ended is not None
    assert state.root_cause is not None
    assert state.ended.message == state.root_cause.message == "ended by SIGKILL 3"
    before = [finding.message for finding in state.past_findings if finding.kind == "restarted"]
    assert before == [
        f"attempt {n} ended: rank 1 killed (SIGKILL) after step 2: ended by SIGKILL {n}; attempt {n + 1} begins"
        for n in (1, 2)
    ]


def test_a_last_attempt_in_which_no_rank_starts_is_the_cause_and_not_the_first(make_run: MakeRun) -> None:
    run = make_run("vanishes", recipe="[cluster]\nmax_restarts = 1\n")
    state = supervise(run)
    assert state.ended is not None
    assert state.root_cause is not None
    assert "ended with exit code 7" in (state.ended.message or "")
    assert state.root_cause.message == state.ended.message


def test_an_exception_that_comes_again_ends_the_restarts(make_run: MakeRun) -> None:
    state = supervise(make_run("fail", recipe="[cluster]\nmax_restarts = 9\n"))
    assert state.status == "failed"
    assert len(state.failures) == 2
    assert state.ended is not None
    assert state.ended.message == "ValueError: bad batch; it happened twice, so the run is not restarted"


def test_a_detached_run_outlives_its_supervisor_and_is_adopted(make_run: MakeRun) -> None:
    run = make_run("gated")
    killed_supervisor(run)
    until((run.dir.path / "waiting").exists)
    before = processes_of(run)
    adopted = adopt(run)
    assert adopted.state == "running"
    assert processes_of(run) == before
    (run.dir.path / "go").touch()
    until(lambda: status_of(run) == "finished")
    until(lambda: not processes_of(run))


def test_a_run_that_finished_without_a_supervisor_is_finished_once_it_is_adopted(make_run: MakeRun) -> None:
    run = make_run("gated")
    killed_supervisor(run)
    (run.dir.path / "go").touch()
    until(lambda: not processes_of(run))
    adopt(run)
    until(lambda: status_of(run) == "finished")


def test_stop_ends_a_run_whose_supervisor_was_killed(make_run: MakeRun) -> None:
    run = make_run("wait")
    killed_supervisor(run)
    done = stop(run)
    assert (done.returncode, done.stdout) == (0, f"{run.id} is stopped; processes left: {NONE}\n")
    assert processes_of(run) == []


def test_a_run_that_failed_without_its_supervisor_has_failed_when_it_is_stopped(make_run: MakeRun) -> None:
    run = make_run("gated-failure")
    killed_supervisor(run)
    until((run.dir.path / "waiting").exists)
    (run.dir.path / "go").touch()
    until(lambda: not processes_of(run))
    done = stop(run)
    failed = f"{run.id} has failed: ValueError: bad batch; processes left: {NONE}\n"
    assert (done.returncode, done.stdout) == (0, failed)
    status = read_status(run.dir)
    assert status is not None
    assert (status.status, status.exit_code, status.message) == ("failed", 1, "ValueError: bad batch")
    assert stop(run).stdout == f"{run.id} has failed already; processes left: none\n"


def test_a_failure_that_was_recorded_before_the_stop_is_the_end_of_the_run(make_run: MakeRun) -> None:
    run = make_run("fails-and-hangs")
    supervisor = start_supervisor(run.dir, leased=False)
    until(lambda: any(isinstance(event, Failure) for event in events_of(run)))
    supervisor.send_signal(signal.SIGINT)
    assert supervisor.wait(LIMIT_S) == 1
    status = read_status(run.dir)
    assert status is not None
    assert (status.status, status.message) == ("failed", "ValueError: bad batch")


def test_stop_waits_until_nothing_is_left(make_run: MakeRun) -> None:
    run = make_run("wait", "wait")
    supervisor = start_supervisor(run.dir, leased=False)
    until(lambda: len(processes_of(run)) == 2)
    done = stop(run)
    assert (done.returncode, done.stdout) == (0, f"{run.id} is stopped; processes left: none\n")
    assert supervisor.wait(LIMIT_S) == 130
    assert stop(run).stdout == f"{run.id} was stopped already; processes left: none\n"


def test_stop_reaches_a_supervisor_that_a_signal_has_stopped(make_run: MakeRun) -> None:
    run = make_run("saves")
    supervisor = waiting_run(run)
    (run.dir.path / "go").touch()
    supervisor.send_signal(signal.SIGSTOP)
    done = stop(run)
    assert (done.returncode, done.stdout) == (0, f"{run.id} is stopped; processes left: none\n")
    assert supervisor.wait(LIMIT_S) == 130
    assert (run.dir.path / "saved").exists()


@pytest.mark.parametrize("mode", ["gated", "saves"])
def test_a_supervisor_out_of_reach_is_replaced_and_the_outcome_recorded(make_run: MakeRun, mode: str) -> None:
    run = make_run(mode)
    supervisor = waiting_run(run)
    with traced(supervisor.pid):
        (run.dir.path / "go").touch()
        if mode == "gated":
            until(lambda: not processes_of(run))
        done = stop(run)
    supervisor.wait(LIMIT_S)
    how = "finished" if mode == "gated" else "stopped"
    assert (done.returncode, done.stdout) == (0, f"{run.id} is {how}; processes left: {NONE}\n"), done.stderr
    assert mode == "gated" or (run.dir.path / "saved").exists()


@pytest.mark.parametrize("killed", [False, True], ids=["supervised", "adopted"])
def test_stop_reaches_a_node_agent_that_a_signal_has_stopped(make_run: MakeRun, killed: bool) -> None:
    run = make_run("saves")
    supervisor = waiting_run(run)
    (run.dir.path / "go").touch()
    (parent,) = processes_of(run)
    os.kill(parent, signal.SIGSTOP)
    if killed:
        kill_without_successor(supervisor.pid)
        supervisor.wait()
    done = stop(run)
    none = NONE if killed else "none"
    assert (done.returncode, done.stdout) == (0, f"{run.id} is stopped; processes left: {none}\n")
    supervisor.wait(LIMIT_S)
    assert (run.dir.path / "saved").exists()


def test_of_a_host_that_is_silent_stop_does_not_say_that_nothing_is_left(make_run: MakeRun) -> None:
    run = make_run("saves")
    supervisor = waiting_run(run)
    (run.dir.path / "go").touch()
    silent = Finding(time=time.time(), kind="host_silent", rank=0, host="h2", message="no contact with h2")
    with run.dir.run_events.open("ab") as file:
        file.write(encode_event(silent))
    done = stop(run)
    assert (done.returncode, done.stdout) == (
        0,
        f"{run.id} is stopped; processes left: none on the hosts that answer\n",
    )
    supervisor.wait(LIMIT_S)


def test_a_run_whose_directory_is_deleted_ends(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("gated")
    supervisor = waiting_run(run)
    run.dir.path.rename(tmp_path / "deleted")
    assert supervisor.wait(LIMIT_S) == 1
    assert processes_of(run) == []
    assert not run.dir.path.exists()
    log = (tmp_path / "deleted" / "logs" / "supervisor.log").read_text()
    assert f"the run directory {run.dir.path} was deleted during the run" in log


@pytest.mark.parametrize("killed", [False, True], ids=["supervised", "without a supervisor"])
def test_stop_finds_a_run_whose_directory_is_deleted(make_run: MakeRun, tmp_path: Path, killed: bool) -> None:
    other = make_run("gated")
    run = make_run("gated")
    supervisors = [start_supervisor(each.dir, leased=False) for each in (run, other)]
    until(lambda: all((each.dir.path / "waiting").exists() for each in (run, other)))
    until(lambda: run.dir.attempt.exists() and other.dir.attempt.exists())
    if killed:
        kill_without_successor(supervisors[0].pid)
    else:
        supervisors[0].send_signal(signal.SIGSTOP)
    run.dir.path.rename(tmp_path / "deleted")
    done = stop(run)
    none = NONE if killed else "none"
    what = f"{run.id} is stopped; its run directory was deleted; processes left: {none}\n"
    assert (done.returncode, done.stdout) == (0, what), done.stderr
    supervisors[0].wait(LIMIT_S)
    assert processes_of(run) == []
    assert processes_of(other) != []
    done = stop(run)
    assert (done.returncode, done.stdout) == (2, "")
    supervisors[1].terminate()
    assert supervisors[1].wait(LIMIT_S) == 130


@pytest.mark.parametrize("content", [b"", b"\xff{", None], ids=["empty", "garbage", "missing"])
def test_stop_finds_a_run_whose_status_cannot_be_read(make_run: MakeRun, content: bytes | None) -> None:
    run = make_run("gated")
    supervisor = waiting_run(run)
    if content is None:
        run.dir.status.unlink()
    else:
        run.dir.status.write_bytes(content)
    done = stop(run)
    assert (done.returncode, done.stdout) == (0, f"{run.id} is stopped; processes left: none\n"), done.stderr
    assert supervisor.wait(LIMIT_S) == 130


def test_a_run_has_one_supervisor(make_run: MakeRun) -> None:
    run = make_run("wait")
    supervisor = start_supervisor(run.dir, leased=False)
    until(run.dir.attempt.exists)
    assert start_supervisor(run.dir, leased=False, adopting=True).wait(LIMIT_S) == 3
    assert len(processes_of(run)) == 1
    supervisor.terminate()
    assert supervisor.wait(LIMIT_S) == 130


def test_a_wait_that_is_interrupted_leaves_the_run_and_one_that_is_not_ends_with_it(make_run: MakeRun) -> None:
    run = make_run("saves")
    supervisor = waiting_run(run)
    interrupted, waiting = begin("wait", run), begin("wait", run)
    assert interrupted.stderr is not None
    told = interrupted.stderr.readline()
    assert told == f"gputrain: waiting for {run.id}; Ctrl-C ends the wait, not the run\n"
    interrupted.send_signal(signal.SIGINT)
    out, err = interrupted.communicate(timeout=LIMIT_S)
    expected = f"gputrain: {run.id} is still running: only the wait has ended\n"
    assert (interrupted.returncode, out, err) == (130, "", expected)
    assert status_of(run) == "running"
    (run.dir.path / "go").touch()
    assert stop(run).returncode == 0
    out, _ = waiting.communicate(timeout=LIMIT_S)
    assert waiting.returncode == supervisor.wait(LIMIT_S) == 130
    assert out.startswith(f"{run.id} stopped in ")
    assert out.endswith(": stopped by `gputrain stop`\n")
