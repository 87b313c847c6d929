"""``gputrain export`` of the record: every single step, as tables and as a timeline; the record is only read."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import synthetic
from commands import Command, command
from long_record import long_run, loss_of, single
from made_runs import append_events
from trace_rules import threads_of

from gputrain_tui.history.export.steps import RecordedSteps
from gputrain_tui.history.export.table import COLUMNS, write_csv
from gputrain_tui.history.export.trace import FIRST_CALL_THREAD
from gputrain_tui.history.run_folders import Run, open_run
from gputrain_tui.history.status_file import write_status
from trainer.contract.output_file import output_file
from trainer.contract.record import (
    CollectiveCall,
    GroupSync,
    Lost,
    RankState,
    RunDir,
    ShareChange,
    Step,
    decode_events,
    encode_event,
)
from trainer.host.process_identity import identify
from trainer.telemetry.step_events import merge

STEPS = 30_000
PEAK = """
import resource, sys
from gputrain_tui.cli import main
code = main(sys.argv[1:])
usage = resource.getrusage(resource.RUSAGE_SELF)
print(usage.ru_maxrss >> 10, usage.ru_utime + usage.ru_stime, file=sys.stderr)
sys.exit(code)
"""
"""Runs a command and prints the MiB and the seconds of a core that it took."""
FORMATS = ("csv", "jsonl", "chrome-trace")


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """`gputrain export`, in a folder of its own."""
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return command(capsys, "export")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run of two ranks whose rank 1 is late, with findings."""
    return synthetic.run(tmp_path / "home" / "runs", steps=40, status="finished", straggler=1)


# ------------------------------------------------------------------------------------------------- every step


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return long_run(tmp_path_factory.mktemp("long") / "runs", steps=STEPS)


