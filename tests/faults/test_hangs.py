"""Real ranks that stop going on: who is named, in every state, and after the collective's time-out as well."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from bench import FOR_EVER, LIMIT_S, Bench, rank_pid, supervisor_pid, until

from gputrain_tui.diagnosis.advice import ADVICE
from gputrain_tui.history.run_folders import Run
from gputrain_tui.history.run_reader import RunReader
from gputrain_tui.lifecycle import leftovers
from gputrain_tui.lifecycle.diagnosis_watch import LiveDiagnosis
from gputrain_tui.lifecycle.supervisor_process import adopt
from gputrain_tui.state import RunState
from gputrain_tui.state.finding_text import run_mark
from trainer.contract.record import AnyEvent, Doing, Failure, Finding, NodeSample, RankStacks, Step

SPEED = 40
"""How much faster than time the clock of the diagnosis runs: a rank is given up after a minute or five."""
RECIPE = """\
name = "hang"

[[cluster.nodes]]
cpu_ranks = {ranks}

[train]
task = "{task}:HangTask"
batch_size = 4
max_epochs = {epochs}
threads = 1

[task]
where = "{where}"
how = "{how}"
"""
SCRIPT_RECIPE = """\
name = "script"

[[cluster.nodes]]
cpu_ranks = 2

