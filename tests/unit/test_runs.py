from __future__ import annotations

import os
import socket
import stat
import subprocess
import time
from pathlib import Path

import msgspec
import pytest
from made_runs import NOON, append_events, make_run, step

from gputrain_tui.history.follow import AppendedFile, Follower
from gputrain_tui.history.record_tail import last_step
from gputrain_tui.history.run_folders import create, find, list_runs, open_directory, run_id
from gputrain_tui.history.run_reader import RunReader
from gputrain_tui.history.status_file import ENDED, Status, read_status
from gputrain_tui.history.summary import summarize
from gputrain_tui.report.load_report import read_run_record
from trainer.contract.errors import RequestError
from trainer.contract.record import (
    AnyEvent,
    EventWriter,
    Failure,
    Finding,
    RankState,
    RunDir,
    RunEnded,
    RunStarted,
    Step,
    encode_event,
)
from trainer.host.process_identity import ProcessIdentity, identify, is_alive


def ended(moment: float = NOON) -> RunEnded:
    return RunEnded(time=moment, status="finished", exit_code=0)


# --- without a supervisor --------------------------------------------------------------------------------------------

BEGAN = RankState(time=NOON, rank=0, state="training")
DONE = [BEGAN, RankState(time=NOON + 9, rank=0, state="finished")]
LOST = Failure(time=NOON + 8, rank=0, kind="lost_peer", message="lost")
BROKE = Failure(time=NOON + 9, rank=1, kind="exception", message="ValueError: no")
AGAIN = RankState(time=NOON + 10, rank=1, state="training")
STATES: dict[str, tuple[list[AnyEvent], list[AnyEvent], str, float | None]] = {
    "both finished": (DONE, [RankState(time=NOON + 11, rank=1, state="finished")], "finished", 11),
    "one goes on": (DONE, [AGAIN], "running", None),
    "one failed, the other lost it": ([BEGAN, LOST], [BROKE], "failed", 9),
    "one failed, the other goes on": ([BEGAN], [BROKE], "running", None),
    "one was started again": (DONE, [BROKE, AGAIN], "running", None),
    "a state after the failure of the same end": (
        DONE, [BROKE, RankState(time=NOON + 9.1, rank=1, state="failed")], "failed", 9,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_without_status_and_nodes_a_run_is_as_its_ranks_have_ended(tmp_path: Path, name: str) -> None:
    first, second, state, took = STATES[name]
    run = RunDir(tmp_path / "run")
    run.events.mkdir(parents=True)
    for rank, events in enumerate((first, second)):
        run.rank_events(rank).write_bytes(b"".join(encode_event(event) for event in events))
    found = open_directory(run.path)
    assert (found.state, found.status.started) == (state, NOON)
    assert found.status.ended == (None if took is None else NOON + took)
    assert found.status.message == ("ValueError: no" if state == "failed" else None)


@pytest.mark.parametrize(
    ("host", "lives", "state"), [("", False, "lost"), ("", True, "running"), ("b", False, "running")]
)
def test_ranks_that_are_gone_without_an_end_leave_a_lost_run(
    tmp_path: Path, host: str, lives: bool, state: str
) -> None:
    process = subprocess.Popen(["sleep", "600"])
    run = RunDir(tmp_path / "run")
    run.events.mkdir(parents=True)
    here = host or socket.gethostname()
    began = RankState(time=NOON, rank=0, state="training", host=here, pid=process.pid)
    run.rank_events(0).write_bytes(encode_event(began) + encode_event(step(0, 9, NOON + 5)))
    try:
        if not lives:
            process.terminate()
            process.wait()
        found = open_directory(run.path)
        assert (found.state, found.status.started, found.status.ended) == (state, NOON, None)
        live = read_run_record(found)
        assert (live.over, live.status) == (state == "lost", state)
        assert not live.over or live.elapsed_s == 5.0
        live.close()
    finally:
        process.kill()
        process.wait()


# --- creating --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("mnist-two-nodes", "20261121-120000-mnist-two-nodes"),
        ("SST-2 / DocNN", "20261121-120000-sst-2-docnn"),
        ("../../etc", "20261121-120000-etc"),
        ("訓練", "20261121-120000-run"),
        ("x" * 99, "20261121-120000-" + "x" * 40),
    ],
)
def test_a_run_id_carries_time_and_recipe_as_one_plain_word(recipe: str, expected: str) -> None:
    assert run_id(recipe, NOON) == expected


