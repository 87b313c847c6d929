"""Output through a safe stream: in order, whole, and without control characters."""

from __future__ import annotations

import errno
import json
import os
import select
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from gputrain_tui.headless import safe_stream
from gputrain_tui.headless.foreground import JsonStream, conclude, exit_code_with
from gputrain_tui.headless.safe_stream import MAX_BACKLOG_BYTES, SafeStream
from gputrain_tui.history.run_folders import Run, create
from gputrain_tui.history.status_file import write_status
from gputrain_tui.state import RunState
from trainer.contract.record import Finding, RunEnded, Step, encode_event


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return create("demo", world_size=1, recipe_toml="", plan=lambda _: b"{}", root=tmp_path)


@pytest.mark.parametrize("is_silent", [False, True])
def test_no_process_is_left_is_said_of_the_hosts_that_answer(pipe: tuple[int, int], run: Run, is_silent: bool) -> None:
    state = RunState(world_size=1)
    if is_silent:
        state.apply(Finding(time=1.0, kind="host_silent", rank=0, host="h2", message="no contact with h2"))
    state.apply(RunEnded(time=2.0, status="stopped", exit_code=130, message="stopped by SIGINT", elapsed_ms=1e3))
    write_status(run.dir, msgspec.structs.replace(run.status, status="stopped", message="stopped by SIGINT"))
    with os.fdopen(os.dup(pipe[1]), "w") as stream:
        out, err = SafeStream(stream), SafeStream(stream)
        conclude(run, 130, state, for_people=False, environ={}, out=out, err=err, is_interrupted=lambda: False)
    text = os.read(pipe[0], 1 << 16).decode()
    assert text.endswith("no process of the run is left" + " on the hosts that answer" * is_silent + "\n")


def test_output_longer_than_a_pipe_arrives_in_order(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    text = "".join(f"line {number}\n" for number in range(100_000)).encode()
    with os.fdopen(os.dup(writer), "w") as stream:
        out = SafeStream(stream)
        for at in range(0, len(text), 100_000):
            out.write_bytes(text[at : at + 100_000])
        read = bytearray()
        while len(read) < len(text):
            read += os.read(reader, 1 << 16)
        assert bytes(read) == text
        out.close(is_interrupted=lambda: False)


def test_the_closing_table_waits_until_the_progress_line_is_erased(pipe: tuple[int, int], run: Run) -> None:
    """Both are written by threads of their own, and to the same terminal."""
    table_reader, table_writer = os.pipe()
    state = RunState(world_size=1)
    state.apply(Step(time=1.0, rank=0, step=1, epoch=1, steps=1, samples=8, loss=1.0))
    with os.fdopen(os.dup(pipe[1]), "w") as err_file, os.fdopen(table_writer, "w") as out_file:
        out, err = SafeStream(out_file), SafeStream(err_file)
        err.write_bytes(b"x" * (1 << 20))  # more than a pipe holds: the erased line is not written yet
        end = threading.Thread(
            target=conclude,
            args=(run, 0, state),
            kwargs={"for_people": True, "environ": {}, "out": out, "err": err, "is_interrupted": lambda: False},
        )
        end.start()
        early = select.select([table_reader], [], [], 0.5)[0]
        read = b""
        while b"record " not in read[-400:]:
            read += os.read(pipe[0], 1 << 16)
        end.join()
        assert not early
        assert os.read(table_reader, 1 << 16).startswith(b"rank")
    os.close(table_reader)


def test_an_unread_message_is_dropped_and_not_kept(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safe_stream, "STALL_S", 0.1)
    with os.fdopen(os.dup(pipe[1]), "w") as stream:
        out = SafeStream(stream)
        for _ in range(100_000):
            out.write("a line of a run that goes on for ever\n")
        assert out.backlog_bytes < 2 * MAX_BACKLOG_BYTES
        out.close(is_interrupted=lambda: True)
        out.line("nobody waits for this")
        assert out.is_written
        while out.backlog_bytes:  # the write in progress ends, some time after its bytes were read
            if select.select([pipe[0]], [], [], 0.01)[0]:
                os.read(pipe[0], 1 << 16)


def test_a_full_disk_is_kept_as_an_error_and_raises_nothing() -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123
        out = SafeStream(full)
        out.line("x")
        out.close(is_interrupted=lambda: False)
        assert out.error is not None
        assert out.error.errno == errno.ENOSPC


@pytest.mark.parametrize(
    ("code", "error", "expected"),
    [
        (0, None, 0),
        (0, OSError(errno.ENOSPC, "No space left on device"), 1),
        (0, BrokenPipeError(), 0),
        (130, OSError(errno.EIO, "Input/output error"), 130),
        (3, OSError(errno.ENOSPC, "No space left on device"), 3),
    ],
)
def test_a_run_whose_output_could_not_be_written_has_not_ended_with_0(
    code: int, error: OSError | None, expected: int
) -> None:
    assert exit_code_with(code, error) == expected


def test_the_lines_of_a_file_keep_their_order_where_its_clock_was_set_back(run: Run, pipe: tuple[int, int]) -> None:
    for rank in (0, 1):
        steps = [
            Step(time=1e3 + step - 900.0 * (step > 3), rank=rank, step=step, epoch=1, steps=1, samples=1)
            for step in range(1, 7)
        ]
        run.dir.rank_events(rank).write_bytes(b"".join(map(encode_event, steps)))
    with os.fdopen(os.dup(pipe[1]), "w") as stream:
        reader = JsonStream(run, SafeStream(stream))
        found = reader.poll()
        lines = list(map(json.loads, os.read(pipe[0], 1 << 16).decode().splitlines()))
        reader.close()
    assert [event.step for event in found if isinstance(event, Step)] == [line["step"] for line in lines]
    for rank in (0, 1):
        assert [line["step"] for line in lines if line["rank"] == rank] == [1, 2, 3, 4, 5, 6]


def test_events_are_passed_on_without_a_control_and_mean_the_same(run: Run, pipe: tuple[int, int]) -> None:
    message = "a\x1b]52;c;eA==\x07\x7f\x9b2Jé訓"
    event = {"type": "finding", "time": 1.0, "kind": "note", "message": message}
    run.dir.run_events.write_bytes(json.dumps(event, ensure_ascii=False).encode() + b"\n")
    with os.fdopen(os.dup(pipe[1]), "w") as stream:
        reader = JsonStream(run, SafeStream(stream))
        assert len(reader.poll()) == 1
        line = os.read(pipe[0], 1 << 16).decode()
        reader.close()
    assert line.removesuffix("\n").isprintable()
    assert json.loads(line) == event
