from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import wraps
from pathlib import Path

import pytest
import synthetic
from rich.style import Style
from screen_frames import console, played, press, settle
from textual.app import App, ComposeResult

from gputrain_tui.console.screens.rank_screen import RankScreen
from gputrain_tui.console.widgets.log_line import decoded, line_strip, prefix
from gputrain_tui.console.widgets.log_view import LogView
from gputrain_tui.history.follow import Follower
from gputrain_tui.history.log_buffer import MAX_LINE_BYTES, Level, LogBuffer, LogLine, level_of, newest_version
from trainer.contract.record import NodeSample, RankSample, RunDir

STYLES = {role: Style.null() for role in ("base", "dim", "prefix", "warning", "error", "match", "current")} | {
    "match": Style(reverse=True),
    "error": Style(color="red"),
}


def texts(buffer: LogBuffer) -> list[bytes]:
    return [buffer.line(buffer.number(row)).raw for row in range(buffer.rows)]


def rendered(line: bytes, *, width: int = 40, **options: object) -> str:
    return line_strip(LogLine("0", line, 0), STYLES, width=width, **options).text  # type: ignore[arg-type]


# The buffer


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ([b"one\ntwo\n"], [b"one", b"two"]),
        ([b"on", b"e\ntw", b"o"], [b"one", b"two"]),
        ([b"a\n\nb\n"], [b"a", b"", b"b"]),
        ([b"  0%\r 50%\r100%\n"], [b"100%"]),
        ([b"  0%\r", b" 50%\r", b"100%\r"], [b"100%"]),
        ([b"  0%", b"\r 50%", b"\rdone\nnext\n"], [b"done", b"next"]),
        ([b"written on Windows\r\n"], [b"written on Windows"]),
        ([b"split there\r", b"\nnext\n"], [b"split there", b"next"]),
    ],
)
def test_lines_are_put_together_and_show_their_newest_version(pieces: list[bytes], lines: list[bytes]) -> None:
    buffer = LogBuffer()
    for piece in pieces:
        buffer.feed("0", piece)
    assert texts(buffer) == lines


def test_a_progress_bar_stays_in_its_place_while_other_ranks_print() -> None:
    buffer = LogBuffer()
    buffer.feed("0", b" 10%")
    buffer.feed("1", b"hello\n")
    buffer.feed("0", b"\r 20%")
    buffer.feed("1", b"again\n")
    buffer.feed("0", b"\rdone\nnext\n")
    assert [(buffer.line(n).name, buffer.line(n).raw) for n in range(4)] == [
        ("0", b"done"),
        ("1", b"hello"),
        ("1", b"again"),
        ("0", b"next"),
    ]


def test_old_lines_fall_off_and_numbers_stay() -> None:
    buffer = LogBuffer(lines=100)
    for number in range(1000):
        buffer.feed("0", b"line %d\n" % number)
    assert 100 <= buffer.rows <= 110
    assert buffer.line(buffer.number(0)).raw == b"line %d" % buffer.number(0)
    assert buffer.number(buffer.rows - 1) == 999
    assert buffer.row(3) == 0


def test_memory_is_bounded_by_bytes_too() -> None:
    buffer = LogBuffer(size_bytes=100_000)
    for _ in range(500):
        buffer.feed("0", b"x" * 1000 + b"\n")
    assert sum(map(len, texts(buffer))) <= 110_000


def test_a_megabyte_without_newline_keeps_its_head_and_the_count_of_cut_bytes() -> None:
    buffer = LogBuffer()
    for _ in range(16):
        buffer.feed("0", b"x" * 65_536)
    line = buffer.line(0)
    assert (len(line.raw), line.cut_bytes, buffer.rows) == (MAX_LINE_BYTES, (1 << 20) - MAX_LINE_BYTES, 1)
    buffer.feed("0", b"\nnext\n")
    assert buffer.line(1).raw == b"next"


