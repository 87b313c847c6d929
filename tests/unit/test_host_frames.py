"""The frames of the connection to a host, whatever stands between them and wherever a read ends."""

from __future__ import annotations

import pytest

from gputrain_tui.hosts.host_frames import MAX_DATA_BYTES, MAX_HEADER_BYTES, FrameBuffer, FrameError, HostFrame, frame

MARK = b"mark-7:"
SENT = (
    frame(1, "answer", {"time": 1.5}),
    frame(2, "file", MARK + b"\n{\x00\xff", name="logs/0.log", offset=1 << 40),
    frame(2, "whole", name="nodes/0.json"),
)


@pytest.mark.parametrize("noise", [b"", b"Welcome, {\nmark", b"\xff" * 100_000])
@pytest.mark.parametrize("read_bytes", [1, 7, 1 << 18])
def test_frames_come_out_as_they_were_sent(noise: bytes, read_bytes: int) -> None:
    buffer = FrameBuffer(MARK)
    stream = b"".join(noise + each.encoded(MARK) for each in SENT)
    found: list[HostFrame] = []
    for begin in range(0, len(stream), read_bytes):
        buffer.add(stream[begin : begin + read_bytes])
        found += buffer.frames()
    assert found == list(SENT)
    assert buffer.skipped_bytes == len(SENT) * len(noise)


def test_noise_without_a_frame_is_counted_and_not_kept() -> None:
    buffer = FrameBuffer(MARK)
    for _ in range(100):
        buffer.add(b"x" * 1000)
        assert list(buffer.frames()) == []
    assert buffer.skipped_bytes >= 100 * 1000 - len(MARK)
    buffer.add(SENT[0].encoded(MARK))
    assert list(buffer.frames()) == [SENT[0]]


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"7",
        b"[" * (MAX_HEADER_BYTES - 100),
        b"x" * MAX_HEADER_BYTES,
        b'{"call": 1, "kind": "answer", "name": "", "offset": 0}',
        b'{"call": 1, "kind": "answer", "name": "", "offset": 0, "bytes": -1}',
        b'{"call": 1, "kind": "answer", "name": "", "offset": 0, "bytes": %d}' % (MAX_DATA_BYTES + 1),
        b'{"call": 1, "kind": "answer", "name": "", "offset": Infinity, "bytes": 0}',
        b'{"call": "x", "kind": "answer", "name": "", "offset": 0, "bytes": 0}',
        b'{"call": 1, "kind": "\xff", "name": "", "offset": 0, "bytes": 0}',
    ],
)
def test_an_invalid_header_is_an_error(header: bytes) -> None:
    buffer = FrameBuffer(MARK)
    buffer.add(MARK + header + b"\n")
    with pytest.raises(FrameError):
        list(buffer.frames())
