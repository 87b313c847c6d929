"""Synthetic runs: run directories written with the record's own definitions, for screens and tests."""

from __future__ import annotations

import math
import random
from pathlib import Path

import msgspec

from gputrain_tui.diagnosis.advice import ADVICE
from gputrain_tui.history.run_folders import Run, create, open_run
from gputrain_tui.history.status_file import write_status
from gputrain_tui.plan.planner import Plan, PlannedNode
from trainer.contract.record import (
    AnyEvent,
    Checkpoint,
    Event,
    Failure,
    Finding,
    Joining,
    NodeSample,
    RankSample,
    RankState,
    RunDir,
    RunEnded,
    RunStarted,
    RunStatusName,
    Step,
    TrainingPlan,
    Validation,
    encode_event,
)

BEGIN = 1_800_000_000.0
"""Start of every synthetic run, Unix seconds."""


def run(
    root: Path,
    *,
    name: str = "demo",
    nodes: int = 1,
    ranks_per_node: int = 2,
    steps: int = 300,
    total: int = 500,
    status: RunStatusName = "running",
    joined: int | None = None,
    straggler: int | None = None,
    failed_rank: int | None = None,
    seed: int = 7,
    started: float = BEGIN,
) -> Run:
    """Write a run directory.

    Args:
        root: folder of the runs.
        name: name of the recipe.
        nodes: number of machines.
        ranks_per_node: ranks on each machine.
        steps: steps that every rank has done.
        total: steps after which the run would end.
        status: status written by the supervisor.
        joined: number of ranks that have joined, before the first step; default: all.
        straggler: rank for which the others wait in the second half.
        failed_rank: rank that failed after the last step.
        seed: seed of the noise.
        started: when the run says that it was started; its events begin at ``BEGIN``.
    """
    world_size = nodes * ranks_per_node
    hosts = [f"node{index:03}" for index in range(nodes)] if nodes > 1 else ["localhost"]

    def plan(run_dir: RunDir) -> bytes:
        return msgspec.json.encode(
            Plan(
                world_size=world_size,
                init_method="tcp://10.0.0.1:29600" if world_size > 1 else None,
                backend="gloo",
                launcher="local" if nodes == 1 else "ssh",
                nodes=[
                    PlannedNode(
                        node=index,
                        host=host,
                        first_rank=index * ranks_per_node,
                        ranks=list(range(index * ranks_per_node, (index + 1) * ranks_per_node)),
                        devices=["cpu"] * ranks_per_node,
                        argv=["python", "-P", "-m", "trainer"],
                        env={},
                    )
                    for index, host in enumerate(hosts)
                ],
            )
        )

    made = create(
        name, world_size=world_size, recipe_toml=f'name = "{name}"\n', plan=plan, root=root, now=lambda: started
    )
    write(made.dir.run_events, RunStarted(
        time=BEGIN, run=made.id, recipe=name, world_size=world_size, run_dir=str(made.dir.path)))  # fmt: skip
    _ranks(made, hosts, ranks_per_node, steps, total, joined, straggler, failed_rank, random.Random(seed))
    if status in ("finished", "failed", "stopped"):
        end = BEGIN + 4 + steps * 0.1 + 2
        code = {"finished": 0, "failed": 1, "stopped": 130}[status]
        write(made.dir.run_events, RunEnded(time=end, status=status, exit_code=code))
        made.status.ended, made.status.exit_code = end, code
    made.status.status = status
    write_status(made.dir, made.status)
    found = open_run(made.dir.path)
    assert found is not None
    return found


def write(path: Path, *events: Event) -> None:
    """Append events to a file of the record."""
    with path.open("ab") as file:
        file.write(b"".join(map(encode_event, events)))


def step_of(rank: int, step: int, noise: random.Random, *, late_ms: float = 0.0, node: int = 0) -> Step:
    """Return a plausible step of a rank."""
    loss = 1.6 + 4 * math.exp(-step / 90) + noise.gauss(0, 0.05)
    forward, backward = 12 + noise.gauss(0, 0.4) + node % 3, 24 + noise.gauss(0, 0.8)
    exposed = max(0.3, 4.5 + noise.gauss(0, 0.6) - late_ms)
    data = 1.5 + abs(noise.gauss(0, 0.3)) + late_ms
    total = data + forward + backward + exposed + 2.1
    return Step(
        time=BEGIN + 4 + step * 0.1, rank=rank, step=step, epoch=1 + step // 200, steps=1, samples=16, loss=loss,
        lr=0.002, grad_norm=0.9 + noise.gauss(0, 0.05), local_grad_norm=1.1 + noise.gauss(0, 0.08), step_ms=total,
        data_ms=data, h2d_ms=0.2, forward_ms=forward, backward_ms=backward, optimizer_ms=1.9, other_ms=0.0,
        sync_ms=exposed + 9, sync_exposed_ms=exposed, sync_bytes=4_200_000, sync_buckets=3,
    )  # fmt: skip


