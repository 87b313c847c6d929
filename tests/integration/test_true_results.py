"""No result that is wrong with exit code 0: steps that were none, numbers that are none, ranks that differ."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_log import newest
from odd_tasks import NormTask
from rank_group import Gang
from tiny_task import TinyOptions
from trained import TASK, TrainingResult, train, train_spawned

from trainer.contract.options import Training
from trainer.engine.end_conditions import Best

ODD = TASK.replace("tiny_task.py:TinyTask", "odd_tasks.py:")


def failure(done: TrainingResult) -> dict[str, Any]:
    return next(event for event in done.events_of("failure") if event["kind"] == "non_finite")


# ------------------------------------------------------------------------------------------------- fp16


@pytest.mark.parametrize("ranks", [1, 2])
def test_fp16_that_never_steps_ends_with_step_and_module_named(tmp_path: Path, ranks: int) -> None:
    flags = ("--batch-size", 5, "--precision", "fp16", "--poison", "gradient", "--max-updates", 200)
    done = train(tmp_path, *flags, ranks=ranks)
    assert done.code == 1, done.output
    message = failure(done)["message"]
    assert message.startswith("the loss scale is 6.1e-05, below --min-loss-scale 0.0001, and 30 steps in a row were ")
    assert "skipped: non-finite gradient at step 4: first in gradient of 3.bias on rank 0" in message
    assert max(event["step"] for event in done.events_of("step")) == 3


def test_the_least_loss_scale_can_be_chosen(tmp_path: Path) -> None:
    flags = ("--precision", "fp16", "--poison", "gradient", "--max-updates", 200, "--min-loss-scale", 10000)
    done = train(tmp_path, "--batch-size", 5, *flags)
    assert "below --min-loss-scale 10000, and 3 steps in a row were skipped" in failure(done)["message"]


def test_only_steps_that_were_taken_count(tmp_path: Path) -> None:
    flags = ("--batch-size", 5, "--precision", "fp16", "--max-updates", 8, "--valid-every-updates", 1)
    flags += ("--lr-scheduler", "polynomial_decay", "--total-num-update", 10, "--optimizer", "sgd")
    done = train(tmp_path, *flags, "--poison", "gradient once")
    assert done.code == 0, done.output
    assert [event["step"] for event in done.events_of("step")] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [event["step"] for event in done.events_of("validation")] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert done.events_of("step")[-1]["lr"] == pytest.approx(1e-3 * 0.3)
    expected = "step 4 was skipped: a gradient overflowed; the loss scale is now 32768"
    assert expected in (tmp_path / "logs" / "0.log").read_text()
    found = newest(tmp_path / "checkpoints")
    assert found is not None
    assert (found[1]["updates"], found[1]["position"]["consumed"]) == (8, 45)


def test_the_local_gradient_norm_is_that_of_the_gradient_without_the_loss_scale(tmp_path: Path) -> None:
    norms = []
    for precision in ("fp32", "fp16"):
        flags = ("--batch-size", 5, "--max-updates", 20, "--sync-detail-every", 1, "--valid-every-updates", 1)
        done = train(tmp_path / precision, *flags, "--precision", precision, "--masked", ranks=2)
        assert done.code == 0, done.output
        norms.append([event["local_grad_norm"] for event in done.events_of("step", 0) if "local_grad_norm" in event])
    assert norms[0]
    assert norms[1] == pytest.approx(norms[0], rel=0.02)


def test_a_checkpoint_in_fp32_goes_on_in_fp16_with_a_fresh_scale(tmp_path: Path) -> None:
    first = train(tmp_path / "first", "--batch-size", 5, "--max-updates", 3)
    flags = ("--batch-size", 5, "--max-updates", 6, "--resume", tmp_path / "first" / "checkpoints")
    second = train(tmp_path / "second", *flags, "--precision", "fp16")
    assert (first.code, second.code) == (0, 0), second.output
    found = newest(tmp_path / "second" / "checkpoints")
    assert found is not None
    assert (found[1]["updates"], found[1]["scaler"]["scale"]) == (6, 65536.0)


# ------------------------------------------------------------------------------------------------- not finite


def test_a_validation_that_is_no_number_is_never_the_best() -> None:
    best = Best(metric="loss", maximize=False)
    assert not best.add(math.nan, {}, step=1)
    assert best.add(2.0, {}, step=2)
    assert not best.add(-math.inf, {}, step=3)
    assert (best.value, best.step, best.since, best.unknown) == (2.0, 2, 0, 1)  # neither better nor worse
    resumed = Best(metric="loss", maximize=False)
    resumed.load_state_dict({"metric": "loss", "value": math.nan, "step": 1, "since": 0})
    assert resumed.add(3.0, {}, step=2)


class Queue:
    """A device's queue, as its events see it: it gets on only when it is waited for, or by itself."""

    step = 0
    waited = 0
    """For what a step has queued itself; what is a step old leaves the queue full."""
    prompt = False


