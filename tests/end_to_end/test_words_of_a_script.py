"""What the terminal says of a script before its first step, and of its checkpoints when it is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from waiting import LIMIT_S

RECIPE = """
[[cluster.nodes]]
cpu_ranks = 2
[train]
script = "wait.py"
"""


def test_a_script_without_a_step_is_started_and_saves_its_own_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text(RECIPE)
    (tmp_path / "wait.py").write_text("import signal\nsignal.pause()\n")
    command = [str(Path(sys.executable).with_name("gputrain")), "run", "one.toml"]
    environment = {**os.environ, "GPUTRAIN_HOME": str(tmp_path / "home")}
    lines: list[str] = []
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        try:
            for line in running.stderr:
                lines.append(line)
                if line.startswith("2 ranks started, no step yet"):
                    running.send_signal(signal.SIGINT)
                    break
            lines += running.stderr
            assert running.wait(LIMIT_S) == 130
        finally:
            running.kill()
    stopping = "".join(line for line in lines if line.startswith("stopping"))
    assert "a script saves its own checkpoints, on SIGTERM;" in stopping, lines
    assert "once it has saved" not in stopping
