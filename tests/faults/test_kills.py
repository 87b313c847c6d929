"""Kills of any process at any moment: a command that has ended leaves a status with the outcome."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest
from bench import LIMIT_S, Bench, rank_pid, supervisor_pid, until
from pid_namespace import run_in_namespace

from gputrain_tui.history.record_tail import last_step
from gputrain_tui.history.run_folders import Run, open_run
from gputrain_tui.history.status_file import read_status, write_status
from gputrain_tui.lifecycle import leftovers
from gputrain_tui.lifecycle.supervisor_process import adopt, start_supervisor
from trainer.contract.record import RunEnded, decode_events

RANDOM = Path(__file__).with_name("random_kills.py")


def ended_events(run: Run) -> list[RunEnded]:
    return [event for event in decode_events(run.dir.run_events.read_bytes()) if isinstance(event, RunEnded)]


def successors(command: int) -> list[int]:
    found = []
    for process in psutil.Process(command).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # gone, or a zombie: the one that was killed
            if "--adopt" in process.cmdline():
                found.append(process.pid)
    return found


def test_a_run_whose_supervisor_and_its_successor_are_killed_is_settled_by_the_command(bench: Bench) -> None:
    command = bench.start("run", bench.torch_free_recipe(), "--json")
    run = bench.await_training()
    os.kill(supervisor_pid(run), signal.SIGKILL)
    until(lambda: successors(command.pid))
    for pid in successors(command.pid):  # it has modules to import before it can do anything
        os.kill(pid, signal.SIGKILL)
    out, err = command.communicate(timeout=LIMIT_S)
    status = read_status(run.dir)
    assert status is not None
    assert (command.returncode, status.status, status.exit_code) == (1, "failed", 1), err
    assert status.message is not None
    assert "supervisor was killed" in status.message
    assert leftovers.processes_of(run.dir.path) == []
    assert json.loads(out.splitlines()[-1])["type"] == "run_ended"


def successors_of(run: Run) -> list[int]:
    """Return the successors of a run's supervisor: those that wait, and one that has taken over."""
    words = [str(run.dir.path), "--adopt", "--restart"]
    return [each.pid for each in psutil.process_iter(["cmdline"]) if (each.info["cmdline"] or [])[-3:] == words]


def test_a_killed_supervisor_of_a_detached_run_is_replaced_and_restarts_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUTRAIN_HOME", str(bench.folder / "home"))
    recipe = bench.torch_free_recipe()
    restarts = "[cluster]\nmax_restarts = 1\nrestart_wait = 0\n[[cluster.nodes]]"
    recipe.write_text(recipe.read_text().replace("[[cluster.nodes]]", restarts))
    run = bench.train_detached(recipe)
    first = supervisor_pid(run)
    until(lambda: successors_of(run))
    os.kill(first, signal.SIGKILL)
    until(lambda: supervisor_pid(run) != first)
    second = supervisor_pid(run)
    assert successors_of(run) == [second], "one that is killed at once is not replaced"
    os.kill(rank_pid(run, 0), signal.SIGKILL)
    killed = time.time()
    until(lambda: (step := last_step(run.dir, 0)) is not None and step.time > killed + 1, "it is started again")
    assert (bench.runs()[0].state, bench.runs()[0].status.restarts) == ("running", 1)
    assert bench.call("stop", run.id).returncode == 0
    assert supervisor_pid(run) == second
    assert leftovers.processes_of(run.dir.path) == []


def test_a_successor_that_waits_ends_with_its_run(bench: Bench) -> None:
    run = bench.train_detached(bench.torch_free_recipe())
    until(lambda: successors_of(run))
    assert bench.call("stop", run.id).returncode == 0
    assert successors_of(run) == []