def test_a_new_run_is_complete_and_only_its_owner_can_look_into_it(tmp_path: Path) -> None:
    planned_for: list[Path] = []

    def plan(final: RunDir) -> bytes:
        planned_for.append(final.path)
        return b'{"world_size":2}'

    run = create("demo", world_size=2, recipe_toml="[train]\n", plan=plan, root=tmp_path / "runs", now=lambda: NOON)

    assert planned_for == [run.dir.path]
    assert stat.S_IMODE(run.dir.path.stat().st_mode) == 0o700
    assert run.dir.recipe.read_text() == "[train]\n"
    assert run.dir.plan.read_bytes() == b'{"world_size":2}'
    assert run.dir.events.is_dir()
    assert run.dir.logs.is_dir()
    assert run.status.supervisor == identify()
    assert [entry.name for entry in (tmp_path / "runs").iterdir()] == [run.id]


def test_runs_of_one_second_get_different_ids(tmp_path: Path) -> None:
    assert [make_run(tmp_path).id for _ in range(3)] == [
        "20261121-120000-demo",
        "20261121-120000-demo-2",
        "20261121-120000-demo-3",
    ]


def test_nothing_half_made_stays_when_the_plan_cannot_be_written(tmp_path: Path) -> None:
    def refuse(_: RunDir) -> bytes:
        raise RequestError("no such plan")

    with pytest.raises(RequestError, match="no such plan"):
        create("demo", world_size=2, recipe_toml="", plan=refuse, root=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match=r"cannot make a run directory in .*file/runs: Not a directory; choose"):
        create("demo", world_size=1, recipe_toml="", plan=lambda _: b"{}", root=tmp_path / "file" / "runs")


# --- listing and finding ---------------------------------------------------------------------------------------------


def test_runs_are_listed_newest_first_and_foreign_folders_are_passed_over(tmp_path: Path) -> None:
    old, new = make_run(tmp_path, "old"), make_run(tmp_path, "new", started=NOON + 5)
    (tmp_path / "notes").mkdir()
    (tmp_path / ".new-0123").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "status.json").write_bytes(b"\xff{")
    assert [run.id for run in list_runs(tmp_path)] == [new.id, old.id]


def test_the_last_of_more_than_ten_runs_of_one_recipe_is_the_newest(tmp_path: Path) -> None:
    made = [make_run(tmp_path, started=NOON + index / 100) for index in range(12)]
    assert find("last", tmp_path).id == made[-1].id


@pytest.mark.parametrize("wanted", ["20261121-120005", "20261121-120005-new", "last"])
def test_a_run_is_found_by_a_unique_prefix_its_id_or_last(tmp_path: Path, wanted: str) -> None:
    make_run(tmp_path, "old")
    new = make_run(tmp_path, "new", started=NOON + 5)
    assert find(wanted, tmp_path).id == new.id


def test_a_whole_id_wins_over_ids_that_it_begins(tmp_path: Path) -> None:
    first, _ = make_run(tmp_path), make_run(tmp_path)
    assert find(first.id, tmp_path).id == first.id


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("2026", "'2026' matches 2 runs: 20261121-120005-new, 20261121-120000-old"),
        ("20261121-120005-mew", "no run is called '20261121-120005-mew'; did you mean '20261121-120005-new'?"),
        ("zebra", "no run is called 'zebra'; the last one is '20261121-120005-new'"),
        ("", "no run is called ''; the last one is '20261121-120005-new'"),
        ("lst", "no run is called 'lst'; did you mean 'last'?"),
        ("old", "'old' is a recipe; its newest run is '20261121-120000-old'"),
    ],
)
def test_a_name_of_no_run_or_several_is_refused_with_candidates(tmp_path: Path, wanted: str, message: str) -> None:
    make_run(tmp_path, "old")
    make_run(tmp_path, "new", started=NOON + 5)
    with pytest.raises(RequestError) as refused:
        find(wanted, tmp_path)
    assert str(refused.value) == message


