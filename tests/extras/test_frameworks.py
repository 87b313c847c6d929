"""Unchanged scripts of Lightning, Hugging Face, accelerate and plain DDP, started by the recipes of the help.

They run with the real packages, which `pip install -e '.[test,frameworks]'` brings.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest
import torch
from documents import DOCUMENTS
from waiting import LIMIT_S

from gputrain_tui.history.run_folders import list_runs
from gputrain_tui.history.run_reader import RunReader
from trainer.contract.record import AnyEvent, Finding, Step
from trainer.host.ports import free_port

PAGE = DOCUMENTS["scripts"]
SCRIPTS = Path(__file__).with_name("scripts")
PACKAGES = {"plain": "torch", "lightning": "lightning", "huggingface": "transformers", "accelerate": "accelerate"}
"""Package that the script of each recipe needs."""
OF_OTHERS = [name for name in PACKAGES if name != "plain"]
"""Those whose script is of another framework."""
SAMPLES = {"huggingface": 16}
"""Samples of a rank in a step, where they are not 64."""
PASSES = {"accelerate": 2}
"""Forward passes in a step, where they are not one."""
STEPS = 200
WARM = 5
"""Steps in which DDP arranges its buckets."""
FIRST = 161
"""Step from which on rank 1 is held up."""
SOON = 20
"""Steps after which it must have been named."""
PHASES = ("forward_ms", "backward_ms", "optimizer_ms", "sync_exposed_ms")


class FrameworkRun:
    """What a run left behind."""

    def __init__(self, folder: Path, done: subprocess.CompletedProcess[str]) -> None:
        self.folder, self.code, self.stdout, self.stderr = folder, done.returncode, done.stdout, done.stderr
        self.dir = list_runs(folder / "home" / "runs")[0].dir
        self.events: list[AnyEvent] = []
        reader = RunReader(self.dir)
        while batch := reader.poll():
            self.events += batch
        reader.close()

    @property
    def every_step(self) -> list[Step]:
        return [event for event in self.events if isinstance(event, Step)]

    def steps(self, rank: int) -> list[Step]:
        return [step for step in self.every_step if step.rank == rank]

    def named_after(self, *, rank: int, cause: str, first: int) -> float:
        """Return the steps done by the first finding of a slow rank from step ``first`` on; infinity without one."""
        times = [found.time for found in self.stragglers if (found.rank, found.cause) == (rank, cause)]
        done = [max(step.step for step in self.every_step if step.time <= time) for time in times]
        return min((step for step in done if step >= first), default=math.inf)

    @property
    def stragglers(self) -> list[Finding]:
        found = [event for event in self.events if isinstance(event, Finding)]
        return [event for event in found if event.kind == "straggler" and event.state == "raised"]

    def weights(self, rank: int) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = torch.load(self.folder / f"weights.{rank}.pt")
        return found


Run = Callable[..., FrameworkRun]


@pytest.fixture(scope="module", params=PACKAGES)
def name(request: pytest.FixtureRequest) -> str:
    """The name of a recipe."""
    package = PACKAGES[request.param]
    pytest.importorskip(package, reason="needs the packages of an extra: pip install -e '.[test,frameworks]'")
    return str(request.param)


@pytest.fixture(scope="module")
def run(name: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run the recipe as the help does, in a folder of its own with the scripts."""

    def run(*words: str, **faults: str) -> FrameworkRun:
        folder = copy_example(name, tmp_path_factory.mktemp(name))
        done = subprocess.run(
            ["bash", "-c", " ".join([command(name), *words])],
            cwd=folder,
            env=os.environ
            | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "NO_COLOR": "1", "COLUMNS": "120"}
            | {"GPUTRAIN_HOME": str(folder / "home")}
            | faults,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        return FrameworkRun(folder, done)

    return run


