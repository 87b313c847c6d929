"""Program of test_orphans.py in a PID namespace: a node agent whose failed ranks leave children that fork and exit."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

from test_node_agent import RunningNodeAgent  # noqa: E402

LIMIT_S = 60.0
"""Far above the seconds that an agent takes at most."""


def forking() -> int:
    names = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            names.append(path.read_text())
    return sum(name.startswith("forks-") for name in names)


def main(run_dir: str, start_method: str) -> int:
    with tempfile.TemporaryDirectory() as temporary:
        agent = RunningNodeAgent(Path(run_dir), temporary, "leaves_children_that_fork", start_method)
        agent.marks()
        print("exit code", agent.process.wait(LIMIT_S))
    print(agent.failure().message)
    print("left", agent.outcome().left)
    until = time.monotonic() + 1.0
    seen = 0
    while time.monotonic() < until:  # each lives for a moment only
        seen = max(seen, forking())
    print("alive", seen)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
