"""A node agent without torch: records real events and ends as its first argument names, to test the supervisor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from trainer.contract.record import Failure, RankState, RunDir, Step, encode_event


def main(words: list[str]) -> int:
    mode, ranks = words[0], [int(word) for word in words[1].split(",")]
    flags = dict(zip(words[2::2], words[3::2], strict=True))
    run_dir = RunDir(Path(flags["--run-dir"]))

    def append_events(rank: int, *events: RankState | Step | Failure) -> None:
        with run_dir.rank_events(rank).open("ab") as file:
            file.write(b"".join(map(encode_event, events)))

    def states(*names: str) -> None:
        for rank in ranks:
            append_events(rank, *(RankState(time=time.time(), rank=rank, state=name) for name in names))  # type: ignore[arg-type]

    if mode == "once" and "--resume" not in flags and not (run_dir.path / "failed-once").exists():
        (run_dir.path / "failed-once").touch()
        mode = "fail"
    elif mode == "once":
        mode = "finish"
    if mode == "vanishes" and (run_dir.path / "attempts").exists():
        return 7
    if mode == "request":
        print("trainer: --batch-size is 0, but must be an integer >= 1", file=sys.stderr)
        return 2
    states("spawned", "training")
    for rank in ranks:
        steps = range(1, int(flags.get("--steps", "2")) + 1)
        append_events(
            rank, *(Step(time=time.time(), rank=rank, step=n, epoch=1, steps=1, samples=4, loss=2.0) for n in steps)
        )
    if mode in ("gated", "gated-failure"):
        (run_dir.path / "waiting").touch()
        while not (run_dir.path / "go").exists():
            time.sleep(0.005)
    if mode in ("finish", "abort", "gated"):
        states("finished")
    if mode == "abort":
        os.abort()
    if mode in ("fail", "gated-failure", "fails", "fails-and-hangs", "vanishes"):
        attempts = run_dir.path / "attempts"
        with attempts.open("a") as file:
            file.write("x")
        nth = f" {attempts.stat().st_size}" if mode == "fails" else ""  # another message for each attempt
        kind, message = (
            ("signal", f"ended by SIGKILL{nth}") if mode == "fails" else ("exception", "ValueError: bad batch")
        )
        append_events(ranks[-1], Failure(time=time.time(), kind=kind, rank=ranks[-1], message=message, step=2))
        if mode == "fails-and-hangs":
            time.sleep(600)
        return 1
    if mode == "peer":
        while not any(b'"exception"' in path.read_bytes() for path in run_dir.events.glob("*.ndjson")):
            time.sleep(0.005)
        early = Failure(time=time.time() - 60, kind="lost_peer", rank=ranks[0], message="Connection closed by peer")
        append_events(ranks[0], early)
        time.sleep(600)
    if mode == "mute":
        print("Segmentation fault in a kernel")
        return 7
    if mode == "saves":
        received: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
        (run_dir.path / "waiting").touch()
        while not (received and (run_dir.path / "go").exists()):
            time.sleep(0.005)
        (run_dir.path / "saved").touch()
        return 130
    if mode == "hang":
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        (run_dir.path / f"hanging-{ranks[0]}").touch()
        time.sleep(600)
    if mode == "wait":
        time.sleep(600)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