def copy_example(name: str, folder: Path) -> Path:
    """Fill a folder with the scripts and the recipe."""
    shutil.copytree(SCRIPTS, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    (recipe,) = re.findall(rf'^```toml\n(name = "{name}"\n.*?)^```$', PAGE, re.DOTALL | re.MULTILINE)
    (folder / f"{name}.toml").write_text(recipe)
    return folder


def command(name: str) -> str:
    """Return the help's command for the recipe."""
    (found,) = re.findall(rf"^gputrain run {name}\.toml$", PAGE, re.MULTILINE)
    return str(found)


@pytest.fixture(scope="module")
def held_up(run: Run, name: str) -> FrameworkRun:
    """A run whose rank 1 is held up at the end."""
    return run_held_up(run, name)


def run_held_up(run: Run, name: str) -> FrameworkRun:
    return run(HELD_UP=f"1:{(FIRST - 1) * PASSES.get(name, 1)}")


# --- what is measured without a line in the script -----------------------------------------------------------------


def test_every_step_of_both_ranks_is_in_the_record_with_its_phases(held_up: FrameworkRun, name: str) -> None:
    assert held_up.code == 0, held_up.stdout + held_up.stderr
    for rank in (0, 1):
        steps = held_up.steps(rank)
        assert [sum(event.steps for event in steps), steps[-1].step] == [STEPS, STEPS]
        assert sum(event.samples for event in steps) == STEPS * SAMPLES.get(name, 64)
        losses = [event.loss for event in steps]
        assert all(loss is not None and math.isfinite(loss) for loss in losses)
        assert losses[-1] < losses[0] / 2
        assert sum(event.data_ms is not None for event in steps) > len(steps) / 2, "accelerate reads a batch ahead"
        warm = [event for event in steps if event.step - event.steps >= WARM]
        for event in warm:
            phases = {phase: getattr(event, phase) for phase in PHASES}
            assert None not in phases.values(), event
            assert 0 < sum(phases.values()) + (event.data_ms or 0) <= event.step_ms, event
    late = [event for event in held_up.steps(1) if event.step > FIRST]
    assert median(event.forward_ms for event in late) > 30 * PASSES.get(name, 1)
    waits = [median(event.sync_exposed_ms for event in held_up.steps(rank) if event.step > FIRST) for rank in (0, 1)]
    assert waits[0] > waits[1], "rank 0 waits for rank 1, and both for cores where the machine has none left"


def test_the_closing_table_has_losses_phases_and_synchronisation_of_both_ranks(held_up: FrameworkRun) -> None:
    title, *rows = (re.split(r"\s{2,}", line.strip()) for line in held_up.stdout.splitlines()[:3])
    for rank, row in enumerate(rows):
        cells = dict(zip(title, row, strict=True))
        assert (cells["rank"], cells["steps"]) == (str(rank), str(STEPS))
        assert float(cells["loss"]) > 0
        for share in ("data", "compute", "sync", "optimizer"):
            assert 0 <= float(cells[share].removesuffix("%")) < 100, share


def test_the_rank_that_is_held_up_is_named_soon_and_with_its_cause(held_up: FrameworkRun, run: Run, name: str) -> None:
    """Other work on the machine may be found, too, or hide it for some steps: one of three runs must show it."""
    found = []
    for record in itertools.chain([held_up], (run_held_up(run, name) for _ in range(2))):
        if record.named_after(rank=1, cause="forward", first=FIRST) <= FIRST + SOON:
            return
        found.append([(finding.step, finding.message) for finding in record.stragglers])
    pytest.fail(f"rank 1 is not named for its forward pass by step {FIRST + SOON}: {found}")


# --- the script sees no difference ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    # Hugging Face trains by accelerate.
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name == "accelerate" else []) for name in OF_OTHERS],
    indirect=True,
    scope="module",
)
def test_the_weights_are_equal_bit_for_bit_without_measuring(run: Run, held_up: FrameworkRun) -> None:
    plain = run("--set", "train.instrument=false")
    assert plain.code == 0, plain.stderr
    assert not plain.steps(0)
    for rank in (0, 1):
        measured, unmeasured = held_up.weights(rank), plain.weights(rank)
        assert measured.keys() == unmeasured.keys()
        assert all(torch.equal(measured[key], unmeasured[key]) for key in measured)


@pytest.mark.parametrize(
    "name",
    ["lightning", *(pytest.param(name, marks=pytest.mark.slow) for name in ("accelerate", "huggingface"))],
    indirect=True,
    scope="module",
)
def test_a_failing_script_ends_as_under_python(run: Run, name: str, tmp_path: Path) -> None:
    done = run("--set", "'cluster.nodes=[{cpu_ranks=1}]'", FAILS="0:5")
    assert done.code == 1
    assert "ValueError: no more data" in done.stderr
    code, errors = run_under_python(copy_example(name, tmp_path), f"train_{name}.py", FAILS="0:5")
    assert code == 1
    assert traceback(done.dir.rank_log(0).read_text(), done.folder) == traceback(errors, tmp_path)


def run_under_python(folder: Path, script: str, **faults: str) -> tuple[int, str]:
    """Run the only rank of a group; return its exit code and errors."""
    place = {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    place |= {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
    settings = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, script],
        cwd=folder,
        env=os.environ | place | settings | faults,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    return done.returncode, done.stderr


def traceback(log: str, folder: Path) -> list[str]:
    """Return the lines of a log's last traceback, paths in the folder without it."""
    _, _, found = log.replace(f"{folder}/", "").rpartition("Traceback (most recent call last):\n")
    return found.splitlines()