class CountedEvent:
    def record(self) -> None:
        self.reached, self.step = Queue.prompt, Queue.step

    def query(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        Queue.waited += not self.reached and self.step == Queue.step
        self.reached = True


def train_queued(
    rank: int, world_size: int, folder: str, options: dict[str, Any], task: dict[str, Any], prompt: bool
) -> dict[str, Any]:
    """Train on the CPU as on a GPU: numbers are on their way to the host until an event has been reached."""
    from host_waits import HostWaits
    from tiny_task import TinyTask
    from worker_contexts import worker_context

    from trainer.engine.loop import Loop
    from trainer.engine.non_finite import NonFiniteError

    Queue.waited, Queue.prompt = 0, prompt
    waited_in_steps: list[int] = []

    class CountingTask(TinyTask):
        def loss(self, model: torch.nn.Module, batch: Any) -> Any:
            if model.training:
                Queue.step += 1
                waited_in_steps.append(Queue.waited)
            return super().loss(model, batch)

    loop = Loop(
        CountingTask(TinyOptions(**task)),
        Training(task="tiny", batch_size=(5,), **({"optimizer": "adam"} | options)),
        worker_context(rank, world_size, checkpoints=Path(folder), copies=HostWaits(CountedEvent).copies),
    )
    message = ""
    try:
        loop.run()
    except NonFiniteError as error:
        message = str(error)
    return {"message": message, "updates": loop.updates, "waited_in_steps": sorted(set(waited_in_steps))}


@pytest.mark.parametrize(
    ("poison", "found"),
    [
        (
            "loss",
            "non-finite loss at step 4: first in output of 4 (_Poison) on rank 0; output of 4 (_Poison) on rank 1",
        ),
        (
            "gradient",
            "non-finite gradient at step 4: first in gradient of 3.bias on rank 0; gradient of 3.bias on rank 1",
        ),
    ],
)
@pytest.mark.parametrize("save_every", [2, 8])
def test_on_a_device_no_checkpoint_is_written_from_unchecked_numbers(
    two_ranks: Gang, tmp_path: Path, poison: str, found: str, save_every: int
) -> None:
    options = {"max_updates": 100, "save_every_updates": save_every, "valid_every_epochs": 0, "save_every_epochs": 0}
    options |= {"optimizer": "adam" if save_every == 2 else "adadelta"}  # a fused one, and one that is not
    results = two_ranks.run(train_queued, str(tmp_path), options, {"poison": poison, "samples": 1000}, False)
    assert [result["message"].partition("; most likely")[0] for result in results] == [found, found]
    assert [result["updates"] for result in results] == [max(4, save_every)] * 2, "at the first save from there on"
    kept = {path.name for path in tmp_path.glob("*.pt")}
    assert kept <= ({"step_00000002.pt"} if save_every == 2 else set())


def test_a_number_that_has_arrived_ends_training_on_all_ranks_without_waiting_for_a_save(
    two_ranks: Gang, tmp_path: Path
) -> None:
    options = {"max_updates": 10**6, "valid_every_epochs": 0, "save_every_epochs": 0}
    results = two_ranks.run(train_queued, str(tmp_path), options, {"poison": "gradient"}, True)
    assert all("non-finite gradient at step 4: first in gradient of 3.bias" in each["message"] for each in results)


def test_no_step_synchronises_with_the_device(two_ranks: Gang, tmp_path: Path) -> None:
    options = {"max_updates": 9, "valid_every_epochs": 0, "save_every_epochs": 0}
    for result in two_ranks.run(train_queued, str(tmp_path), options, {"samples": 1000}, False):
        assert (result["message"], result["updates"]) == ("", 9)
        assert result["waited_in_steps"] == [0]
    assert [path.name for path in tmp_path.glob("step_*.pt")] == ["step_00000009.pt"]


def test_the_statistics_of_a_batch_norm_are_not_taken_for_the_cause(tmp_path: Path) -> None:
    flags = ("--task", f"{ODD}BadSampleTask", "--batch-size", 5, "--no-shuffle", "--max-epochs", 1)
    done = train(tmp_path, *flags)
    assert failure(done)["message"].startswith("non-finite loss at step 4: first in output of 0 (Linear); ")


def test_a_model_that_its_optimizer_makes_infinite_is_not_saved(tmp_path: Path) -> None:
    flags = ("--batch-size", 5, "--optimizer", "sgd", "--lr", "1e38", "--max-updates", 1)
    done = train(tmp_path, *flags, "--weight-decay", 1e30)
    assert done.code == 1, done.output
    assert failure(done)["message"].startswith(
        "non-finite model after step 1, though every loss and gradient was finite: first in 0."
    )
    assert not list((tmp_path / "checkpoints").glob("*.pt"))


# ------------------------------------------------------------------------------------------------- one model


def test_the_saved_batch_norm_statistics_are_the_validated_ones(tmp_path: Path) -> None:
    flags = ("--task", f"{ODD}NormTask", "--batch-size", 5, "--max-updates", 5, "--lr", 0.1)
    done = train(tmp_path, *flags, "--valid-samples", 300, ranks=2)
    assert done.code == 0, done.output
    (expected,) = (event["loss"] for event in done.events_of("validation"))
    task = NormTask(TinyOptions(valid_samples=300))
    model = task.model()
    found = newest(tmp_path / "checkpoints")
    assert found is not None
    model.load_state_dict(found[1]["model"])
    model.eval()
    valid = task.datasets()["valid"]
    with torch.no_grad():
        loss, count, _ = task.loss(model, task.collate([valid[index] for index in range(len(valid))]))
    assert expected == pytest.approx(float(loss / count), rel=1e-6)
    assert {event["message"] for event in done.events_of("finding") if event["kind"] == "desync"} == set()


# ------------------------------------------------------------------------------------------------- seeds


def splits(rank: int, world_size: int, options: dict[str, Any]) -> dict[str, list[int]]:
    """Return which samples of all the data each split has on this rank."""
    import random

    from odd_tasks import SplitTask
    from worker_contexts import worker_context

    from trainer.engine.loop import Loop

    random.seed(1000 + rank)  # whatever a process has drawn before
    loop = Loop(
        SplitTask(TinyOptions()),
        Training(task="split", batch_size=(5,), max_updates=1, **options),
        worker_context(rank, world_size),
    )
    return {
        "after": [random.getrandbits(30)],
        **{split: list(dataset.indices) for split, dataset in loop.data.splits.items()},  # type: ignore[attr-defined]
    }


def test_a_split_that_is_drawn_at_random_is_the_same_on_all_ranks(two_ranks: Gang) -> None:
    first, second = two_ranks.run(splits, {})
    assert (first["train"], first["valid"]) == (second["train"], second["valid"])
    assert set(first["train"]).isdisjoint(second["valid"])
    assert first["after"] != second["after"], "what is drawn in training differs between ranks"
    again, _ = two_ranks.run(splits, {})
    assert again == first
    other, _ = two_ranks.run(splits, {"seed": 2})
    assert other["valid"] != first["valid"]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_same_seed_gives_the_same_bits(tmp_path: Path, workers: int) -> None:
    flags = ("--task", f"{ODD}NoisyTask", "--batch-size", 5, "--max-epochs", 2, "--dropout", 0.2)
    first, second = (train(tmp_path / name, *flags, "--num-workers", workers, ranks=2) for name in ("first", "second"))
    assert (first.code, second.code) == (0, 0), first.output
    assert torch.equal(first.parameters, second.parameters)
    assert [event["loss"] for event in first.events_of("validation")] == [
        event["loss"] for event in second.events_of("validation")
    ]


# ------------------------------------------------------------------------------------------------- data


def test_a_last_batch_of_one_sample_that_a_batch_norm_cannot_take_is_refused_at_the_start(tmp_path: Path) -> None:
    flags = ("--task", f"{ODD}NormTask", "--samples", 41, "--batch-size", 5, "--max-epochs", 2)
    done = train_spawned(tmp_path / "refused", *flags, ranks=2)
    assert done.code == 2, done.output
    line = (
        "the training data has 41 samples, whose last batch is 1 sample on a rank, and the model's batch norm needs 2: "
        "leave it out with --drop-last, or choose another --batch-size"
    )
    assert len([text for text in done.output.splitlines() if line in text]) == 1
    assert "Traceback" not in done.output
    dropped = train(tmp_path / "dropped", *flags, "--drop-last", ranks=2)
    assert dropped.code == 0, dropped.output
    assert sum(event["samples"] * 1 for event in dropped.events_of("step")) == 2 * 40
    assert next(event["updates_per_epoch"] for event in dropped.events_of("training_plan")) == 4


def test_a_rank_without_samples_runs_a_batch_norm_all_the_same(tmp_path: Path) -> None:
    # Of the last ten samples eight are read by rank 0 and two by rank 1; rank 2 has none.
    flags = ("--task", f"{ODD}NormTask", "--samples", 34, "--batch-size", 8, "--max-epochs", 2)
    done = train(tmp_path, *flags, ranks=3)
    assert done.code == 0, done.output
    assert sum(event["samples"] for event in done.events_of("step")) == 2 * 34


def test_a_training_that_left_out_its_last_samples_resumes_at_the_next_epoch(tmp_path: Path) -> None:
    flags = ("--batch-size", 8, "--max-epochs", 3, "--drop-last", "--dropout", 0.2)  # 50 samples: 6 updates
    straight = train(tmp_path / "straight", *flags)
    first = train(tmp_path / "first", *flags, "--max-updates", 6)
    second = train(tmp_path / "second", *flags, "--resume", tmp_path / "first" / "checkpoints")
    assert (straight.code, first.code, second.code) == (0, 0, 0), second.output
    assert torch.equal(second.parameters, straight.parameters)
    assert sum(event["samples"] for event in straight.events_of("step")) == 3 * 48


@pytest.mark.parametrize(("workers", "share"), [(0, 0.0), (2, 1.0)])
def test_validation_reads_with_as_many_processes_as_training(tmp_path: Path, workers: int, share: float) -> None:
    flags = ("--task", f"{ODD}ReaderTask", "--batch-size", 5, "--max-epochs", 2, "--num-workers", workers)
    done = train(tmp_path, *flags)
    assert done.code == 0, done.output
    assert [event["metrics"]["in_worker"] for event in done.events_of("validation")] == [share, share]


# ------------------------------------------------------------------------------------------------- what loss returns


def test_a_loss_may_return_two_values(tmp_path: Path) -> None:
    done = train(tmp_path, "--task", f"{ODD}TwoValueTask", "--batch-size", 10, "--max-epochs", 1)
    assert done.code == 0, done.output
    assert [event.get("metrics", {}) for event in done.events_of("validation")] == [{}]


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("only the loss", "WrongTask.loss() returned a Tensor"),
        ("four", "WrongTask.loss() returned a tuple of 4"),
        ("a number", "WrongTask.loss() returned a float as the loss"),
        ("unsummed", "WrongTask.loss() returned a tensor [3] of float32 as the loss"),
        ("detached", "WrongTask.loss() returned a loss that was not computed from the model's parameters"),
        ("no count", "WrongTask.loss() returned a NoneType as the count"),
        ("a list of metrics", "WrongTask.loss() returned a list as the metrics"),
        ("an unsummed metric", "WrongTask.loss() returned a tensor [2] of float32 as the metric 'hits'"),
    ],
)
def test_a_wrong_return_value_of_a_loss_is_reported_with_the_class_of_the_task(
    tmp_path: Path, given: str, line: str
) -> None:
    done = train(tmp_path, "--task", f"{ODD}WrongTask", "--batch-size", 10, "--max-epochs", 1, "--poison", given)
    assert done.code == 2, done.output
    assert "Traceback" not in done.output
    result = json.loads((tmp_path / "nodes" / "0.json").read_text())
    assert result["failure"]["message"].startswith(f"{line}; it must return the summed loss")


