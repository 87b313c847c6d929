"""Live sinks cost a run nothing but a warning: a package that is missing, a sink that breaks, one that hangs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from stand_in_runs import stand_in_run
from waiting import LIMIT_S, until

from gputrain_tui.history.run_reader import RunReader
from gputrain_tui.history.status_file import read_status
from gputrain_tui.lifecycle import leftovers
from gputrain_tui.lifecycle.supervisor_process import start_supervisor
from trainer.contract.record import Finding

RECIPE = """
[[cluster.nodes]]
cpu_ranks = 1
[train]
task = "lm"
max_updates = 1
[task]
data = "stdlib"
[report]
"""


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_reported_before_there_is_a_run(tmp_path: Path, name: str) -> None:
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is installed here")
    (tmp_path / "wandb").mkdir()  # as wandb leaves one where it logs; no package
    (tmp_path / "r.toml").write_text(f'{RECIPE}{name} = "elsewhere"\n')
    done = subprocess.run(
        [sys.executable, "-m", "gputrain_tui", "run", "r.toml"], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "GPUTRAIN_HOME": str(tmp_path / "home")}, timeout=LIMIT_S,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == (
        f"gputrain: r.toml:10: report.{name}: {name} is not installed for {sys.executable}; "
        f"{sys.executable} -m pip install {name}\n"
    )
    assert not (tmp_path / "home" / "runs").exists()


def test_a_sink_that_breaks_costs_one_warning(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    run = stand_in_run(tmp_path, "gated", recipe=f'[report]\ntensorboard = "{tmp_path}/taken"\n')
    supervisor = start_supervisor(run.dir, leased=False)
    reader, findings = RunReader(run.dir), list[Finding]()

    def is_found() -> bool:
        findings.extend(event for event in reader.poll() if isinstance(event, Finding))
        return any(finding.kind == "not_reported" for finding in findings)

    until(is_found)
    (run.dir.path / "go").touch()
    assert supervisor.wait(LIMIT_S) == 0
    is_found()
    reader.close()
    (finding,) = (finding for finding in findings if finding.kind == "not_reported")
    assert finding.severity == "warning"
    assert finding.message.startswith("report.tensorboard is no longer written: ")
    assert "Error: " in finding.message
    status = read_status(run.dir)
    assert status is not None
    assert (status.status, status.message) == ("finished", None)
    assert leftovers.processes_of(run.dir.path) == []
