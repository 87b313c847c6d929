"""An exported folder is read back by TensorBoard's own reader."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import synthetic
from commands import Command, command
from long_record import single
from made_runs import append_events

from gputrain_tui.history.run_folders import Run
from trainer.contract.record import RankState
from trainer.telemetry.step_events import merge

reader: Any = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator",
    reason="tensorboard is not installed: pip install '.[tensorboard]'",
)
STEPS = 40


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = synthetic.run(tmp_path / "home" / "runs", steps=STEPS, status="finished", straggler=1)
    run.dir.recipe.write_text('name = "demo"\n[train]\ntask = "lm"\nlr = 0.5\ncpu = true\n[task]\napi_key = "secret"\n')
    return run


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return command(capsys, "export")


def read(folder: Path) -> Any:
    found = reader.EventAccumulator(str(folder), size_guidance={reader.SCALARS: 0, reader.TENSORS: 0})
    return found.Reload()


def scalars(found: Any, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in found.Scalars(tag)]


def test_every_step_of_each_rank_and_over_ranks_validation_and_hyper_parameters_come_back(
    call: Command, run: Run
) -> None:
    fast = {rank: [single(rank, number) for number in range(STEPS + 1, STEPS + 9)] for rank in range(2)}
    for rank, steps in fast.items():
        append_events(run.dir, rank, merge(steps))
    done = call(run.id, "--to", "tensorboard", "-o", "out")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("out: 96 steps of 2 ranks, 1 to 48, ")
    ranks = [read(Path(f"out/rank_{rank}")) for rank in range(2)]
    for rank, found in enumerate(ranks):
        losses = scalars(found, "train/loss")
        assert [step for step, _ in losses] == list(range(1, STEPS + 9))
        assert [value for _, value in losses[STEPS:]] == [step.loss for step in fast[rank]]
        assert [value for _, value in scalars(found, "time/step_ms")[STEPS:]] == [s.step_ms for s in fast[rank]]
        assert scalars(found, "time/data_ms")[STEPS:] == [(48, 1.5)], "a mean stands once"
        assert scalars(found, "core_wait/forward_ms") == [(48, 0.5)]
    over = read(Path("out"))
    for step, value in scalars(over, "train/loss"):
        both = [scalars(found, "train/loss")[step - 1][1] for found in ranks]
        assert value == pytest.approx(sum(both) / 2, rel=1e-6)
        assert scalars(read(Path("out/lowest")), "train/loss")[step - 1][1] == min(both) if step == 45 else True
        assert scalars(read(Path("out/highest")), "train/loss")[step - 1][1] == max(both) if step == 45 else True
    assert [value for _, value in scalars(over, "train/samples")][:2] == [32.0, 32.0]
    assert scalars(over, "valid/loss") == [(STEPS, pytest.approx(1.91))]

    from tensorboard.plugins.hparams import metadata

    start = over.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    given = metadata.parse_session_start_info_plugin_data(start).hparams
    assert given["train.lr"].number_value == 0.5
    assert given["train.cpu"].bool_value
    assert given["train.task"].string_value == "lm"
    assert given["task.api_key"].string_value == "•••"
    assert given["world_size"].number_value == 2


def test_after_a_restart_the_reader_has_the_steps_of_the_last_attempt(call: Command, run: Run) -> None:
    for rank in range(2):
        again = [single(rank, number) for number in range(31, 36)]
        append_events(run.dir, rank, RankState(time=2e9, rank=rank, state="joining"), *again)
    assert call(run.id, "--to", "tensorboard", "-o", "out").returncode == 0
    for folder in ("out", "out/rank_1"):
        losses = scalars(read(Path(folder)), "train/loss")
        assert [step for step, _ in losses] == list(range(1, 36))
    assert losses[-1][1] == single(1, 35).loss


def test_force_replaces_the_folder_of_an_export(call: Command, run: Run) -> None:
    assert call(run.id, "--to", "tensorboard", "-o", "out").returncode == 0
    refused = call(run.id, "--to", "tensorboard", "-o", "out")
    assert refused.stderr == "gputrain: out already exists: replace it with --force, or name another folder\n"
    assert call(run.id, "--to", "tensorboard", "-o", "out", "--force", "--rank", 1).returncode == 0
    assert sorted(path.name for path in Path("out").iterdir() if path.is_dir()) == ["rank_1"]
    assert sorted(path.name for path in Path().iterdir()) == ["home", "out"]


def test_the_export_brings_neither_torch_nor_tensorflow(run: Run, tmp_path: Path) -> None:
    program = (
        "import sys; from gputrain_tui.cli import main; code = main(sys.argv[1:]);"
        "print(code, {'torch', 'tensorflow', 'textual'} & sys.modules.keys())"
    )
    words = ["export", str(run.dir.path), "--to", "tensorboard", "-o", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 set()"
