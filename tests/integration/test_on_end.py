"""The command of ``[report] on_end``: run once, with the outcome in its environment, and no harm to the run."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from lone_kill import kill_without_successor
from stand_in_runs import stand_in_run
from waiting import LIMIT_S, until, written

from gputrain_tui.history.plan_file import read_plan
from gputrain_tui.history.run_folders import Run
from gputrain_tui.history.status_file import Status, read_status
from gputrain_tui.lifecycle import leftovers, report_sinks
from gputrain_tui.lifecycle.run_end import record_end
from gputrain_tui.lifecycle.supervisor_process import adopt, start_supervisor
from trainer.contract.record import RunDir

ECHO = 'echo "$GPUTRAIN_RUN_ID|$GPUTRAIN_RUN_NAME|$GPUTRAIN_RUN_STATUS|$GPUTRAIN_RUN_EXIT_CODE|$GPUTRAIN_RUN_DIR"'


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path))


def on_end_recipe(command: str) -> str:
    return f"[report]\non_end = {json.dumps(command)}\n"


def ended(run: Run) -> Status:
    status = read_status(run.dir)
    assert status is not None
    return status


def killed_supervisor(run: Run) -> None:
    supervisor = start_supervisor(run.dir, leased=False)
    until((run.dir.path / "waiting").exists)
    until(run.dir.attempt.exists)
    kill_without_successor(supervisor.pid)
    supervisor.wait()


@pytest.mark.parametrize(("mode", "status", "code"), [("finish", "finished", 0), ("fail", "failed", 1)])
def test_the_command_finds_the_run_in_its_environment_and_no_value_is_a_command(
    tmp_path: Path, mode: str, status: str, code: int
) -> None:
    name = f"$(touch {tmp_path}/pwned) `id` \"'; #"
    run = stand_in_run(tmp_path / "runs", mode, name=name, recipe=on_end_recipe(ECHO))
    assert start_supervisor(run.dir, leased=False).wait(LIMIT_S) == code
    assert run.dir.on_end_log.read_text() == f"{run.id}|{name}|{status}|{code}|{run.dir.path}\n"
    assert ended(run).message == (None if mode == "finish" else "ValueError: bad batch")
    assert not (tmp_path / "pwned").exists()


def test_the_end_of_a_lease_is_reported_as_any_other(tmp_path: Path) -> None:
    run = stand_in_run(tmp_path / "runs", "gated", recipe=on_end_recipe("echo $GPUTRAIN_RUN_STATUS"))
    supervisor = start_supervisor(run.dir, leased=True)
    until((run.dir.path / "waiting").exists)
    assert supervisor.stdin is not None
    supervisor.stdin.close()  # as when the command is killed
    assert supervisor.wait(LIMIT_S) == 130
    assert run.dir.on_end_log.read_text() == "stopped\n"
    assert ended(run).message == "lost contact with the command that started it"


def test_a_command_that_fails_costs_a_warning(tmp_path: Path) -> None:
    run = stand_in_run(tmp_path / "runs", "finish", recipe=on_end_recipe("echo no mail here; exit 3"))
    assert start_supervisor(run.dir, leased=False).wait(LIMIT_S) == 0
    log = run.dir.on_end_log
    assert log.read_text() == "no mail here\n"
    assert (ended(run).status, ended(run).exit_code) == ("finished", 0)
    assert ended(run).message == f"report.on_end has failed with exit code 3; its output is in {log}"


def test_a_command_that_hangs_is_killed_with_its_child_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_sinks, "COMMAND_TIMEOUT_S", 0.5)
    run_dir = RunDir(tmp_path)
    run_dir.logs.mkdir()
    status = Status(run="r", recipe="r", world_size=1, status="finished", exit_code=0)
    problem = report_sinks.run_on_end("sleep 600 & echo $!; wait", run_dir, status, is_interrupted=lambda: False)
    assert problem.startswith("report.on_end took longer than ")
    pid = run_dir.on_end_log.read_text().strip()
    until(lambda: not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text())


def test_a_signal_ends_the_wait_for_the_command_at_the_end(tmp_path: Path) -> None:
    run = stand_in_run(tmp_path / "runs", "finish", recipe=on_end_recipe("echo begun; exec sleep 600"))
    supervisor = start_supervisor(run.dir, leased=False)
    written(run.dir.on_end_log)
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(LIMIT_S) == 0
    assert "report.on_end was killed before it ended" in str(ended(run).message)


def test_an_adopted_run_reports_its_end_once(tmp_path: Path) -> None:
    until_done = 'echo $GPUTRAIN_RUN_STATUS; until test -e "$GPUTRAIN_RUN_DIR/done"; do sleep 0.02; done'
    run = stand_in_run(tmp_path / "runs", "gated", recipe=on_end_recipe(until_done))
    killed_supervisor(run)
    adopt(run)
    (run.dir.path / "go").touch()
    written(run.dir.on_end_log)
    (supervisor,) = leftovers.supervisors_of(run.dir.path)
    os.kill(supervisor, signal.SIGKILL)  # while the command runs
    until(lambda: not leftovers.supervisors_of(run.dir.path))
    assert start_supervisor(run.dir, leased=False, adopting=True).wait(LIMIT_S) == 0
    assert run.dir.on_end_log.read_text() == "finished\n"
    (run.dir.path / "done").touch()


@pytest.mark.parametrize("folder", ["runs", "somebody-elses"])
def test_on_end_of_a_run_without_supervisor_runs_once_and_only_among_the_own_runs(tmp_path: Path, folder: str) -> None:
    (tmp_path / "runs").mkdir()
    run = stand_in_run(tmp_path / folder, "gated", recipe=on_end_recipe("echo $GPUTRAIN_RUN_STATUS"))
    killed_supervisor(run)
    for _ in range(2):
        assert record_end(run.dir, read_plan(run.dir), -signal.SIGKILL, give_up=bool) == 1
    assert run.dir.on_end_log.exists() == (folder == "runs")
    assert folder != "runs" or run.dir.on_end_log.read_text() == "failed\n"


def test_on_end_of_a_copied_run_is_not_run(tmp_path: Path) -> None:
    run = stand_in_run(tmp_path / "runs", "gated", recipe=on_end_recipe("echo $GPUTRAIN_RUN_STATUS"))
    killed_supervisor(run)
    copy = RunDir(shutil.copytree(run.dir.path, tmp_path / "runs" / f"{run.id}-2"))
    assert record_end(copy, read_plan(copy), -signal.SIGKILL, give_up=bool) == 1
    assert not copy.on_end_log.exists()
    assert record_end(run.dir, read_plan(run.dir), -signal.SIGKILL, give_up=bool) == 1
    assert run.dir.on_end_log.read_text() == "failed\n"
