"""Orphans of a rank, which its node agent adopts: reaped as they end, and found even while they fork."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench import Bench
from pid_namespace import run_in_namespace
from test_node_agent import RunningNodeAgent, start as start
from waiting import LIMIT_S, until, written

from gputrain_tui.lifecycle.leftovers import processes_of
from trainer.host.proc_files import CGROUP
from trainer.host.processes import pids, read_stat

MAX_PROCESSES = 80
"""Limit of the cgroup: far fewer than the orphans that the ranks make."""


@pytest.fixture
def limited_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the ranks join a cgroup with few processes, where this user may make one."""
    base = next((path for path in (CGROUP / "pids", CGROUP) if (path / "pids.max").exists()), CGROUP / "pids")
    group = base / f"gputrain-test-{uuid.uuid4().hex}"
    try:
        group.mkdir()
        (group / "pids.max").write_text(str(MAX_PROCESSES))
    except OSError:
        yield
        return
    monkeypatch.setenv("TEST_CGROUP", str(group))
    yield
    until(lambda: not (group / "cgroup.procs").read_text(), "the cgroup is empty")
    group.rmdir()


def zombies_of(pid: int) -> list[int]:
    stats = {each: read_stat(each) for each in pids()}
    return [each for each, stat in stats.items() if stat is not None and stat.parent_pid == pid and not stat.alive]


@pytest.mark.usefixtures("limited_group")
@pytest.mark.parametrize("start_method", ["light", "spawn"])
def test_orphans_are_reaped_as_they_end(start: type[RunningNodeAgent], start_method: str) -> None:
    agent = start("makes_orphans", start_method)
    assert agent.marks() == ["0 of 300 failed"] * 2
    until(lambda: not zombies_of(agent.process.pid), "the agent has no zombies")
    (agent.run_dir.path / "go").touch()
    assert agent.wait() == 0, agent.errors.read_text()


def test_the_orphans_of_a_single_rank_are_reaped_and_its_own_children_are_not(bench: Bench) -> None:
    task = Path(__file__).with_name("orphan_task.py")
    recipe = bench.folder / "orphans.toml"
    recipe.write_text(
        f'[[cluster.nodes]]\ncpu_ranks = 1\n[train]\ntask = "{task}:OrphanTask"\nbatch_size = 4\nmax_epochs = 1\n'
    )
    process = bench.start("run", recipe)
    run = until(bench.runs)[0]
    assert written(run.dir.path / "made") == "0"

    def zombies() -> list[int]:
        return [zombie for pid in processes_of(run.dir.path) for zombie in zombies_of(pid)]

    until(lambda: len(zombies()) <= 1, "only the task's own child is a zombie")
    (run.dir.path / "go").touch()
    assert process.wait(LIMIT_S) == 0, process.communicate()
    assert (run.dir.path / "child").read_text() == "7"


@pytest.mark.parametrize("start_method", ["light", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_failure_ends_children_that_fork_and_exit_in_a_loop(tmp_path: Path, start_method: str) -> None:
    done = run_in_namespace(Path(__file__).with_name("forking_children.py"), tmp_path, start_method)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == ["exit code 1", "ZeroDivisionError: one over nothing", "left []", "alive 0"]


def test_a_daemon_with_a_cleared_environment_is_stopped_though_all_others_were_killed(tmp_path: Path) -> None:
    done = run_in_namespace(Path(__file__).with_name("killed_with_its_agent.py"), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    killed = "the run's supervisor was killed, and node 0 on localhost was killed before rank 0 finished"
    lost = f"has failed: {killed}; processes left: none found taking over"
    assert done.stdout.splitlines() == ["daemons 1", f"0 {lost}", "daemons 0"]
