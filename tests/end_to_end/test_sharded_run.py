"""A run with ``strategy = "fsdp"``: evaluated, exported and used for predictions as one of DDP."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_eval_and_export import gputrain

from gputrain_tui.history.run_folders import list_runs
from trainer.checkpoint import load

RECIPE = """\
name = "fsdp"

[[cluster.nodes]]
cpu_ranks = 2

[task]
data = "text.txt"
context = 16
layers = 2
dim = 16
heads = 2
sample_bytes = 40

[train]
task = "lm"
strategy = "fsdp"
batch_size = 4
max_updates = 12
lr = 0.01
threads = 1
"""


def test_what_fsdp_has_trained_is_evaluated_exported_and_predicts_as_a_checkpoint_of_ddp(tmp_path: Path) -> None:
    """Its checkpoint is the one that DDP writes, as tests/integration/test_sharded_model.py shows."""
    (tmp_path / "text.txt").write_bytes(bytes(range(32, 122)) * 40)
    (tmp_path / "lines.txt").write_text("ABCD\n")
    (tmp_path / "fsdp.toml").write_text(RECIPE)

    def call(*words: object) -> str:
        done = gputrain(tmp_path, *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    call("run", "fsdp.toml")
    run = list_runs(tmp_path / "home" / "runs")[0]
    losses = []
    alone = ["--set", "cluster.nodes=[{cpu_ranks=1}]", "--set", "train.strategy=ddp"]
    for more in ([], alone):
        printed = call("eval", run.id, "--split", "valid", *more)
        losses.append(float(re.search(r"loss (\d+\.\d+)", printed)[1]))  # type: ignore[index]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    call("export", run.id, "--to", "safetensors", "-o", "fsdp.safetensors")
    exported, kept = load_file(tmp_path / "fsdp.safetensors"), load(run.dir.checkpoints / "best.pt")["model"]
    assert exported.keys() == kept.keys()
    assert all(torch.equal(exported[name], weight) for name, weight in kept.items())
    as_ddp = call("predict", run.id, "--input", "lines.txt", "--set", "train.strategy=ddp")
    assert call("predict", run.id, "--input", "lines.txt") == as_ddp
