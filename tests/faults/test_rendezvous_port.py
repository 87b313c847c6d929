"""Ports of the rendezvous at default settings: runs beside each other, and a port that another program takes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from bench import Bench
from waiting import LIMIT_S, until

from gputrain_tui.history.plan_file import read_plan
from gputrain_tui.history.record_tail import last_step
from gputrain_tui.history.run_folders import Run
from gputrain_tui.plan.planner import rendezvous_port
from trainer.contract.outcome import PORT_TAKEN
from trainer.contract.record import Finding, decode_events
from trainer.host.ports import free_port

TAKER = Path(__file__).parents[1] / "support" / "port_taker.py"
SCRIPT = """\
import os, pathlib
here = pathlib.Path(__file__)
here.with_name(f"port-of-{os.environ['RANK']}").write_text(os.environ["MASTER_PORT"])
"""


def steps(run: Run) -> list[int]:
    return [0 if (step := last_step(run.dir, rank)) is None else step.step for rank in (0, 1)]


def test_two_runs_at_default_settings_train_at_once(bench: Bench) -> None:
    recipe = bench.gated_recipe(2, 4)
    commands = [bench.start("run", recipe) for _ in range(2)]
    until(lambda: len(bench.runs()) == 2 and all(min(steps(run)) >= 1 for run in bench.runs()))
    assert all(command.poll() is None for command in commands)
    ports = [rendezvous_port(read_plan(run.dir)) for run in bench.runs()]
    bench.gate.touch()
    said = [command.communicate(timeout=LIMIT_S)[1] for command in commands]
    assert [command.returncode for command in commands] == [0, 0], said
    assert None not in ports
    assert ports[0] != ports[1]
    assert [steps(run) for run in bench.runs()] == [[4, 4]] * 2


def with_taker(bench: Bench, recipe: Path, times: int) -> list[str]:
    """Have ports taken before each node's command starts; return the words of a run of the recipe."""
    (bench.folder / "taken").touch()
    setup = f'"{sys.executable}" "{TAKER}" {times} "{bench.folder}/taken" "$@"'
    return ["run", str(recipe), "--set", f"cluster.setup={json.dumps(setup)}"]


def taken(bench: Bench) -> list[int]:
    return [int(port) for port in (bench.folder / "taken").read_text().split()]


def test_a_run_whose_port_is_taken_before_its_ranks_meet_starts_again_at_another(bench: Bench) -> None:
    done = bench.call(*with_taker(bench, bench.recipe(), 2))
    assert done.returncode == 0, done.stderr
    (run,) = bench.runs()
    assert (run.state, run.status.restarts, steps(run)) == ("finished", 0, [5, 5])
    first, second = taken(bench)
    events = decode_events(run.dir.run_events.read_bytes())
    said = [event.message for event in events if isinstance(event, Finding) and event.kind == PORT_TAKEN]
    assert [line.partition(";")[0] for line in said] == [
        f"port {port} of localhost was taken before the ranks met there" for port in (first, second)
    ]
    assert said[0].endswith(f"starting again at port {second}")
    assert said[0] in done.stderr


def test_the_ranks_of_a_script_get_the_port_at_which_they_meet(bench: Bench) -> None:
    (bench.folder / "own.py").write_text(SCRIPT)
    recipe = bench.folder / "script.toml"
    recipe.write_text('[[cluster.nodes]]\ncpu_ranks = 2\n[train]\nscript = "own.py"\n')
    done = bench.call(*with_taker(bench, recipe, 1))
    assert done.returncode == 0, done.stderr
    (run,) = bench.runs()
    ports = {(bench.folder / f"port-of-{rank}").read_text() for rank in (0, 1)}
    (message,) = [
        event.message
        for event in decode_events(run.dir.run_events.read_bytes())
        if isinstance(event, Finding) and event.kind == PORT_TAKEN
    ]
    assert {message.rpartition(" ")[2]} == ports


@pytest.mark.parametrize("fixed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_whose_port_is_always_taken_fails_with_the_reason_and_leaves_nothing(bench: Bench, fixed: bool) -> None:
    port = free_port()
    words = ["--set", f"cluster.port={port}"] if fixed else []
    done = bench.call(*with_taker(bench, bench.recipe(), 9), *words)
    found = taken(bench)
    assert (done.returncode, len(found)) == (2, 1 if fixed else 4), done.stderr
    assert f"port {found[-1]} is in use on this machine" in done.stderr.splitlines()[-1]
    assert fixed is (found == [port])
    assert not bench.runs()
