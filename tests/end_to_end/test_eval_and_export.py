"""``gputrain eval`` and ``gputrain export``: what a run has kept is evaluated and written for other programs."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_group import Member
from safetensors import safe_open
from safetensors.torch import load_file
from text_cache import with_task_options
from trace_rules import threads_of

from gputrain_tui import cli
from gputrain_tui.history.run_folders import Run, list_runs
from gputrain_tui.lifecycle.run_checkpoints import choose_checkpoint
from trainer import export_weights
from trainer.checkpoint import load, write_file

TASK = f"{Path(__file__).parents[1] / 'support' / 'tiny_task.py'}:TaskWithTest"
RECIPE = """\
name = "tested"

[cluster]
max_restarts = 1

[[cluster.nodes]]
cpu_ranks = 2

[train]
task = "{task}"
batch_size = [4, 3]
max_epochs = 6
lr = 0.05
threads = 1
save_dir = "kept"
"""


@dataclass(frozen=True)
class Trained:
    """A run whose best weights are not its last ones, and whose checkpoints are in a folder of their own."""

    folder: Path
    run: Run
    closing: str

    @property
    def kept(self) -> Path:
        return self.folder / "kept"

    def call(self, *words: object) -> subprocess.CompletedProcess[str]:
        return gputrain(self.folder, *words)


def gputrain(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "GPUTRAIN_HOME": str(with_task_options(folder / "home")), "NO_COLOR": "1"}
    command = [sys.executable, "-m", "gputrain_tui", *map(str, words)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "r.toml").write_text(RECIPE.format(task=TASK))
    done = gputrain(folder, "run", "r.toml")
    assert done.returncode == 0, done.stderr
    return Trained(folder, list_runs(folder / "home" / "runs")[0], done.stdout)


def contents(*folders: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()}


def test_a_run_names_the_weights_it_tested_and_eval_finds_the_same_without_training(trained: Trained) -> None:
    tested = trained.run.status.tested
    assert tested is not None
    assert tested.weights_step is not None
    assert tested.weights_step < (trained.run.status.step or 0)
    line = f"test       (weights of step {tested.weights_step})  loss {tested.loss:.4f}  accuracy "
    assert line in trained.closing
    best_valid = trained.run.status.best_valid
    assert best_valid is not None
    assert (best_valid.metric, best_valid.step) == ("loss", tested.weights_step)
    assert f"best valid step {best_valid.step}  loss {best_valid.value:.4f}\n" in trained.closing

    before = contents(trained.run.dir.path, trained.kept)
    done = trained.call("eval", "last", "--set", "cluster.nodes=[{cpu_ranks=1}]", "--set", "train.resume=nowhere.pt")
    assert done.returncode == 0, done.stderr
    assert contents(trained.run.dir.path, trained.kept) == before
    best = trained.kept / "best.pt"
    assert f"gputrain: evaluating the best checkpoint of {trained.run.id}, {best}\n" in done.stderr
    assert done.stdout.startswith(line), "one rank finds what two have found"
    assert "steps" not in done.stdout

    newest = list_runs(trained.folder / "home" / "runs")[0]
    assert (newest.status.recipe, newest.status.world_size, newest.state) == ("eval-tested", 1, "finished")
    assert newest.status.tested is not None
    assert (newest.status.tested.loss, newest.status.tested.weights_step) == (tested.loss, tested.weights_step)
    assert not list(newest.dir.checkpoints.iterdir())
    listed = json.loads(trained.call("runs", "--json").stdout)
    assert [entry["tested"]["weights_step"] for entry in listed] == [tested.weights_step] * len(listed)
    refused = trained.call("eval", newest.id)
    assert (refused.returncode, refused.stderr) == (
        2,
        f"gputrain: {newest.id} is an evaluation of {best}: name that file, or the run that trained it\n",
    )


def test_a_checkpoint_is_evaluated_on_another_split_and_every_event_printed(trained: Trained) -> None:
    newest = max(trained.kept.glob("step_*.pt"))
    done = trained.call("eval", newest, "--recipe", "r.toml", "--split", "valid", "--json")
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    (found,) = (event for event in events if event["type"] == "validation")
    step = int(newest.stem.removeprefix("step_"))
    assert (found["split"], found["step"], found["weights_step"]) == ("valid", step, step)
    assert not any(event["type"] in ("step", "checkpoint") for event in events)


def test_a_task_without_the_split_is_refused_before_there_is_a_run(trained: Trained) -> None:
    count = len(list_runs(trained.folder / "home" / "runs"))
    other = TASK.replace("TaskWithTest", "TinyTask")
    words = ("eval", trained.kept / "best.pt", "--recipe", "r.toml", "--set", f"train.task={other}")
    done = trained.call(*words, "--split", "test")
    assert done.returncode == 2
    line = "gputrain: train.eval_split is test, but the task has no such split; it has valid"
    assert done.stderr.splitlines()[-1] == line, done.stderr
    assert len(list_runs(trained.folder / "home" / "runs")) == count


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["eval", "{kept}/best.pt"], "{kept}/best.pt is not in a run directory: name the recipe of its training with "),
        (["eval", "{kept}/none.pt"], "{kept}/none.pt does not exist: name a checkpoint, such as FOLDER/best.pt, or a"),
        (["eval", "{kept}"], "{kept} is a folder: name a checkpoint, such as FOLDER/best.pt, or a run"),
        (
            ["eval", "{run}", "--checkpoint", "nwest"],
            "--checkpoint 'nwest' is not a checkpoint of {run}; allowed are best, ",
        ),
        (["eval", "{kept}/best.pt", "--checkpoint", "best"], "--checkpoint best selects a checkpoint of a run, but "),
        (["eval", "2001"], "no run is called '2001'"),
        (["export", "{run}"], "export: the following arguments are required: --to"),
        (["export", "{run}", "--to", "onnx"], "export: argument --to: invalid choice: 'onnx' (choose from "),
        (["export", "{kept}/r.toml", "--to", "safetensors"], "{kept}/r.toml does not exist: name a checkpoint, "),
    ],
)
def test_a_missing_run_or_checkpoint_is_one_line(
    trained: Trained,
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("GPUTRAIN_HOME", str(trained.folder / "home"))
    places = {"kept": trained.kept, "run": trained.run.id}
    assert cli.main([word.format(**places) for word in words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"gputrain: {message.format(**places)}")
    assert printed.err.count("\n") == 1


def test_a_checkpoint_in_a_run_directory_is_known_to_be_of_that_run(trained: Trained) -> None:
    inside = trained.run.dir.checkpoints / "step_00000001.pt"
    inside.write_bytes(b"")
    try:
        chosen = choose_checkpoint(str(inside), None)
    finally:
        inside.unlink()
    assert chosen.run is not None
    assert (chosen.run.id, chosen.path) == (trained.run.id, inside)


# -------------------------------------------------------------------------------------------------------- export


def test_a_run_is_exported_with_its_best_weights_and_replaces_no_file(trained: Trained) -> None:
    assert trained.run.status.tested is not None
    step = trained.run.status.tested.weights_step
    done = trained.call("export", trained.run.id, "--to", "safetensors")
    assert done.returncode == 0, done.stderr
    written = trained.folder / f"{trained.run.id}.safetensors"
    assert done.stdout.startswith(f"{written.name}: weights of step {step}, 4 tensors, ")
    best = trained.kept / "best.pt"
    assert done.stderr == f"gputrain: exported the best checkpoint of {trained.run.id}, {best}\n"
    kept = load(best)["model"]
    exported = load_file(written)
    assert exported.keys() == kept.keys()
    assert all(torch.equal(exported[name], kept[name]) for name in kept)
    with safe_open(written, "pt") as file:
        assert file.metadata() == {"format": "pt", "task": TASK, "step": str(step), "run": trained.run.id}
    mask = os.umask(0o022)
    os.umask(mask)
    assert written.stat().st_mode & 0o777 == 0o666 & ~mask

    words = ("export", trained.run.id, "--to", "safetensors", "--checkpoint", "newest")
    again = trained.call(*words)
    assert (again.returncode, again.stderr) == (
        2,
        f"gputrain: {written.name} already exists: replace it with --force, or name another file\n",
    )
    assert load_file(written).keys() == kept.keys()
    assert trained.call(*words, "--force").returncode == 0
    with safe_open(written, "pt") as file:
        assert file.metadata()["step"] == str(trained.run.status.step)


def test_the_timeline_of_a_real_run_keeps_the_rules_of_its_format(trained: Trained) -> None:
    done = trained.call("export", trained.run.id, "--to", "chrome-trace", "-o", "t.json")
    assert done.returncode == 0, done.stderr
    threads = threads_of(json.loads((trained.folder / "t.json").read_text()))
    for rank in range(2):
        assert sum(event["cat"] == "step" for event in threads[rank, 1]) == trained.run.status.step
        assert {event["name"] for event in threads[rank, 2]} == {"all-reduce"}


def checkpoint(folder: Path, model: Mapping[str, Any]) -> Path:
    path = folder / "step_00000007.pt"
    write_file(path, {"task": "own", "updates": 7, "model": dict(model)})
    return path


def export(*words: object) -> int:
    return export_weights.main([str(word) for word in words])


def test_tied_half_uneven_and_empty_tensors_come_back_as_they_were(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = torch.randn(6, 4)
    model = {
        "embed.weight": whole,
        "head.weight": whole,
        "part": whole[1:3],
        "turned": whole.t(),
        "half": torch.randn(3).bfloat16(),
        "count": torch.tensor(5),
        "mask": torch.tensor([True, False]),
        "empty": torch.empty(0, 3),
        "extra._extra_state": {"version": 2},
    }
    output = tmp_path / "out.safetensors"
    assert export(checkpoint(tmp_path, model), output) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["tensors"], report["left_out"], report["bytes"]) == (
        8,
        ["extra._extra_state"],
        output.stat().st_size,
    )
    found = load_file(output)
    del model["extra._extra_state"]
    assert found.keys() == model.keys()
    for name, tensor in model.items():
        assert isinstance(tensor, torch.Tensor)
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    tied = torch.nn.ModuleDict({"embed": torch.nn.Embedding(6, 4), "head": torch.nn.Linear(4, 6, bias=False)})
    tied["head"].weight = tied["embed"].weight
    tied.load_state_dict({name: found[name] for name in ("embed.weight", "head.weight")})


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (".", "{output} is a folder: name a file in it"),
        ("none/out.safetensors", "{output}: there is no folder {output.parent}"),
        ("step_00000007.pt", "{output} already exists: replace it with --force, or name another file"),
        ("pipe", "{output} is not a regular file and will not be replaced"),
        ("complex.safetensors", "safetensors: "),
    ],
)
def test_a_failed_write_is_one_line_and_leaves_nothing(
    tmp_path: Path, output: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    path = checkpoint(tmp_path, {"weight": torch.zeros(2, dtype=torch.complex128)})
    before = sorted(tmp_path.iterdir())
    assert export(path, tmp_path / output) == 2
    report = capsys.readouterr().err
    assert report.startswith("trainer: " + message.format(output=tmp_path / output))
    assert report.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_without_the_package_the_line_has_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert export(tmp_path / "any.pt", tmp_path / "out.safetensors") == 3
    assert capsys.readouterr().err == "trainer: safetensors is not installed: pip install 'safetensors>=0.8'\n"


def export_with_little_disk(path: str, output: str) -> int:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    with open(os.devnull, "w") as sys.stderr:  # noqa: PTH123
        return export("--force", path, output)


def test_a_full_disk_leaves_the_file_that_was_there_and_no_part_of_another(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, {"weight": torch.zeros(1 << 16)})
    output = tmp_path / "out.safetensors"
    output.write_bytes(b"before")
    member = Member()
    member.begin(export_with_little_disk, str(path), str(output))
    assert member.outcome() == 1
    member.kill()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out.safetensors", path.name]
    assert output.read_bytes() == b"before"
