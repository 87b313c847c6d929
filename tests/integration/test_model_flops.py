from __future__ import annotations

from pathlib import Path

import pytest
import torch
from trained import train

FLAGS = ("--batch-size", 5, "--max-updates", 4, "--seed", 3, "--dropout", 0.2)
PER_SAMPLE = 4 * 8 * 16 + 6 * 16 * 12
"""Two products for the first layer, whose inputs need no gradient, and three for the second."""


TASKS = Path(__file__).parents[1] / "support" / "counted_tasks.py"
ON = ("--count-flops", "on")
OFF = ("--count-flops", "off")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("more", [(), ("--update-freq", 2), ("--precision", "bf16")])
def test_operations_are_counted_by_each_rank_and_nothing_of_the_training_changes(
    tmp_path: Path, ranks: int, more: tuple[object, ...]
) -> None:
    counted = train(tmp_path / "on", *FLAGS, *more, *ON, ranks=ranks)
    plain = train(tmp_path / "off", *FLAGS, *more, *OFF, ranks=ranks)
    events = counted.events_of("model_flops")
    assert (counted.code, sorted(event["rank"] for event in events)) == (0, list(range(ranks)))
    for event in events:
        assert event["flops_per_sample"] == PER_SAMPLE
        assert event["number_format"] == ("bf16" if "bf16" in more else "fp32")
        assert "peak_flops_per_s" not in event, "a CPU has none"
    assert plain.events_of("model_flops") == []
    assert torch.equal(counted.parameters, plain.parameters)


def test_the_last_batch_of_an_epoch_has_fewer_samples_of_as_many_operations(tmp_path: Path) -> None:
    counted = train(tmp_path, "--batch-size", 16, "--max-epochs", 2, *ON)  # 50 samples
    assert [event["flops_per_sample"] for event in counted.events_of("model_flops")] == [PER_SAMPLE]


def test_samples_that_take_unequally_many_operations_have_no_figure(tmp_path: Path) -> None:
    for name in ("PaddedTask", "SkippingTask"):
        counted = train(tmp_path / name, *FLAGS, "--max-updates", 9, "--task", f"{TASKS}:{name}", *ON)
        assert counted.code == 0, counted.output
        assert [event.get("varies", False) for event in counted.events_of("model_flops")] == [False, True]


def test_recomputed_activations_do_not_count(tmp_path: Path) -> None:
    task = ("--task", f"{TASKS}:DeepTask", *FLAGS)
    kept = train(tmp_path / "kept", *task, *ON)
    again = train(tmp_path / "again", *task, "--activation-checkpointing", *ON)
    (one,), (other,) = kept.events_of("model_flops"), again.events_of("model_flops")
    assert other["flops_per_sample"] == one["flops_per_sample"]


def test_a_part_that_the_task_compiles_stays_compiled_and_has_no_figure(tmp_path: Path) -> None:
    task = ("--task", f"{TASKS}:PartlyCompiledTask", *FLAGS)
    counted, plain = train(tmp_path / "on", *task, *ON), train(tmp_path / "off", *task, *OFF)
    assert counted.code == plain.code == 0, counted.output
    assert counted.events_of("model_flops") == []
    compiled = [run.events_of("validation")[-1]["metrics"]["compiled"] for run in (counted, plain)]
    assert compiled[0] == compiled[1] > 0


def test_flops_on_a_cpu_are_counted_only_on_request(tmp_path: Path) -> None:
    assert train(tmp_path, *FLAGS).events_of("model_flops") == []
