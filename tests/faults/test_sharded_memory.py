"""A model that does not fit a rank's memory: DDP ends with a message, ``--strategy fsdp`` trains it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from forked_trainer import ForkedTrainer

from trainer.checkpoint import load
from trainer.contract.errors import ExitCode

LIMIT_MIB = 175
"""Less than four times the model's 49 MiB, as much as parameters, gradients and two moments take."""
SUPPORT = Path(__file__).parents[1] / "support"


def train(folder: Path, strategy: str, ranks: int, *words: str, limit_mib: int = LIMIT_MIB) -> tuple[int, str]:
    data = folder / "text.txt"
    if not data.exists():
        data.write_bytes(bytes(range(32, 122)) * 12)
    model = ["--context", "16", "--dim", "512", "--layers", "4", "--heads", "2", "--sample-bytes", "0"]
    request = ["--task", "limited_lm:LimitedLm", "--limit-mib", str(limit_mib), "--data", str(data), *model]
    group = ["--cpu", "--distributed-world-size", str(ranks), "--threads", "1", "--strategy", strategy]
    steps = ["--max-epochs", "2", "--lr", "3e-4", "--valid-every-epochs", "0", "--save-every-epochs", "0", *words]
    batch = ["--batch-size", str(12 // ranks)] if 12 % ranks == 0 else []
    environ = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    done: subprocess.CompletedProcess[str] = ForkedTrainer(
        [*request, *group, *steps, *batch], cwd=folder, environ=environ
    ).finish()
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training on two ranks, under the limit, that ended within its second epoch."""
    folder = tmp_path_factory.mktemp("divided")
    code, text = train(folder, "fsdp", 2, "--save-dir", "saved", "--max-updates", "3")
    assert code == ExitCode.FINISHED, text
    return folder


def test_ddp_runs_out_of_memory_with_one_line_that_names_the_other_strategy(tmp_path: Path) -> None:
    code, text = train(tmp_path, "ddp", 2, "--save-dir", "saved")
    assert code == ExitCode.FAILED
    assert "or --strategy fsdp, which divides the model among the ranks" in text
    assert not list((tmp_path / "saved").glob("*.pt"))


def test_two_three_and_four_ranks_under_the_limit_end_where_ddp_without_it_does(divided: Path) -> None:
    more = ["--resume", "saved", "--max-updates", "8"]
    code, text = train(divided, "ddp", 2, *more, "--save-dir", "ddp", limit_mib=0)
    assert code == ExitCode.FINISHED, text
    expected = load(max((divided / "ddp").glob("step_*")))
    for ranks in (2, 3, 4):
        code, text = train(divided, "fsdp", ranks, *more, "--save-dir", f"fsdp{ranks}")
        assert code == ExitCode.FINISHED, text
        saved = load(max((divided / f"fsdp{ranks}").glob("step_*")))
        assert saved["position"] == expected["position"]  # each sample once
        assert saved["updates"] == expected["updates"]
        for name, weight in expected["model"].items():
            torch.testing.assert_close(saved["model"][name], weight, rtol=0, atol=2e-5)