def _ranks(
    run: Run,
    hosts: list[str],
    per_node: int,
    steps: int,
    total: int,
    joined: int | None,
    straggler: int | None,
    failed_rank: int | None,
    noise: random.Random,
) -> None:
    world_size = len(hosts) * per_node
    present = world_size if joined is None else joined
    for rank in range(world_size):
        node = rank // per_node
        events: list[AnyEvent] = [
            RankState(time=BEGIN + 1, rank=rank, state="spawned", node=node, host=hosts[node],
                      local_rank=rank % per_node, device="cpu", pid=40_000 + rank),
        ]  # fmt: skip
        if rank < present or noise.random() < 0.5:
            events.append(RankState(time=BEGIN + 2, rank=rank, state="joining"))
        if rank < present and (steps or present == world_size):
            events.append(RankState(time=BEGIN + 3, rank=rank, state="ready"))
        if rank == 0 and steps:
            events.append(TrainingPlan(time=BEGIN + 3.5, world_size=world_size, updates_per_epoch=200,
                                       samples_per_epoch=200 * 16 * world_size, max_updates=total,
                                       loss_unit="nats"))  # fmt: skip
        elif rank == 0 and joined is not None:
            events.append(Joining(time=BEGIN + 3, joined=list(range(present)), missing=list(range(present, world_size)),
                                  waited_ms=1500))  # fmt: skip
        for step in range(1, steps + 1):
            late = 20.0 if rank == straggler and step > steps // 2 else 0.0
            event = step_of(rank, step, noise, late_ms=late, node=node)
            if straggler is not None and rank != straggler and step > steps // 2:
                event.sync_exposed_ms = (event.sync_exposed_ms or 0) + 20
                event.step_ms = (event.step_ms or 0) + 20
            events.append(event)
        if rank == 0 and steps:
            events.append(Validation(time=BEGIN + 4 + steps * 0.1, step=steps, epoch=1, split="valid", loss=1.91))
            events.append(Checkpoint(time=BEGIN + 4 + steps * 0.1, step=steps, path="checkpoints/last.pt",
                                     bytes=8_400_000, write_ms=31.0))  # fmt: skip
        if rank == failed_rank:
            events.append(Failure(time=BEGIN + 4 + steps * 0.1 + 0.2, rank=rank, host=hosts[node], step=steps,
                                  in_step=steps + 1,
                                  kind="out_of_memory", message="CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 "
                                  "has a total capacity of 79.10 GiB of which 1.31 GiB is free.",
                                  traceback="Traceback…\ntorch.OutOfMemoryError: CUDA out of memory"))  # fmt: skip
        elif failed_rank is not None:
            events.append(Failure(time=BEGIN + 4 + steps * 0.1 + 0.6, rank=rank, host=hosts[node], step=steps,
                                  in_step=steps + 1,
                                  kind="lost_peer", message="Connection closed by peer [10.0.0.2]"))  # fmt: skip
        write(run.dir.rank_events(rank), *events)
        lines = [f"12:00:{step % 60:02}.316 INFO  step {step} loss {5 - step / 100:.3f}" for step in range(1, 30)]
        if rank == failed_rank:
            lines += ['  File "trainer/loop.py", line 212, in _step', "    loss.backward()",
                      "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."]  # fmt: skip
        run.dir.rank_log(rank).write_text("\n".join(lines) + "\n")
    for node, host in enumerate(hosts):
        ranks = range(node * per_node, (node + 1) * per_node)
        write(run.dir.node_events(node), NodeSample(
            time=BEGIN + 3, node=node, host=host, cpu_percent=91, memory_used_bytes=9 << 30,
            memory_total_bytes=64 << 30,
            ranks=[RankSample(rank=r, cpu_percent=97.0, rss_bytes=1_500_000_000) for r in ranks]))  # fmt: skip
    if straggler is not None and steps:
        node = straggler // per_node
        write(run.dir.run_events,
              Finding(time=BEGIN + 4 + steps * 0.06, kind="input_bound", step=10,
                      message="waiting for data takes 52 % of a step (21.4 of 41.0 ms)",
                      evidence={"data_ms": 21.4, "step_ms": 41.0, "data_share": 0.52}, advice=ADVICE["input_bound"]),
              Finding(time=BEGIN + 4 + steps * 0.07, kind="input_bound", state="cleared",
                      message="waiting for data takes 52 % of a step (21.4 of 41.0 ms)"),
              Finding(time=BEGIN + 4 + steps * 0.08, kind="straggler", rank=straggler, host=hosts[node], device="cpu",
                      step=int(steps * 0.8), severity="warning", cause="data",
                      message=f"rank {straggler} takes 20.1 ms longer than the others in each step (29 % of a step), "
                              "because of its data loading",
                      evidence={"excess_ms": 20.1, "step_ms": 64.6, "excess_share": 0.29, "data_ms": 21.6,
                                "usual_data_ms": 1.6}, advice=ADVICE["data"]))  # fmt: skip
