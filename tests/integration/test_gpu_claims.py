"""GPUs that a run has taken: another run is refused by name, also before the driver shows a process of the first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_driver import fake_driver

from gputrain_tui.hosts.inventory import Gpu, is_free, why_busy
from trainer.host.gpu_claims import MACHINE, GpuTakenError, claim_gpus, claims

SCRIPT = """
import os, pathlib, sys
pathlib.Path(sys.argv[1]).touch()
os.read(os.open(sys.argv[2], os.O_RDONLY), 1)
"""
HOLD = """
import os, sys
from trainer.host.gpu_claims import claim_gpus
with claim_gpus(["GPU-a"], "first", shared=False, environ=os.environ):
    print(flush=True)
    sys.stdin.read()
"""


def test_a_claim_is_seen_by_all_and_ends_with_its_process_however_that_ends(tmp_path: Path) -> None:
    environ = {**os.environ, MACHINE: str(tmp_path / "claims")}
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        found = claims(["GPU-a", "GPU-b"], environ)
        assert list(found) == ["GPU-a"]
        assert (found["GPU-a"].run, found["GPU-a"].pid) == ("first", holder.pid)
        taken = Gpu(index=0, uuid="GPU-a", processes=(), claim=found["GPU-a"])
        assert not is_free(taken)
        assert why_busy(taken).startswith(f"taken by run first (pid {holder.pid} of ")
        refused = pytest.raises(GpuTakenError, match=rf"GPU GPU-a is taken by run first \(pid {holder.pid}")
        with refused, claim_gpus(["GPU-b", "GPU-a"], "second", shared=False, environ=environ):
            pass
        assert list(claims(["GPU-a", "GPU-b"], environ)) == ["GPU-a"], "what the refused one had is free again"
        with claim_gpus(["GPU-a"], "third", shared=True, environ=environ):
            assert claims(["GPU-a"], environ)["GPU-a"].run == "first", "a run that shares goes on beside it"
        holder.kill()
        holder.wait()
    assert claims(["GPU-a"], environ) == {}


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """A machine with a driver and a torch for GPUs, as the preflight and a script without torch see it."""
    torch = tmp_path / "packages" / "torch"
    torch.mkdir(parents=True)
    (torch / "__init__.py").touch()
    (torch / "version.py").write_text("__version__ = '2.13.0'\ncuda = '12.8'\n")
    (tmp_path / "own.py").write_text(SCRIPT)
    os.mkfifo(tmp_path / "gate")
    (tmp_path / "r.toml").write_text(
        '[[cluster.nodes]]\ngpus = [1]\n[train]\nscript = "own.py"\nargs = ["ready", "gate"]\n'
    )
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(fake_driver(tmp_path)),
        "PYTHONPATH": str(torch.parent),
        "GPUTRAIN_HOME": str(tmp_path / "home"),
        MACHINE: str(tmp_path / "claims"),
    }


def test_the_second_of_two_launches_is_refused_with_the_run_that_has_the_gpu(
    tmp_path: Path, machine: dict[str, str]
) -> None:
    def gputrain(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "gputrain_tui", *words]
        return subprocess.run(command, cwd=tmp_path, env=machine | more, capture_output=True, text=True, timeout=300)

    first = gputrain("run", "r.toml", "--detach")
    assert first.returncode == 0, first.stderr
    run = first.stdout.strip()
    gate = os.open(tmp_path / "gate", os.O_WRONLY)  # opened once the script of the first run has opened it
    try:
        second = gputrain("run", "r.toml")
        assert (second.returncode, second.stdout) == (3, "")
        assert f"GPU 1 is in use by run {run} (pid " in second.stderr
        # Its preflight sees no claim, as if it had been over before the first run made one: its node agent refuses.
        early = gputrain(
            "run", "r.toml", "--set", f'cluster.env={{ {MACHINE} = "{machine[MACHINE]}" }}', **{MACHINE: "/nowhere"}
        )
        assert (early.returncode, early.stdout) == (3, "")
        assert f"GPU GPU-bbbb is taken by run {run} (pid " in early.stderr.splitlines()[-1]
        assert [entry.name for entry in (tmp_path / "home" / "runs").iterdir()] == [run], "nothing is left of them"
        gpus = json.loads(gputrain("gpus", "--json").stdout)["gpus"]
        assert [gpu["claim"] and gpu["claim"]["run"] for gpu in gpus] == [None, run]
        assert f"taken by run {run}" in gputrain("gpus").stdout
        free = gputrain("check", "r.toml", "--set", 'cluster.nodes=[{gpus = "free"}]')
        assert "has no free GPU" in free.stdout
    finally:
        os.close(gate)
        gputrain("stop", run)
    assert claims(["GPU-bbbb"], machine) == {}
