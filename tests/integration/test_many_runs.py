"""Lists of many runs: only the newest are read before they are shown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from made_runs import NOON, make_run
from waiting import LIMIT_S

from gputrain_tui.console.widgets.run_list import RunList
from gputrain_tui.history.notes import Notes, write_notes
from gputrain_tui.history.run_folders import RECENT_RUNS, Run, find, list_runs, newest_runs, run_id
from gputrain_tui.history.run_listing import RunListing
from gputrain_tui.history.status_file import write_status
from trainer.contract.errors import RequestError

OLD = 1_000

_opened: list[str] | None = None
"""Paths that this process has opened, while they are counted."""


def _record_open(event: str, values: tuple[object, ...]) -> None:
    if event == "open" and _opened is not None:
        _opened.append(str(values[0]))


sys.addaudithook(_record_open)


@contextmanager
def opened_files() -> Iterator[list[str]]:
    """Collect the paths of the files that this process opens."""
    global _opened
    _opened = paths = []
    try:
        yield paths
    finally:
        _opened = None


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with ``OLD`` runs of the recipe old, and ``RECENT_RUNS`` newer ones of the recipe new."""
    folder = tmp_path_factory.mktemp("many") / "runs"
    status = {"recipe": "old", "world_size": 2, "status": "finished", "exit_code": 0}
    for index in range(OLD):
        started = NOON - 60.0 * (index + 1)
        run = folder / run_id("old", started)
        run.mkdir(parents=True)
        (run / "status.json").write_text(json.dumps({**status, "run": run.name, "started": started}))
    for index in range(RECENT_RUNS):
        make_run(folder, "new", started=NOON + index, status="finished", ended=NOON + index)
    return folder


@pytest.mark.parametrize(
    "wanted", ["last", run_id("new", NOON), run_id("new", NOON)[:-4]], ids=["last", "an id", "a prefix"]
)
def test_a_run_is_found_without_reading_the_others(runs: Path, wanted: str) -> None:
    with opened_files() as opened:
        found = find(wanted, runs)
    assert found.status.recipe == "new"
    assert len({path for path in opened if path.endswith("status.json")}) == 1


def test_the_newest_runs_are_read_and_no_older_one(runs: Path) -> None:
    with opened_files() as opened:
        found = list_runs(runs)
    assert [run.status.started for run in found] == [NOON + index for index in reversed(range(RECENT_RUNS))]
    assert not any("-old/" in path for path in opened)


def test_a_prefix_of_very_many_runs_is_refused_after_a_few_are_read(runs: Path) -> None:
    with opened_files() as opened, pytest.raises(RequestError, match=r"'2' matches more than 4 runs: .*-new, .*, …"):
        find("2", runs)
    assert not any("-old/" in path for path in opened)


def test_completion_offers_the_newest_runs_and_by_a_prefix_any(runs: Path, tmp_path: Path) -> None:
    def offered(line: str) -> list[str]:
        words = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "words")}
        words |= {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_SUPPRESS_SPACE": "1"}
        environment = {**os.environ, "GPUTRAIN_HOME": str(runs.parent), **words}
        subprocess.run([sys.executable, "-P", "-m", "gputrain_tui"], env=environment, check=True, timeout=LIMIT_S)
        return (tmp_path / "words").read_text().split("\v")

    newest = offered("gputrain logs ")
    assert newest[:2] == ["last", run_id("new", NOON + RECENT_RUNS - 1)]
    assert not any("-old" in word for word in newest)
    oldest = run_id("old", NOON - 60.0 * OLD)
    assert offered(f"gputrain logs {oldest[:-3]}") == [oldest]


def test_a_listing_shows_the_newest_first_and_then_ever_more(runs: Path) -> None:
    parts = RunListing(runs).read(now=NOON)
    with opened_files() as opened:
        first = next(parts)
    assert [entry["started"] for entry in first.entries] == [NOON + index for index in reversed(range(RECENT_RUNS))]
    assert first.unread == OLD
    assert not any("-old/" in path for path in opened)
    rest = list(parts)
    assert [len(part.entries) for part in rest] == [2 * RECENT_RUNS, 4 * RECENT_RUNS, OLD + RECENT_RUNS]
    every = [run for run in newest_runs(runs) if isinstance(run, Run)]
    assert [entry["id"] for entry in rest[-1].entries] == [run.id for run in every]
    assert rest[-1].unread == 0


def test_a_listing_reads_an_ended_run_again_only_after_it_has_changed(tmp_path: Path) -> None:
    ended = make_run(tmp_path, "ended", status="finished", ended=NOON + 1)
    going = make_run(tmp_path, "going", started=NOON + 5)
    listing = RunListing(tmp_path)

    def read() -> tuple[list[dict[str, object]], set[str]]:
        with opened_files() as opened:
            *_, found = listing.read(now=NOON + 60)
        return found.entries, {Path(path).parent.name for path in opened if path.startswith(str(tmp_path) + "/2")}

    assert read()[1] == {ended.id, going.id}
    assert read()[1] == {going.id}
    write_notes(ended, Notes(note="kept"))
    assert read()[0][1]["note"] == "kept"
    write_status(ended.dir, msgspec.structs.replace(ended.status, loss=0.5))
    assert read()[0][1]["loss"] == 0.5
    ended.dir.path.rename(tmp_path / "20261121-130000-renamed")
    assert [Path(str(entry["run_dir"])).name for entry in read()[0]] == ["20261121-130000-renamed", going.id]


def test_a_list_says_how_many_older_runs_are_not_read_yet(runs: Path) -> None:
    first = next(RunListing(runs).read(now=NOON))
    listing = RunList(id="runs")
    listing.lines = listing.listed = first.entries
    listing.unread = first.unread
    assert "reading 1,000 older" in "".join(text for text, _ in listing.head(120)[0])