@pytest.mark.parametrize(
    ("line", "level"),
    [
        (b"step 3 loss 0.4", Level.ALL),
        (b"validation error 0.2, 0 errors", Level.ALL),
        (b"WARNING: slow disk", Level.WARNING),
        (b"x.py:3: UserWarning: beware", Level.WARNING),
        (b"[rank0]:[W1121 01:02:03.456 ProcessGroupNCCL.cpp:1] late", Level.WARNING),
        (b"ValueError: no", Level.ERROR),
        (b"error: no such file", Level.ERROR),
        (b"2026-11-21 ERROR out of memory", Level.ERROR),
        (b"Segmentation fault (core dumped)", Level.ERROR),
    ],
)
def test_the_level_is_read_from_the_text(line: bytes, level: Level) -> None:
    assert level_of(line) is level


def test_a_level_keeps_whole_tracebacks_and_follows_what_comes() -> None:
    buffer = LogBuffer()
    buffer.feed("0", b"fine\nTraceback (most recent call last):\n")
    buffer.feed("1", b"also fine\n")
    buffer.feed("0", b'  File "a.py", line 3\n    x()\nKeyError: 3\nfine again\n')
    buffer.set_level(Level.ERROR)
    trace = [b"Traceback (most recent call last):", b'  File "a.py", line 3', b"    x()", b"KeyError: 3"]
    assert texts(buffer) == trace
    buffer.feed("1", b"warning: hm\nerror: no\n")
    assert texts(buffer) == [*trace, b"error: no"]
    buffer.set_level(Level.WARNING)
    assert texts(buffer) == [*trace, b"warning: hm", b"error: no"]


def test_an_unended_line_is_seen_at_its_place_once_it_turns_out_to_matter() -> None:
    buffer = LogBuffer()
    buffer.set_level(Level.ERROR)
    buffer.feed("0", b"Value")
    buffer.feed("1", b"error: later\n")
    buffer.feed("0", b"Error: no\n")
    assert texts(buffer) == [b"ValueError: no", b"error: later"]


def test_the_search_goes_round_in_both_directions() -> None:
    buffer = LogBuffer()
    buffer.feed("0", b"Loss 1\nnothing\nloss 2\nnothing\n")
    assert buffer.find("LOSS", 0, forward=True) == 2
    assert buffer.find("loss", 2, forward=True) == 0
    assert buffer.find("loss", 0, forward=False) == 2
    assert buffer.find("absent", 0, forward=True) is None


def test_ten_thousand_lines_cost_little() -> None:
    buffer = LogBuffer()
    data = b"".join(b"step %d loss 0.123456 samples/s 1234.5 lr 0.001\n" % n for n in range(1000))
    started = time.process_time()
    for _ in range(10):
        buffer.feed("0", data)
    assert time.process_time() - started < 0.25  # of a second in which they came; measured: 0.004


# One line


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"[bold]not markup[/bold] [red]", "[bold]not markup[/bold] [red]"),
        (b"\x1b[2J\x1b[H\x1b]0;title\x07cleared", "cleared"),
        (b"\x1b[31mred\x1b[0m plain", "red plain"),
        (b"bell \x07 and null \x00", "bell ␇ and null ␀"),
        (b"broken \xff\xc3 utf-8", "broken \\xff\\xc3 utf-8"),
        ("right-to-left \u202e override".encode(), "right-to-left \\u202e override"),
        (b"a\tb", "a       b"),
        ("größer 漢字".encode(), "größer 漢字"),
    ],
)
def test_control_sequences_are_made_visible_or_dropped(line: bytes, text: str) -> None:
    assert rendered(line).rstrip() == text
    assert line_strip(LogLine("0", line, 0), STYLES, width=40).cell_length == 40


def test_colours_are_decoded() -> None:
    pieces = decoded(b"a\x1b[1;31mb\x1b[38;5;208mc\x1b[48;2;1;2;3md\x1b[0me")
    assert [text for text, _ in pieces] == list("abcde")
    assert [str(style) for _, style in pieces] == [
        "none",
        "bold color(1)",
        "bold color(208)",
        "bold color(208) on #010203",
        "none",
    ]