def peak(run: Run, *words: object) -> tuple[int, float, subprocess.CompletedProcess[str]]:
    line = [sys.executable, "-c", PEAK, "export", str(run.dir.path), *map(str, words)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    mib, seconds = done.stderr.splitlines()[-1].split()
    return int(mib), float(seconds), done


def test_a_csv_of_very_many_steps_has_each_step_once_in_bounded_memory(long: Run, tmp_path: Path) -> None:
    before = contents(long.dir.path)
    small = long_run(tmp_path / "runs", steps=500)
    least_mib, _, _ = peak(small, "--to", "csv", "-o", tmp_path / "small.csv")
    mib, seconds, done = peak(long, "--to", "csv", "-o", tmp_path / "long.csv")
    assert done.stdout.startswith(f"{tmp_path}/long.csv: 60,000 steps of 2 ranks, 1 to 30000, ")
    assert len(done.stderr.splitlines()) == 1, "no bar where nobody looks"
    assert mib < least_mib + 32
    assert seconds < 6
    assert contents(long.dir.path) == before
    with (tmp_path / "long.csv").open(newline="") as file:
        rows = csv.reader(file)
        assert tuple(next(rows)) == COLUMNS
        rank_at, step_at, loss_at = (COLUMNS.index(name) for name in ("rank", "step", "loss"))
        for rank in range(2):
            for number in range(1, STEPS + 1):
                row = next(rows)
                assert (row[rank_at], row[step_at]) == (str(rank), str(number))
                assert float(row[loss_at]) == loss_of(rank, number)
        assert next(rows, None) is None


def test_single_values_are_each_steps_own_and_means_are_marked(call: Command, run: Run) -> None:
    steps = [single(0, number) for number in range(41, 47)]
    append_events(run.dir, 0, merge(steps[:4]), merge(steps[4:5]), merge(steps[5:]))
    done = call(run.id, "--to", "csv", "-o", "-", "--rank", 0)
    rows = list(csv.DictReader(io.StringIO(done.stdout)))[40:]
    assert [int(row["step"]) for row in rows] == list(range(41, 47))
    assert [int(row["averaged_over"]) for row in rows] == [4, 4, 4, 4, 1, 1]
    for row, step in zip(rows, steps, strict=True):
        assert float(row["loss"]) == step.loss
        assert float(row["step_ms"]) == step.step_ms
        assert float(row["sync_exposed_ms"]) == step.sync_exposed_ms
        assert (row["epoch"], row["lr"], row["samples"], row["tokens"]) == ("1", "0.001", "16", "")
        assert (row["core_wait_forward_ms"], row["core_wait_data_ms"]) == ("0.5", "0.0")
    assert [float(row["data_ms"]) for row in rows] == [1.5] * 4 + [2.0, 1.0]
    assert done.stderr == "gputrain: 46 steps of 1 rank, 1 to 46\n"

    lines = call(run.id, "--to", "jsonl", "-o", "-", "--rank", 0).stdout.encode()
    read = [event for event in decode_events(lines) if isinstance(event, Step)]
    assert [(event.step, event.steps, event.loss) for event in read[40:]] == [(s.step, 1, s.loss) for s in steps]
    assert json.loads(lines.splitlines()[41]).items() >= {"attempt": 1, "averaged_over": 4, "step": 42}.items()


def test_steps_that_a_failed_attempt_lost_stand_in_both_attempts(call: Command, run: Run) -> None:
    for rank in range(2):
        again = [single(rank, number) for number in range(31, 36)]
        append_events(run.dir, rank, RankState(time=2e9, rank=rank, state="joining"), *again)
    rows = list(csv.DictReader(io.StringIO(call(run.id, "--to", "csv", "-o", "-").stdout)))
    found = [(int(row["rank"]), int(row["attempt"]), int(row["step"])) for row in rows]
    assert found == [
        (rank, attempt, step)
        for rank in range(2)
        for attempt, begin, end in ((1, 1, 40), (2, 31, 35))
        for step in range(begin, end + 1)
    ]


def test_a_csv_has_the_share_that_a_rank_had_at_each_step_of_each_attempt(call: Command, run: Run) -> None:
    def change(step: int, *shares: int, cause: Any = "measured") -> ShareChange:
        return ShareChange(time=2e9, step=step, previous=[], shares=list(shares), cause=cause)

    begin = RankState(time=2e9, rank=0, state="joining")
    append_events(run.dir, 0, change(21, 24, 8), begin, change(31, 20, 12, cause="resumed"), change(34, 28, 4))
    for rank in range(2):
        again = [single(rank, number) for number in range(31, 36)]
        append_events(run.dir, rank, *([RankState(time=2e9, rank=1, state="joining")] if rank else []), *again)
    rows = list(csv.DictReader(io.StringIO(call(run.id, "--to", "csv", "-o", "-").stdout)))
    found = {(int(row["rank"]), int(row["attempt"]), int(row["step"])): row["share"] for row in rows}
    for rank, shares in enumerate([("", "24", "20", "28"), ("", "8", "12", "4")]):
        assert {found[rank, 1, step] for step in range(1, 21)} == {shares[0]}
        assert {found[rank, 1, step] for step in range(21, 41)} == {shares[1]}
        assert [found[rank, 2, step] for step in range(31, 36)] == [shares[2]] * 3 + [shares[3]] * 2
    alone = list(csv.DictReader(io.StringIO(call(run.id, "--to", "csv", "-o", "-", "--rank", 1).stdout)))
    assert alone[30]["share"] == "8"


# -------------------------------------------------------------------------------------------- how far it goes


def lose_supervisor(run: Run) -> None:
    gone = identify()
    run.status.status = "running"
    run.status.supervisor = type(gone)(pid=2**22 + 1, start_ticks=1, boot_id=gone.boot_id, host=gone.host)
    write_status(run.dir, run.status)


def keep_running(run: Run) -> None:
    run.status.status, run.status.supervisor = "running", identify()
    write_status(run.dir, run.status)
    append_events(run.dir, 0, torn=b'{"type":"step","ti')  # it is being written


def tear_last_line(run: Run) -> None:
    append_events(run.dir, 0, torn=encode_event(single(0, 41))[:30])


def lose_steps(run: Run) -> None:
    append_events(run.dir, 0, Lost(time=2e9, rank=0, events=7, message="disk full"), single(0, 48), single(0, 49))  # type: ignore[arg-type]
    append_events(run.dir, 1, torn=b"\x00garbage\n")


def mix_older_events(run: Run) -> None:
    for rank in range(2):
        step = b'{"type":"step","time":1.8e9,"rank":%d,"step":50,"epoch":1,"steps":10,"samples":80,"loss":2.5}\n' % rank
        append_events(run.dir, rank, torn=step + b'{"type":"mood","time":1}\n')


def lose_a_rank(run: Run) -> None:
    run.dir.rank_events(1).unlink()


@pytest.mark.parametrize(
    ("happened", "steps", "warnings"),
    [
        (lambda run: None, 80, []),
        (lose_supervisor, 80, ["{run} has no end, its supervisor was killed: its record goes to step 40"]),
        (keep_running, 80, ["{run} is still running: its record goes to step 40 so far"]),
        (tear_last_line, 80, ["rank 0: 1 unreadable line of its record left out"]),
        (
            lose_steps,
            82,
            [
                "rank 0: 7 steps in between are not in the record: 41 to 47",
                "rank 0: 7 events could not be written to disk",
                "rank 1 has recorded steps only up to 40",
                "rank 1: 1 unreadable line of its record left out",
            ],
        ),
        (
            mix_older_events,
            100,
            [
                "rank 0: 1 unreadable line of its record left out",
                "rank 0: the record has only means of 10 steps, which are repeated",
                "rank 1: 1 unreadable line of its record left out",
                "rank 1: the record has only means of 10 steps, which are repeated",
            ],
        ),
        (lose_a_rank, 40, ["rank 1 has recorded no step"]),
    ],
)
def test_the_recorded_steps_are_exported_and_missing_ones_reported(
    call: Command, run: Run, happened: Callable[[Run], None], steps: int, warnings: list[str]
) -> None:
    happened(run)
    before = contents(run.dir.path)
    for form in FORMATS:
        done = call(run.id, "--to", form, "-o", f"out.{form}")
        assert done.returncode == 0
        assert done.stderr.splitlines() == [f"gputrain: {line.format(run=run.id)}" for line in warnings]
        assert f"out.{form}: {steps} steps of " in done.stdout
    assert len(Path("out.csv").read_text().splitlines()) == 1 + steps
    assert len(Path("out.jsonl").read_text().splitlines()) == steps
    json.loads(Path("out.chrome-trace").read_text())
    assert contents(run.dir.path) == before


def test_the_export_of_a_failed_run_reports_its_last_step(call: Command, tmp_path: Path) -> None:
    run = synthetic.run(tmp_path / "home" / "runs", steps=12, status="failed", failed_rank=1)
    done = call("last", "--to", "csv")
    assert done.stderr == f"gputrain: {run.id} failed: its record goes to step 12\n"
    assert done.stdout.startswith(f"{run.id}.csv: 24 steps of 2 ranks, 1 to 12, ")


# ----------------------------------------------------------------------------------------------- the timeline


def test_a_timeline_keeps_the_rules_of_its_format_and_has_ranks_phases_buckets_and_findings(
    call: Command, run: Run
) -> None:
    for rank in range(2):
        append_events(run.dir, rank, merge([single(rank, number) for number in range(41, 65)]))
    assert call(run.id, "--to", "chrome-trace", "-o", "t.json").returncode == 0
    trace = json.loads(Path("t.json").read_text())
    events = trace["traceEvents"]
    threads = threads_of(trace)
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert named == {0: "rank 0", 1: "rank 1", 2: f"run {run.id}"}
    tracks = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert sorted(tracks[0, tid] for pid, tid in tracks if pid == 0) == [
        "bucket 0", "bucket 1", "gradient synchronisation", "steps",
    ]  # fmt: skip
    for rank in range(2):
        names = [event["name"] for event in threads[rank, 1] if event["cat"] == "step"]
        assert names == [f"step {number}" for number in range(1, 65)]
    phases = {event["name"] for event in threads[0, 1] if event["cat"] == "phase"}
    assert phases == {"data", "copy to device", "forward", "backward", "wait for gradients", "optimizer"}
    late = next(event for event in threads[1, 1] if event["name"] == "data" and event["args"]["data_ms"] > 15)
    assert late["dur"] == pytest.approx(late["args"]["data_ms"] * 1e3, abs=1.0)
    instants = {event["name"]: event for event in events if event["ph"] == "i"}
    assert instants["straggler"]["pid"] == 1
    assert (instants["input_bound"]["pid"], instants["input_bound"]["s"]) == (2, "g")
    assert instants["straggler"]["args"]["cause"] == "data"
    assert {"input_bound cleared", "valid loss 1.91", "saved step 40"} <= instants.keys()


def test_collectives_are_in_each_format_by_group_and_overlapping_ones_are_on_several_tracks(
    call: Command, run: Run
) -> None:
    tp = GroupSync(group="tp", calls=2.0, bytes=96.0, exposed_ms=3.5, total_ms=7.0, operations={"all_gather": 2.0})
    calls = [
        CollectiveCall("tp", "all_gather", 64, 1.0, 5.0, 2.0),
        CollectiveCall("tp", "all_gather", 32, 2.0, 2.0, 1.5),
        CollectiveCall("dp", "all_reduce", 8, 2.5, 1.0, 1.0),
        CollectiveCall("tp", "barrier", 0, 6.5, 900.0, 0.0),
    ]
    step = single(0, 41)
    step.groups, step.calls = [tp], calls
    step.sync_exposed_ms, step.time = 4.5, 2e9
    append_events(run.dir, 0, step, merge([single(0, 42), single(0, 43)]))

    rows = list(csv.DictReader(io.StringIO(call(run.id, "--to", "csv", "-o", "-", "--rank", 0).stdout)))
    assert json.loads(rows[40]["groups"]) == [msgspec.to_builtins(tp)]
    assert rows[41]["groups"] == ""
    assert "calls" not in rows[0]
    line = call(run.id, "--to", "jsonl", "-o", "-", "--rank", 0).stdout.splitlines()[40]
    assert json.loads(line)["calls"] == [list(msgspec.to_builtins(each)) for each in calls]

    assert call(run.id, "--to", "chrome-trace", "-o", "t.json", "--rank", 0).returncode == 0
    trace = json.loads(Path("t.json").read_text())
    threads = threads_of(trace)
    names = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    drawn = {tid: [each["name"] for each in slices] for (_, tid), slices in threads.items() if tid >= FIRST_CALL_THREAD}
    assert [(names[tid], of) for tid, of in sorted(drawn.items())] == [
        ("collectives of tp", ["all_gather", "barrier"]),
        ("collectives of tp", ["all_gather"]),
        ("collectives of dp", ["all_reduce"]),
    ]
    whole = next(each for each in threads[0, 1] if each["name"] == "step 41")
    first, barrier = threads[0, FIRST_CALL_THREAD]
    assert (first["ts"] - whole["ts"], first["dur"]) == (1000, 5000)
    assert first["args"] == {"group": "tp", "bytes": 64, "exposed_ms": 2.0}
    assert barrier["ts"] + barrier["dur"] == whole["ts"] + whole["dur"], "it ends with its step"
    assert "wait for other ranks" in {each["name"] for each in threads[0, 1]}


# ------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{run}", "--to", "csv", "-o", "here.csv"], "here.csv already exists: replace it with --force, or name"),
        (["{run}", "--to", "csv", "-o", "folder"], "folder is a folder: name a file in it"),
        (["{run}", "--to", "csv", "-o", "none/x.csv"], "none/x.csv: there is no folder none"),
        (["{run}", "--to", "csv", "--rank", "2"], "export: run {run} has no rank 2: its ranks are 0 to 1"),
        (
            ["{run}", "--to", "csv", "--checkpoint", "best"],
            "export: --checkpoint is for --to safetensors, dcp, not for csv",
        ),
        (["{run}", "--to", "archive", "--rank", "1"], "export: --rank is for --to csv, jsonl, tensorboard, chrome-"),
        (["{run}", "--to", "tensorboard", "-o", "-"], "export: --to tensorboard writes a folder: name one with -o "),
        (["{run}", "--to", "tensorboard", "-o", "here.csv"], "here.csv is not a folder and will not be replaced"),
        (["{run}", "--to", "tensorboard", "-o", "folder", "--force"], "folder holds other files, such as mine.txt: "),
        (["2001", "--to", "csv"], "no run is called '2001'"),
        (["{empty}", "--to", "csv"], "{empty} has recorded no step: there is nothing to export"),
        (["{empty}", "--to", "chrome-trace"], "{empty} has recorded no step: there is nothing to export"),
    ],
)
def test_a_refused_export_is_one_line_and_leaves_nothing(
    call: Command, run: Run, tmp_path: Path, words: list[str], message: str
) -> None:
    empty = synthetic.run(tmp_path / "home" / "runs", name="empty", steps=0, status="stopped")
    Path("here.csv").write_text("before")
    Path("folder").mkdir()
    Path("folder/mine.txt").touch()
    before = contents(tmp_path)
    names = {"run": run.id, "empty": empty.id}
    done = call(*(word.format(**names) for word in words))
    assert done.returncode == 2
    assert done.stderr.startswith(f"gputrain: {message.format(**names)}")
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)
    assert contents(tmp_path) == before