[train]
script = "{script}"
args = ["{how}"]
"""


def recipe(bench: Bench, where: str, *, how: str = "sleep", ranks: int = 2, epochs: int = 3) -> Path:
    path = bench.folder / "hang.toml"
    task = Path(__file__).with_name("hang_task.py")
    path.write_text(RECIPE.format(task=task, where=where, how=how, ranks=ranks, epochs=epochs))
    return path


def script_recipe(bench: Bench, how: str) -> Path:
    path = bench.folder / "script.toml"
    path.write_text(SCRIPT_RECIPE.format(script=Path(__file__).with_name("unmeasured_script.py"), how=how))
    return path


def failed(bench: Bench, *words: str | Path) -> str:
    """Run to the expected exit code and return standard error."""
    process = bench.start("run", *words)
    _, err = process.communicate(timeout=LIMIT_S)
    print(err)
    assert process.returncode == 1
    return err


class Hanging:
    """A run of which a rank hangs, and its record."""

    def __init__(self, bench: Bench, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.run = until(bench.runs)[0]
        until((self.run.dir.path / "hangs").exists)

    def first_stall(self) -> Finding:
        """Diagnose the run by a clock that is faster: from here on nothing happens in it."""
        begun = time.time()
        diagnosis = LiveDiagnosis(self.run.dir, now=lambda: begun + SPEED * (time.time() - begun))
        found: Finding = until(lambda: next((f for f in diagnosis.check() if f.kind == "stalled"), None))
        diagnosis.close()
        print(found.message)
        return found

    def close(self) -> None:
        for _ in range(2):  # the second does not wait for ranks that cannot answer
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGINT)
                until(lambda: self.process.poll() is not None or self.read_status() == "stopping")
        self.process.communicate(timeout=LIMIT_S)

    def read_status(self) -> str:
        return self.run.dir.status.read_text().partition('"status":"')[2].partition('"')[0]


@pytest.fixture
def hanging(bench: Bench) -> Iterator[Callable[..., Hanging]]:
    begun: list[Hanging] = []

    def begin(recipe: Path) -> Hanging:
        begun.append(Hanging(bench, bench.start("run", recipe)))
        return begun[-1]

    yield begin
    for each in begun:
        each.close()


def await_line(hanging: Hanging, rank: int, line: str) -> None:
    """Wait until a sample has the line at which a rank stays."""
    until(
        lambda: any(
            sample.rank == rank and line in sample.line
            for event in read(hanging.run)[1]
            if isinstance(event, NodeSample)
            for sample in event.ranks
        )
    )


def read(run: Run) -> tuple[RunState, list[AnyEvent]]:
    state, events = RunState(), list[AnyEvent]()
    reader = RunReader(run.dir)
    while batch := reader.poll():
        events += batch
        state.apply_all(batch)
    reader.close()
    return state, events


@pytest.mark.parametrize(
    ("where", "words"),
    [
        # The first is also asked of a task of one's own, below.
        pytest.param("datasets", "rank 1 on HOST has been getting ready for more than", marks=pytest.mark.slow),
        pytest.param("model", "rank 1 on HOST has been getting ready for more than", marks=pytest.mark.slow),
        pytest.param("first", "rank 1 on HOST has done no step for more than", marks=pytest.mark.slow),
        pytest.param("valid", "rank 1 on HOST has been validating for", marks=pytest.mark.slow),
        pytest.param("epoch", "rank 1 on HOST has done no step for more than", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_hangs_is_named_in_whichever_state(
    bench: Bench, hanging: Callable[..., Hanging], where: str, words: str
) -> None:
    found = hanging(recipe(bench, where)).first_stall()
    assert (found.rank, found.state) == (1, "raised")
    assert found.message.replace(f" on {found.host} ", " on HOST ").startswith(words)
    assert "and the others wait" in found.message


def test_a_rank_that_spins_in_a_validation_is_named(bench: Bench, hanging: Callable[..., Hanging]) -> None:
    found = hanging(recipe(bench, "valid", how="spin", ranks=3)).first_stall()
    assert (found.rank, found.cause) == (1, "busy")
    assert "has been validating for" in found.message


@pytest.mark.parametrize(
    ("where", "ranks"),
    [
        ("first", 2),
        pytest.param("valid", 3, marks=pytest.mark.slow),
        pytest.param("epoch", 2, marks=pytest.mark.slow),
    ],
)
def test_after_the_time_out_of_the_others_the_rank_that_hung_is_the_cause_and_its_stall_stands(
    bench: Bench, where: str, ranks: int
) -> None:
    err = failed(bench, recipe(bench, where, ranks=ranks), "--set", "train.distributed_timeout=18")
    assert re.search(r"^rank 1 failed on \S+( after step \d+)?: stalled$", err, re.MULTILINE)
    assert "rank 0 failed" not in err
    state, _ = read(bench.runs()[0])
    assert state.root_cause is not None
    assert (state.root_cause.rank, state.root_cause.kind) == (1, "stalled")
    assert ("stalled", 1) in state.findings
    assert all(finding.state == "raised" for finding in state.past_findings if finding.kind == "stalled")


def test_of_ranks_that_give_up_before_a_stall_is_found_the_silent_one_is_the_cause(bench: Bench) -> None:
    err = failed(bench, recipe(bench, "first"), "--set", "train.distributed_timeout=3")
    assert re.search(r"^rank 1 failed on \S+: silent$", err, re.MULTILINE)
    assert "rank 1 reported nothing; rank 0 gave up:" in err


def test_a_rank_that_left_in_the_middle_is_the_cause(bench: Bench) -> None:
    err = failed(bench, script_recipe(bench, "leave"))
    assert re.search(r"^rank 1 failed on \S+: left early$", err, re.MULTILINE)
    assert "rank 1 had exited with code 0 while others were still training; rank 0 gave up:" in err


def test_a_script_that_hangs_is_named_by_where_it_is_and_by_its_own_line(
    bench: Bench, hanging: Callable[..., Hanging]
) -> None:
    script = bench.folder / "script.py"
    script.write_text(
        "import os, time, torch, torch.distributed as dist\n"
        "from pathlib import Path\n"
        "from torch.nn.parallel import DistributedDataParallel\n"
        "def augment(number):\n"
        "    if number == 40 and dist.get_rank() == 1:\n"
        "        Path(os.environ['GPUTRAIN_RUN'], 'hangs').touch()\n"
        "        time.sleep(600)\n"
        "dist.init_process_group('gloo')\n"
        "model = DistributedDataParallel(torch.nn.Linear(4, 1))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "for number, batch in enumerate(torch.utils.data.DataLoader(torch.randn(4000, 4), batch_size=8)):\n"
        "    augment(number)\n"
        "    optimizer.zero_grad()\n"
        "    model(batch).square().mean().backward()\n"
        "    optimizer.step()\n"
    )
    path = bench.folder / "script.toml"
    path.write_text(SCRIPT_RECIPE.format(script=script, how=""))
    run = hanging(path)
    until(lambda: any(isinstance(event, Doing) and event.rank == 1 for event in read(run.run)[1]))
    found = run.first_stall()
    assert found.rank == 1
    assert "rank 1 is between its batch and its forward pass (" in found.message
    assert "script.py:7 in augment)" in found.message
    assert run_mark([found]) == "rank 1 stalled: between batch and forward (script.py:7 in augment)"
    run.close()
    state, _ = read(run.run)
    assert state.ranks[1].doing is not None
    assert [(view.phase, view.display_state) for view in state.ranks.values()] == [(None, "stopped")] * 2


def test_a_script_whose_threads_keep_its_process_is_told_apart_from_ranks_that_wait_for_each_other(
    bench: Bench, hanging: Callable[..., Hanging]
) -> None:
    script = bench.folder / "script.py"
    script.write_text(
        "import os, threading, torch, torch.distributed as dist\n"
        "from pathlib import Path\n"
        "from torch.nn.parallel import DistributedDataParallel\n"
        "def wait_for_news():\n"
        "    threading.Event().wait()\n"
        "dist.init_process_group('gloo')\n"
        "threading.Thread(target=wait_for_news).start()\n"
        "model = DistributedDataParallel(torch.nn.Linear(4, 1))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "for batch in torch.randn(10, 8, 4):\n"
        "    optimizer.zero_grad()\n"
        "    model(batch).square().mean().backward()\n"
        "    optimizer.step()\n"
        "dist.destroy_process_group()\n"
        "Path(os.environ['GPUTRAIN_RUN'], 'hangs').touch()\n"
    )
    path = bench.folder / "script.toml"
    path.write_text(SCRIPT_RECIPE.format(script=script, how=""))
    run = hanging(path)
    until(lambda: {view.stage for view in read(run.run)[0].ranks.values()} == {"threads"})
    found = run.first_stall()
    assert found.rank is None
    assert found.message.startswith("every rank has waited for threads of its script, whose code has ended, for more")
    assert found.message.endswith(", after step 10; 2 ranks are at script.py:5 in wait_for_news")
    assert found.advice == ADVICE["stalled_ended"]
    assert run_mark([found]) == "stalled: threads of an ended script"


def test_a_rank_of_a_script_that_is_not_measured_is_found_to_hang(
    bench: Bench, hanging: Callable[..., Hanging]
) -> None:
    run = hanging(script_recipe(bench, "hang"))
    await_line(run, 1, "unmeasured_script.py:21 in main")
    found = run.first_stall()
    _, events = read(run.run)
    has_wait_channels = any(rank.sleeps_in for event in events if isinstance(event, NodeSample) for rank in event.ranks)
    assert found.rank == (1 if has_wait_channels else None)
    assert re.match(r"no step was seen, and every rank has done nothing for more than \d+ s", found.message)
    assert "rank 1 is at unmeasured_script.py:" in found.message


def test_the_data_of_a_task_of_ones_own_that_hangs_is_named_by_its_line(
    bench: Bench, hanging: Callable[..., Hanging]
) -> None:
    run = hanging(recipe(bench, "datasets"))
    await_line(run, 1, " in reach")
    found = run.first_stall()
    assert found.rank == 1
    assert found.message.startswith(f"rank 1 on {found.host} has been getting ready for more than")
    assert "and the others wait" in found.message
    assert re.search(r"rank 1 is at .*hang_task.py:\d+ in reach", found.message)


def test_a_stopped_rank_is_reported_with_the_command_that_continues_it_and_cleared_by_it(bench: Bench) -> None:
    process = bench.start("run", bench.recipe(FOR_EVER))
    run = bench.await_training()
    pid = rank_pid(run, 1)

    def stalls() -> list[Finding]:
        return [finding for finding in read(run)[0].past_findings if finding.kind == "stalled"]

    os.kill(pid, signal.SIGSTOP)
    (found,) = until(stalls)
    assert (found.rank, found.cause) == (1, "stopped")
    assert found.message.endswith("; its process is stopped (state T)")
    subprocess.run(["kill", "-CONT", str(pid)], check=True)
    until(lambda: [finding.state for finding in stalls()] == ["raised", "cleared"])
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT_S)
    assert f"`kill -CONT {pid}` on {found.host} continues it" in err


def test_a_killed_fork_server_is_the_cause_and_no_rank(bench: Bench) -> None:
    process = bench.start("run", bench.recipe(FOR_EVER))
    run = bench.await_training()
    server = psutil.Process(rank_pid(run, 1)).parent()
    assert server is not None
    os.kill(server.pid, signal.SIGKILL)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert "the fork server, the parent of all ranks on this node, was ended by SIGKILL" in err
    assert "exit code 255" not in err
    state, _ = read(run)
    assert [event.rank for event in state.failures] == [None]


# --- cluster.on_stall -----------------------------------------------------------------------------------------------

SOON = ("--set", "cluster.stall_timeout=10", "--set", "train.save_every_updates=4")


def test_a_hang_ends_with_the_rank_its_line_and_the_checkpoint_that_is_kept(bench: Bench) -> None:
    err = failed(bench, recipe(bench, "epoch", ranks=3), *SOON)
    run = bench.runs()[0]
    message = run.status.message or ""
    print(message)
    assert message.startswith("rank 1 on ")
    assert re.search(
        r"hangs after step \d+: (.*, )?\S*hang_task\.py:\d+ in reach; the others waited \d\d s for it", message
    )
    assert 'cluster.on_stall = "stop" ended it; the newest checkpoint is that of step 8' in message
    assert message in err
    _, events = read(run)
    answers = [event for event in events if isinstance(event, RankStacks)]
    assert {event.rank for event in answers} == {0, 1, 2}
    assert leftovers.processes_of(run.dir.path) == []


def test_a_hang_is_restarted_from_the_checkpoint_where_the_recipe_says_so(bench: Bench) -> None:
    words = [*SOON, "--set", "cluster.max_restarts=1", "--set", "cluster.on_stall=restart"]
    process = bench.start("run", recipe(bench, "epoch", how="once"), *words)
    _, err = process.communicate(timeout=LIMIT_S)
    print(err)
    assert process.returncode == 0
    state, events = read(bench.runs()[0])
    steps = [event.step for event in events if isinstance(event, Step) and event.rank == 0]
    assert state.step == max(steps) == 24
    failures = [event.message for event in events if isinstance(event, Failure) and event.kind == "stalled"]
    assert len(failures) == 1
    assert 'cluster.on_stall = "restart" ended it' in failures[0]


def test_a_hang_is_only_reported_where_the_recipe_says_so(bench: Bench, hanging: Callable[..., Hanging]) -> None:
    path = recipe(bench, "epoch")
    path.write_text(path.read_text().replace("[train]", '[cluster]\non_stall = "report"\nstall_timeout = 10\n[train]'))
    path.write_text(path.read_text().replace("[[cluster.nodes]]\ncpu_ranks = 2\n", ""))
    path.write_text(path.read_text().replace("[train]", "[[cluster.nodes]]\ncpu_ranks = 2\n\n[train]"))
    found = hanging(path)
    until(lambda: any(isinstance(event, Finding) and event.kind == "stalled" for event in read(found.run)[1]))
    until(lambda: sum(isinstance(event, RankStacks) for event in read(found.run)[1]) >= 2)
    begun = time.monotonic()
    until(lambda: time.monotonic() - begun > 5)  # the time-out has long passed
    assert found.process.poll() is None


def test_on_finding_tells_a_frozen_rank_of_a_detached_run_once_whoever_supervises(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUTRAIN_HOME", str(bench.folder / "home"))
    recipe = bench.recipe(FOR_EVER)
    show = "echo $GPUTRAIN_FINDING_KIND $GPUTRAIN_FINDING_STATE $GPUTRAIN_FINDING_RANK"
    recipe.write_text(f"{recipe.read_text()}[report]\non_finding = {json.dumps(show)}\n")
    run = bench.train_detached(recipe)
    first = supervisor_pid(run)
    os.kill(first, signal.SIGKILL)  # the second one takes over by itself
    until(lambda: supervisor_pid(run) != first)
    os.kill(rank_pid(run, 1), signal.SIGSTOP)
    log = run.dir.on_finding_log
    until(lambda: log.exists() and log.read_text() == "stalled raised 1\n")
    supervisor = psutil.Process(supervisor_pid(run))
    supervisor.kill()
    until(lambda: not supervisor.is_running() or supervisor.status() == psutil.STATUS_ZOMBIE)
    adopt(run)  # the third one is started by a command
    os.kill(rank_pid(run, 1), signal.SIGCONT)
    until(lambda: "cleared" in log.read_text())
    assert bench.call("stop", run.id).returncode in (0, 130)
    assert log.read_text() == "stalled raised 1\nstalled cleared 1\n"
