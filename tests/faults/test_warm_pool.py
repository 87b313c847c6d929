from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from bench import FOR_EVER, RECIPE, TEXT, rank_pid
from waiting import until

from gputrain_tui.history.record_tail import last_step
from gputrain_tui.history.run_folders import Run, open_run
from gputrain_tui.lifecycle import leftovers, start
from gputrain_tui.lifecycle.stop_run import stop
from gputrain_tui.lifecycle.warm_pool import WarmPool
from gputrain_tui.lifecycle.warm_supervisor import WarmAgent
from gputrain_tui.recipe.build import load
from trainer.contract.record import RunDir, Step, decode_events
from trainer.host.temporary_folder import NAME

OWN_TASK = """\
import json
import os
from pathlib import Path
from trainer.tasks.lm import LanguageModel

class EnvironmentTask(LanguageModel):
    def model(self):
        Path(os.environ["GPUTRAIN_RUN"], "environment").write_text(json.dumps(dict(os.environ)))
        return super().model()
"""
HOLDER = """\
import sys, time
from gputrain_tui.lifecycle import start
from gputrain_tui.lifecycle.stop_run import stop
from gputrain_tui.lifecycle.warm_pool import WarmPool
from gputrain_tui.recipe.build import load
warm = WarmPool()
warm.open()
assert warm.wait(120)
if len(sys.argv) > 1:
    run, supervisor = start.launch(start.prepare(load(sys.argv[1])), leased=False, warm=warm)
    print(run.dir.path, flush=True)
else:
    print(warm.pid, flush=True)
time.sleep(60)
"""
"""A console that opens the form, and launches if it is given a recipe."""


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(
        dir="/tmp", ignore_cleanup_errors=True
    ) as folder:  # a Unix socket's name may not be much longer
        monkeypatch.setenv("GPUTRAIN_HOME", f"{folder}/home")
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr("tempfile.tempdir", None)
        yield Path(folder)


@pytest.fixture
def warm() -> Iterator[WarmPool]:
    warm = WarmPool()
    yield warm
    warm.close()


def write(folder: Path, *, updates: int = 3, ranks: int = 2, task: str = "lm") -> Path:
    data = folder / "text.txt"
    data.write_text(TEXT)
    path = folder / "tiny.toml"
    path.write_text(RECIPE.format(updates=updates, ranks=ranks, task=task, data=data))
    return path


def launch(path: Path, warm: WarmPool | None) -> tuple[Run, subprocess.Popen[bytes]]:
    return start.launch(start.prepare(load(str(path))), leased=False, warm=warm)


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def fork_server(pid: int) -> int:
    """Pid of the process that has loaded torch: the largest."""
    return max(descendants(pid), key=lambda process: process.memory_info().rss).pid


def event_types(run: Run, name: str) -> list[str]:
    events = decode_events((run.dir.events / f"{name}.ndjson").read_bytes())
    return [type(event).__name__ for event in events]


def mean_loss(run: Run, rank: int) -> float:
    """Of all steps; what an event covers of them depends on the pace."""
    steps = [event for event in decode_events(run.dir.rank_events(rank).read_bytes()) if isinstance(event, Step)]
    losses = [(step.loss or math.nan) * step.steps for step in steps]
    return sum(losses) / sum(step.steps for step in steps)


def folders(home: Path) -> list[Path]:
    return list(home.glob("gputrain-*"))


def test_a_warm_launch_trains_and_is_recorded_like_a_cold_one(home: Path, warm: WarmPool) -> None:
    path = write(home)
    warm.open()
    assert warm.wait(120)
    waiting = warm.pid
    run, supervisor = launch(path, warm)
    assert supervisor.pid == waiting
    assert supervisor.wait(120) == 0
    cold, other = launch(path, None)
    assert other.wait(120) == 0

    one, two = open_run(run.dir.path), open_run(cold.dir.path)
    assert one is not None
    assert two is not None
    assert (one.state, two.state) == ("finished", "finished")
    losses = [[mean_loss(each, rank) for rank in range(2)] for each in (run, cold)]
    assert losses[0] == pytest.approx(losses[1])
    files = [sorted(str(file.relative_to(r.dir.path)) for file in r.dir.path.rglob("*")) for r in (run, cold)]
    assert files[0] == files[1]
    assert [set(event_types(run, name)) for name in "01"] == [set(event_types(cold, name)) for name in "01"]
    logs = [r.dir.node_log(0).read_text().partition(" tcp://")[0] for r in (run, cold)]
    assert logs[0] == logs[1] != ""
    assert leftovers.processes_of(run.dir.path) == []
    assert folders(home) == []
    assert warm.pid is None