@pytest.mark.parametrize("codes", [b"38", b"38;5", b"38;2;300", b"99999999999", b";;;", b"38:2::1:2:3"])
def test_unfinished_colours_are_harmless(codes: bytes) -> None:
    assert rendered(b"\x1b[" + codes + b"mtext").rstrip() == "text"


def test_a_long_line_is_cut_and_can_be_moved_sideways() -> None:
    line = b"0123456789" * 10
    assert rendered(line, width=12) == "012345678901"
    assert rendered(line, width=12, shift=5) == "567890123456"
    assert rendered(line, width=12, shift=5, prefix_cells=3) == "r0 567890123"
    assert rendered("漢字漢字".encode(), width=5) == "漢字 "


def test_matches_are_marked_across_colours() -> None:
    strip = line_strip(LogLine("0", b"abc\x1b[31mdef", 0), STYLES, width=8, needle="CD")
    marked = "".join(segment.text for segment in strip if segment.style is not None and segment.style.reverse)
    assert marked == "cd"


def test_prefixes_are_aligned() -> None:
    assert [prefix(name, 4) for name in ("3", "128", "node-0", "supervisor")] == ["  r3 ", "r128 ", "  n0 ", " sup "]


# Following files


def test_a_follower_gives_unended_lines_and_begins_near_the_end(tmp_path: Path) -> None:
    (tmp_path / "0.log").write_bytes(b"".join(b"line %05d\n" % n for n in range(100_000)) + b"torn")
    follower = Follower(tmp_path, ".log", torn=True, last_bytes=65_536)
    data = b"".join(piece for _, piece in follower.poll(1 << 20))
    assert data.startswith(b"line ")
    assert data.endswith(b"line 99999\ntorn")
    assert 60_000 < len(data) <= 65_536
    follower.close()


# The widget


