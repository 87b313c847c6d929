"""The training loop with real ranks: exact gradients, resuming, stopping, and what goes wrong."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_log import newest
from torch import Tensor
from trained import TASK, TrainingResult, train, train_spawned

from trainer.checkpoint import write_file


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    """Two trainings at a time: most of each is the loading of torch, in one thread."""
    with ThreadPoolExecutor(2) as executor:
        yield executor


Begun = dict[str, Future[TrainingResult]]
Flags = tuple[object, ...]


def begin(
    pool: ThreadPoolExecutor, folder: Path, variants: Mapping[str, Flags], *flags: object, ranks: int = 1
) -> Begun:
    """Begin trainings that do not depend on each other, each in a folder of its name."""
    return {name: pool.submit(train, folder / name, *flags, *own, ranks=ranks) for name, own in variants.items()}


def relative_error(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> TrainingResult:
    run_dir = tmp_path_factory.mktemp("one")
    done = train(run_dir, "--batch-size", 24, "--max-epochs", 3, "--optimizer", "sgd", "--lr", 0.5, "--double")
    assert done.code == 0, done.output
    return done


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (2, ("--batch-size", 12)),
        (3, ("--batch-size", "11,9,4")),
        (2, ("--batch-size", 4, "--update-freq", 3)),
        (1, ("--batch-size", 8, "--update-freq", 3)),
    ],
    ids=["two ranks", "uneven batch sizes", "two ranks accumulating", "one rank accumulating"],
)
def test_gradients_are_the_exact_mean_over_the_global_batch(
    one_process: TrainingResult, tmp_path: Path, ranks: int, flags: Flags
) -> None:
    done = train(tmp_path, *flags, "--max-epochs", 3, "--optimizer", "sgd", "--lr", 0.5, "--double", ranks=ranks)
    assert done.code == 0, done.output
    assert relative_error(done.parameters, one_process.parameters) < 1e-12
    assert done.sum_of("grad_norm", 0) == pytest.approx(one_process.sum_of("grad_norm", 0), rel=1e-9)


def test_a_count_that_varies_with_the_batch_is_summed_over_the_ranks(pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    flags = ("--masked", "--max-epochs", 3, "--optimizer", "sgd", "--lr", 0.5, "--double")
    begun = pool.submit(train, tmp_path / "one", "--batch-size", 20, *flags)
    ranks = train(tmp_path / "two", "--batch-size", "13,7", *flags, ranks=2)
    union = begun.result()
    assert (union.code, ranks.code) == (0, 0), union.output + ranks.output
    assert relative_error(ranks.parameters, union.parameters) < 1e-12


def test_a_rank_in_whose_batch_nothing_counts_trains_on_and_has_no_loss_of_its_own(tmp_path: Path) -> None:
    task = TASK.replace(":TinyTask", ":OneSidedTask")
    done = train(tmp_path, "--task", task, "--masked", "--batch-size", 5, "--max-updates", 4, ranks=2)
    assert done.code == 0, done.output
    assert [sum(event["steps"] for event in done.events_of("step", rank)) for rank in (0, 1)] == [4, 4]
    assert all("loss" in event for event in done.events_of("step", 0))
    assert not any("loss" in event for event in done.events_of("step", 1))


def test_every_rank_reports_every_step_and_the_parameters_agree(tmp_path: Path) -> None:
    flags = ("--batch-size", 5, "--dropout", 0.3, "--lr", 0.1, "--lr-scheduler", "polynomial_decay")
    done = train_spawned(tmp_path, *flags, "--max-epochs", 2, ranks=2)
    assert done.code == 0, done.output
    # The schedule ends with the last of the two epochs, of five steps each.
    assert done.events_of("step", 0)[-1]["lr"] == pytest.approx(0.01)
    for rank in (0, 1):
        assert sum(event["steps"] for event in done.events_of("step", rank)) == 10
        assert done.events_of("rank_state", rank)[-1]["state"] == "finished"
    assert {event["loss"] for event in done.events_of("step", 0)}.isdisjoint(
        event["loss"] for event in done.events_of("step", 1)
    )
    last = {event["rank"]: event for event in done.events_of("checksum")}
    assert last[0]["parameters"] == last[1]["parameters"]
    assert sum(event["samples"] for event in done.events_of("step")) == 2 * 50


MUON: tuple[Any, ...] = ("--optimizer", "muon", "--no-decay-norms", "--weight-decay", 0.1)
if not hasattr(torch.optim, "Muon"):
    MUON = MUON[2:]


@pytest.mark.parametrize(
    ("stop", "more"),
    [
        (4, ("--lr-scheduler", "cosine")),
        (10, ("--lr-scheduler", "wsd", "--decay-updates", 6, "--ema-decay", 0.9, "--ema-start", 3, *MUON)),
    ],
    ids=["inside an epoch", "at the end of an epoch"],
)
def test_a_resumed_run_is_equal_to_one_without_a_stop_bit_for_bit(
    pool: ThreadPoolExecutor, tmp_path: Path, stop: int, more: tuple[Any, ...]
) -> None:
    # Fast steps share an event; a validation ends it, so that none covers steps before and after the stop.
    flags = ("--batch-size", 5, "--dropout", 0.3, "--total-num-update", 15, "--valid-every-updates", 2, *more)
    begun = pool.submit(train, tmp_path / "straight", *flags, "--max-epochs", 3, ranks=2)
    first = train(tmp_path / "first", *flags, "--max-epochs", 3, "--max-updates", stop, ranks=2)
    second = train(
        tmp_path / "second", *flags, "--max-epochs", 3, "--resume", tmp_path / "first" / "checkpoints", ranks=2
    )
    straight = begun.result()
    assert (straight.code, first.code, second.code) == (0, 0, 0), second.output
    assert torch.equal(second.parameters, straight.parameters)
    for rank in (0, 1):
        for value in ("loss", "grad_norm"):
            expected = straight.sum_of(value, rank, after=stop)
            assert second.sum_of(value, rank) == pytest.approx(expected, rel=1e-12)


def test_on_another_world_size_the_rest_of_the_epoch_is_seen_once(tmp_path: Path) -> None:
    flags = ("--batch-size", 4, "--max-epochs", 1)
    first = train(tmp_path / "first", *flags, "--max-updates", 3, ranks=2)
    second = train(tmp_path / "second", *flags, "--resume", tmp_path / "first" / "checkpoints", ranks=3)
    assert (first.code, second.code) == (0, 0), second.output
    assert sum(event["samples"] for event in first.events_of("step")) == 24
    assert sum(event["samples"] for event in second.events_of("step")) == 26


def test_validation_does_not_depend_on_the_number_of_ranks(pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    flags = ("--batch-size", 4, "--max-updates", 1, "--lr", "1e-30", "--max-epochs", 1)
    results = []
    for done in pool.map(lambda ranks: train(tmp_path / str(ranks), *flags, ranks=ranks), (1, 2)):
        assert done.code == 0, done.output
        results.append([(e["loss"], e["metrics"]["accuracy"]) for e in done.events_of("validation")])
    assert len(results[0]) == 1
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)


REASONS: dict[str, Flags] = {
    "max_updates 3 reached": ("--max-updates", 3),
    "max_epochs 1 reached": ("--max-epochs", 1),
    "stop_time 0.0001 minutes reached": ("--stop-time", 0.0001),
    "no lower loss in 2 validations": ("--patience", 2, "--lr", "1e-30"),
    "the learning rate is not above min_lr 0.0004": (
        *("--min-lr", 0.0004, "--lr-scheduler", "polynomial_decay", "--total-num-update", 20),
    ),
}


@pytest.fixture(scope="module")
def ended(pool: ThreadPoolExecutor, tmp_path_factory: pytest.TempPathFactory) -> Begun:
    return begin(pool, tmp_path_factory.mktemp("ended"), REASONS, "--batch-size", 10)


@pytest.mark.parametrize("reason", REASONS)
def test_training_ends_for_the_configured_reason(ended: Begun, reason: str) -> None:
    done = ended[reason].result()
    assert done.code == 0, done.output
    assert f"finished: {reason}" in (done.run_dir / "logs" / "0.log").read_text()
    early = [event["message"] for event in done.events_of("finding") if event["kind"] == "ended_early"]
    assert early == ([] if reason.startswith("max_") else [f"finished: {reason}"])


@pytest.mark.parametrize(
    ("poison", "where", "remedy"),
    [
        ("loss", "output of 4 (_Poison)", "otherwise look for a non-finite or very large number in this batch"),
        ("gradient", "gradient of 3.bias", "otherwise look for a square root or logarithm of 0"),
    ],
)
def test_a_non_finite_number_is_named_with_step_and_module_and_what_to_try(
    tmp_path: Path, poison: str, where: str, remedy: str
) -> None:
    done = train(tmp_path, "--batch-size", 10, "--max-epochs", 3, "--poison", poison, ranks=2)
    assert done.code == 1
    kinds = {event["kind"] for event in done.events_of("failure")}
    assert "non_finite" in kinds, done.output
    message = next(event["message"] for event in done.events_of("failure") if event["kind"] == "non_finite")
    assert f"non-finite {poison} at step 4: first in {where}" in message
    assert f"; {remedy}" in message


def test_an_overflow_of_half_precision_is_located_in_half_precision(tmp_path: Path) -> None:
    done = train(tmp_path, "--batch-size", 10, "--max-epochs", 3, "--poison", "half", "--precision", "fp16")
    assert done.code == 1
    (failure,) = done.events_of("failure")
    assert failure["message"].startswith("non-finite loss at step 4: first in output of 4 (_Poison); ")
    assert "or take bf16 instead of fp16" in failure["message"]


@pytest.mark.parametrize(
    ("poison", "known"),
    [
        ("once", "non-finite loss at step 4: the same batch computed again gives finite numbers, so no module can"),
        ("norm", "non-finite gradient at step 4: every gradient is finite, but their norm is too large for its"),
    ],
)
def test_a_non_finite_number_that_does_not_recur_is_reported_with_the_known_facts(
    tmp_path: Path, poison: str, known: str
) -> None:
    done = train(tmp_path, "--batch-size", 10, "--max-epochs", 3, "--poison", poison)
    assert done.code == 1
    (failure,) = done.events_of("failure")
    assert (failure["kind"], failure["step"]) == ("non_finite", 4)
    assert failure["message"].startswith(known)


REFUSALS: dict[str, Flags] = {
    "the training data has 50 samples, but 3 ranks": ("--batch-size", 40, "--max-epochs", 1),
    "--batch-size has 2 values, but there are 3 ranks": ("--batch-size", "4,4", "--max-epochs", 1),
    "--bach-size": ("--batch-size", 4, "--max-epochs", 1, "--bach-size", "4"),
    "nothing would end this training": ("--batch-size", 10),
    "did you mean 'accuracy'?": ("--batch-size", 4, "--max-epochs", 1, "--best-metric", "acuracy"),
    "--samples is 'many', but must be an integer": ("--batch-size", 4, "--max-epochs", 1, "--samples", "many"),
}
OF_THREE_RANKS = list(REFUSALS)[:3]


@pytest.fixture(scope="module")
def refused(pool: ThreadPoolExecutor, tmp_path_factory: pytest.TempPathFactory) -> Begun:
    folder = tmp_path_factory.mktemp("refused")
    several = [pool.submit(train_spawned, folder / line, *REFUSALS[line], ranks=3) for line in OF_THREE_RANKS]
    alone = begin(pool, folder, {line: flags for line, flags in REFUSALS.items() if line not in OF_THREE_RANKS})
    return dict(zip(OF_THREE_RANKS, several, strict=True)) | alone


@pytest.mark.parametrize("line", REFUSALS)
def test_a_request_that_only_the_ranks_can_refuse_is_one_line_and_exit_code_2(refused: Begun, line: str) -> None:
    done = refused[line].result()
    assert done.code == 2, done.output
    assert len([text for text in done.output.splitlines() if line in text]) == 1
    assert "Traceback" not in done.output


def test_the_language_models_loss_curve_does_not_depend_on_how_the_global_batch_is_divided(
    pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"".join(b"%d squared is %d; " % (number, number * number) for number in range(600)))
    flags: Flags = ("--task", "lm", "--data", text, "--context", 16, "--dim", 32, "--layers", 1)
    # A validation ends an event, so that every step has one of its own.
    flags += ("--heads", 2, "--max-updates", 20, "--clip-norm", 1.0)
    flags += ("--valid-every-updates", 1, "--valid-fraction", 0.02)
    alone: dict[str, Flags] = {"one": ("--batch-size", 16), "accumulated": ("--batch-size", 8, "--update-freq", 2)}
    begun = begin(pool, tmp_path, alone, *flags)
    two_ranks = train(tmp_path / "two", *flags, "--batch-size", 8, ranks=2)
    divided = [begun["one"].result(), two_ranks, begun["accumulated"].result()]
    assert [done.code for done in divided] == [0, 0, 0], divided[1].output
    one, two, accumulated = (done.curve() for done in divided)
    assert len(one) == 20
    assert two == pytest.approx(one, rel=1e-5)
    assert accumulated == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("raise", "exception", "ArithmeticError: the answer is not 42"),
        ("memory", "out_of_memory", "out of memory at step 3, batch [5, 8] float32, [5, 3] int64"),
        pytest.param("exit", "exit", "exit code 7", marks=pytest.mark.slow),
        ("kill", "signal", "SIGKILL"),
    ],
)
def test_a_rank_that_dies_ends_the_run_at_once_and_is_named(
    tmp_path: Path, fault: str, kind: str, message: str
) -> None:
    flags = ("--batch-size", 5, "--max-epochs", 1000, "--fault-rank", 1, "--fault-step", 3, "--fault", fault)
    done = train_spawned(tmp_path, *flags, ranks=2)
    assert done.code == 1
    result = json.loads((tmp_path / "nodes" / "0.json").read_text())
    assert (result["failure"]["rank"], result["failure"]["kind"]) == (1, kind)
    assert message in result["failure"]["message"]
    assert fault not in ("raise", "memory") or result["failure"]["in_step"] == 3, "the step that was being made"
    assert sum(event["steps"] for event in done.events_of("step", 0)) <= 3
    if fault == "raise" and hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json"):
        collectives = json.loads((tmp_path / "logs" / "collectives_1.json").read_text())["entries"]
        assert {entry["profiling_name"] for entry in collectives} >= {"gloo:all_reduce"}, "what it did before"


def test_dropout_differs_between_ranks_and_repeats_with_the_seed(pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    flags = ("--batch-size", 5, "--max-epochs", 1, "--dropout", 0.5)
    variants: dict[str, Flags] = {"first": (), "second": (), "other": ("--seed", 2)}
    begun = begin(pool, tmp_path, variants, *flags, ranks=2)
    first, second, other = (one.result().parameters for one in begun.values())
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


@pytest.fixture(scope="module")
def stopped_at_3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("stopped")
    assert train(run_dir, "--batch-size", 10, "--max-updates", 3).code == 0
    return run_dir / "checkpoints"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--task", TASK.replace(":TinyTask", ":OtherTask")), "is of task"),
        (("--width", 17), "does not fit this model"),
        (("--resume", "nowhere.pt"), "nowhere.pt"),
    ],
    ids=["another task", "another shape", "no file"],
)
def test_a_checkpoint_that_does_not_fit_is_refused_in_one_line(
    stopped_at_3: Path, tmp_path: Path, flags: Flags, line: str
) -> None:
    done = train(tmp_path, "--batch-size", 10, "--max-updates", 3, "--resume", stopped_at_3, *flags)
    assert done.code == 2, done.output
    assert len([text for text in done.output.splitlines() if line in text]) == 1
    assert "Traceback" not in done.output


def test_a_resumed_training_that_is_at_its_end_already_is_refused(tmp_path: Path) -> None:
    flags = ("--batch-size", 10, "--max-updates", 3)
    assert train(tmp_path / "first", *flags).code == 0
    folder = tmp_path / "first" / "checkpoints"
    done = train(tmp_path / "second", *flags, "--lr", 0.5, "--resume", folder)
    assert done.code == 2, done.output
    assert "nothing is left to train: max_updates 3 reached" in done.output.splitlines()[-1]
    # In its own run directory it is the restart of a run that was killed after its last checkpoint.
    assert train(tmp_path / "first", *flags, "--resume", folder).code == 0


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_training_whose_last_checkpoint_cannot_be_written_fails_in_one_line(tmp_path: Path, ranks: int) -> None:
    limit = 1 << 20  # of a file's size, less than the checkpoint's
    words = [sys.executable, "-m", "trainer", "--task", TASK, "--cpu", "--threads", "1", "--width", "50000"]
    words += ["--run-dir", str(tmp_path), "--batch-size", "10", "--max-updates", "3"]
    done = subprocess.run(
        [*words, "--distributed-world-size", str(ranks)],
        capture_output=True,
        text=True,
        timeout=200,
        env={key: value for key, value in os.environ.items() if not key.startswith("SLURM")},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    message = "trained, but there is no checkpoint; that of step 3 was not kept: File too large"
    last = done.stderr.splitlines()[-1]
    assert (done.returncode, last) == (1, f"trainer: rank 0 on {socket.gethostname()}: {message}")
    (failure,) = TrainingResult(tmp_path, done).events_of("failure")
    assert (failure["kind"], failure["message"], failure["step"]) == ("checkpoint_lost", message, 3)
    result = json.loads((tmp_path / "nodes" / "0.json").read_bytes())
    assert (result["exit_code"], result["failure"]["message"]) == (1, message)
    assert not list((tmp_path / "checkpoints").glob("*.pt"))


def test_an_epoch_that_ends_where_an_evaluation_is_due_by_updates_has_one_evaluation(tmp_path: Path) -> None:
    done = train(tmp_path, "--batch-size", 25, "--valid-every-updates", 1, "--max-epochs", 2)  # 50 samples
    assert [event["step"] for event in done.events_of("validation")] == [1, 2, 3, 4]


@pytest.mark.parametrize("updates", [13, 15], ids=["inside epoch 3", "at the end of epoch 3"])
def test_the_validation_that_a_resumed_training_lacks_has_the_epoch_of_its_last_step(
    tmp_path: Path, updates: int
) -> None:
    flags = ("--batch-size", 10, "--max-updates", updates)  # 50 samples
    first = train(tmp_path / "first", *flags)
    found = newest(tmp_path / "first" / "checkpoints")
    assert found is not None
    write_file(tmp_path / "stopped.pt", {**found[1], "validated_at": -1})
    done = train(tmp_path / "second", *flags, "--resume", tmp_path / "stopped.pt")
    (event,) = done.events_of("validation")
    last = first.events_of("validation")[-1]
    assert (event["step"], event["epoch"]) == (last["step"], last["epoch"]) == (updates, 3)


def test_a_training_that_lacks_only_its_last_validation_gets_it_without_an_update(tmp_path: Path) -> None:
    flags = ("--batch-size", 10, "--max-updates", 3)
    assert train(tmp_path / "first", *flags).code == 0
    found = newest(tmp_path / "first" / "checkpoints")
    assert found is not None
    # As it is after a stop in the middle of the validation.
    write_file(tmp_path / "stopped.pt", {**found[1], "validated_at": -1})
    done = train(tmp_path / "second", *flags, "--resume", tmp_path / "stopped.pt")
    assert done.code == 0, done.output
    line = "no steps are left, max_updates 3 reached: running its last validation now"
    assert line in (tmp_path / "second" / "logs" / "0.log").read_text().splitlines()
    assert [event["message"] for event in done.events_of("finding")] == [line], "who looks at the run sees it too"
    assert [event["step"] for event in done.events_of("validation")] == [3]
    assert done.events_of("step") == []
