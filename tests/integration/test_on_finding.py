"""The command of ``[report] on_finding``: once for each raise and clearing, with the facts, and no harm to the run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from manual_clock import ManualClock
from waiting import until

from gputrain_tui.lifecycle import finding_command
from gputrain_tui.lifecycle.finding_command import KIND_INTERVAL_S, FindingCommand
from trainer.contract.record import Finding, RunDir

SHOW = 'echo "$GPUTRAIN_FINDING_KIND $GPUTRAIN_FINDING_STATE $GPUTRAIN_FINDING_RANK $GPUTRAIN_FINDING_OTHERS"'


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path)
    run_dir.logs.mkdir()
    return run_dir


def finding(kind: str = "straggler", rank: int | None = 1, **others: Any) -> Finding:
    return Finding(time=1.0, kind=kind, rank=rank, message=f"{kind} on {rank}", **others)


def told(command: FindingCommand, *updates: Sequence[Finding]) -> list[str]:
    """Make the updates, and return what the commands have printed so far."""
    for findings in updates:
        command.update(findings)
        problems = command.wait(is_interrupted=lambda: False)
        assert problems == []
    log = command._dir.on_finding_log
    return log.read_text().splitlines() if log.exists() else []


def test_each_raise_and_each_clearing_is_told_once(run_dir: RunDir) -> None:
    clock = ManualClock()
    command = FindingCommand(run_dir, SHOW, clock=clock)
    assert told(command, [], [finding()], [finding()]) == ["straggler raised 1 0"]
    clock.advance(1e3 * KIND_INTERVAL_S)
    assert told(command, [finding()]) == ["straggler raised 1 0"]
    assert told(command, [], []) == ["straggler raised 1 0", "straggler cleared 1 0"]


def test_a_kind_is_told_once_a_minute_and_the_rest_is_counted(run_dir: RunDir) -> None:
    clock = ManualClock()
    command = FindingCommand(run_dir, SHOW, clock=clock)
    first = told(command, [finding(rank=0), finding("stalled", 3, severity="critical")])
    assert sorted(first) == ["stalled raised 3 0", "straggler raised 0 0"]
    assert told(command, [finding(rank=0), finding(rank=1)], [finding(rank=1)], [finding(rank=1), finding(rank=2)]) == (
        first
    )
    clock.advance(1e3 * KIND_INTERVAL_S)
    now = told(command, [finding(rank=1), finding(rank=2), finding("stalled", 3, severity="critical")])
    assert now[2:] == ["straggler raised 1 2"], "0 was cleared and 2 was raised besides"


def test_what_comes_and_goes_within_the_minute_is_only_counted(run_dir: RunDir) -> None:
    clock = ManualClock()
    command = FindingCommand(run_dir, SHOW, clock=clock)
    assert told(command, [finding()], [], [finding()], []) == ["straggler raised 1 0"]
    clock.advance(1e3 * KIND_INTERVAL_S)
    assert told(command, [])[1:] == ["straggler cleared 1 2"]


def test_findings_that_only_inform_are_not_told(run_dir: RunDir) -> None:
    assert told(FindingCommand(run_dir, SHOW), [finding("not_measured", severity="info")]) == []


def test_a_successor_tells_only_what_has_changed(run_dir: RunDir) -> None:
    first = told(FindingCommand(run_dir, SHOW), [finding(), finding("stalled", 2)])
    assert len(first) == 2
    successor = FindingCommand(run_dir, SHOW)
    assert told(successor, [finding(), finding("stalled", 2)]) == first
    assert told(successor, [finding()])[2:] == ["stalled cleared 2 0"]


def test_the_facts_are_values_and_on_standard_input(run_dir: RunDir) -> None:
    hostile = finding(host="h1; touch pwned", step=7, advice="$(touch pwned) `id`")
    command = FindingCommand(run_dir, 'cat > "$GPUTRAIN_RUN_DIR/given"; echo "$GPUTRAIN_FINDING_ADVICE"')
    assert told(command, [hostile]) == ["$(touch pwned) `id`"]
    given = json.loads((run_dir.path / "given").read_text())
    assert given["run"] == {"id": run_dir.path.name, "name": "", "dir": str(run_dir.path)}
    assert given["others"] == 0
    values = {name: given["finding"][name] for name in ("kind", "rank", "host", "step", "message")}
    assert values == {"kind": "straggler", "rank": 1, "host": "h1; touch pwned", "step": 7, "message": hostile.message}
    assert not (run_dir.path / "pwned").exists()


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("echo no mail; exit 3", "report.on_finding has failed with exit code 3; its output is in "),
        ("kill -9 $$", "report.on_finding was killed by signal 9; its output is in "),
    ],
)
def test_a_command_that_fails_is_a_line(run_dir: RunDir, command: str, problem: str) -> None:
    caller = FindingCommand(run_dir, command)
    caller.update([finding()])
    (line,) = caller.wait(is_interrupted=lambda: False)
    assert line.startswith(problem)
    assert caller.pids() == set()


def test_a_command_that_hangs_holds_up_nothing_and_is_killed(run_dir: RunDir) -> None:
    clock = ManualClock()
    caller = FindingCommand(run_dir, "echo $$; sleep 600 & wait", clock=clock)
    caller.update([finding()])
    (pid,) = caller.pids()
    until(lambda: run_dir.on_finding_log.read_text() == f"{pid}\n")
    assert caller.problems() == []
    clock.advance(1e3 * finding_command.COMMAND_TIMEOUT_S)
    (line,) = caller.problems()
    assert "took longer than 30 s and was killed" in line
    assert not Path(f"/proc/{pid}").exists()


def test_a_full_disk_keeps_no_finding_from_being_told(run_dir: RunDir, tmp_path: Path) -> None:
    run_dir.logs.rmdir()
    run_dir.told_findings.mkdir()
    command = FindingCommand(run_dir, f"echo told >> {tmp_path}/elsewhere")
    command.update([finding()])
    command.wait(is_interrupted=lambda: False)
    assert (tmp_path / "elsewhere").read_text() == "told\n"
