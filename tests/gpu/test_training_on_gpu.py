"""``python -m trainer`` on one GPU: every task, the options, what goes wrong, and what is left afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from task_data import write_data
from trained import TrainingResult

from trainer.contract.builtin_tasks import BUILT_IN

SUPPORT = Path(__file__).parents[1] / "support"
TINY = f"{SUPPORT / 'tiny_task.py'}:TinyTask"
OWN = f"{Path(__file__).with_name('gpu_tasks.py')}:"
HERE = str(Path(__file__).parent)


def train(run_dir: Path, *flags: object, task: str = TINY, environment: dict[str, str] | None = None) -> TrainingResult:
    words = [sys.executable, "-m", "trainer", "--task", task, "--run-dir", str(run_dir), *map(str, flags)]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
    environ["PYTHONPATH"] = os.pathsep.join([str(SUPPORT), HERE])
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=environ | (environment or {}))
    return TrainingResult(run_dir, done)


def failure(done: TrainingResult) -> str:
    assert done.code == 1, done.output
    return str(next(event["message"] for event in done.events_of("failure")))


@pytest.mark.parametrize("task", sorted(BUILT_IN))
def test_every_task_trains_evaluates_and_saves(tmp_path: Path, task: str) -> None:
    if task == "masked_lm":
        pytest.importorskip("tokenizers")
    options = [word for name, value in write_data(tmp_path, task).items() for word in (f"--{name}", value)]
    flags = [str(word).replace("_", "-") if str(word).startswith("--") else word for word in options]
    cache = {"GPUTRAIN_CACHE": str(tmp_path / "cache")}
    done = train(
        tmp_path / "run", "--batch-size", 6, "--max-epochs", 2, "--lr", 3e-3, *flags, task=task, environment=cache
    )
    assert done.code == 0, done.output
    (plan,) = done.events_of("training_plan")
    assert plan["tf32"] is (torch.cuda.get_device_capability() >= (8, 0))
    steps = done.events_of("step")
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert all(event["memory_peak_bytes"] > 0 and event["step_ms"] > 0 for event in steps)
    assert all(event["device"].startswith("cuda:0") for event in done.events_of("rank_state") if "device" in event)
    assert len([event for event in done.events_of("validation") if event["split"] == "valid"]) == 2
    assert done.events_of("checkpoint")


@pytest.mark.parametrize(
    "flags",
    [
        ("--precision", "bf16"),
        ("--precision", "fp16"),
        ("--no-tf32",),
        ("--deterministic",),
        ("--compile",),
        ("--clip-norm", 0.1, "--update-freq", 3, "--masked"),
        ("--num-workers", 2),
        ("--save-every-updates", 3, "--valid-every-updates", 4),
        *(("--optimizer", name) for name in ("sgd", "adam", "adamw", "adadelta", "adagrad")),
    ],
    ids=lambda flags: " ".join(map(str, flags)),
)
def test_options_train_to_the_end(tmp_path: Path, flags: tuple[object, ...]) -> None:
    if "bf16" in flags and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this GPU has no bf16")
    done = train(tmp_path, "--batch-size", 5, "--max-updates", 12, "--dropout", 0.1, *flags)
    assert done.code == 0, done.output
    events = done.events_of("step")
    assert events[-1]["step"] == 12
    assert sum(event["steps"] for event in events) == 12
    assert not done.events_of("failure")


def test_a_gpu_and_a_cpu_train_alike(tmp_path: Path) -> None:
    flags = ("--batch-size", 5, "--max-updates", 20, "--double", "--masked", "--update-freq", 2, "--clip-norm", 0.5)
    gpu, cpu = train(tmp_path / "gpu", *flags), train(tmp_path / "cpu", *flags, "--cpu")
    assert (gpu.code, cpu.code) == (0, 0), gpu.output + cpu.output
    assert torch.allclose(gpu.parameters, cpu.parameters, rtol=1e-9, atol=1e-12)


def test_two_ranks_share_a_gpu_where_that_is_allowed_and_train_as_one(tmp_path: Path) -> None:
    flags = ("--max-epochs", 3, "--optimizer", "sgd", "--lr", 0.5, "--double", "--desync-every", 2)
    refused = train(tmp_path / "refused", *flags, "--distributed-world-size", 2)
    if torch.cuda.device_count() == 1:
        assert refused.code == 2
        assert "--share-devices" in refused.output
    one = train(tmp_path / "one", *flags, "--batch-size", 24)
    two = train(
        tmp_path / "two", *flags, "--batch-size", 12, "--distributed-world-size", 2, "--share-devices",
        environment={"CUDA_VISIBLE_DEVICES": "0"},
    )  # fmt: skip
    assert (one.code, two.code) == (0, 0), one.output + two.output
    assert torch.allclose(two.parameters, one.parameters, rtol=1e-9, atol=1e-12)
    assert len({event["parameters"] for event in two.events_of("checksum") if event["step"] == 2}) == 1
    assert any("sync_ms" in event for event in two.events_of("step"))


# ------------------------------------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize(
    ("poison", "message"),
    [
        ("loss", "non-finite loss at step 4: first in output of 4 (_Poison) on rank 0"),
        ("gradient", "non-finite gradient at step 4: first in gradient of 3.bias on rank 0"),
    ],
)
def test_a_non_finite_number_ends_the_run_with_step_and_module(tmp_path: Path, poison: str, message: str) -> None:
    done = train(tmp_path, "--batch-size", 5, "--max-updates", 100, "--poison", poison, "--save-every-updates", 2)
    assert failure(done).startswith(message)
    assert {path.name for path in tmp_path.glob("checkpoints/*.pt")} <= {"step_00000002.pt"}


def test_fp16_leaves_a_step_out_and_ends_when_none_is_taken_any_more(tmp_path: Path) -> None:
    flags = ("--batch-size", 5, "--precision", "fp16", "--max-updates", 8)
    once = train(tmp_path / "once", *flags, "--poison", "gradient once")
    assert once.code == 0, once.output
    assert once.events_of("step")[-1]["step"] == 8
    never = train(tmp_path / "never", *flags, "--poison", "gradient")
    assert failure(never).startswith("the loss scale is ")


def test_running_out_of_memory_names_step_and_batch(tmp_path: Path) -> None:
    done = train(tmp_path, "--batch-size", 5, "--max-updates", 9, task=f"{OWN}TooLargeTask")
    assert "out of memory at step 3, batch [5, 8] float32, [5, 3] int64: " in failure(done)


# ------------------------------------------------------------------------------------------------- coming back


def test_a_resumed_training_ends_bit_for_bit_as_one_that_was_never_stopped(tmp_path: Path) -> None:
    flags = ("--batch-size", 5, "--dropout", 0.2, "--deterministic", "--clip-norm", 1.0, "--masked")
    whole = train(tmp_path / "whole", *flags, "--max-updates", 12)
    first = train(tmp_path / "first", *flags, "--max-updates", 7)
    second = train(tmp_path / "second", *flags, "--max-updates", 12, "--resume", tmp_path / "first" / "checkpoints")
    assert (whole.code, first.code, second.code) == (0, 0, 0), second.output
    assert torch.equal(second.parameters, whole.parameters)


def test_a_rank_that_is_killed_leaves_nothing_on_the_gpu_and_its_checkpoint_goes_on(tmp_path: Path) -> None:
    free_before, _ = torch.cuda.mem_get_info()
    flags = ("--batch-size", 5, "--save-every-updates", 2)
    killed = train(
        tmp_path / "killed", *flags, "--max-updates", 9, "--fault", "kill", "--fault-rank", 0, "--fault-step", 6
    )
    assert killed.code == -9, "the process alone is the rank"
    free_after, _ = torch.cuda.mem_get_info()
    assert free_before - free_after < 64 << 20, "the context of a rank is several times as large"
    again = train(tmp_path / "again", *flags, "--max-updates", 9, "--resume", tmp_path / "killed" / "checkpoints")
    assert again.code == 0, again.output


WATCHED = """
import torch
from torch import nn
from trainer.watch import watch

device = torch.device("cuda")
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with watch(model, optimizer) as watched:
    for batch in watched.batches([torch.randn(16, 64, device=device) for _ in range(30)]):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        watched.report(loss=loss)
        optimizer.step()
"""


def test_a_watched_script_records_its_steps(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WATCHED)
    environ = os.environ | {"GPUTRAIN_RUN_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = TrainingResult(
        tmp_path,
        subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environ, timeout=120),
    )
    assert done.code == 0, done.output
    steps = done.events_of("step")
    assert sum(event["steps"] for event in steps) == 30
    assert all(event["forward_ms"] > 0 and event["backward_ms"] > 0 and event["loss"] > 0 for event in steps)
