"""Program of test_kills.py in a PID namespace: at each moment of a start, the command or its node agent is killed.

Prints a line for each kill: the moment, the killed one, and what is left. The last line is of a node agent that refuses
its request.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

from bench import FOR_EVER, Bench  # noqa: E402
from random_kills import processes as all_processes  # noqa: E402
from waiting import until  # noqa: E402

AGENT, SERVER = "-m trainer --", "multiprocessing.forkserver"


def processes() -> list[tuple[int, str]]:
    return [(pid, command) for pid, command in all_processes() if pid != 1]


def named(words: str) -> list[int]:
    return [pid for pid, command in processes() if words in command and SERVER not in command]


def servers() -> list[int]:
    return [pid for pid, command in processes() if SERVER in command]


def loads_torch() -> bool:
    for pid in servers():
        with suppress(OSError):
            if "libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text():
                return True
    return False


MOMENTS: dict[str, Callable[[], object]] = {
    "supervisor": lambda: named("gputrain_tui.lifecycle.supervisor"),
    "node agent": lambda: named(AGENT),
    "fork server": servers,
    "torch": loads_torch,
    "ranks": lambda: len(servers()) >= 3,
}

KILLS = [*(("command", moment) for moment in MOMENTS), ("node agent", "fork server"), ("node agent", "torch")]


def left(temporary: Path) -> list[str]:
    until(lambda: not processes(), "everything has ended")
    return [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]


def main(folder: str) -> int:
    with tempfile.TemporaryDirectory(prefix="gt-", dir="/tmp", ignore_cleanup_errors=True) as name:
        temporary = Path(name)
        os.environ["TMPDIR"] = name
        bench = Bench(Path(folder))
        recipe = bench.recipe(FOR_EVER)
        for victim, moment in KILLS:
            command = bench.start("run", recipe)
            until(MOMENTS[moment], moment)
            os.kill(command.pid if victim == "command" else named(AGENT)[0], signal.SIGKILL)
            command.communicate(timeout=300)
            print(f"{moment}, {victim}: {left(temporary)}", flush=True)
        data = Path(folder) / "text.txt"
        words = ["--task", "lm", "--data", str(data), "--cpu", "--distributed-init-method", "tcp://127.0.0.1:29999"]
        ranks = ["--distributed-world-size", "2", "--distributed-gpus", "2", "--distributed-rank", "1"]
        ranks += ["--run-dir", folder]
        refused = subprocess.run(
            [sys.executable, "-P", "-m", "trainer", *words, *ranks],
            env={**os.environ, "GPUTRAIN_RUN": folder},
            capture_output=True,
            timeout=300,
        )
        print(f"refused, {refused.returncode}: {[words for _, words in processes()]} {left(temporary)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
