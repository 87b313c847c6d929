"""Output through a safe stream: in order, whole, and without control characters."""

from __future__ import annotations

import errno
import json
import os
import select
from collections.abc import Iterator
from pathlib import Path

import pytest

from gputrain_tui.headless import safe_stream
from gputrain_tui.headless.foreground import JsonStream
from gputrain_tui.headless.safe_stream import MAX_BACKLOG_BYTES, SafeStream
from gputrain_tui.history.runs import Run, create


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return create("demo", world_size=1, recipe_toml="", plan=lambda _: b"{}", root=tmp_path)


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
        out.settle(hurried=lambda: False)


def test_unread_narration_is_dropped_and_not_kept(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safe_stream, "STALL_S", 0.1)
    with os.fdopen(os.dup(pipe[1]), "w") as stream:
        out = SafeStream(stream)
        for _ in range(100_000):
            out.write("a line of a run that goes on for ever\n")
        assert out.backlog_bytes < 2 * MAX_BACKLOG_BYTES
        out.settle(hurried=lambda: True)
        out.line("nobody waits for this")
        assert out.is_settled
        while out.backlog_bytes:  # the write in progress ends, some time after its bytes were read
            if select.select([pipe[0]], [], [], 0.01)[0]:
                os.read(pipe[0], 1 << 16)


def test_a_full_disk_is_kept_as_an_error_and_raises_nothing() -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123
        out = SafeStream(full)
        out.line("x")
        out.settle(hurried=lambda: False)
        assert out.error is not None
        assert out.error.errno == errno.ENOSPC


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