def test_a_folder_named_without_a_slash_is_offered_with_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hand").mkdir()
    with pytest.raises(RequestError) as refused:
        find("hand", tmp_path / "runs")
    assert str(refused.value) == "no run is called 'hand'; did you mean the folder './hand'?"
    with pytest.raises(RequestError, match="there is no run in "):
        find("h" * 300, tmp_path / "runs")


def test_without_any_run_the_command_for_the_first_is_reported(tmp_path: Path) -> None:
    assert list_runs(tmp_path / "none") == []
    with pytest.raises(RequestError, match=r"there is no run in .* start one with `gputrain run RECIPE`"):
        find("last", tmp_path / "none")


@pytest.mark.parametrize("status", ENDED)
def test_an_ended_run_needs_no_living_supervisor(tmp_path: Path, status: str) -> None:
    gone = ProcessIdentity(pid=2**22 + 1, start_ticks=1, boot_id="x", host="elsewhere")
    assert make_run(tmp_path, status=status, supervisor=gone).state == status


@pytest.mark.parametrize(
    ("change", "alive"),
    [
        ({}, True),
        ({"start_ticks": 1}, False),
        ({"pid": 2**22 + 1}, False),
        ({"boot_id": "00000000-0000-0000-0000-000000000000"}, False),
        ({"host": "another-machine"}, None),
        ({"boot_id": ""}, None),
    ],
)
def test_a_process_is_recognised_by_pid_start_boot_and_host(change: dict[str, object], alive: bool | None) -> None:
    assert is_alive(msgspec.structs.replace(identify(), **change)) is alive


