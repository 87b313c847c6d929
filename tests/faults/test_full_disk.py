"""A disk that fills up or a folder that is deleted: the trained state is kept, or the run reports that it is not."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from bench import FOR_EVER, LIMIT_S, Bench, until
from checkpoint_log import newest
from small_disk import small_file_system

from gputrain_tui.console.widgets.run_header import run_condition
from gputrain_tui.diagnosis import Diagnosis
from gputrain_tui.history.record_tail import last_step
from gputrain_tui.history.run_folders import Run
from gputrain_tui.history.run_reader import RunReader
from gputrain_tui.lifecycle import leftovers
from gputrain_tui.lifecycle.diagnosis_watch import LiveDiagnosis
from gputrain_tui.state import RunState
from trainer.contract.record import RunEnded, recorded_checkpoints

UPDATES = 60
KEPT = 20
SETTINGS = (f"train.save_every_updates={KEPT}", "train.keep_last=1", "train.test=false")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with 8 MiB."""
    with small_file_system(tmp_path / "disk", "8m") as folder:
        yield folder


def fill(folder: Path) -> None:
    with suppress(OSError), (folder / "others").open("ab", buffering=0) as file:
        while True:
            file.write(b"\0" * 4096)


def run_arguments(recipe: Path, *settings: str) -> list[str | Path]:
    return ["run", recipe, *(word for text in (*SETTINGS, *settings) for word in ("--set", text))]


def saved_once(bench: Bench) -> Run:
    """The run, once it has trained up to its gate and its first checkpoint is on the disk."""
    run = bench.await_training()
    until(lambda: recorded_checkpoints(run.dir))
    return run


def change_while_stopped(run: Run, change: Callable[[], None]) -> None:
    """Change something while every process of a run is held."""
    pids = leftovers.processes_of(run.dir.path)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    change()
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def last_checkpoint_step(folder: Path) -> int:
    """The step of the newest checkpoint of a folder."""
    found = newest(folder)
    assert found is not None
    return int(found[1]["updates"])


@pytest.mark.parametrize("whose", ["record and checkpoints", pytest.param("checkpoints", marks=pytest.mark.slow)])
def test_an_unwritable_last_checkpoint_fails_a_run_that_has_trained(
    small_disk: Path, tmp_path: Path, whose: str
) -> None:
    everything = whose == "record and checkpoints"
    bench = Bench(small_disk if everything else tmp_path)
    settings = [] if everything else [f"train.save_dir={small_disk}/kept"]
    process = bench.start(*run_arguments(bench.gated_recipe(KEPT, UPDATES), *settings))
    run = saved_once(bench)
    folder = run.dir.checkpoints if everything else small_disk / "kept"
    change_while_stopped(run, lambda: fill(small_disk))
    bench.gate.touch()
    _, err = process.communicate(timeout=LIMIT_S)
    assert last_checkpoint_step(folder) == KEPT
    message = (
        f"trained, but the last checkpoint is step {KEPT}; that of step {UPDATES} was not kept: No space left on device"
    )
    full = "; the disk of the run directory is full: the end of the record is missing"
    (ended,) = bench.runs()
    assert (process.returncode, ended.state, ended.status.exit_code) == (1, "failed", 1), err
    assert ended.status.message == message + (full if everything else "")
    assert message in err
    assert list(run.dir.path.rglob("*.tmp")) == list(folder.glob(".*.tmp")) == []
    if not everything:
        assert "Traceback" not in err + run.dir.rank_log(0).read_text()


def test_a_full_disk_loses_the_record_only_and_is_reported(small_disk: Path, tmp_path: Path) -> None:
    bench = Bench(small_disk)
    process = bench.start(*run_arguments(bench.gated_recipe(KEPT, UPDATES), f"train.save_dir={tmp_path}/kept"))
    run = saved_once(bench)
    change_while_stopped(run, lambda: fill(small_disk))
    bench.gate.touch()
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    (ended,) = bench.runs()
    assert (ended.state, ended.status.exit_code) == ("finished", 0)
    assert ended.status.message == "the disk of the run directory is full: the end of the record is missing"
    assert ended.status.message in err
    assert last_checkpoint_step(tmp_path / "kept") == UPDATES
    assert list(run.dir.path.rglob("*.tmp")) == []
    assert "Traceback" not in err + run.dir.rank_log(0).read_text()


