"""``unshare --pid --fork --mount-proc python random_kills.py FOLDER KILLS SEED``: foreground runs, and kills in them.

Each run gets one SIGKILL, or two, at random moments: to any process of it but the command, or to every supervisor.
Prints a line of JSON for each: how the command ended, the status, the processes left. To be run inside a PID
namespace, where whatever is signalled belongs to these runs.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from bench import FOR_EVER, Bench

SUPERVISOR = "gputrain_tui.lifecycle.supervisor"


def processes() -> Iterator[tuple[int, str]]:
    """Yield pid and command line of all that lives in the namespace besides this process."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            with suppress(OSError):
                words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if words:  # a zombie has none
                    yield int(folder.name), words


def supervisors() -> list[int]:
    return [pid for pid, words in processes() if SUPERVISOR in words]


def kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def main(folder: Path, kills: int, seed: int) -> None:
    assert len(list(processes())) == 0, "not alone in a PID namespace"
    chance = random.Random(seed)
    bench = Bench(folder)
    recipe = bench.recipe(FOR_EVER)
    for _ in range(kills):
        command = bench.start("run", recipe)
        twice = chance.random() < 0.5
        for longest_s in (4.0, 0.4) if twice else (4.0,):
            while not supervisors() and command.poll() is None:
                time.sleep(0.001)
            time.sleep(chance.random() * longest_s)
            others = [pid for pid, _ in processes() if pid != command.pid]
            kill(supervisors() if twice else [chance.choice(others)])
        try:
            _, err = command.communicate(timeout=15)
        except subprocess.TimeoutExpired:  # it was one that a run can do without, as its resource tracker
            command.send_signal(signal.SIGINT)
            _, err = command.communicate(timeout=300)
        left = [words for _, words in processes()]
        run = bench.runs()[0]
        status = json.loads(run.dir.status.read_bytes())
        found = {"status": status.get("status"), "exit_code": status.get("exit_code"), "left": left, "err": err}
        print(json.dumps({"run": run.id, "twice": twice, "returncode": command.returncode, **found}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
