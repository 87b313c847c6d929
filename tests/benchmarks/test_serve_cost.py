"""CPU time of `gputrain serve` while viewers look at a run of 8 ranks with 10 steps a second."""

from __future__ import annotations

import http.client
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import psutil
import pytest
import synthetic

pytestmark = pytest.mark.benchmark

RANKS = 8
MEASURED_S = 15.0


@pytest.mark.parametrize(("viewers", "max_share"), [(1, 0.05), (20, 0.30)])
def test_viewers_take_a_small_share_of_a_core(tmp_path: Path, viewers: int, max_share: float) -> None:
    run = synthetic.run(tmp_path / "runs", ranks_per_node=RANKS, steps=500)
    argv = [sys.executable, "-m", "gputrain_tui", "serve", run.id, "--port", "0"]
    server = subprocess.Popen(
        argv, stdout=subprocess.PIPE, text=True, env={**os.environ, "GPUTRAIN_HOME": str(tmp_path)}
    )
    assert server.stdout is not None
    address = urlsplit(server.stdout.readline().strip())
    over = threading.Event()

    def step() -> None:
        noise, number = random.Random(1), 500
        while not over.wait(0.1):
            number += 1
            for rank in range(RANKS):
                synthetic.write(run.dir.rank_events(rank), synthetic.step_of(rank, number, noise))

    def view() -> None:
        connection = http.client.HTTPConnection(address.netloc)
        token = parse_qs(address.query)["token"][0]
        connection.request("GET", f"/run/{run.id}/events", headers={"Cookie": f"gputrain_{address.port}={token}"})
        answer = connection.getresponse()
        while not over.is_set() and answer.read1(1 << 20):
            pass

    threads = [threading.Thread(target=each, daemon=True) for each in (step, *[view] * viewers)]
    for thread in threads:
        thread.start()
    process = psutil.Process(server.pid)
    over.wait(3.0)
    began, used = time.monotonic(), sum(process.cpu_times()[:2])
    over.wait(MEASURED_S)
    share = (sum(process.cpu_times()[:2]) - used) / (time.monotonic() - began)
    over.set()
    server.terminate()
    server.wait()
    server.stdout.close()
    print(f"\n{viewers} viewers: {100 * share:.1f} % of a core")
    assert share <= max_share
