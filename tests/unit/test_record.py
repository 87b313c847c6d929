from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from record_reading import events_of, numbers_of, sample
from waiting import until

from trainer.contract.record import (
    AnyEvent,
    EventWriter,
    Failure,
    Finding,
    Lost,
    RunDir,
    Sample,
    Step,
    create_atomically,
    decode_events,
    encode_event,
    write_atomically,
)
from trainer.contract.record.writer import until_next

# ------------------------------------------------------------------------------------------------------ the lines


@pytest.mark.parametrize(
    ("now", "waits"),
    [
        (1000.0, 0.5),
        (1000.001, 0.499),
        (999.999, 0.501),  # woken a little early: not again a moment later
        (1000.2, 0.3),
        (1000.3, 0.7),
        (1000.25, 0.75),
    ],
)
def test_writers_of_all_ranks_write_at_the_same_moments(now: float, waits: float) -> None:
    assert until_next(now, 0.5) == pytest.approx(waits)


def test_a_value_that_was_not_measured_is_absent() -> None:
    line = encode_event(Step(time=1.5, rank=2, step=7, epoch=1, steps=1, samples=32, loss=0.25))
    assert json.loads(line) == {
        "type": "step", "time": 1.5, "rank": 2, "step": 7, "epoch": 1, "steps": 1, "samples": 32, "loss": 0.25,
    }  # fmt: skip
    assert line.endswith(b"}\n")


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_is_null(number: float) -> None:
    line = encode_event(Step(time=1.0, rank=0, step=1, epoch=1, steps=1, samples=1, loss=number))
    assert json.loads(line)["loss"] is None
    [event] = decode_events(line)
    assert isinstance(event, Step)
    assert event.loss is None


def test_a_finding_whose_evidence_is_no_number_is_kept_without_it() -> None:
    made = Finding(time=1.0, kind="straggler", evidence={"late_ms": float("nan"), "ranks": 2.0})
    line = encode_event(made)
    assert json.loads(line)["evidence"] == {"ranks": 2.0}
    assert decode_events(line.replace(b'"ranks"', b'"late_ms":null,"ranks"')) == [made]


def test_text_that_is_not_utf8_does_not_stop_the_record() -> None:
    name = os.fsdecode(b"caf\xe9.tsv")
    [event] = decode_events(encode_event(Failure(time=1.0, kind="exception", message=f"cannot read {name}", rank=3)))
    assert event == Failure(time=1.0, kind="exception", message="cannot read caf?.tsv", rank=3)


@pytest.mark.parametrize(
    "foreign",
    [
        b'{"type":"sample","time":0.0,"st',
        b'{"type":"of the future","time":0.0}',
        b'{"type":"sample","time":0.0,"step":"one","text":""}',
        b'{"type":"sample","time":0.0}',
        b'{"type":"sample","time":0.0,"step":1,"text":"\xff"}',
        b'{"type":"sample","time":0.0,"step":1,"text":"\\ud800"}',
        b"Traceback (most recent call last):",
        b"\x00\x00\x00\x00",
        b"\xff\xfe",
        b"[]",
        b"",
    ],
)
def test_a_foreign_line_is_passed_over(foreign: bytes) -> None:
    lines = encode_event(sample(1)) + foreign + b"\n" + encode_event(sample(2))
    assert numbers_of(list(decode_events(lines))) == [1, 2]


def test_a_field_of_the_future_is_passed_over() -> None:
    [event] = decode_events(b'{"type":"sample","time":0.0,"step":1,"text":"x","mood":"good"}\n')
    assert event == Sample(time=0.0, step=1, text="x")


# ----------------------------------------------------------------------------------------------------- the writer


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    before = set(threading.enumerate())
    yield tmp_path / "events" / "0.ndjson"
    until(lambda: set(threading.enumerate()) <= before)


def test_events_come_out_in_the_order_in_which_they_went_in(path: Path) -> None:
    writer = EventWriter(path, rank=0)
    for number in range(5000):
        writer.write(sample(number))
    assert writer.flush()
    assert numbers_of(events_of(path)) == list(range(5000))
    writer.write(sample(5000))
    writer.close()
    assert numbers_of(events_of(path)) == list(range(5001))
    assert writer.lost == 0