def in_loop(test: Callable[..., Coroutine[None, None, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*args: object, **fixtures: object) -> None:
        asyncio.run(test(*args, **fixtures))

    return run


class LogApp(App[None]):
    def __init__(self, run: RunDir, rank: int | None = None) -> None:
        super().__init__()
        self.view = LogView(run, rank=rank)

    def compose(self) -> ComposeResult:
        yield self.view


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "logs").mkdir()
    return RunDir(tmp_path)


def printed(run: RunDir, name: str, text: str) -> None:
    with (run.logs / f"{name}.log").open("a") as file:
        file.write(text)


def screen(view: LogView) -> list[str]:
    return [view.render_line(y).text.rstrip(" ┃") for y in range(view.size.height)]


@in_loop
async def test_an_empty_log_shows_a_notice(run: RunDir) -> None:
    app = LogApp(run)
    async with app.run_test(size=(60, 8)):
        app.view.tick()
        assert "nothing was printed yet" in "\n".join(screen(app.view))


@in_loop
async def test_the_end_is_followed_until_a_scroll_up_and_again_at_the_end(run: RunDir) -> None:
    app = LogApp(run)
    printed(run, "0", "".join(f"line {n}\n" for n in range(20)))
    async with app.run_test(size=(60, 6)) as pilot:
        app.view.focus()
        app.view.tick()
        assert screen(app.view)[1:] == [f"line {n}" for n in range(15, 20)]
        await pilot.press("up")
        printed(run, "0", "line 20\nline 21\n")
        app.view.tick()
        assert screen(app.view)[1:] == [f"line {n}" for n in range(14, 19)]
        assert "3 lines below, End follows" in screen(app.view)[0]
        await pilot.press("end")
        printed(run, "0", "line 22\n")
        app.view.tick()
        assert screen(app.view)[1:] == [f"line {n}" for n in range(18, 23)]


@in_loop
async def test_the_view_stays_on_its_lines_while_old_ones_fall_off(run: RunDir) -> None:
    app = LogApp(run)
    app.view = LogView(run, lines=100)
    printed(run, "0", "".join(f"line {n}\n" for n in range(100)))
    async with app.run_test(size=(60, 6)) as pilot:
        app.view.focus()
        app.view.tick()
        await pilot.press("up")
        seen = screen(app.view)[1:]
        printed(run, "0", "".join(f"line {n}\n" for n in range(100, 160)))
        app.view.tick()
        assert app.view.buffer.number(0) > 0
        assert screen(app.view)[1:] == seen


@in_loop
async def test_all_ranks_carry_their_names_and_one_rank_does_not(run: RunDir) -> None:
    app = LogApp(run)
    printed(run, "0", "hello\n")
    printed(run, "11", "hello\n")
    async with app.run_test(size=(60, 6)):
        app.view.tick()
        assert screen(app.view)[1:3] == [" r0 hello", "r11 hello"]
        app.view.show_rank(11)
        app.view.tick()
        assert screen(app.view)[1:3] == ["hello", ""]
        assert "rank 11" in screen(app.view)[0]


@in_loop
async def test_a_match_in_a_log_that_fits_has_no_lines_below(run: RunDir) -> None:
    app = LogApp(run)
    printed(run, "0", "line 1\nline 2\n")
    async with app.run_test(size=(60, 6)) as pilot:
        app.view.focus()
        app.view.tick()
        await pilot.press("slash", *"line 1", "enter")
        assert "lines below" not in screen(app.view)[0]
        assert "End follows" in screen(app.view)[0]


@in_loop
async def test_keys_search_and_choose_the_level(run: RunDir) -> None:
    app = LogApp(run)
    printed(run, "0", "".join(f"line {n}\n" for n in range(50)) + "ValueError: no\n" + "more\n" * 20)
    async with app.run_test(size=(60, 6)) as pilot:
        app.view.focus()
        app.view.tick()
        await pilot.press("slash", *"line 7", "enter")
        assert "line 7" in screen(app.view)[1:]
        assert "/line 7" in screen(app.view)[0]
        await pilot.press("escape", "L", "L")
        assert screen(app.view)[1] == "ValueError: no"
        assert "errors only" in screen(app.view)[0]
        await pilot.press("slash", *"absent", "enter")
        assert "not found" in screen(app.view)[0]
        await pilot.press("escape", "L")
        assert app.view.buffer.rows == 71


@played
async def test_lines_have_their_time_and_level_and_flagged_ranks_are_jumped_to(tmp_path: Path) -> None:
    made = synthetic.run(tmp_path, steps=20, straggler=1)
    for rank in (0, 1):
        made.dir.rank_log(rank).write_text("".join(f"line {n} of {rank}\n" for n in range(30)))
    with made.dir.rank_log(0).open("a") as file:
        file.write("WARNING: the disk is slow\n")
    samples = [RankSample(rank=rank, log_bytes=made.dir.rank_log(rank).stat().st_size) for rank in (0, 1)]
    at = synthetic.BEGIN + 5
    synthetic.write(made.dir.node_events(0), NodeSample(time=at, node=0, host="here", ranks=samples))
    printed(made.dir, "0", "after the last sample\n")
    app = console(made)
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot)
        await press(pilot, "o", "z")
        view = app.screen.query_one(LogView)
        clock = time.strftime("%H:%M:%S", time.localtime(at))
        lines = screen(view)
        assert f"{clock} r0 line 29 of 0" in lines
        assert f"{clock} r0▲WARNING: the disk is slow" in lines
        assert "         r0 after the last sample" in lines
        await press(pilot, "home", "e")
        first = next(line for line in screen(view)[1:] if " r1 " in line)
        assert first.endswith("line 0 of 1")
        assert not view.following
        await press(pilot, "escape", "escape", "enter", "e")
        assert isinstance(app.screen, RankScreen)
        assert app.screen.rank == 1


def test_newest_version_leaves_other_lines_alone() -> None:
    assert newest_version(b"plain") == b"plain"
