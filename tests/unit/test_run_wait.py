from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from made_runs import make_run

from gputrain_tui import cli
from gputrain_tui.lifecycle.run_wait import ABANDONED_S, Outlook, RunWait, outlook
from trainer.host.process_identity import ProcessIdentity, identify


@pytest.mark.parametrize(
    ("state", "has_supervisor", "has_job", "archived", "for_s", "expected"),
    [
        ("finished", False, False, False, 0.0, "ended"),
        ("stopped", False, False, True, 0.0, "ended"),
        ("queued", False, True, False, 0.0, "awaited"),
        ("running", True, False, False, 0.0, "awaited"),
        ("starting", False, False, False, 0.0, "awaited"),
        ("lost", False, False, False, 0.0, "awaited"),
        ("lost", False, False, False, ABANDONED_S, "abandoned"),
        ("lost", True, False, False, 9 * ABANDONED_S, "awaited"),
        ("lost", False, True, False, 9 * ABANDONED_S, "awaited"),
        ("lost", False, False, True, 0.0, "abandoned"),
        (None, False, False, False, 0.0, "awaited"),
        (None, False, False, False, ABANDONED_S, "abandoned"),
    ],
)
def test_a_run_is_awaited_as_long_as_something_can_record_its_end(
    state: str | None, has_supervisor: bool, has_job: bool, archived: bool, for_s: float, expected: Outlook
) -> None:
    assert (
        outlook(state, has_supervisor=has_supervisor, has_job=has_job, is_archived=archived, for_s=for_s)  # type: ignore[arg-type]
        == expected
    )


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path))
    return tmp_path / "runs"


def dead_process() -> ProcessIdentity:
    """Return the identity of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = identify(process.pid)
    process.communicate()
    return identity


def test_the_exit_code_is_the_first_of_those_named_that_is_not_0(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = make_run(home, status="finished", exit_code=0).id
    stopped = make_run(home, status="stopped", exit_code=130, message="stopped by `gputrain stop`").id
    failed = make_run(home, status="failed", exit_code=3, message="it broke", failed_rank=1, failed_host="h2").id
    assert cli.main(["wait", good]) == 0
    assert cli.main(["wait", good, stopped, failed]) == 130
    assert cli.main(["wait", failed, good, stopped, failed]) == 3
    out, err = capsys.readouterr()
    *_, third, first, second = out.splitlines()
    assert third.startswith(f"{failed} failed")
    assert third.endswith("0 steps: rank 1 on h2: it broke")
    assert first.startswith(f"{good} finished")
    assert second.endswith(": stopped by `gputrain stop`")
    assert err == ""


def test_a_run_that_goes_on_after_the_time_counts_as_1_and_is_told(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    going = make_run(home, status="running", supervisor=identify(os.getpid())).id
    assert cli.main(["wait", going, "--timeout", "0"]) == 1
    assert capsys.readouterr() == ("", f"gputrain: {going} is still running: 0 s are over\n")
    stopped = make_run(home, status="stopped", exit_code=130).id
    assert cli.main(["wait", stopped, going, "--timeout=0", "--json"]) == 130
    assert [each["state"] for each in json.loads(capsys.readouterr().out)] == ["stopped", "running"]


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf", "1e999", "x", ""])
def test_a_time_that_is_none_is_refused(home: Path, capsys: pytest.CaptureFixture[str], seconds: str) -> None:
    assert cli.main(["wait", "last", f"--timeout={seconds}"]) == 2
    assert "is no number of seconds from 0 on" in capsys.readouterr().err


def test_a_run_whose_supervisor_was_killed_is_told_and_not_awaited_for_ever(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = make_run(home, status="running", supervisor=dead_process()).id
    assert cli.main(["wait", lost]) == 1
    why = f"its supervisor was killed, with its ranks: `gputrain stop {lost}` takes it over and ends it"
    assert capsys.readouterr().out == f"{lost} lost: {why}\n"


def test_the_wait_for_a_run_that_is_deleted_meanwhile_ends(home: Path) -> None:
    wait = RunWait(make_run(home, status="running", supervisor=identify(os.getpid())))
    assert wait.check(0.0) is None
    shutil.rmtree(wait.run.dir.path)
    assert wait.check(100.0) is None
    result = wait.check(100.0 + ABANDONED_S)
    assert result is not None
    assert (result.state, result.exit_code, result.problem) == ("deleted", 1, "its run directory was deleted")
