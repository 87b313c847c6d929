"""Program of test_orphans.py in a PID namespace: every marked process of a run is killed, its unmarked daemon lives."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

from bench import Bench  # noqa: E402
from waiting import until  # noqa: E402

from gputrain_tui.lifecycle import leftovers  # noqa: E402
from trainer.host.process_identity import unmarked_processes  # noqa: E402

SCRIPT = """\
import subprocess, time
quiet = subprocess.DEVNULL
print(subprocess.Popen(["sleep", "600"], env={}, start_new_session=True, stdin=quiet, stdout=quiet, stderr=quiet).pid)
time.sleep(600)
"""
RECIPE = '[[cluster.nodes]]\ncpu_ranks = 1\n[train]\nscript = "daemon.py"\n'


def daemons() -> int:
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found += path.read_bytes() == b"sleep\x00600\x00"
    return found


def main(folder: str) -> int:
    bench = Bench(Path(folder))
    (bench.folder / "daemon.py").write_text(SCRIPT)
    (bench.folder / "daemon.toml").write_text(RECIPE)
    done = bench.call("run", "daemon.toml", "--detach")
    run = bench.runs()[0]
    until(lambda: list(unmarked_processes(run.dir.path)), "the daemon is listed", 60)
    pids = [*leftovers.supervisors_of(run.dir.path), *leftovers.processes_of(run.dir.path)]
    for number in (signal.SIGSTOP, signal.SIGKILL):  # at once, so that none can end the others in order
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
    until(lambda: not leftovers.processes_of(run.dir.path))
    print("daemons", daemons())
    done = bench.call("stop", run.id)
    print(done.returncode, done.stdout.strip().partition(" ")[2], done.stderr.strip().partition("; ")[2])
    print("daemons", daemons())
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
