from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from gputrain_tui.history.plan_file import SlurmJob
from gputrain_tui.lifecycle.launchers.slurm_cause import is_for_slurm, is_put_back
from gputrain_tui.lifecycle.launchers.slurm_launcher import SlurmLauncher
from gputrain_tui.lifecycle.saving_time import saving_time_s
from gputrain_tui.plan.batch_script import (
    excluded_by,
    save_before_limit_s,
    signal_before_limit_s,
    successor_arguments,
    with_signal,
)
from trainer.contract.record import Checkpoint, RunDir, Step, encode_event


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        (None, 120), ("1", 15), ("4", 60), ("60", 120), ("0:40", 10), ("00:04:00", 60), ("10:00:00", 120),
        ("0-00:02", 30), ("1-12", 120), ("UNLIMITED", 120), ("0", 1),
    ],
)  # fmt: skip
def test_the_signal_comes_two_minutes_before_the_limit_or_a_quarter_of_it(time: str | None, seconds: int) -> None:
    assert save_before_limit_s(time) == seconds


@pytest.mark.parametrize(
    ("time", "saving_s", "seconds"),
    [(None, 0.2, 31), ("60", 3.0, 36), (None, 300.0, 630), ("10", 300.0, 300), ("1", 0.1, 30), ("0", 5.0, 1)],
)
def test_the_signal_comes_as_early_as_saving_took_at_most_half_of_the_limit(
    time: str | None, saving_s: float, seconds: int
) -> None:
    assert save_before_limit_s(time, saving_s) == seconds


SIGNALLED = ["--requeue", "--signal=B:USR1@120", "--nodes=2"]


@pytest.mark.parametrize(
    ("arguments", "excluded", "expected"),
    [
        (SIGNALLED, "", [*SIGNALLED, "--dependency=afterany:7"]),
        (SIGNALLED, "n[1-2],n5", [*SIGNALLED, "--dependency=afterany:7", "--exclude=n[1-2],n5"]),
        (
            ["--nodes=1", "-d", "singleton", ":", "--nodes=2"],
            "n5",
            [
                *("--nodes=1", "-d", "singleton", "--dependency=afterany:7", "--exclude=n5"),
                *(":", "--nodes=2", "--exclude=n5"),
            ],
        ),
    ],
    ids=["as before", "without hosts", "heterogeneous"],
)
def test_a_successor_waits_for_the_job_before_and_leaves_out_hosts(
    arguments: list[str], excluded: str, expected: list[str]
) -> None:
    assert successor_arguments(arguments, after=7, excluded=excluded) == expected


def test_the_time_of_the_signal_is_read_and_changed_only_where_it_is_ours() -> None:
    by_user = ["--nodes=2", "--signal=USR1@60"]
    assert (signal_before_limit_s(SIGNALLED), signal_before_limit_s(by_user)) == (120, None)
    assert with_signal(SIGNALLED, 300) == ["--requeue", "--signal=B:USR1@300", "--nodes=2"]
    assert with_signal(by_user, 300) == by_user


@pytest.mark.parametrize(
    ("arguments", "hosts"),
    [
        (["--nodes=2"], []),
        (["--exclude=n1", "-x", "n[2-3]"], ["n1", "n[2-3]"]),
        (["--exclude", "n1", ":", "-xn1"], ["n1"]),
    ],
)
def test_hosts_that_the_recipe_leaves_out_are_read(arguments: list[str], hosts: list[str]) -> None:
    assert excluded_by(arguments) == hosts


def test_the_time_to_save_is_the_longest_step_and_the_longest_write_of_the_end_of_the_record(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert saving_time_s(run_dir) is None
    run_dir.events.mkdir()
    steps = [
        Step(time=1.0, rank=0, step=step, epoch=1, steps=1, samples=4, step_ms=ms)
        for step, ms in ((1, 1e6), (2, 2_000.0), (3, 100.0))
    ]
    saves = [
        Checkpoint(time=1.0, step=step, path=f"/c/{step}.pt", bytes=1, write_ms=ms)
        for step, ms in ((2, 9_000.0), (3, 20.0))
    ]
    lines = [*map(encode_event, steps[:1]), b" " * (1 << 20), b"\n", *map(encode_event, [*steps[1:], *saves])]
    run_dir.rank_events(0).write_bytes(b"".join(lines) + b'{"type":"checkpoint"')
    assert saving_time_s(run_dir) == 11.0


@pytest.mark.parametrize(
    ("job", "own", "refused"),
    [
        (None, "4", False),
        (SlurmJob(number=4, batch=True), "4", False),
        (SlurmJob(number=5, batch=True, earlier=[4]), "4", True),
        (SlurmJob(number=5, batch=True, earlier=[4]), "5", False),
        (SlurmJob(number=5), "4", False),
    ],
    ids=["not recorded yet", "its job", "the job before", "the successor", "in an allocation"],
)
def test_only_the_job_that_the_run_names_may_train_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: SlurmJob | None, own: str, refused: bool
) -> None:
    run_dir = RunDir(tmp_path)
    if job is not None:
        run_dir.slurm.write_bytes(msgspec.json.encode(job))
    monkeypatch.setenv("SLURM_JOB_ID", own)
    expected = f"job 4 may not train {tmp_path.name}, whose job is 5 now" if refused else ""
    assert SlurmLauncher().refusal(run_dir) == expected


@pytest.mark.parametrize(
    ("reason", "goes_on", "put_back"),
    [
        ("its time limit in Slurm is near", True, False),
        ("it reached its time limit in Slurm", True, False),
        ("Slurm pre-empted it for another job", True, False),
        ("Slurm put it back into its queue", True, True),
        ("Slurm lost n2 with rank 2, and put the run back into its queue", True, True),
        ("stopped by `gputrain stop`", False, False),
        ("it was cancelled in Slurm", False, False),
        ("stopped by SIGINT", False, False),
    ],
)
def test_a_run_goes_on_after_what_slurm_does_and_not_after_what_a_person_does(
    reason: str, goes_on: bool, put_back: bool
) -> None:
    assert (is_for_slurm(reason), is_put_back(reason)) == (goes_on, put_back)