def test_several_threads_may_write(path: Path) -> None:
    writer = EventWriter(path)
    threads = [
        threading.Thread(target=lambda first=first: [writer.write(sample(first + i)) for i in range(500)])
        for first in range(0, 2000, 500)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    assert sorted(numbers_of(events_of(path))) == list(range(2000))


def test_without_a_path_nothing_is_recorded() -> None:
    threads = threading.active_count()
    writer = EventWriter(None)
    writer.write(sample(1))
    assert writer.flush()
    writer.close()
    assert (writer.enabled, writer.lost, threading.active_count()) == (False, 0, threads)


def test_events_written_after_closing_are_ignored(path: Path) -> None:
    writer = EventWriter(path)
    assert writer.enabled
    writer.close()
    writer.write(sample(1))
    writer.close()
    assert not writer.enabled
    assert path.read_bytes() == b""


def test_the_line_that_a_crash_tore_does_not_spoil_the_next(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(encode_event(sample(1)) + encode_event(sample(2))[:20])
    writer = EventWriter(path)
    writer.write(sample(3))
    writer.close()
    assert numbers_of(events_of(path)) == [1, 3]


def test_a_whole_last_line_is_left_as_it_is(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(encode_event(sample(1)))
    writer = EventWriter(path)
    writer.write(sample(2))
    writer.close()
    assert path.read_bytes() == encode_event(sample(1)) + encode_event(sample(2))


def test_only_the_owner_can_read_the_record(path: Path) -> None:
    EventWriter(path).close()
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.fixture
def stalled(path: Path) -> Iterator[int]:
    """Make the record a pipe that takes some 64 KiB and then nothing, as a stalled disk; the value reads it."""
    path.parent.mkdir()
    os.mkfifo(path)
    reader = os.open(path, os.O_RDWR)
    yield reader
    os.close(reader)


def read_pipe(reader: int, until: bytes) -> list[AnyEvent]:
    data = b""
    while not data.endswith(until):
        data += os.read(reader, 65536)
    return list(decode_events(data))


def test_a_stalled_disk_never_holds_the_caller(path: Path, stalled: int) -> None:
    writer = EventWriter(path, rank=1)
    writer.capacity = 200
    for number in range(500):  # A write that waited for the disk would wait here for ever.
        writer.write(sample(number, size=1000))
    assert writer.lost >= 200
    assert not writer.flush(0.05)

    started = time.monotonic()
    writer.close(0.05)
    assert time.monotonic() - started < 30.0, "it does not wait for the disk"
    assert writer.lost == 500, "nothing is known to be written"
    read_pipe(stalled, b'"message":"the disk is too slow"}\n')  # lets the writer's thread go


def test_a_disk_that_comes_back_gets_the_rest_and_the_gap(path: Path, stalled: int) -> None:
    writer = EventWriter(path, rank=1)
    writer.capacity = 200
    for number in range(500):
        writer.write(sample(number, size=1000))
    lost = writer.lost
    assert lost >= 200
    events = read_pipe(stalled, b'"message":"the disk is too slow"}\n')
    assert numbers_of(events) == list(range(500 - lost))
    gap = events[-1]
    assert isinstance(gap, Lost)
    assert (gap.events, gap.rank) == (lost, 1)
    writer.write(sample(500))
    writer.close()
    assert numbers_of(read_pipe(stalled, b'"step":500,"text":""}\n')) == [500]
    assert writer.lost == 0


def test_a_record_that_cannot_be_opened_raises_at_once(tmp_path: Path) -> None:
    (tmp_path / "events").write_text("a file where the folder should be")
    with pytest.raises(FileExistsError):
        EventWriter(tmp_path / "events" / "0.ndjson")


# ---------------------------------------------------------------------------------------------------- the folder


def test_the_run_directory_names_its_files() -> None:
    run = RunDir("/runs/1")
    assert {
        str(path.relative_to("/runs/1"))
        for path in (run.rank_events(3), run.node_events(1), run.rank_log(3), run.node_log(1), run.node_result(1))
    } == {"events/3.ndjson", "events/node-1.ndjson", "logs/3.log", "logs/node-1.log", "nodes/1.json"}


def test_a_small_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    write_atomically(path, b"old")
    with path.open("rb") as reader:
        write_atomically(path, b"new")
        assert reader.read() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_small_file_is_created_as_a_whole_and_never_over_another(tmp_path: Path) -> None:
    path = tmp_path / "slurm.json"
    create_atomically(path, b"first")
    with pytest.raises(FileExistsError):
        create_atomically(path, b"second")
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]
