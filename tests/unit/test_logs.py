from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from made_runs import NOON, append_to_log, make_ended_run as make_run
from utc_home import utc_home  # noqa: F401 - a fixture

from gputrain_tui.commands.logs import follow_logs, format_line, line_prefix, print_logs
from gputrain_tui.commands.runs import report
from gputrain_tui.history.status_file import write_status
from gputrain_tui.history.summary import summarize
from trainer.contract.record import EventWriter, Step
from trainer.host.process_identity import ProcessIdentity, identify


def test_a_log_of_many_chunks_comes_out_whole(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gputrain_tui.commands.logs.CHUNK_BYTES", 100)
    run = make_run(home)
    text = b"".join(b"line %d\n" % number for number in range(1_000)) + b"x" * 1_000
    append_to_log(run, 0, text)
    got: list[bytes] = []
    assert print_logs(run, None, lambda _, lines: got.append(lines))
    assert b"".join(got) == text


def test_following_prints_new_lines_until_the_run_has_ended(home: Path) -> None:
    run = make_run(home, status="running", supervisor=identify())
    got: list[tuple[str, bytes]] = []
    acts: list[Callable[[], object]] = [
        lambda: append_to_log(run, 0, b"one\ntw"),
        lambda: append_to_log(run, 1, b"late\n"),
        lambda: append_to_log(run, 0, b"o\nlast words"),
        lambda: write_status(run.dir, msgspec.structs.replace(run.status, status="finished")),
    ]
    assert follow_logs(run, None, lambda name, lines: got.append((name, lines)), sleep=lambda _: acts.pop(0)())
    assert got == [("0", b"one\n"), ("1", b"late\n"), ("0", b"two\n"), ("0", b"last words")]
    assert acts == []


def test_following_one_rank_leaves_the_others_unread(home: Path) -> None:
    run = make_run(home)
    append_to_log(run, 0, b"zero\n")
    append_to_log(run, 1, b"one\n")
    got: list[tuple[str, bytes]] = []
    assert follow_logs(run, {"1"}, lambda name, lines: got.append((name, lines)))
    assert got == [("1", b"one\n")]


@pytest.mark.parametrize(
    ("line", "printed"),
    [
        (b"plain", b"plain"),
        ("naïve 訓練\t✓".encode(), "naïve 訓練\t✓".encode()),
        (b"\x1b[31mred\x1b[0m \x1b[2J\x1b]0;title\x07on", b"red on"),
        (b"\xffbad\xc3", rb"\xffbad\xc3"),
        (b"bell\x07 null\x00 del\x7f", "bell␇ null␀ del␡".encode()),
        ("c1 \x9b2J bidi \u202e".encode(), rb"c1 \u009b2J bidi \u202e"),
        (b" 10%\r 50%\r100%\r", b"100%"),
        (b"windows\r", b"windows"),
        (b"", b""),
        (b"\x1b", "␛".encode()),
    ],
)
def test_nothing_that_a_rank_prints_commands_the_terminal(line: bytes, printed: bytes) -> None:
    assert format_line(line, b"", True) == printed + b"\n"
    assert format_line(line, b"[rank 0] ", False) == b"[rank 0] " + line + b"\n"


def test_ranks_have_different_colours_on_a_terminal_only() -> None:
    assert line_prefix("3", colour=False) == b"[rank 3] "
    assert line_prefix("node-1", colour=False) == b"[node 1] "
    assert line_prefix("0", colour=True) == b"\x1b[36m[rank 0]\x1b[0m "
    assert line_prefix("0", colour=True) != line_prefix("1", colour=True)


# --- runs ------------------------------------------------------------------------------------------------------------


def test_runs_are_described_by_their_status_and_a_running_one_by_its_newest_step(home: Path) -> None:
    running = make_run(home, status="running", supervisor=identify())
    writer = EventWriter(running.dir.rank_events(0), rank=0)
    writer.write(Step(time=NOON, rank=0, step=41, epoch=1, steps=1, samples=8, loss=2.5))
    writer.close()
    gone = ProcessIdentity(pid=2**22 + 1, start_ticks=1, boot_id=identify().boot_id, host=identify().host)
    lost = make_run(home, status="running", supervisor=gone)
    done = make_run(home, ended=NOON + 65, step=100, loss=1.25, exit_code=0)

    described = {run.id: summarize(run, now=NOON + 3_600) for run in (running, lost, done)}
    keys = ("state", "step", "loss", "duration_s")
    assert [tuple(entry[key] for key in keys) for entry in described.values()] == [
        ("running", 41, 2.5, 3_600.0),
        ("lost", None, None, None),
        ("finished", 100, 1.25, 65.0),
    ]
    assert described[done.id]["run_dir"] == str(done.dir.path)


def test_people_see_the_runs_newest_first(home: Path) -> None:
    entries = [
        summarize(make_run(home, "mnist", ended=NOON + 65, step=100, loss=1.25), now=NOON),
        summarize(make_run(home, "lm", status="failed", ended=NOON + 3_700), now=NOON),
    ]
    assert [line.split() for line in report(entries).splitlines()] == [
        ["run", "state", "recipe", "ranks", "step", "loss", "started", "took"],
        ["20261121-120000-mnist", "finished", "mnist", "2", "100", "1.2500", "2026-11-21", "12:00:00", "1:05"],
        ["20261121-120000-lm", "failed", "lm", "2", "2026-11-21", "12:00:00", "1:01:40"],
    ]


CAUSE = "rank 2 on n2 ran out of memory: Slurm enforced the job's limit of 400 MiB per node; raise slurm.mem"


@pytest.mark.parametrize(
    ("cells", "rows"),
    [
        (
            200,
            [
                "run                    state     recipe  ranks  step    loss  started               took  cause",
                "20261121-120000-mnist  finished  mnist       2   100  1.2500  2026-11-21 12:00:00   1:05",
                "20261121-120000-lm     failed    lm          2                2026-11-21 12:00:00  12:00  " + CAUSE,
            ],
        ),
        (
            100,
            [
                "run                    state     recipe  ranks  step    loss   took  cause",
                "20261121-120000-mnist  finished  mnist       2   100  1.2500   1:05",
                "20261121-120000-lm     failed    lm          2                12:00  rank 2 on n2 ran out of memory…",
            ],
        ),
        (
            60,
            [
                "run                    state     step  cause",
                "20261121-120000-mnist  finished   100",
                "20261121-120000-lm     failed          rank 2 on n2 ran out…",
            ],
        ),
        (
            40,
            [
                "run                    state",
                "20261121-120000-mnist  finished",
                "20261121-120000-lm     failed",
            ],
        ),
    ],
)
def test_the_cause_of_a_failure_stands_in_the_table_as_far_as_the_terminal_is_wide(
    home: Path, cells: int, rows: list[str]
) -> None:
    entries = [
        summarize(make_run(home, "mnist", ended=NOON + 65, step=100, loss=1.25), now=NOON),
        summarize(make_run(home, "lm", status="failed", ended=NOON + 720, message=CAUSE), now=NOON),
    ]
    printed = report(entries, cells=cells).splitlines()
    assert printed == rows
    assert max(map(len, printed)) <= cells
    assert report(entries).splitlines()[2].endswith(CAUSE), "whole in a file, where it is no endless line"
