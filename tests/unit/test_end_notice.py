"""The notice at the end of a run: for whom, once, and in what each terminal understands."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from run_dirs import run_dir

from gputrain_tui.console import settings
from gputrain_tui.console.terminal import EndNotice, notice
from gputrain_tui.lifecycle.live_run import LiveRun
from trainer.contract.record import RunEnded, encode_event

XTERM = {"TERM": "xterm-256color"}


@pytest.mark.parametrize(
    ("environ", "written"),
    [
        (XTERM, "\a\x1b]9;gputrain: mnist failed; no\x1b\\"),
        ({"TERM": "xterm-kitty"}, "\a\x1b]9;gputrain: mnist failed; no\x1b\\"),
        ({"TERM": "foot"}, "\a\x1b]777;notify;gputrain;mnist failed, no\x1b\\"),
        ({**XTERM, "VTE_VERSION": "7600"}, "\a\x1b]777;notify;gputrain;mnist failed, no\x1b\\"),
        (
            {"TERM": "tmux-256color", "TMUX": "/tmp/s,1,0"},
            "\a\x1bPtmux;\x1b\x1b]9;gputrain: mnist failed; no\x1b\x1b\\\x1b\\",
        ),
        ({"TERM": "linux"}, "\a"),
        ({"TERM": "screen", "STY": "1.tty"}, "\a"),
        ({}, "\a"),
    ],
)
def test_each_terminal_gets_its_notification_sequence(environ: dict[str, str], written: str) -> None:
    assert notice("mnist failed; no", environ) == written


def test_a_message_cannot_end_the_sequence_that_carries_it() -> None:
    assert notice("\x1b\\\a\x07\x9c]0;x", XTERM).count("\x1b") == 2
    assert notice("x" * 10_000, XTERM).count("x") < 300


def test_the_end_of_a_run_is_notified_once_and_only_by_a_console_that_saw_it_running(tmp_path: Path) -> None:
    run = run_dir(tmp_path, "mnist", status="running")
    seen: list[str] = []
    notices, live = EndNotice(seen.append, XTERM), LiveRun(run)
    late: list[str] = []
    try:
        live.poll()
        notices.check(live)
        assert seen == []
        ended = RunEnded(time=run.status.started + 99, status="failed", exit_code=1, message="ValueError: bad batch")
        with run.dir.run_events.open("ab") as file:
            file.write(encode_event(ended))
        live.poll()
        for _ in range(3):
            notices.check(live)
        EndNotice(late.append, XTERM).check(live)
    finally:
        live.close()
    assert seen == ["\a\x1b]9;gputrain: mnist failed: ValueError: bad batch\x1b\\"]
    assert late == []


def test_notices_that_are_turned_off_stay_off_beside_a_theme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path))
    assert settings.notifies(os.environ)
    settings.save("notify", False)
    settings.save("theme", "textual-light")
    assert not settings.notifies(os.environ)
    assert settings.theme({"GPUTRAIN_HOME": str(tmp_path)}) == "textual-light"