def test_a_process_whose_name_holds_parentheses_is_read_rightly(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text("7 (a) b (c) S " + " ".join(str(field) for field in range(4, 53)))
    assert identify(7, proc=tmp_path).start_ticks == 22


# --- reading what is appended ----------------------------------------------------------------------------------------


def test_every_event_is_read_once_from_all_files_also_from_late_ones(tmp_path: Path) -> None:
    run = make_run(tmp_path).dir
    reader = RunReader(run)
    assert reader.poll() == []
    append_events(run, 0, step(0, 1))
    assert reader.poll() == [step(0, 1)]
    append_events(run, 0, step(0, 2))
    append_events(run, 10, step(10, 1, NOON - 1))
    with run.node_events(0).open("ab") as file:
        file.write(encode_event(RankState(time=NOON - 2, rank=0, state="spawned")))
    assert reader.poll() == [RankState(time=NOON - 2, rank=0, state="spawned"), step(10, 1, NOON - 1), step(0, 2)]
    assert reader.poll() == []
    reader.close()


def test_a_torn_last_line_is_read_when_its_rest_has_come(tmp_path: Path) -> None:
    run = make_run(tmp_path).dir
    reader = RunReader(run)
    line = encode_event(step(0, 2))
    append_events(run, 0, step(0, 1), torn=line[:20])
    assert reader.poll() == [step(0, 1)]
    append_events(run, 0, torn=line[20:40])
    assert reader.poll() == []
    append_events(run, 0, torn=line[40:])
    assert reader.poll() == [step(0, 2)]
    reader.close()


def test_garbage_and_events_of_a_later_version_are_passed_over(tmp_path: Path) -> None:
    run = make_run(tmp_path).dir
    reader = RunReader(run)
    append_events(
        run, 0, step(0, 1), torn=b'\xff\xfe\x00\n{"type":"of_the_future","time":1}\n[]\n\n' + encode_event(step(0, 2))
    )
    assert reader.poll() == [step(0, 1), step(0, 2)]
    reader.close()


def test_a_poll_reads_within_its_budget_and_reports_the_backlog(tmp_path: Path) -> None:
    run = make_run(tmp_path).dir
    for rank in range(3):
        append_events(run, rank, *(step(rank, number) for number in range(1, 2_001)))
    total = sum(run.rank_events(rank).stat().st_size for rank in range(3))
    run.run_events.write_bytes(encode_event(ended(NOON - 9)))
    reader = RunReader(run)
    first = reader.poll(1)
    assert reader.backlog_bytes == total - 3 * Follower.share_bytes
    assert {event.rank for event in first if isinstance(event, Step)} == {0, 1, 2}
    rest = []
    while reader.backlog_bytes:
        rest += reader.poll(1)
    assert len(first) + len(rest) == 6_001
    assert isinstance(rest[-1], RunEnded), "the end comes after all else, also when a clock is behind"
    assert not any(isinstance(event, RunEnded) for event in first + rest[:-1])
    reader.close()


def test_a_line_longer_than_a_share_is_read_whole(tmp_path: Path) -> None:
    run = make_run(tmp_path).dir
    long = RankState(time=NOON, rank=0, state="failed", message="x" * (3 * Follower.share_bytes))
    append_events(run, 0, long)
    reader = RunReader(run)
    events = reader.poll(1)
    while reader.backlog_bytes:
        events += reader.poll(1)
    assert events == [long]
    reader.close()


def test_files_beyond_the_limit_of_open_files_are_read_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "0.log"
    file = AppendedFile(path, keep_open=False)
    before = set(Path("/proc/self/fd").iterdir())
    assert file.unread() == 0
    path.write_bytes(b"one\ntw")
    assert file.unread() == 6
    assert file.lines(100) == b"one\n"
    with path.open("ab") as stream:
        stream.write(b"o\nthree")
    assert file.lines(100) == b"two\n"
    assert file.remainder() == b"three"
    assert set(Path("/proc/self/fd").iterdir()) == before


def test_a_folder_is_not_listed_again_while_nothing_was_made_in_it(tmp_path: Path) -> None:
    moment = [time.time() + 1.0]
    follower = Follower(tmp_path, ".log", now=lambda: moment[0])
    assert list(follower.poll(1)) == []
    changed = tmp_path.stat().st_mtime_ns
    (tmp_path / "0.log").write_bytes(b"a\n")
    os.utime(tmp_path, ns=(changed, changed))
    assert list(follower.poll(1)) == [], "the change time says that nothing is new"
    moment[0] += Follower.rescan_s
    assert list(follower.poll(1)) == [("0", b"a\n")]
    (tmp_path / "1.log").write_bytes(b"b\n")
    assert list(follower.poll(1)) == [("1", b"b\n")]
    follower.close()


def test_the_last_step_is_read_from_the_end_of_a_rank_s_file(tmp_path: Path) -> None:
    run = make_run(tmp_path).dir
    assert last_step(run) is None
    append_events(run, 0, *(step(0, number) for number in range(1, 1_000)), torn=b'{"type":"st')
    assert last_step(run, tail_bytes=1_000) == step(0, 999)


# --- following -------------------------------------------------------------------------------------------------------


def test_a_reader_sees_what_the_ranks_writers_append_until_the_run_ends(tmp_path: Path) -> None:
    run = make_run(tmp_path, status="running").dir
    started = RunStarted(time=NOON, run="x", recipe="demo", world_size=2, run_dir=str(run.path))
    own = EventWriter(run.run_events)
    own.write(started)
    own.flush()
    reader = RunReader(run)
    assert reader.poll() == [started]
    for rank in range(2):
        writer = EventWriter(run.rank_events(rank), rank=rank)
        writer.write(step(rank, 1, NOON + 1))
        writer.close()
    assert reader.poll() == [step(0, 1, NOON + 1), step(1, 1, NOON + 1)]
    own.write(ended(NOON + 2))
    own.close()
    assert reader.poll() == [ended(NOON + 2)]
    reader.close()


def test_a_status_written_by_a_later_version_can_still_be_read(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.dir.status.write_bytes(run.dir.status.read_bytes().replace(b"{", b'{"colour":"blue",', 1))
    assert read_status(run.dir) == run.status
    assert isinstance(run.status, Status)


def test_a_run_that_goes_on_is_listed_with_the_findings_that_stand(tmp_path: Path) -> None:
    run = make_run(tmp_path, status="running")
    found = Finding(time=NOON, kind="non_finite", severity="critical", rank=1, step=60, cause="loss")
    slow = Finding(time=NOON, kind="straggler", rank=0, step=9, message="slow")
    over = msgspec.structs.replace(slow, time=NOON + 1, state="cleared")
    run.dir.run_events.write_bytes(b"".join(map(encode_event, (slow, found, over))))
    entry = summarize(run, now=NOON + 5)
    assert (entry["finding"], entry["loss_is_nan"]) == ("NaN since step 60 on rank 1", True)
    assert [each["kind"] for each in entry["findings"]] == ["non_finite"]
