"""CPU time of copying the record of 16 hosts with 8 ranks each, compared with decoding the same bytes once."""

from __future__ import annotations

import os
import select
import sys
import time
from pathlib import Path

import pytest

from gputrain_tui.lifecycle.launchers.ssh_launcher import SshLauncher
from gputrain_tui.plan.planner import PlannedNode
from trainer.contract.record import RunDir, Step, decode_events, encode_event

pytestmark = pytest.mark.benchmark

HOSTS = 16
RANKS = 8
EVENTS_PER_S = 20
"""Events per second of a rank with fast steps, about 6.5 kB."""
SECONDS = 10.0
MOST_OF_DECODING = 2.8
"""Maximum CPU time of copying over that of decoding: 2 % of a core for 128 ranks that write 6.5 kB/s each, where
decoding takes 0.7 %."""
ON_THIS_MACHINE = (
    'while [ "$1" != -- ]; do shift; done; shift 2; rm -f {tokens}; export GPUTRAIN_HOME={home}; exec sh -c "$*"'
)
"""Shell script in place of ssh: runs the command here, with another home and without the mark of a shared disk."""
WRITES = """
import os, sys, time
line, folder, pause = sys.argv[1].encode(), os.environ["GPUTRAIN_RUN"], float(sys.argv[2])
files = [open(f"{folder}/events/{rank}.ndjson", "ab", buffering=0) for rank in sys.argv[3:]]
while True:
    for file in files:
        file.write(line)
    time.sleep(pause)
"""


def event() -> Step:
    return Step(
        time=1_770_000_000.123, rank=0, step=1000, epoch=1, loss=1.2345678, samples=64, lr=0.001, steps=3,
        grad_norm=1.0, local_grad_norm=1.1, step_ms=16.7, data_ms=0.3, forward_ms=5.1, backward_ms=9.2,
        optimizer_ms=1.9, sync_ms=3.1,
        losses=[1.2, 1.3, 1.2], step_ms_each=[16.1, 17.0, 17.0], sync_exposed_ms_each=[0.4, 0.5, 0.4],
        sync_exposed_ms=0.43, sync_bytes=1_000_000, sync_buckets=2,
    )  # fmt: skip


def test_following_128_ranks_costs_little_more_than_decoding_their_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = RunDir(tmp_path / "runs" / "20260101-000000-run")
    for folder in (run_dir.events, run_dir.logs, run_dir.checkpoints, run_dir.nodes):
        folder.mkdir(parents=True)
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\n" + ON_THIS_MACHINE.format(tokens=f"{run_dir.agents}/*/token", home=tmp_path / "far"))
    ssh.chmod(0o755)
    monkeypatch.setenv("GPUTRAIN_SSH", str(ssh))
    line = encode_event(event()).decode() + "\n"
    nodes = []
    for number in range(HOSTS):
        ranks = list(range(number * RANKS, (number + 1) * RANKS))
        argv = [sys.executable, "-S", "-c", WRITES, line, str(1 / EVENTS_PER_S), *map(str, ranks)]
        planned = PlannedNode(
            node=number,
            host=f"far{number}",
            first_rank=ranks[0],
            ranks=ranks,
            devices=["cpu"] * RANKS,
            argv=argv,
            env={},
        )
        nodes.append(SshLauncher().launch(planned, run_dir, env={}, leased=True))
    try:
        for node in nodes:
            while node.identity is None:
                assert select.select([node], [], [], 60.0)[0]
                assert node.poll() is None, node.host_error
        began, cpu_s, size = time.monotonic(), time.process_time(), followed(run_dir)
        time.sleep(SECONDS)
        took_s, cpu_s, size = time.monotonic() - began, time.process_time() - cpu_s, followed(run_dir) - size
    finally:
        for node in nodes:
            node.kill()
        for node in nodes:
            while node.poll() is None:
                select.select([node], [], [], 60.0)
            node.close()
    data = line.encode() * 5000
    begin = time.process_time()
    assert len(list(decode_events(data))) == 5000
    decoding = (time.process_time() - begin) / len(data) * size
    share = f"{cpu_s / took_s:.1%} of a core, {cpu_s / decoding:.2f} times decoding it"
    print(f"\n{size / took_s / 1e6:.2f} MB/s of {HOSTS} hosts: {share}; load average {os.getloadavg()[0]:.1f}")
    assert size / took_s > 0.5 * HOSTS * RANKS * EVENTS_PER_S * len(line), "it keeps up with the writers"
    assert cpu_s <= MOST_OF_DECODING * decoding


def followed(run_dir: RunDir) -> int:
    return sum(file.stat().st_size for file in run_dir.events.iterdir())
