"""A run that another run's script starts detached: it outlives that script, its run and a stop of it."""

from __future__ import annotations

import pytest
from bench import Bench
from waiting import until

from gputrain_tui.history.run_folders import Run
from gputrain_tui.lifecycle import leftovers

RECIPE = """\
name = "{name}"

[[cluster.nodes]]
cpu_ranks = 1

[train]
script = "{folder}/{name}.py"
"""
OUTER = """\
import subprocess, sys, time
from pathlib import Path
subprocess.run([sys.executable, "-m", "gputrain_tui", "run", "inner.toml", "--detach"], check=True)
while not Path("end-outer").exists():
    time.sleep(0.01)
"""
INNER = """\
import tempfile, time
from pathlib import Path
Path("inner-began").touch()
while not Path("end-inner").exists():
    time.sleep(0.01)
with tempfile.TemporaryFile() as file:
    file.write(b"kept")
"""


def run_named(bench: Bench, name: str) -> Run:
    return next(run for run in bench.runs() if run.id.endswith(name))


@pytest.mark.parametrize("how", ["finished", "stopped"])
def test_a_detached_run_outlives_the_run_whose_script_started_it(bench: Bench, how: str) -> None:
    for name, script in (("outer", OUTER), ("inner", INNER)):
        (bench.folder / f"{name}.py").write_text(script)
        (bench.folder / f"{name}.toml").write_text(RECIPE.format(name=name, folder=bench.folder))
    outer = bench.start("run", "outer.toml")
    until(lambda: (bench.folder / "inner-began").exists() or outer.poll() is not None)
    assert outer.poll() is None, outer.communicate()
    if how == "stopped":
        done = bench.call("stop", run_named(bench, "outer").id)
        assert done.stdout.endswith("is stopped; processes left: none\n"), done
    else:
        (bench.folder / "end-outer").touch()
    out, err = outer.communicate()
    assert run_named(bench, "outer").state == how, out + err
    assert run_named(bench, "inner").state == "running"
    (bench.folder / "end-inner").touch()
    until(lambda: run_named(bench, "inner").state != "running")
    inner = run_named(bench, "inner")
    assert inner.state == "finished", inner.dir.rank_log(0).read_text()
    until(lambda: not leftovers.supervisors_of(inner.dir.path) + leftovers.processes_of(inner.dir.path))
