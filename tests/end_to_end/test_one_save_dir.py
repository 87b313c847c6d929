"""Two runs with one ``save_dir``, as a user types them: no command takes the weights of the other run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from text_cache import with_task_options
from trained import TASK, train

from trainer.checkpoint import load
from trainer.contract.checkpoint_trailer import owner_of

RECIPE = """\
name = "{name}"

[[cluster.nodes]]
cpu_ranks = 1

[train]
task = "{task}"
batch_size = 10
max_updates = {updates}
seed = {seed}
save_every_updates = 2
threads = 1
save_dir = "kept"
"""
OPTIONS = ("--batch-size", 10, "--save-every-updates", 2)


def gputrain(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "GPUTRAIN_HOME": str(with_task_options(folder / "home")), "NO_COLOR": "1"}
    command = [sys.executable, "-m", "gputrain_tui", *map(str, words)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def recipe(folder: Path, name: str, *, updates: int, seed: int) -> str:
    (folder / f"{name}.toml").write_text(RECIPE.format(name=name, task=TASK, updates=updates, seed=seed))
    return f"{name}.toml"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    done = gputrain(folder, "run", recipe(folder, "first", updates=6, seed=1))
    assert done.returncode == 0, done.stderr
    return folder


def run_id(folder: Path, name: str) -> str:
    (found,) = (folder / "home" / "runs").glob(f"*-{name}")
    return found.name


def validation(done: subprocess.CompletedProcess[str]) -> float:
    events = [json.loads(line) for line in done.stdout.splitlines()]
    (found,) = (event["loss"] for event in events if event["type"] == "validation")
    return float(found)


def test_a_second_run_in_the_folder_is_refused_by_check_run_and_trainer_unless_it_continues_the_first(
    folder: Path,
) -> None:
    before = {path: path.read_bytes() for path in (folder / "kept").glob("*.pt")}
    second = recipe(folder, "second", updates=9, seed=2)
    for command in ("check", "run"):
        done = gputrain(folder, command, second)
        assert done.returncode == 3, done.stderr
        text = done.stdout + done.stderr
        assert f"kept holds {len(before)} checkpoints of {run_id(folder, 'first')}, which this run does not" in text
        assert 'name another folder, or continue that run with train.resume = "kept"' in text
    done = train(folder / "by hand", *OPTIONS, "--max-updates", 9, "--save-dir", folder / "kept")
    assert done.code == 2, done.output
    assert f"kept: holds checkpoints of run {run_id(folder, 'first')} (step_00000006.pt and 2 more)" in done.output
    assert "Traceback" not in done.output
    assert {path: path.read_bytes() for path in (folder / "kept").glob("*.pt")} == before


def test_a_run_that_another_one_has_continued_is_evaluated_exported_and_resumed_with_its_own_weights(
    folder: Path,
) -> None:
    first = run_id(folder, "first")
    loss = validation(gputrain(folder, "eval", first, "--split", "valid", "--json"))
    done = gputrain(
        folder, "run", recipe(folder, "third", updates=40, seed=3), "--set", "train.lr=0.05", "--resume", first
    )
    assert done.returncode == 0, done.stderr
    third = run_id(folder, "third")
    owners = {owner_of(path) for path in (folder / "kept").glob("*.pt")}
    assert owners == {first, third}
    assert validation(gputrain(folder, "eval", first, "--split", "valid", "--json")) == loss
    exported = gputrain(folder, "export", first, "--to", "safetensors", "-o", "first.safetensors")
    assert exported.returncode == 0, exported.stderr
    assert "weights of step 5" in exported.stdout, "its best ones"
    again = gputrain(folder, "run", "--resume", first, "--set", "train.max_updates=8", "--json")
    assert again.returncode == 0, again.stderr
    plans = [json.loads(line) for line in again.stdout.splitlines() if '"training_plan"' in line]
    assert [(plan["first_update"], plan["best_step"]) for plan in plans] == [(6, 5)]
    refused = gputrain(
        folder,
        "eval",
        third,
        "--checkpoint",
        next(path.name for path in (folder / "kept").glob("step_*") if owner_of(path) == first),
    )
    assert refused.returncode == 2
    assert f"is a checkpoint of {first}, not of {third}" in refused.stderr


@pytest.mark.slow
def test_trainings_by_hand_without_a_run_directory_have_an_identity_of_their_own(tmp_path: Path) -> None:
    def trainer(*words: object, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "trainer", "--task", TASK, "--cpu", "--save-dir", "kept", *map(str, words)]
        environment = {**os.environ, **(environ or {})}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)

    words = (*OPTIONS, "--keep-last", 1)
    assert trainer(*words, "--max-updates", 2).returncode == 0
    (first,) = {owner_of(path) for path in (tmp_path / "kept").glob("*.pt")}
    assert "-by-hand-" in first
    again = trainer(*words, "--max-updates", 4)
    assert again.returncode == 2, again.stderr
    assert f"holds checkpoints of run {first} (step_00000002.pt and 1 more)" in again.stderr
    assert "--resume" in again.stderr
    # Continued by hand in its folder it is the same training, whose older files are deleted.
    assert trainer(*words, "--max-updates", 4, "--resume", "kept").returncode == 0
    assert {owner_of(path) for path in (tmp_path / "kept").glob("*.pt")} == {first}
    assert [path.name for path in (tmp_path / "kept").glob("step_*")] == ["step_00000004.pt"]
    assert load(tmp_path / "kept" / "step_00000004.pt")["run"] == first
    # Slurm and torchrun start the same command again.
    restarted = trainer(*words, "--max-updates", 3, environ={"SLURM_RESTART_COUNT": "1"})
    assert restarted.returncode == 0, restarted.stderr
    assert {owner_of(path) for path in (tmp_path / "kept").glob("*.pt")} == {first}
    finished = trainer(*words, "--max-updates", 3, "--resume", "kept")
    assert finished.returncode == 2
    assert "nothing is left to train" in finished.stderr