# ------------------------------------------------------------------------------------------------- waits


def train_without_waits(rank: int, world_size: int, count_per_sample: int | None) -> int:
    """Train with every wait for a device refused, from the first step to the last; return the steps."""
    from host_waits import HostWaits
    from tiny_task import TinyTask
    from worker_contexts import worker_context

    from trainer.engine.loop import Loop

    waits = HostWaits()

    class HostWaitTask(TinyTask):
        def loss(self, model: torch.nn.Module, batch: Any) -> Any:
            if self.calls == 2:  # DDP's first backward pass rebuilds its buckets
                waits.start()
            return super().loss(model, batch)

    task = HostWaitTask(TinyOptions(masked=count_per_sample is None, valid_samples=5))
    task.count_per_sample = count_per_sample
    loop = Loop(
        task,
        Training(
            batch_size=(5,),
            update_freq=(2,),
            max_updates=4,
            optimizer="sgd",  # the step counters of others are on the host
            desync_every=1,
            clip_norm=0.1,
            valid_every_epochs=0,
            shuffle=False,  # the order is on the host, and differs in nothing from values on a device
        ),
        worker_context(
            rank,
            world_size,
            before_wait=waits.stop,  # before the last evaluation and the save, which may wait
            copies=waits.copies,
        ),
    )
    try:
        loop.run()
    finally:
        waits.stop()
    return loop.updates


@pytest.mark.parametrize("count_per_sample", [None, 3], ids=["counts summed over the ranks", "counts known"])
def test_no_step_waits_for_the_device(two_ranks: Gang, count_per_sample: int | None) -> None:
    assert two_ranks.run(train_without_waits, count_per_sample) == [4, 4]