def test_a_run_whose_directory_becomes_read_only_is_stopped_and_says_so(small_disk: Path, tmp_path: Path) -> None:
    bench = Bench(small_disk)
    process = bench.start(*run_arguments(bench.recipe(FOR_EVER), f"train.save_dir={tmp_path}/kept"))
    run = bench.await_training()
    until(run.dir.attempt.exists)
    subprocess.run(["mount", "--bind", small_disk, small_disk], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", small_disk], check=True)
        stop = bench.call("stop", "last")
        _, err = process.communicate(timeout=LIMIT_S)
        assert stop.stdout == (
            f"{run.id} is stopped; its run directory cannot be written: Read-only file system; processes left: none\n"
        ), stop.stderr + err + (run.dir.logs / "supervisor.log").read_text()
        assert (stop.returncode, process.returncode) == (0, 130), stop.stderr + err
        assert "no process of the run is left" in err
        ended = r"^stopped in \S+ ?s?; the end of the record is missing: Read-only file system"
        assert re.search(ended, err, re.MULTILINE), err
        assert "its record cannot be written: Read-only file system" in bench.call("runs").stdout
    finally:
        subprocess.run(["umount", small_disk], check=True)


SCRIPT_RECIPE = """\
name = "script"

[[cluster.nodes]]
cpu_ranks = 2

[train]
script = "{script}"
args = ["{steps}", "{before}", "{gate}"]
"""


def test_a_script_whose_record_lost_steps_says_so_in_every_face_and_is_called_no_stall(
    small_disk: Path, tmp_path: Path
) -> None:
    bench = Bench(small_disk)
    gate = tmp_path / "gate"
    script = Path(__file__).with_name("steps_script.py")
    recipe = tmp_path / "script.toml"
    recipe.write_text(SCRIPT_RECIPE.format(script=script, steps=300, before=79, gate=gate))
    process = bench.start("run", recipe)
    run = until(bench.runs)[0]
    until(lambda: all(gate.with_suffix(f".{rank}").exists() for rank in range(2)))
    until(lambda: all((last := last_step(run.dir, rank)) is not None and last.step == 79 for rank in range(2)))
    change_while_stopped(run, lambda: fill(small_disk))
    diagnosis = LiveDiagnosis(run.dir)
    gate.touch()
    _, err = process.communicate(timeout=LIMIT_S)
    begun = time.time()
    state = diagnosis.read_rest()
    diagnosis.close()
    later = Diagnosis()
    later.update(state, begun)
    assert [found for found in later.update(state, begun + 300.0) if found.kind == "stalled"] == []
    assert "critical" not in err
    assert process.returncode == 0, err
    reason = "the disk of the run directory is full: the end of the record is missing"
    assert re.search(rf"^finished in .*, 300 steps, 4,800 samples; {reason}", err, re.MULTILINE), err
    (ended,) = bench.runs()
    assert (ended.status.message, ended.status.step) == (reason, 300)
    seen = RunState()
    reader = RunReader(run.dir)
    while events := reader.poll():
        seen.apply_all(events)
    reader.close()
    ending = RunEnded(time=begun, status="finished", exit_code=0, message=ended.status.message)
    if seen.ended is None:
        seen.apply(ending)
    assert seen.record_gap == reason
    assert "the record is incomplete" in str(run_condition(seen, "finished"))


@pytest.mark.parametrize("whose", [pytest.param("record and checkpoints", marks=pytest.mark.slow), "checkpoints"])
def test_a_run_stopped_on_a_full_disk_reports_the_checkpoint_that_was_not_saved(
    small_disk: Path, tmp_path: Path, whose: str
) -> None:
    everything = whose == "record and checkpoints"
    bench = Bench(small_disk if everything else tmp_path)
    settings = [] if everything else [f"train.save_dir={small_disk}/kept"]
    assert bench.call(*run_arguments(bench.recipe(FOR_EVER), *settings), "--detach").returncode == 0
    run = saved_once(bench)
    folder = run.dir.checkpoints if everything else small_disk / "kept"
    change_while_stopped(run, lambda: fill(small_disk))
    done = bench.call("stop", "last")
    narration = re.search(
        r"is stopped at step (\d+), but the last checkpoint is step (\d+); that of step (\d+) was not kept: "
        r"No space left on device",
        done.stdout,
    )
    assert narration is not None, done.stdout
    assert narration[1] == narration[3]
    assert last_checkpoint_step(folder) == int(narration[2]) < int(narration[1])


@pytest.mark.parametrize("parent", [False, True], ids=["the folder", "its parent"])
def test_a_deleted_folder_is_made_again_or_fails_the_run(bench: Bench, parent: bool) -> None:
    folder = bench.folder / "parent" / "kept"
    process = bench.start(*run_arguments(bench.gated_recipe(KEPT, UPDATES), f"train.save_dir={folder}"))
    run = saved_once(bench)
    change_while_stopped(run, lambda: shutil.rmtree(folder.parent if parent else folder))
    bench.gate.touch()
    out, err = process.communicate(timeout=LIMIT_S)
    assert f"{folder} and its checkpoints were deleted" in err or parent
    if not parent:
        assert process.returncode == 0, err
        assert last_checkpoint_step(folder) == UPDATES
        assert f"checkpoint {folder}/step_{UPDATES:08}.pt" in out
        return
    assert process.returncode == 1
    what = f"trained, but there is no checkpoint; that of step {UPDATES} was not kept: No such file or directory"
    assert bench.runs()[0].status.message == what
    assert what in err
    assert str(folder) not in out, "no file is named that is not there"


def test_a_record_at_the_limit_of_a_files_size_fails_no_run(bench: Bench) -> None:
    limit, updates = 100 << 10, 300
    # Some events in each step; a loss that falls is no best one, which would be saved.
    events = ("train.valid_every_updates=1", "task.valid_fraction=0.01", "train.save_every_updates=0")
    events += ("train.maximize_best_metric=true",)
    process = bench.start(
        *run_arguments(bench.recipe(updates), f"train.save_dir={bench.folder}/kept", *events),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    _, err = process.communicate(timeout=LIMIT_S)
    (run,) = bench.runs()
    assert run.dir.rank_events(0).stat().st_size == limit
    assert (process.returncode, run.state) == (0, "finished"), err
    told = last_step(run.dir)
    assert told is not None
    assert run.status.message == (
        f"the end of the record is missing: the record ends at step {told.step}: File too large"
    )
    assert f", {updates} steps, " in err
    assert run.status.message.partition(": ")[2] in err
    assert last_checkpoint_step(bench.folder / "kept") == updates
