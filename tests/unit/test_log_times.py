"""Each line of a log has the time at which its file was first seen to hold it."""

from __future__ import annotations

import pytest

from gputrain_tui.history.log_buffer import LogBuffer
from gputrain_tui.history.log_times import MIN_TIMES, LogTimes, in_order


def test_a_line_has_the_time_of_the_first_sample_that_holds_all_of_it() -> None:
    times = LogTimes()
    for size, time in ((100, 1.0), (100, 2.0), (250, 3.0), (300, 4.0)):
        times.note(size, time)
    assert [times.at(end) for end in (1, 100, 101, 250, 299, 301)] == [1.0, 1.0, 3.0, 3.0, 4.0, None]
    assert times.last == 300


def test_the_oldest_times_are_forgotten_and_none_is_made_up_for_them() -> None:
    times = LogTimes(ranks=1 << 16)
    for second in range(10 * MIN_TIMES):
        times.note(10 * (second + 1), float(second))
    assert times.at(10) is None
    assert times.at(10 * 10 * MIN_TIMES) == 10 * MIN_TIMES - 1
    assert sum(times.at(10 * (second + 1)) is not None for second in range(10 * MIN_TIMES)) <= MIN_TIMES


def test_times_from_the_middle_of_a_record_date_only_the_lines_after_the_first_one() -> None:
    times = LogTimes(whole=False)
    for size, time in ((100, 1.0), (250, 3.0)):
        times.note(size, time)
    assert [times.at(end) for end in (1, 100, 101, 250, 251)] == [None, None, 3.0, 3.0, None]


def test_the_past_of_several_logs_is_read_in_the_order_of_time() -> None:
    times = {"0": LogTimes(), "1": LogTimes()}
    for name, marks in (("0", [(4, 1.0), (10, 3.0)]), ("1", [(3, 2.0), (8, 4.0)])):
        for size, time in marks:
            times[name].note(size, time)
    parts = [("0", b"a0\nb0\nc0\nd0\n", 0), ("1", b"a1\nb1\nc", 0), ("sup", b"hello\n", 0)]
    read = list(in_order(parts, times))
    assert read == [
        ("sup", b"hello\n", 0),
        ("0", b"a0\n", 0),
        ("1", b"a1\n", 0),
        ("0", b"b0\nc0\n", 3),
        ("1", b"b1\nc", 3),
        ("0", b"d0\n", 9),
    ]


def test_lines_whose_times_are_forgotten_come_before_those_of_known_times() -> None:
    forgetful, known = LogTimes(ranks=1 << 16), LogTimes()
    for second in range(2 * MIN_TIMES):
        forgetful.note(10 * (second + 1), float(second))
    known.note(4, 1.0)
    parts = [("1", b"new\n", 0), ("0", b"old\n", 0)]
    assert [name for name, *_ in in_order(parts, {"0": forgetful, "1": known})] == ["0", "1"]


@pytest.mark.parametrize(
    "pieces",
    [[b"one\ntwo\nthree"], [b"on", b"e\ntw", b"o", b"\nthree"], [b"10%\r 5", b"0%\rone\ntwo\nthr", b"ee"]],
)
def test_lines_know_where_in_their_file_they_end(pieces: list[bytes]) -> None:
    buffer, begin = LogBuffer(), 1000
    for piece in pieces:
        buffer.feed("0", piece, begin=begin)
        begin += len(piece)
    whole = b"".join(pieces)
    ends = [1000 + index + 1 for index, byte in enumerate(whole) if byte == ord("\n")] + [1000 + len(whole)]
    assert [buffer.line(buffer.number(row)).end for row in range(buffer.rows)] == ends
