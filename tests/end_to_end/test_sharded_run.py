"""A run with ``strategy = "fsdp"``: evaluated, exported and used for predictions as one of DDP."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_eval_and_export import gputrain

from gputrain_tui.history.run_folders import list_runs

RECIPE = """\
name = "{strategy}"

[[cluster.nodes]]
cpu_ranks = 2

[task]
data = "text.txt"
context = 16
layers = 2
dim = 16
heads = 2

[train]
task = "lm"
strategy = "{strategy}"
batch_size = 4
max_updates = 12
lr = 0.01
threads = 1
"""


def test_what_fsdp_has_trained_is_evaluated_exported_and_predicts_as_what_ddp_has(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(bytes(range(32, 122)) * 40)
    (tmp_path / "lines.txt").write_text("ABCD\n")
    found = {}
    for strategy in ("ddp", "fsdp"):
        (tmp_path / f"{strategy}.toml").write_text(RECIPE.format(strategy=strategy))
        done = gputrain(tmp_path, "run", f"{strategy}.toml")
        assert done.returncode == 0, done.stderr
        run = list_runs(tmp_path / "home" / "runs")[0]
        losses = []
        alone = ["--set", "cluster.nodes=[{cpu_ranks=1}]", "--set", "train.strategy=ddp"]
        for more in ([], alone) if strategy == "fsdp" else ([],):
            done = gputrain(tmp_path, "eval", run.id, "--split", "valid", *more)
            assert done.returncode == 0, done.stderr
            losses.append(float(re.search(r"loss (\d+\.\d+)", done.stdout)[1]))  # type: ignore[index]
        done = gputrain(tmp_path, "export", run.id, "--to", "safetensors", "-o", f"{strategy}.safetensors")
        assert done.returncode == 0, done.stderr
        predicted = gputrain(tmp_path, "predict", run.id, "--input", "lines.txt")
        assert predicted.returncode == 0, predicted.stderr
        found[strategy] = losses, load_file(tmp_path / f"{strategy}.safetensors"), predicted.stdout
    (losses, weights, lines), (own_losses, own_weights, own_lines) = found["ddp"], found["fsdp"]
    assert own_losses == pytest.approx([losses[0]] * 2, abs=1e-4)
    assert own_weights.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(own_weights[name], weight, rtol=0, atol=1e-6)
    assert own_lines == lines
