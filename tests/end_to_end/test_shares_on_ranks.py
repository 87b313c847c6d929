"""Balanced shares on real ranks: what is learned stays the same, whatever the shares do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_log import newest
from trained import ENVIRON, TrainingResult, train
from waiting import LIMIT_S, until

from trainer.contract.record import RunDir, ShareChange, decode_events
from trainer.host.processes import descendants

TASK = f"{Path(__file__).parents[1] / 'support' / 'slowed_task.py'}:SlowedTask"
N = 24
FLAGS: tuple[Any, ...] = ("--task", TASK, "--samples", N * 45 + 7, "--optimizer", "sgd", "--lr", 0.002)
"""An epoch of 46 micro-steps, of which the last has 7 samples."""
BALANCED = ("--batch-size", "balanced", "--global-batch-size", N, "--sample-ms", "0.1,0.8")
EQUAL = ("--batch-size", N // 2, "--sample-ms", "0,0")


def changes(done: TrainingResult) -> list[dict[str, Any]]:
    """Return the changes of shares, each once."""
    return [event for event in done.events_of("shares") if event["previous"] and "measured_ms" not in event]


def relative_error(one: TrainingResult, other: TrainingResult) -> float:
    return float((one.parameters - other.parameters).norm() / other.parameters.norm())


def curve(done: TrainingResult) -> list[float]:
    """Return the loss of each step of whole batches: the mean over the samples of all ranks."""
    shares = {event["step"]: event["shares"] for event in done.events_of("shares")} or {1: [N // 2, N // 2]}
    sums: dict[int, float] = {}
    for event in done.events_of("step"):
        losses = event.get("losses") or [event.get("loss")]
        for step, loss in enumerate(losses, event["step"] - len(losses) + 1):
            share = shares[max(begin for begin in shares if begin <= step)][event["rank"]]
            sums[step] = sums.get(step, 0.0) + (loss or 0.0) * share / N
    return [sums[step] for step in sorted(sums) if step % 46]  # an epoch's last step has few samples


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


@pytest.mark.parametrize(
    "more",
    [(), ("--update-freq", 2, "--ema-decay", 0.9), ("--no-counts", "--num-workers", 1)],
    ids=["plain", "accumulating, with an average", "counts summed, with a loading process"],
)
def test_shares_that_change_learn_what_equal_ones_learn(
    pool: ThreadPoolExecutor, tmp_path: Path, more: tuple[Any, ...]
) -> None:
    begun = pool.submit(train, tmp_path / "equal", *FLAGS, *EQUAL, *more, "--max-epochs", 2, ranks=2)
    done = train(tmp_path / "balanced", *FLAGS, *BALANCED, *more, "--max-epochs", 2, ranks=2)
    equal = begun.result()
    assert (done.code, equal.code) == (0, 0), done.output + equal.output
    first = changes(done)[0]
    assert first["cause"] == "measured"
    assert first["shares"][0] > first["shares"][1]
    assert all(sum(event["shares"]) == N for event in changes(done))
    assert sum(event["samples"] for event in done.events_of("step")) == 2 * (N * 45 + 7)
    assert relative_error(done, equal) < 1e-10
    if not more:
        assert len(curve(done)) == 90
        assert curve(done) == pytest.approx(curve(equal), rel=1e-5)
    assert done.sum_of("grad_norm", 0) == pytest.approx(equal.sum_of("grad_norm", 0), rel=1e-9)
    for one, other in zip(done.events_of("validation"), equal.events_of("validation"), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-9)


def test_shares_of_tokens_change_and_learn_what_one_rank_learns(pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    tokens = ("--batch-size", "balanced", "--global-batch-size", 96, "--max-tokens", 90, "--max-epochs", 2)
    one = ("--batch-size", "balanced", "--global-batch-size", 96, "--max-tokens", 102, "--max-epochs", 2)
    more = ("--update-freq", 2, "--ema-decay", 0.9)
    begun = pool.submit(train, tmp_path / "one", *FLAGS, *one, *more, "--sample-ms", "0")
    done = train(tmp_path / "balanced", *FLAGS, *tokens, *more, "--sample-ms", "0.1,0.8", ranks=2)
    alone = begun.result()
    assert (done.code, alone.code) == (0, 0), done.output + alone.output
    assert changes(done)[0]["shares"][0] > 48
    assert all(sum(event["shares"]) == 96 and max(event["shares"]) <= 84 for event in changes(done))
    assert sum(event["samples"] for event in done.events_of("step")) == 2 * (N * 45 + 7)
    assert relative_error(done, alone) < 1e-10


def test_the_next_run_on_such_devices_begins_with_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENVIRON, "GPUTRAIN_CACHE", str(tmp_path / "cache"))
    devices = ("--threads=1", "--threads=2")  # the model of a CPU is that of its threads
    first = train(tmp_path / "first", *FLAGS, *BALANCED, "--max-updates", 60, ranks=2, own=devices)
    after = train(tmp_path / "after", *FLAGS, *BALANCED, "--max-updates", 2, ranks=2, own=devices)
    assert (first.code, after.code) == (0, 0), first.output + after.output
    (start,) = after.events_of("shares")
    assert (start["step"], start["cause"]) == (1, "learned")
    assert start["shares"][0] > 12
    assert "at the start, by earlier runs on such devices" in after.output


@pytest.fixture(scope="module")
def balanced(tmp_path_factory: pytest.TempPathFactory) -> TrainingResult:
    """A training whose shares have changed, stopped within its second epoch."""
    folder = tmp_path_factory.mktemp("balanced")
    done = train(folder, *FLAGS, *BALANCED, "--max-updates", 60, "--max-epochs", 3, ranks=2)
    assert done.code == 0, done.output
    assert changes(done)
    return done


def test_with_the_recorded_shares_a_run_repeats_bit_for_bit(balanced: TrainingResult, tmp_path: Path) -> None:
    flags = (*FLAGS, *BALANCED, "--sample-ms", "0,0", "--shares-from", balanced.run_dir)
    again = train(tmp_path, *flags, "--max-updates", 60, "--max-epochs", 3, ranks=2)
    assert again.code == 0, again.output
    assert [(event["step"], event["shares"]) for event in changes(again)] == [
        (event["step"], event["shares"]) for event in changes(balanced)
    ]
    assert {event["cause"] for event in changes(again)} == {"recorded"}
    assert torch.equal(again.parameters, balanced.parameters)
    assert [event["loss"] for event in again.events_of("validation")] == [
        event["loss"] for event in balanced.events_of("validation")
    ]


def test_a_resumed_run_has_the_shares_that_it_had_and_goes_on_bit_for_bit(
    pool: ThreadPoolExecutor, balanced: TrainingResult, tmp_path: Path
) -> None:
    flags = (*FLAGS, *BALANCED, "--sample-ms", "0,0", "--shares-from", balanced.run_dir, "--max-epochs", 2)
    begun = pool.submit(train, tmp_path / "straight", *flags, ranks=2)
    resumed = train(tmp_path / "resumed", *flags, "--resume", balanced.run_dir / "checkpoints", ranks=2)
    straight = begun.result()
    assert (resumed.code, straight.code) == (0, 0), resumed.output + straight.output
    first = resumed.events_of("shares")[0]
    assert (first["step"], first["cause"], first["shares"]) == (61, "resumed", changes(balanced)[-1]["shares"])
    assert torch.equal(resumed.parameters, straight.parameters)


def test_a_run_killed_while_its_shares_change_resumes_and_learns_the_same(
    pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    begun = pool.submit(train, tmp_path / "equal", *FLAGS, *EQUAL, "--max-epochs", 1, ranks=2)
    killed = tmp_path / "killed"
    words = ["--cpu", "--run-dir", killed, "--threads", 1, "--distributed-world-size", 2, *FLAGS, *BALANCED]
    words += ["--max-epochs", 1, "--save-every-updates", 1]
    agent = subprocess.Popen([sys.executable, "-m", "trainer", *map(str, words)], env=ENVIRON, stderr=subprocess.PIPE)
    record = RunDir(killed).rank_events(0)
    until(lambda: record.exists() and b'"previous":[12,12]' in record.read_bytes())
    for pid in (*descendants(agent.pid), agent.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    agent.communicate(timeout=LIMIT_S)
    before = len(record.read_bytes())
    resumed = train(killed, *FLAGS, *BALANCED, "--max-epochs", 1, "--resume", killed / "checkpoints", ranks=2)
    equal = begun.result()
    assert (resumed.code, equal.code) == (0, 0), resumed.output + equal.output
    again = decode_events(record.read_bytes()[before:])
    first = next(event for event in again if isinstance(event, ShareChange))
    assert first.cause == "resumed"
    assert relative_error(resumed, equal) < 1e-10


@pytest.mark.parametrize(
    ("more", "found"),
    [
        (("--memory", "99,9"), [16, 8]),
        (("--memory", "17,9", "--memory-from", 20, "--update-freq", 2, "--no-counts"), [16, 8]),
        # Between two layers, of which the last has its gradient, and in the last micro-step its bucket is on its way.
        (("--memory", "17,9", "--in-backward", "--bucket-cap-mb", 1e-4, "--update-freq", 2, "--no-counts"), [16, 8]),
    ],
    ids=["in the first step", "later, accumulating, counts summed", "in the backward pass"],
)
def test_a_rank_that_runs_out_of_memory_in_a_step_gets_less_and_nothing_is_lost(
    pool: ThreadPoolExecutor, tmp_path: Path, more: tuple[Any, ...], found: list[int]
) -> None:
    balanced = ("--batch-size", "balanced", "--global-batch-size", N, "--sample-ms", "0.2,0.2")
    same = more[more.index("--update-freq") :] if "--update-freq" in more else ()
    begun = pool.submit(train, tmp_path / "equal", *FLAGS, *EQUAL, *same, "--max-epochs", 1, ranks=2)
    done = train(tmp_path / "short", *FLAGS, *balanced, *more, "--max-epochs", 1, ranks=2)
    equal = begun.result()
    assert (done.code, equal.code) == (0, 0), done.output + equal.output
    first = changes(done)[0]
    assert (first["cause"], first["shares"], first["bounds"]) == ("memory", found, [0, found[1]])
    assert sum(event["samples"] for event in done.events_of("step")) == N * 45 + 7
    assert relative_error(done, equal) < 1e-10
    assert [event["loss"] for event in done.events_of("validation")] == pytest.approx(
        [event["loss"] for event in equal.events_of("validation")], rel=1e-9
    )


@pytest.mark.parametrize(("threads", "bounds"), [(1, [0, 8]), (2, [0, 0])], ids=["the same", "another"])
def test_a_bound_by_memory_is_kept_for_the_device_that_has_it(tmp_path: Path, threads: int, bounds: list[int]) -> None:
    balanced = ("--batch-size", "balanced", "--global-batch-size", N, "--sample-ms", "0.2,0.2", "--max-epochs", 2)
    first = train(tmp_path, *FLAGS, *balanced, "--memory", "99,9", "--max-updates", 20, ranks=2)
    own = ("--threads=1", f"--threads={threads}")  # the model of a CPU is that of its threads
    more = ("--resume", tmp_path / "checkpoints", "--max-updates", 22)
    resumed = train(tmp_path / "on", *FLAGS, *balanced, *more, ranks=2, own=own)
    assert (first.code, resumed.code) == (0, 0), first.output + resumed.output
    saved = newest(tmp_path / "on" / "checkpoints")
    assert saved is not None
    assert saved[1]["shares"]["shares"] == [16, 8]
    assert saved[1]["shares"]["bounds"] == bounds


def test_ranks_whose_memory_together_holds_less_than_the_batch_compute_it_in_parts(
    pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    begun = pool.submit(train, tmp_path / "equal", *FLAGS, *EQUAL, "--max-epochs", 1, ranks=2)
    flags = ("--batch-size", "balanced", "--global-batch-size", N, "--sample-ms", "0.3,0.3", "--memory", "5,5")
    done = train(tmp_path / "short", *FLAGS, *flags, "--max-epochs", 1, ranks=2)
    equal = begun.result()
    assert (done.code, equal.code) == (0, 0), done.output + equal.output
    assert all(event["cause"] != "memory" for event in changes(done))  # no shares would be better
    assert relative_error(done, equal) < 1e-10


def test_a_rank_whose_memory_holds_no_sample_is_named_before_the_training(tmp_path: Path) -> None:
    done = train(tmp_path, *FLAGS, *BALANCED, "--memory", "99,0", "--max-epochs", 1, ranks=2)
    assert done.code == 1
    failure = next(event for event in done.events_of("failure") if event["kind"] == "out_of_memory")
    assert "the memory of rank 1 does not hold one sample: no memory for 1 samples" in failure["message"]
    assert not done.events_of("step")


def test_a_rank_that_is_too_slow_even_with_one_sample_is_told_once(tmp_path: Path) -> None:
    flags = ("--batch-size", "balanced", "--global-batch-size", 4, "--sample-ms", "0.2,30", "--max-updates", 90)
    done = train(tmp_path, *FLAGS, *flags, ranks=2)
    assert done.code == 0, done.output
    assert changes(done)[-1]["shares"] == [3, 1]
    told = [event for event in done.events_of("finding") if event["kind"] == "slow_with_one_sample"]
    assert len(told) == 1
    assert told[0]["message"].startswith("rank 1 takes ")
    assert told[0]["rank"] == 1, "views name it by this, not by the rank that wrote it"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--batch-size", "balanced", "--global-batch-size", 1),
            "--global-batch-size is 1, but there are 2 ranks, each with at least 1 sample: give 2 or more",
        ),
        (
            (*BALANCED, "--buffers"),
            "the model has a batch norm, which needs batches of at least 2 samples, but a share of --batch-size "
            "balanced may be 1: give a --batch-size of one value per rank",
        ),
        (
            ("--batch-size", "balanced", "--global-batch-size", 96, "--max-tokens", 50),
            "--global-batch-size is 96 tokens, but for 2 ranks with samples of up to 6 tokens and --max-tokens 50 it "
            "must be 12 to 88",
        ),
        (
            (*BALANCED, "--shares-from", "/nowhere"),
            "--shares-from: /nowhere is no run directory: /nowhere/events/0.ndjson cannot be read",
        ),
    ],
)
def test_what_cannot_be_balanced_is_refused_in_one_line(tmp_path: Path, flags: tuple[Any, ...], message: str) -> None:
    done = train(tmp_path, *FLAGS, *flags, "--max-updates", 2, ranks=2)
    assert done.code == 2
    assert message in done.output
    assert "Traceback" not in done.output
