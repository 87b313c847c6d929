"""Write run directories of ended runs, with falling losses."""

from __future__ import annotations

import math
from pathlib import Path

from gputrain_tui.history.run_folders import Run, create, open_run
from gputrain_tui.history.status_file import ENDED, Status, write_status
from trainer.contract.record import RunStarted, RunStatusName, Step, Validation, encode_event
from trainer.host.process_identity import identify

RECIPE = """name = "{name}"

[[cluster.nodes]]
cpu_ranks = {world_size}

[train]
task = "lm"
max_updates = {steps}
lr = {lr}

[task]
data = "stdlib"
"""


def run_dir(
    root: Path,
    name: str,
    *,
    started: float = 1_790_000_000.0,
    status: RunStatusName = "finished",
    world_size: int = 2,
    steps: int = 50,
    lr: float = 0.1,
    seconds_per_step: float = 0.5,
    message: str | None = None,
) -> Run:
    text = RECIPE.format(name=name, world_size=world_size, steps=steps, lr=lr)
    run = create(name, world_size=world_size, recipe_toml=text, plan=lambda _: b"{}", root=root, now=lambda: started)
    loss = 0.0
    for rank in range(world_size):
        with run.dir.rank_events(rank).open("wb") as file:
            for step in range(1, steps + 1):
                loss = 1.0 + 4.0 * math.exp(-step * lr) + 0.01 * rank
                time = started + step * seconds_per_step
                event = Step(
                    time=time, rank=rank, step=step, epoch=1, steps=1, samples=8, loss=loss,
                    step_ms=1e3 * seconds_per_step,
                )  # fmt: skip
                file.write(encode_event(event))
            if rank == 0:
                file.write(encode_event(Validation(time=time, step=steps, epoch=1, split="valid", loss=loss + 0.5)))
    begin = RunStarted(time=started, run=run.id, recipe=name, world_size=world_size, run_dir=str(run.dir.path))
    run.dir.run_events.write_bytes(encode_event(begin))
    over = status in ENDED
    ended = started + steps * seconds_per_step if over else None
    kept = Status(
        run=run.id,
        recipe=name,
        world_size=world_size,
        status=status,
        supervisor=None if over else identify(),
        started=started,
        ended=ended,
        message=message,
        step=steps,
        loss=loss,
    )
    write_status(run.dir, kept)
    found = open_run(run.dir.path)
    assert found is not None
    return found
