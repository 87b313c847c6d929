"""Scripts that start their ranks themselves: these are the ranks of the run, like launched ones."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from bench import Bench, node_agent_pid
from waiting import until

from gputrain_tui.history.run_folders import Run
from gputrain_tui.history.run_reader import RunReader
from gputrain_tui.lifecycle import leftovers
from gputrain_tui.state import RunState
from trainer.contract.record import RunDir, Step, decode_events

SCRIPT = Path(__file__).parents[1] / "support" / "starting_script.py"
STEPS = 30
FOR_EVER = 1_000_000
RECIPE = """\
name = "own"

[[cluster.nodes]]
cpu_ranks = {ranks}

[train]
script = "own/script.py"
starts_ranks = {starts_ranks}
args = [{args}]
"""


def recipe(bench: Bench, way: str, *args: object, starts_ranks: bool = False, ranks: int = 1) -> Path:
    (bench.folder / "own").mkdir()
    shutil.copy(SCRIPT, bench.folder / "own" / "script.py")
    # In the ranks neither this module nor ours may take the place of the other.
    (bench.folder / "own" / "trainer.py").write_text("raise ImportError('a module of the script')\n")
    path = bench.folder / "own.toml"
    words = ", ".join(f'"{each}"' for each in (way, *args))
    path.write_text(RECIPE.format(ranks=ranks, starts_ranks=str(starts_ranks).lower(), args=words))
    return path


def state_of(run: Run) -> RunState:
    state, reader = RunState(), RunReader(run.dir)
    while events := reader.poll():
        state.apply_all(events)
    reader.close()
    return state


def steps(run: RunDir, rank: int) -> int:
    return sum(event.steps for event in decode_events(run.rank_events(rank).read_bytes()) if isinstance(event, Step))


@pytest.mark.parametrize(
    ("way", "starts_ranks", "ranks"),
    [
        pytest.param("spawn", False, 1, id="mp.spawn in a plan of one rank"),
        pytest.param("subprocess", True, 2, id="subprocesses, planned"),
        pytest.param("torchrun", True, 4, id="torchrun with fewer ranks than planned", marks=pytest.mark.slow),
        pytest.param("fork", False, 1, id="fork", marks=pytest.mark.slow),
        pytest.param("first", True, 2, id="the script is the first rank", marks=pytest.mark.slow),
    ],
)
def test_both_ranks_are_measured_and_logged_and_the_slow_one_is_named(
    bench: Bench, way: str, starts_ranks: bool, ranks: int
) -> None:
    done = bench.call("run", recipe(bench, way, STEPS, "slow", starts_ranks=starts_ranks, ranks=ranks))
    assert done.returncode == 0, done.stderr
    (run,) = bench.runs()
    state = state_of(run)
    assert sorted(state.ranks) == [0, 1]
    assert (state.world_size, run.status.world_size, state.step) == (2, 2, STEPS)
    for rank, view in state.ranks.items():
        assert (view.state, view.local_rank, steps(run.dir, rank)) == ("finished", rank, STEPS)
        assert view.totals.synced_steps
        assert f"rank {rank} of 2: " in run.dir.rank_log(rank).read_text()
    latest = state.latest()
    assert latest is not None
    assert latest[0] == 1
    table = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("   ")]
    assert table == ["0", "1"]


@pytest.mark.parametrize(
    ("way", "fault", "cause"),
    [
        pytest.param("processes", "raise", "ValueError: no such label", id="an exception that the script ignores"),
        pytest.param("spawn", "kill", "SIGKILL", id="SIGKILL", marks=pytest.mark.slow),
        pytest.param("spawn", "raise", "ValueError: no such label (", id="mp.spawn", marks=pytest.mark.slow),
        pytest.param("subprocess", "exit", "exit code 7", id="os._exit", marks=pytest.mark.slow),
    ],
)
def test_a_failure_is_that_of_its_rank(bench: Bench, way: str, fault: str, cause: str) -> None:
    done = bench.call("run", recipe(bench, way, STEPS, fault))
    assert done.returncode == 1
    (run,) = bench.runs()
    failure = state_of(run).root_cause
    assert failure is not None
    assert failure.rank == 1
    assert cause in failure.message
    assert "rank 1 failed on" in done.stderr


def test_stacks_are_those_of_the_ranks_and_a_stop_lets_both_save_and_leaves_nothing(bench: Bench) -> None:
    process = bench.start("run", recipe(bench, "spawn", FOR_EVER))
    run = bench.await_training()
    until(lambda: {0, 1} <= set(state_of(run).ranks))
    shown = bench.call("stacks", "last")
    assert (shown.returncode, "in work" in shown.stdout) == (0, True), shown.stdout + shown.stderr
    assert "own/script.py" in shown.stdout
    stopped = bench.call("stop", "last")
    process.communicate()
    assert (stopped.returncode, process.returncode) == (0, 130)
    for rank in (0, 1):
        assert f"rank {rank} saved" in run.dir.rank_log(rank).read_text()
    assert leftovers.kill_processes(run.dir.path) == []
    assert not _processes_of(bench.folder)


def _processes_of(folder: Path) -> list[str]:
    """What runs there, or was given a path to it: other tests have scripts of the same name."""
    listed = [each.info for each in psutil.process_iter(["cmdline", "cwd"])]
    lines = [(" ".join(each["cmdline"] or ()), each["cwd"] or "") for each in listed]
    return [line for line, cwd in lines if str(folder) in line or Path(cwd).is_relative_to(folder)]


@pytest.mark.slow
def test_on_two_nodes_the_ranks_are_those_of_the_whole_group(bench: Bench) -> None:
    path = recipe(bench, "spawn", STEPS, starts_ranks=True, ranks=2)
    path.write_text(path.read_text().replace("[train]", "[[cluster.nodes]]\ncpu_ranks = 2\n\n[train]"))
    done = bench.call("run", path)
    assert done.returncode == 0, done.stderr
    state = state_of(bench.runs()[0])
    assert {rank: (view.node, view.step, view.state) for rank, view in state.ranks.items()} == {
        rank: (rank // 2, STEPS, "finished") for rank in range(4)
    }


@pytest.mark.slow
def test_ranks_of_a_plan_that_start_ranks_each_are_a_finding(bench: Bench) -> None:
    done = bench.call("run", recipe(bench, "spawn", STEPS, ranks=2))
    assert done.returncode == 0, done.stderr
    assert "the script of each starts ranks itself" in done.stderr
    assert "starts_ranks = true" in next(
        finding.advice for finding in state_of(bench.runs()[0]).findings.values() if finding.cause == "started_ranks"
    )


@pytest.mark.slow
def test_results_are_bit_for_bit_those_without_gputrain(bench: Bench) -> None:
    bench.call("run", recipe(bench, "spawn", 200))
    (run,) = bench.runs()
    plain = {name: value for name, value in os.environ.items() if not name.startswith("GPUTRAIN")}
    bare = subprocess.run(
        [sys.executable, str(SCRIPT), "spawn", "200"], env=plain, capture_output=True, text=True, check=True
    )
    ours = [line for rank in (0, 1) for line in run.dir.rank_log(rank).read_text().splitlines() if " of 2: " in line]
    assert sorted(ours) == sorted(line for line in bare.stdout.splitlines() if " of 2: " in line)
    assert len(ours) == 2


@pytest.mark.slow
def test_ranks_end_with_a_killed_node_agent(bench: Bench) -> None:
    process = bench.start("run", recipe(bench, "processes", FOR_EVER))
    run = bench.await_training()
    os.kill(node_agent_pid(run), signal.SIGKILL)
    process.communicate()
    assert process.returncode == 1
    assert not _processes_of(bench.folder)
