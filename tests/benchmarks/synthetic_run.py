"""Synthetic runs of any size and rate: run directories written at once, or live by a separate process.

``python synthetic_run.py live FOLDER --ranks 1024 --rate 10`` prints the run's directory and writes until it is killed.
``python synthetic_run.py whole FOLDER --ranks 64 --steps 100000`` writes a finished run.
"""

from __future__ import annotations

import math
import random
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path

import msgspec

from gputrain_tui.history.run_folders import Run, create, open_run
from gputrain_tui.history.status_file import write_status
from gputrain_tui.plan.planner import Plan, PlannedNode
from trainer.contract.record import (
    Finding,
    GpuSample,
    NodeSample,
    RankSample,
    RankState,
    RunDir,
    RunEnded,
    RunStarted,
    Step,
    TrainingPlan,
    Validation,
    encode_event,
)
from trainer.contract.record.downsampled import Downsampler

NOISE = 4096
"""Number of random numbers, drawn once and reused: drawing takes longer than writing."""
BLOCK = 500
"""Steps of a rank per write."""
PER_NODE = 8


class SyntheticRun:
    """Run directory with ranks that have joined; ``step`` returns further steps."""

    def __init__(
        self,
        root: Path,
        *,
        ranks: int,
        rate: float,
        total: int = 0,
        straggler: int | None = None,
        began: float | None = None,
        now: Callable[[], float] = time.time,
        seed: int = 1,
    ) -> None:
        """Create the directory.

        Args:
            root: folder of the runs.
            ranks: number of ranks, on nodes of eight.
            rate: steps per second of every rank.
            total: steps after which the run would end; 0: never.
            straggler: rank for which the others wait.
            began: start of the run, Unix seconds; default: now.
            now: clock, in Unix seconds.
            seed: seed of the noise.
        """
        self.ranks = ranks
        self.began = now() if began is None else began
        self._interval = 1 / rate
        self._straggler = straggler
        self._total = total
        chance = random.Random(seed)
        self._noise = [chance.gauss(0, 1) for _ in range(NOISE)]
        self._encode = msgspec.json.Encoder().encode
        self._events = [
            Step(time=0.0, rank=rank, step=0, epoch=1, steps=1, samples=32, lr=0.002, h2d_ms=0.25, optimizer_ms=1.9,
                 sync_bytes=4_200_000, sync_buckets=3)
            for rank in range(ranks)
        ]  # fmt: skip
        self.run = create(
            "synthetic", world_size=ranks, recipe_toml='name = "synthetic"\n', plan=self._plan, root=root,
            now=lambda: self.began,
        )  # fmt: skip
        self._join()

    @property
    def dir(self) -> RunDir:
        return self.run.dir

    @property
    def hosts(self) -> list[str]:
        return [f"node{index:03}" for index in range(math.ceil(self.ranks / PER_NODE))]

    def step(self, rank: int, number: int, when: float) -> bytes:
        """Return a step of a rank as a line; ``number`` counts from 1, ``when`` is in Unix seconds."""
        noise = self._noise
        place = (number * 61 + rank * 977) % (NOISE - 4)
        loss = 1.5 + 9 * math.exp(-number / 4000) + 0.1 * noise[place]
        slow = 30.0 if rank == self._straggler else 0.0
        forward, backward = 30 + noise[place + 1], 60 + noise[place + 2]
        exposed = max(0.5, (38.0 if self._straggler is not None else 8.0) - slow + noise[place + 3])
        event = self._events[rank]
        event.time, event.step, event.epoch = when, number, 1 + number // 10_000
        event.loss, event.grad_norm, event.local_grad_norm = loss, 0.8 + 0.05 * noise[place], 1.0 + 0.05 * noise[place]
        event.data_ms, event.forward_ms, event.backward_ms = 2.0 + slow, forward, backward
        event.sync_exposed_ms, event.sync_ms = exposed, exposed + 9
        event.step_ms = 4.2 + slow + forward + backward + exposed
        return self._encode(event) + b"\n"

    def sample(self, node: int, when: float) -> bytes:
        """Return a node's machine sample as a line."""
        first = node * PER_NODE
        ranks = range(first, min(first + PER_NODE, self.ranks))
        return encode_event(
            NodeSample(
                time=when, node=node, host=self.hosts[node], cpu_percent=37.0, memory_used_bytes=90 << 30,
                memory_total_bytes=512 << 30,
                ranks=[RankSample(rank=rank, cpu_percent=99.0, rss_bytes=4 << 30) for rank in ranks],
                gpus=[
                    GpuSample(index=rank - first, uuid=f"GPU-{rank}", rank=rank, utilization_percent=93.0,
                              memory_used_bytes=57 << 30, memory_total_bytes=80 << 30, temperature_celsius=61.0)
                    for rank in ranks
                ],
            )
        )  # fmt: skip

    def write_whole(self, steps: int) -> None:
        """Write steps of all ranks, and the end of the run."""
        for rank in range(self.ranks):
            self._write_rank(rank, steps)
        end = self.began + 4 + steps * self._interval
        with self.dir.run_events.open("ab") as file:
            if self._straggler is not None:
                file.write(encode_event(self._found(end - 100)))
            file.write(encode_event(RunEnded(time=end + 1, status="finished", exit_code=0)))
        status = self.run.status
        status.status, status.exit_code, status.ended = "finished", 0, end + 1
        write_status(self.dir, status)

    def _write_rank(self, rank: int, steps: int) -> None:
        """Write a rank's steps, and their digest as the trainer's writer does."""
        path = self.dir.rank_events(rank)
        digest = Downsampler(self.dir.digest, path.stem, path.stat().st_size)
        with path.open("ab", buffering=0) as file:
            for first in range(1, steps + 1, BLOCK):
                lines = []
                for number in range(first, min(first + BLOCK, steps + 1)):
                    when = self.began + 4 + number * self._interval
                    lines.append(self.step(rank, number, when))
                    digest.add(self._events[rank], len(lines[-1]))
                if rank == 0:
                    evaluation = Validation(time=when, step=number, epoch=1 + number // 10_000, split="valid",
                                            loss=1.6 + 9 * math.exp(-number / 4000))  # fmt: skip
                    lines.append(encode_event(evaluation))
                    digest.add(evaluation, len(lines[-1]))
                file.write(b"".join(lines))
                digest.append(digest.take())
        digest.finish()
        digest.append(digest.take())

    def _found(self, when: float) -> Finding:
        return Finding(
            time=when, kind="straggler", rank=self._straggler, host=self.hosts[(self._straggler or 0) // PER_NODE],
            severity="warning", cause="waits for data", message=f"the others wait 30 ms for rank {self._straggler}",
            evidence={"excess_ms": 30.0},
        )  # fmt: skip

    def _plan(self, run_dir: RunDir) -> bytes:
        nodes = []
        for index, host in enumerate(self.hosts):
            first = index * PER_NODE
            ranks = list(range(first, min(first + PER_NODE, self.ranks)))
            nodes.append(
                PlannedNode(node=index, host=host, first_rank=first, ranks=ranks,
                            devices=[str(rank - first) for rank in ranks],
                            argv=["python", "-P", "-m", "trainer"], env={})
            )  # fmt: skip
        return msgspec.json.encode(
            Plan(world_size=self.ranks, init_method="tcp://10.0.0.1:29600", backend="nccl", launcher="ssh", nodes=nodes)
        )

    def _join(self) -> None:
        began = self.began
        with self.dir.run_events.open("ab") as file:
            file.write(encode_event(RunStarted(
                time=began, run=self.run.id, recipe="synthetic", world_size=self.ranks,
                run_dir=str(self.dir.path))))  # fmt: skip
        for rank in range(self.ranks):
            node, local = divmod(rank, PER_NODE)
            lines = [
                RankState(time=began + 1, rank=rank, state="spawned", node=node, host=self.hosts[node],
                          local_rank=local, device=f"cuda:{local} GPU-{rank}", pid=40_000 + rank),
                RankState(time=began + 2, rank=rank, state="joining"),
                RankState(time=began + 3, rank=rank, state="ready"),
            ]  # fmt: skip
            if rank == 0:
                plan = TrainingPlan(time=began + 3.5, world_size=self.ranks, updates_per_epoch=10_000,
                                    samples_per_epoch=320_000 * self.ranks, max_updates=self._total)  # fmt: skip
                lines.append(plan)  # type: ignore[arg-type]
            with self.dir.rank_events(rank).open("ab") as file:
                file.write(b"".join(map(encode_event, lines)))
            text = "".join(f"12:00:{second:02}.316 INFO  rank {rank} is warming up\n" for second in range(20))
            self.dir.rank_log(rank).write_text(text)
        for node in range(len(self.hosts)):
            with self.dir.node_events(node).open("ab") as file:
                file.write(self.sample(node, began + 1))


def whole(root: Path, *, ranks: int, steps: int, rate: float = 10.0, straggler: int | None = None) -> Run:
    """Write a finished run that ends about now."""
    synthetic = SyntheticRun(
        root, ranks=ranks, rate=rate, total=steps, straggler=straggler, began=time.time() - steps / rate - 10
    )
    synthetic.write_whole(steps)
    found = open_run(synthetic.dir.path)
    assert found is not None
    return found


def live(root: Path, *, ranks: int, rate: float, batch_s: float = 0.1) -> None:
    """Print the directory of a running run, and append steps until this process is killed."""
    synthetic = SyntheticRun(root, ranks=ranks, rate=rate, straggler=ranks // 3)
    files = [synthetic.dir.rank_events(rank).open("ab", buffering=0) for rank in range(ranks)]
    nodes = [synthetic.dir.node_events(node).open("ab", buffering=0) for node in range(len(synthetic.hosts))]
    status = synthetic.run.status
    status.status = "running"
    write_status(synthetic.dir, status)
    print(synthetic.dir.path, flush=True)
    began = time.monotonic()
    done = reported = 0
    while True:
        due = int((time.monotonic() - began) * rate)
        behind = due - done
        if behind:
            now = time.time()
            for rank, file in enumerate(files):
                file.write(b"".join([synthetic.step(rank, done + n, now) for n in range(1, behind + 1)]))
            done = due
        second = int(time.monotonic() - began)
        if second > reported:
            reported = second
            for node, file in enumerate(nodes):
                file.write(synthetic.sample(node, time.time()))
        rest = began + (int((time.monotonic() - began) / batch_s) + 1) * batch_s - time.monotonic()
        time.sleep(max(rest, 0.001))


def main() -> int:
    parser = ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("live", "whole"):
        command = commands.add_parser(name)
        command.add_argument("root", type=Path)
        command.add_argument("--ranks", type=int, default=64)
        command.add_argument("--rate", type=float, default=10.0, help="steps of every rank per second")
        if name == "whole":
            command.add_argument("--steps", type=int, default=100_000)
    args = parser.parse_args()
    if args.command == "live":
        live(args.root, ranks=args.ranks, rate=args.rate)
    else:
        print(whole(args.root, ranks=args.ranks, steps=args.steps, rate=args.rate).dir.path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
