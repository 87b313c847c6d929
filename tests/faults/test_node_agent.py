"""The node agent with real processes: node_agent_targets.py has the ranks, node_agent_harness.py the agent."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from waiting import LIMIT_S, until

from trainer.contract.outcome import NodeOutcome, RankOutcome, is_lost_peer, lost_peer_text, root_cause
from trainer.contract.record import AnyEvent, Failure, NodeSample, RankState, RunDir, Step, decode_events
from trainer.host.ports import free_port
from trainer.host.processes import descendants
from trainer.host.stop_request import LEASE_LOST, LEASE_RETURNED
from trainer.host.temporary_folder import NAME

HERE = Path(__file__).parent


class RunningNodeAgent:
    """A running node's parent."""

    def __init__(self, run_dir: Path, temporary: str, *words: str, lease: bool = False) -> None:
        self.run_dir = RunDir(run_dir)
        self.errors = run_dir / "stderr"
        environ = os.environ | {
            "GPUTRAIN_LEASE": "stdin" if lease else "",
            "PYTHONPATH": os.pathsep.join(sys.path),
            "TMPDIR": temporary,
        }
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    str(HERE.parents[0] / "support" / "node_agent_harness.py"),
                    words[0],
                    str(run_dir),
                    *words[1:],
                ],
                stdin=subprocess.PIPE if lease else subprocess.DEVNULL,
                stderr=errors,
                env=environ,
                start_new_session=True,
            )
        self.family: set[int] = set()
        """Every process that was seen below the parent."""

    def wait(self) -> int:
        return self.process.wait(LIMIT_S)

    def marks(self) -> list[str]:
        """Wait until both ranks have come to their mark, and return what they wrote."""
        paths = [self.run_dir.path / f"mark-{rank}" for rank in range(2)]
        until(lambda: all(path.exists() for path in paths) or self.process.poll() is not None)
        self.family |= descendants(self.process.pid)
        return [path.read_text() for path in paths]

    def outcome(self) -> NodeOutcome:
        return msgspec.json.decode(self.run_dir.node_result(0).read_bytes(), type=NodeOutcome)

    def failure(self) -> Failure:
        failure = self.outcome().failure
        assert failure is not None
        return failure

    def events(self) -> list[AnyEvent]:
        return list(decode_events(self.run_dir.node_events(0).read_bytes()))

    def close(self) -> None:
        if self.process.poll() is None:
            for pid in descendants(self.process.pid) | {self.process.pid}:
                with contextlib.suppress(ProcessLookupError):  # one that has just ended
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()


Start = Callable[..., RunningNodeAgent]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    parents: list[RunningNodeAgent] = []

    # A killed parent leaves its socket's folder, which lies outside a run directory whose path is long.
    with tempfile.TemporaryDirectory() as temporary:

        def begin(*words: str, lease: bool = False) -> RunningNodeAgent:
            parents.append(RunningNodeAgent(tmp_path, temporary, *words, lease=lease))
            return parents[-1]

        yield begin
        for agent in parents:
            agent.close()


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def still_alive(pids: set[int]) -> set[int]:
    return {pid for pid in pids if alive(pid)}


def failure(kind: str, message: str = "", rank: int = 0) -> Failure:
    return Failure(time=0.0, kind=kind, message=message, rank=rank)


# --- success --------------------------------------------------------------------------------------------------------


def test_ranks_that_finish_leave_a_record_and_nothing_else(start: Start) -> None:
    agent = start("trains")
    assert agent.wait() == 0
    done = RankOutcome(exit_code=0, finished=True)
    assert agent.outcome() == NodeOutcome(node=0, host="here", exit_code=0, ranks={0: done, 1: done})
    spawned = [event for event in agent.events() if isinstance(event, RankState)]
    assert [(event.rank, event.state, event.host, event.device) for event in spawned] == [
        (0, "spawned", "here", "cpu"),
        (1, "spawned", "here", "cpu"),
    ]
    samples = [event for event in agent.events() if isinstance(event, NodeSample)]
    sampled = [process for sample in samples for process in sample.ranks]
    assert sampled
    assert {process.rank for process in sampled} <= {0, 1}  # one may have ended before the other had begun
    assert all(process.rss_bytes for process in sampled)
    assert agent.run_dir.rank_log(1).read_text() == "rank 1 prints\nand complains\n"
    assert agent.errors.read_text() == ""


@pytest.mark.parametrize(
    ("target", "ended_by"), [("aborts_after_success", "SIGABRT"), ("hangs_after_success", "SIGKILL")]
)
def test_how_a_rank_exits_after_its_success_does_not_matter(start: Start, target: str, ended_by: str) -> None:
    agent = start(target)
    assert agent.wait() == 0
    assert agent.outcome().ranks[1] == RankOutcome(signal=ended_by, finished=True)
    assert agent.outcome().failure is None