def test_of_a_lost_run_whose_ranks_train_on_the_command_that_ends_it_is_named_and_stacks_are_printed(
    bench: Bench,
) -> None:
    run = bench.train_detached(bench.torch_free_recipe())
    until(lambda: successors_of(run))
    supervisors = [*successors_of(run), supervisor_pid(run)]
    node = leftovers.processes_of(run.dir.path)
    for pid in supervisors:  # the successor first
        os.kill(pid, signal.SIGKILL)
    until(lambda: bench.runs()[0].state == "lost")
    told = f"its supervisor was killed, but its ranks train on: `gputrain stop {run.id}` takes it over and ends it"
    (entry,) = json.loads(bench.call("runs", "--json").stdout)
    assert (entry["state"], entry["message"]) == ("lost", told)
    assert "its supervisor was killed, but its ranks train on: `gputrain stop" in bench.call("runs").stdout
    assert told in " ".join(bench.call("report", run.id).stdout.split())
    stacks = bench.call("stacks", run.id)
    assert (stacks.returncode, stacks.stderr) == (0, ""), stacks.stdout
    for pid in node:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until(lambda: not leftovers.processes_of(run.dir.path))
    told = f"its supervisor was killed, with its ranks: `gputrain stop {run.id}` takes it over and ends it"
    stacks = bench.call("stacks", run.id)
    assert (stacks.returncode, stacks.stdout) == (1, "")
    assert f"{run.id} is lost: {told}" in stacks.stderr
    assert bench.call("stop", run.id).returncode == 0


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    bench = Bench(tmp_path_factory.mktemp("ended"))
    assert bench.call("run", bench.torch_free_recipe(5)).returncode == 0
    return bench


@pytest.fixture
def run(ended: Bench, bench: Bench) -> Run:
    """A run that has finished, to be changed."""
    shutil.copytree(ended.folder, bench.folder, dirs_exist_ok=True)
    return bench.runs()[0]


def test_an_ended_run_is_not_changed_by_a_late_supervisor(run: Run) -> None:
    before = run.dir.status.read_bytes(), run.dir.run_events.read_bytes()
    assert start_supervisor(run.dir, leased=False, adopting=True).wait(LIMIT_S) == 0
    assert (run.dir.status.read_bytes(), run.dir.run_events.read_bytes()) == before


@pytest.mark.parametrize(("how", "code"), [("finished", 0), ("stopped", 130)])
def test_the_status_follows_the_last_event_of_a_supervisor_killed_before_writing_it(
    run: Run, how: str, code: int
) -> None:
    (ended,) = ended_events(run)
    lines = run.dir.run_events.read_bytes().splitlines(keepends=True)[:-1]
    run_ended = msgspec.json.encode({**json.loads(msgspec.json.encode(ended)), "status": how, "exit_code": code})
    run.dir.run_events.write_bytes(b"".join(lines) + run_ended + b"\n")
    status = read_status(run.dir)
    assert status is not None
    dead = subprocess.Popen(["true"])
    dead.wait()
    assert status.supervisor is not None
    status.status, status.exit_code = "running", None
    status.supervisor = msgspec.structs.replace(status.supervisor, pid=dead.pid)
    write_status(run.dir, status)
    lost = open_run(run.dir.path)
    assert lost is not None
    assert lost.state == "lost"
    settled = adopt(lost)
    assert (settled.state, settled.status.exit_code) == (how, code)
    assert len(ended_events(run)) == 1


@pytest.mark.parametrize(
    "kills", [2, pytest.param(74, marks=pytest.mark.slow)], ids=["a few", "as many as the attack that found it"]
)
def test_kills_at_random_moments_never_leave_the_status_running(tmp_path: Path, kills: int) -> None:
    namespace = ["unshare", "--pid", "--fork", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*namespace, "true"], capture_output=True).returncode:
        pytest.skip("needs PID namespaces (root, unshare)")
    words = [*namespace, "--kill-child", sys.executable, str(RANDOM), str(tmp_path), str(kills), "15"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=LIMIT_S + 30 * kills)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == kills
    for one in found:
        ended = {1: "failed", 130: "stopped"}  # the latter where the killed process was of no importance
        assert one["status"] == ended[one["returncode"]], one
        assert one["exit_code"] == one["returncode"], one
        assert one["left"] == [], one


def test_a_start_that_is_killed_or_refused_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    done = run_in_namespace(Path(__file__).with_name("killed_at_start.py"), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    moments = ["supervisor", "node agent", "fork server", "torch", "ranks"]
    killed = [f"{moment}, command: []" for moment in moments]
    killed += ["fork server, node agent: []", "torch, node agent: []"]
    assert done.stdout.splitlines() == [*killed, "refused, 2: [] []"], done.stderr