def test_force_replaces_a_file(call: Command, run: Run) -> None:
    Path("here.csv").write_text("before")
    assert call(run.id, "--to", "csv", "-o", "here.csv", "--force").returncode == 0
    assert Path("here.csv").read_text().startswith("rank,attempt,step,")


def test_without_the_package_tensorboard_is_refused_with_the_command_that_installs_it(
    call: Command, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tensorboard", "tensorboard.compat.proto"):  # which another test may have imported
        monkeypatch.setitem(sys.modules, name, None)
    before = contents(tmp_path)
    done = call(run.id, "--to", "tensorboard")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == "gputrain: tensorboard is not installed: pip install 'tensorboard>=2.14'\n"
    assert contents(tmp_path) == before


@pytest.mark.parametrize("form", [*FORMATS, "archive"])
def test_a_full_disk_leaves_the_file_that_was_there_and_no_part_of_another(run: Run, tmp_path: Path, form: str) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "file").write_text("before")
    words = ["export", str(run.dir.path), "--to", form, "-o", str(folder / "file"), "--force"]
    limited = ["bash", "-c", 'ulimit -f 4; exec "$@"', "bash", sys.executable, "-m", "gputrain_tui", *words]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"gputrain: cannot write {folder / 'file'}: File too large\n"
    assert [(path.name, path.read_text()) for path in folder.iterdir()] == [("file", "before")]


def test_an_interrupted_export_leaves_nothing(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()

    def interrupted() -> None:
        with output_file(folder / "x.csv") as file:
            write_csv(RecordedSteps(run, [0, 1]), file)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not list(folder.iterdir())


def test_an_export_of_a_run_directory_that_the_trainer_made_alone(call: Command, tmp_path: Path) -> None:
    alone = RunDir(tmp_path / "alone")
    alone.events.mkdir(parents=True)
    append_events(alone, 0, single(0, 1), single(0, 2))
    done = call("./alone", "--to", "csv", "-o", "-")
    assert len(done.stdout.splitlines()) == 3
    assert open_run(alone.path) is None