def test_ranks_fork_with_torch_in_memory_and_one_thread(start: Start) -> None:
    agent = start("records_its_context", "forkserver")
    assert agent.wait() == 0
    # Three threads: the main one, the one that watches the parent, and the one that watches the main one.
    assert [mark.rpartition(" ")[0] for mark in agent.marks()] == ["True 3 3 1"] * 2


def test_the_spawn_start_method_uses_torch_multiprocessing(start: Start) -> None:
    agent = start("records_its_context", "spawn")
    assert agent.wait() == 0
    assert [mark.rpartition(" ")[0] for mark in agent.marks()] == ["False 3 3 None"] * 2
    folders = {Path(mark.rpartition(" ")[2]) for mark in agent.marks()}
    assert [NAME.fullmatch(folder.name) is not None and folder.exists() for folder in folders] == [False]


# --- failure --------------------------------------------------------------------------------------------------------


def test_one_exception_stops_the_ranks_that_hang_in_c_and_is_reported(start: Start) -> None:
    agent = start("one_raises")
    assert agent.wait() == 1
    outcome = agent.outcome()
    assert outcome.failure is not None
    assert (outcome.failure.kind, outcome.failure.rank) == ("exception", 1)
    assert outcome.failure.message == "ZeroDivisionError: one over nothing"
    assert "in one_raises" in (outcome.failure.traceback or "")
    assert outcome.ranks[0] == RankOutcome(signal="SIGTERM")
    assert "ZeroDivisionError" in agent.run_dir.rank_log(1).read_text()


@pytest.mark.parametrize("kind", ["task", "script"])
def test_a_rank_that_is_ended_because_of_another_has_its_last_steps_on_disk(kind: str, start: Start) -> None:
    agent = start("one_raises_before_the_record_of_the_other_is_written", "light", "", kind)
    assert agent.wait() == 1
    events = decode_events(agent.run_dir.rank_events(0).read_bytes())
    assert [event.step for event in events if isinstance(event, Step)] == [1]


def test_a_request_that_only_a_rank_can_refuse_ends_as_a_bad_request(start: Start) -> None:
    agent = start("one_finds_the_request_wrong")
    assert agent.wait() == 2
    reported = agent.failure()
    assert (reported.kind, reported.message, reported.traceback) == ("request", "/data is missing", None)


def test_the_cause_is_the_killed_rank_not_the_one_that_lost_it_first(start: Start) -> None:
    agent = start("one_is_killed_and_the_other_loses_its_peer")
    assert agent.wait() == 1
    reported = agent.failure()
    assert (reported.kind, reported.rank) == ("signal", 1)
    assert "SIGKILL" in reported.message
    # The killed rank could not write it, so the parent's own events hold it.
    assert [(event.rank, event.kind) for event in agent.events() if isinstance(event, Failure)] == [(1, "signal")]
    assert ("failed", 1) in [(event.state, event.rank) for event in agent.events() if isinstance(event, RankState)]


def test_a_lost_peer_is_the_cause_only_when_nothing_else_failed_here(start: Start) -> None:
    agent = start("all_lose_a_peer")
    assert agent.wait() == 1
    reported = agent.failure()
    assert reported.kind == "lost_peer"


def test_leaving_without_having_trained_is_a_failure_whatever_the_exit_code(start: Start) -> None:
    agent = start("leaves_early")
    assert agent.wait() == 1
    reported = agent.failure()
    assert (reported.kind, reported.rank) == ("exit", 1)
    assert "exit code 0 before its training was complete" in reported.message


def test_ranks_that_end_with_a_killed_fork_server_are_not_blamed(start: Start) -> None:
    agent = start("all_hang")
    pid = int(agent.marks()[0])
    server = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    assert server != agent.process.pid
    os.kill(server, signal.SIGKILL)
    assert agent.wait() == 1
    reported = agent.failure()
    assert (reported.kind, reported.rank, reported.host) == ("signal", None, "here")
    assert reported.message.startswith("the fork server, the parent of all ranks on this node, was ended by SIGKILL")
    assert [event for event in agent.events() if isinstance(event, Failure)] == [reported]
    assert still_alive(agent.family) == set()


def test_a_rank_that_exits_with_255_is_an_ordinary_failure(start: Start) -> None:
    agent = start("leaves_with_255")
    assert agent.wait() == 1
    reported = agent.failure()
    assert (reported.kind, reported.rank) == ("exit", 1)
    assert "exit code 255" in reported.message


