"""A console in a pseudo-terminal rings when the run on its screen ends, unless that was turned off."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from run_dirs import run_dir
from waiting import LIMIT_S

from gputrain_tui.history.status_file import write_status
from trainer.contract.record import RunEnded, encode_event


@pytest.mark.parametrize("on", [True, False], ids=["on", "off"])
def test_the_end_of_the_run_rings_and_notifies(tmp_path: Path, on: bool) -> None:
    home = tmp_path / "home"
    run = run_dir(home / "runs", "mnist", status="running")
    (home / "config").mkdir()
    (home / "config" / "console.json").write_text(json.dumps({"notify": on}))
    env = {key: value for key, value in os.environ.items() if key not in ("TMUX", "STY", "VTE_VERSION")}
    master, terminal = pty.openpty()
    console = subprocess.Popen(
        [sys.executable, "-m", "gputrain_tui", "attach", run.id],
        stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
        env={**env, "GPUTRAIN_HOME": str(home), "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"},
    )  # fmt: skip
    os.close(terminal)
    written = b""

    def read_until(text: bytes) -> None:
        nonlocal written
        deadline = time.monotonic() + LIMIT_S
        while text not in written:
            assert select.select([master], [], [], max(deadline - time.monotonic(), 0))[0], text
            written += os.read(master, 1 << 16)

    try:
        read_until(b"running")
        ended = RunEnded(time=time.time(), status="finished", exit_code=0)
        with run.dir.run_events.open("ab") as file:
            file.write(encode_event(ended))
        write_status(run.dir, msgspec.structs.replace(run.status, status="finished", exit_code=0, ended=ended.time))
        read_until(b"\x1b]9;" if on else b"finished")
        os.write(master, b"q")
        while True:
            try:
                written += os.read(master, 1 << 16)
            except OSError:  # the console has left its terminal
                break
        assert console.wait(LIMIT_S) == 0
    finally:
        console.kill()
        console.wait()
        os.close(master)
    assert written.count(b"\a\x1b]9;gputrain: mnist finished\x1b\\") == written.count(b"\x1b]9;") == on
