"""Two hosts of a network whose link is slow: what its record is diagnosed to be."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from host_recipe import ENVIRON, as_process, recipe
from network_namespaces import LIMIT_S, network, require_namespaces

from gputrain_tui.diagnosis import HISTORY, Diagnosis
from gputrain_tui.history.run_reader import RunReader
from gputrain_tui.state import RunState
from trainer.contract.record import AnyEvent, Finding, RunDir

INTERFACES = {"h1": "eth0", "h2": "eth0"}
STEPS = 90
RATE = "40mbit"
"""Of each host's interface. Gradients of a third of a megabyte take about 70 ms."""


def findings(record: Path) -> list[Finding]:
    """Diagnose a record as it came."""
    reader = RunReader(RunDir(record))
    events: list[AnyEvent] = []
    while batch := reader.poll():
        events += batch
    reader.close()
    state, diagnosis, found = RunState(history=HISTORY), Diagnosis(), list[Finding]()
    for event in sorted(events, key=lambda event: event.time):
        state.apply(event)
        found += diagnosis.update(state, event.time)
    return found


@pytest.mark.parametrize("slow", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_slow_link_bounds_the_run_and_is_no_uneven_work(tmp_path: Path, slow: bool) -> None:
    require_namespaces()
    if shutil.which("tc") is None:
        pytest.skip("needs tc (iproute2)")
    with network(tmp_path, INTERFACES) as hosts:
        for host in hosts if slow else []:
            shaped = ["tc", "qdisc", "add", "dev", host.interface, "root", "tbf", "rate", RATE]
            done = host.run(*shaped, "burst", "32kbit", "latency", "400ms", check=False)
            if done.returncode:
                pytest.skip(f"this kernel shapes no link: {done.stderr.strip()}")
        text = recipe([host.name for host in hosts], [1, 1], task={"width": 4000, "samples": 2000}, max_updates=STEPS)
        (tmp_path / "recipe.toml").write_text(text)
        plan = [
            sys.executable,
            "-m",
            "gputrain_tui",
            "plan",
            "recipe.toml",
            "--shell",
            "--run-dir",
            tmp_path / "record",
        ]
        lines = hosts[0].run(*plan, cwd=tmp_path, env=ENVIRON).stdout.splitlines()
        with (tmp_path / "output").open("w") as output:
            started = [
                host.start("sh", "-c", as_process(command), cwd=tmp_path, env=ENVIRON, stdout=output, stderr=output)
                for host, command in zip(hosts, lines[1::2], strict=True)
            ]
            codes = [process.wait(LIMIT_S) for process in started]
    assert codes == [0, 0], (tmp_path / "output").read_text()
    found = findings(tmp_path / "record")
    print([finding.message for finding in found])
    kinds = {finding.kind for finding in found}
    assert ("communication_bound" in kinds, "imbalance" in kinds) == (slow, False)