@pytest.mark.parametrize(
    ("target", "kind", "words"),
    [
        ("one_is_silent", "silent", "rank 1 reported nothing; rank 0 gave up: Connection reset by peer"),
        (
            "one_is_ended_by_the_watchdog_of_nccl",
            "silent",
            "rank 1 reported nothing; rank 0 gave up: the process was ended by SIGABRT: another rank did not "
            "answer in time",
        ),
        (
            "one_is_ended_by_the_heartbeat_monitor_of_nccl",
            "silent",
            "rank 1 reported nothing; rank 0 gave up: the process was ended by SIGABRT: another rank did not "
            "answer in time",
        ),
        (
            "one_ends_as_its_peer_is_gone",
            "silent",
            "rank 1 reported nothing; rank 0 gave up: the process ended with exit code 1 before its training was "
            "complete: RuntimeError: Connection closed by peer",
        ),
        (
            "one_has_left",
            "left_early",
            "rank 1 had exited with code 0 while others were still training; rank 0 gave up: Connection reset by peer",
        ),
    ],
)
def test_a_rank_that_another_has_lost_is_the_cause(start: Start, target: str, kind: str, words: str) -> None:
    agent = start(target)
    assert agent.wait() == 1
    reported = agent.failure()
    assert (reported.kind, reported.rank, reported.message) == (kind, 1, words)


def test_child_processes_of_ranks_end_with_them_daemons_too(start: Start) -> None:
    agent = start("has_children")
    assert agent.wait() == 1
    started = {int(pid) for mark in agent.marks() for pid in mark.split()}
    assert len(started) == 6
    assert still_alive(started) == set()


# --- being stopped --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_parent_stops_ranks_that_hang(start: Start, number: signal.Signals) -> None:
    agent = start("all_hang")
    agent.marks()
    agent.process.send_signal(number)
    assert agent.wait() == 130
    assert still_alive(agent.family) == set()
    assert (agent.outcome().exit_code, agent.outcome().failure) == (130, None)


def test_a_rank_that_dies_of_the_signal_before_the_agent_receives_it_has_not_failed(start: Start) -> None:
    """Slurm signals all processes of a job, in no order."""
    agent = start("all_hang", "light", "", "script")
    ranks = [int(mark) for mark in agent.marks()]
    os.kill(ranks[1], signal.SIGTERM)
    until(lambda: not still_alive({ranks[1]}))
    agent.process.send_signal(signal.SIGTERM)
    assert agent.wait() == 130
    outcome = agent.outcome()
    assert (outcome.exit_code, outcome.failure, outcome.stop_reason) == (130, None, "stopped by SIGTERM")
    assert not [event for event in agent.events() if isinstance(event, Failure)]


def test_a_rank_that_alone_is_ended_by_a_signal_has_failed(start: Start) -> None:
    agent = start("all_hang", "light", "", "script")
    ranks = [int(mark) for mark in agent.marks()]
    os.kill(ranks[1], signal.SIGTERM)
    assert agent.wait() == 1
    reported = agent.failure()
    assert (reported.kind, reported.rank, reported.message) == ("signal", 1, "the process was ended by SIGTERM")


def test_control_c_reaches_the_whole_group_and_stops_it_once_and_quietly(start: Start) -> None:
    agent = start("all_hang")
    agent.marks()
    os.killpg(agent.process.pid, signal.SIGINT)
    assert agent.wait() == 130
    assert still_alive(agent.family) == set()
    assert agent.errors.read_text() == ""


def test_control_c_while_torch_is_loading_starts_no_rank_and_is_quiet(start: Start) -> None:
    agent = start("trains", "forkserver")
    until(lambda: bool(descendants(agent.process.pid)))
    os.killpg(agent.process.pid, signal.SIGINT)
    assert agent.wait() == 130
    assert not any(isinstance(event, RankState) for event in agent.events())
    assert agent.errors.read_text() == ""


def test_ranks_that_ignore_the_polite_signal_are_killed(start: Start) -> None:
    agent = start("all_hang_and_ignore_sigterm")
    agent.marks()
    agent.process.send_signal(signal.SIGINT)
    assert agent.wait() == 130
    assert still_alive(agent.family) == set()
    assert agent.outcome().ranks[0] == RankOutcome(signal="SIGKILL")


@pytest.mark.parametrize(
    ("word", "reason"), [(b"", LEASE_LOST), (LEASE_RETURNED, "stopped by the command that started it")]
)
def test_the_end_of_the_lease_stops_the_run_and_its_cause_is_known(start: Start, word: bytes, reason: str) -> None:
    agent = start("all_hang", lease=True)
    agent.marks()
    assert agent.process.stdin is not None
    os.write(agent.process.stdin.fileno(), word)
    agent.process.stdin.close()
    assert agent.wait() == 130
    assert still_alive(agent.family) == set()
    assert agent.outcome().stop_reason == reason