def test_the_fork_server_that_waits_has_one_thread_and_no_cuda(warm: WarmPool) -> None:
    warm.open()
    assert warm.wait(120)
    assert warm.pid is not None
    server = fork_server(warm.pid)
    assert len(list(Path(f"/proc/{server}/task").iterdir())) == 1
    assert "libtorch_cpu" in Path(f"/proc/{server}/maps").read_text()
    opened = [str(descriptor.readlink()) for descriptor in Path(f"/proc/{server}/fd").iterdir()]
    assert not any("nvidia" in path for path in opened)
    program = (
        "import gc, os, trainer.engine.preload, torch\n"
        "gc.unfreeze()\n"
        "tensors = [found for found in gc.get_objects() if type(found) is torch.Tensor]\n"
        "print(torch.cuda.is_initialized(), len(tensors), len(os.listdir('/proc/self/task')))"
    )
    printed = subprocess.check_output(
        [sys.executable, "-c", program], env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True
    )
    assert printed.split() == ["False", "0", "1"]


def test_ranks_have_the_environment_of_their_run_and_not_the_one_before_it(home: Path, warm: WarmPool) -> None:
    own = home / "report.py"
    own.write_text(OWN_TASK)
    path = write(home, task=f"{own}:EnvironmentTask")
    warm.open()
    assert warm.wait(120)
    run, supervisor = launch(path, warm)
    assert supervisor.wait(120) == 0, run.dir.rank_log(0).read_text()
    seen = json.loads((run.dir.path / "environment").read_text())
    assert seen["GPUTRAIN_RUN"] == str(run.dir.path)
    assert NAME.fullmatch(Path(seen["TMPDIR"]).name)
    assert seen["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert seen["OMP_NUM_THREADS"] == "1"


def test_the_processes_of_a_warm_run_are_found_and_stopped(home: Path, warm: WarmPool) -> None:
    warm.open()
    assert warm.wait(120)
    run, supervisor = launch(write(home, updates=FOR_EVER), warm)
    until(lambda: all(last_step(run.dir, rank) is not None for rank in (0, 1)))
    # The fork server and what tracks its resources were there before the run; they end with the node's parent.
    (parent,) = psutil.Process(supervisor.pid).children()
    ranks = {rank_pid(run, rank) for rank in (0, 1)}
    assert set(leftovers.processes_of(run.dir.path)) == {parent.pid, *ranks}
    assert leftovers.supervisors_of(run.dir.path) == [supervisor.pid]
    supervisor.send_signal(signal.SIGTERM)
    supervisor.wait(20)
    ended = open_run(run.dir.path)
    assert ended is not None
    assert ended.state == "stopped"
    assert leftovers.processes_of(run.dir.path) == []
    assert folders(home) == []


def test_stop_ends_a_warm_run_whose_run_directory_does_not_mention_it(home: Path, warm: WarmPool) -> None:
    """The disk may have been full when the run began, so that a file of it is empty."""
    warm.open()
    assert warm.wait(120)
    run, supervisor = launch(write(home, updates=FOR_EVER), warm)
    until(lambda: all(last_step(run.dir, rank) is not None for rank in (0, 1)))
    assert not (run.dir.path / "mark").exists()
    run.dir.attempt.write_bytes(b"")
    everything = [psutil.Process(supervisor.pid), *descendants(supervisor.pid)]
    supervisor.kill()
    supervisor.wait()
    found = open_run(run.dir.path)
    assert found is not None
    report, left = stop(found)
    lost = "has failed: the run's supervisor was killed, and its ranks ended with it"
    ends = {"is stopped": "none", lost: "none found"}  # the agent has recorded its end, or has died before
    assert report in (f"{run.id} {how}; processes left: {none}" for how, none in ends.items())
    assert left == []
    until(lambda: not any(process.is_running() for process in everything))


def test_a_killed_supervisor_leaves_a_warm_run_to_the_next_one(home: Path, warm: WarmPool) -> None:
    warm.open()
    assert warm.wait(120)
    run, supervisor = launch(write(home, updates=FOR_EVER), warm)
    until(lambda: all(last_step(run.dir, rank) is not None for rank in (0, 1)))
    until(run.dir.attempt.exists)
    supervisor.kill()
    supervisor.wait()
    before = leftovers.processes_of(run.dir.path)
    assert before
    start.adopt(run)
    assert leftovers.processes_of(run.dir.path) == before
    adopted = open_run(run.dir.path)
    assert adopted is not None
    assert adopted.status.supervisor is not None
    os.kill(adopted.status.supervisor.pid, signal.SIGTERM)
    until(lambda: not leftovers.processes_of(run.dir.path))
    until(lambda: not folders(home))


def test_closing_ends_the_warm_pool_at_once_also_while_torch_is_loading(home: Path, warm: WarmPool) -> None:
    warm.open()
    assert warm.pid is not None
    until(lambda: len(descendants(warm.pid or 0)) >= 2)
    all_of_it = [psutil.Process(warm.pid), *descendants(warm.pid)]
    warm.close()
    until(lambda: not any(process.is_running() for process in all_of_it), limit_s=2)
    assert folders(home) == []


def test_the_warm_pool_ends_with_a_killed_console(home: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True) as console:
        assert console.stdout is not None
        pid = int(console.stdout.readline())
        all_of_it = [psutil.Process(pid), *descendants(pid)]
        assert len(all_of_it) >= 3
        console.kill()
    until(lambda: not any(process.is_running() for process in all_of_it), limit_s=3)
    assert folders(home) == []


def test_a_killed_console_leaves_the_run_that_it_launched_warm(home: Path) -> None:
    path = write(home, updates=FOR_EVER)
    with subprocess.Popen([sys.executable, "-c", HOLDER, path], stdout=subprocess.PIPE, text=True) as console:
        assert console.stdout is not None
        run_dir = RunDir(console.stdout.readline().strip())
        until(lambda: last_step(run_dir, 0) is not None)
        console.kill()
    step = last_step(run_dir, 0)
    assert step is not None
    until(lambda: (now := last_step(run_dir, 0)) is not None and now.step > step.step + 5)
    run = open_run(run_dir.path)
    assert run is not None
    assert run.state == "running"
    assert run.status.supervisor is not None
    os.kill(run.status.supervisor.pid, signal.SIGTERM)
    until(lambda: not leftovers.processes_of(run_dir.path))


def test_a_killed_waiting_supervisor_takes_the_fork_server_with_it(warm: WarmPool) -> None:
    warm.open()
    assert warm.wait(120)
    assert warm.pid is not None
    all_of_it = descendants(warm.pid)
    os.kill(warm.pid, signal.SIGKILL)
    until(lambda: not any(process.is_running() for process in all_of_it), limit_s=3)


def test_an_idle_warm_pool_ends_and_the_next_launch_is_cold(home: Path) -> None:
    warm = WarmPool(idle_s=3.0)
    warm.open()
    pid = warm.pid
    assert pid is not None
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, limit_s=10)
    assert folders(home) == []
    _, supervisor = launch(write(home), warm)
    assert supervisor.pid != pid
    assert supervisor.wait(120) == 0
    assert warm.pid is None


def test_a_run_of_one_rank_starts_as_always_from_a_supervisor_that_waited(home: Path, warm: WarmPool) -> None:
    warm.open()
    waiting = warm.pid
    _, supervisor = launch(write(home, ranks=1), warm)
    assert supervisor.pid == waiting
    assert supervisor.wait(120) == 0
    assert folders(home) == []


def test_opening_again_keeps_the_warm_pool() -> None:
    now = [0.0]
    warm = WarmPool(idle_s=100, now=lambda: now[0])
    try:
        warm.open()
        first = warm.pid
        now[0] = 90
        warm.open()
        now[0] = 180
        assert warm.pid == first
        now[0] = 189
        assert warm.pid is None
        warm.open()
        assert warm.pid not in (None, first)
    finally:
        warm.close()


def test_a_node_with_an_environment_of_its_own_is_not_given_to_the_warm_pool(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = start.prepare(load(str(write(home)))).plan.nodes[0]
    spare = WarmAgent.__new__(WarmAgent)
    assert spare.fits(planned)
    planned.env["LD_PRELOAD"] = "x"
    assert not spare.fits(planned)