@pytest.mark.parametrize("target", ["all_hang", "all_hang_with_the_gil"])
def test_ranks_die_with_a_killed_parent_even_where_python_cannot_run(start: Start, target: str) -> None:
    agent = start(target)
    agent.marks()
    agent.process.kill()
    agent.wait()
    until(lambda: not still_alive(agent.family))


def test_ranks_die_with_a_killed_parent_when_torch_multiprocessing_started_them(start: Start) -> None:
    agent = start("all_hang_with_the_gil", "spawn")
    agent.marks()
    agent.process.kill()
    agent.wait()
    until(lambda: not still_alive(agent.family))


def test_ranks_inside_a_real_collective_die_with_a_killed_parent(start: Start) -> None:
    agent = start("all_reduces_for_ever", "forkserver", f"tcp://127.0.0.1:{free_port()}")
    agent.marks()
    agent.process.kill()
    agent.wait()
    until(lambda: not still_alive(agent.family))


def test_stacks_are_printed_into_the_ranks_log_on_request(start: Start) -> None:
    agent = start("all_hang")
    pid = int(agent.marks()[1])
    os.kill(pid, signal.SIGQUIT)
    log = agent.run_dir.rank_log(1)
    until(lambda: "in all_hang" in log.read_text())
    assert alive(pid)


# --- judging --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failures", "cause"),
    [
        ([], None),
        ([(5, failure("exception", rank=0)), (3, failure("signal", rank=1))], 1),
        ([(1, failure("lost_peer", rank=0)), (9, failure("exception", rank=1))], 1),
        ([(1, failure("join_timeout", rank=0)), (9, failure("request", rank=1))], 1),
        ([(1, failure("lost_peer", rank=0)), (9, failure("join_timeout", rank=1))], 1),
        ([(2, failure("lost_peer", rank=0)), (1, failure("lost_peer", rank=1))], 1),
    ],
)
def test_the_root_cause_is_the_earliest_failure_that_is_no_consequence(
    failures: list[tuple[int, Failure]], cause: int | None
) -> None:
    found = root_cause(failures)
    assert (found.rank if found else None) == cause


@pytest.mark.parametrize(
    ("message", "lost"),
    [
        (
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.77.0.3]:42163",
            True,
        ),
        ("pair.cc:537] Read error [10.0.0.2]:99: Connection reset by peer", True),
        ("unbound_buffer.cc:78] Timed out waiting 10000ms for recv operation to complete", True),
        ("Failed to recv, got 0 bytes. Connection was likely closed.", True),
        ("Gloo connectFullMesh failed with ... timed out connecting", True),
        ("NCCL error: remote process exited or there was a network error, ncclRemoteError", True),
        (
            "[enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:456] op.preamble.length <= "
            "op.nbytes. 16 vs 8. Received data size doesn't match expected size.",
            True,
        ),
        ("[PG ID 0 Rank 1] ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress", True),
        ("[PG ID 0 Rank 1] Heartbeat monitor timed out! Process will be terminated after dumping debug info.", True),
        ("[Rank 1] Observed flight recorder dump signal from another rank via TCPStore.", True),
        (
            "[PG ID 0 Rank 1] Process group watchdog thread terminated with exception: CUDA error: an illegal memory "
            "access was encountered",
            False,
        ),
        ("[enforce fail at gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find interface for: eth9", False),
        ("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)", False),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", False),
        ("No such file or directory: 'train.tsv'", False),
    ],
)
def test_messages_about_a_lost_peer_are_recognised_and_put_into_words(message: str, lost: bool) -> None:
    assert is_lost_peer(message) == lost
    assert (lost_peer_text(message) != message) == (lost and "got 0 bytes" not in message)
    assert ("gloo" in lost_peer_text(message)) == ("gloo" in message and not lost)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("gloo/pair.cc:553] Connection closed by peer [10.0.0.3]:4", "the connection to another rank was lost"),
        ("unbound_buffer.cc:78] Timed out waiting 10000ms for recv", "another rank did not answer within 10 s"),
        (
            "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, Timeout(ms)=600000) ran for 600012 ms",
            "another rank did not answer within 600 s",
        ),
        ("NCCL operation timed out", "another rank did not answer in time"),
        ("timeout - timeout watchdog detected operation timeout", "another rank did not answer in time"),
        ("error - timeout watchdog detected operation error", "the connection to another rank was lost"),
        ("timeout - collective operation timed out", "another rank did not answer in time"),
        ("DistStoreError: wait timeout after 2500ms, keys: /a", "another rank did not answer within 2.5 s"),
        (
            "[enforce fail at gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 16 vs 8",
            "the ranks called a collective with tensors of unequal size",
        ),
        ("ConnectionRefusedError: Connection refused", "ConnectionRefusedError: Connection refused"),
    ],
)
def test_the_text_of_gloo_and_nccl_is_put_into_words(message: str, words: str) -> None:
    assert lost_peer_text(message) == words
