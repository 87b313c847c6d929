"""Create run directories with a given status, and append to the logs and events of their ranks."""

from __future__ import annotations

from pathlib import Path

import msgspec

from gputrain_tui.history.run_folders import Run, create, find
from gputrain_tui.history.status_file import write_status
from trainer.contract.record import RankState, RunDir, Step, encode_event

NOON = 1_795_262_400.0
"""2026-11-21 12:00:00 UTC."""


def make_run(root: Path, recipe: str = "demo", *, started: float = NOON, world_size: int = 2, **changes: object) -> Run:
    run = create(
        recipe,
        world_size=world_size,
        recipe_toml="name = 'demo'\n",
        plan=lambda _: b"{}",
        root=root,
        now=lambda: started,
    )
    if changes:
        write_status(run.dir, msgspec.structs.replace(run.status, **changes))
    return find(run.id, root)


def make_ended_run(home: Path, recipe: str = "demo", **changes: object) -> Run:
    return make_run(home / "runs", recipe, **{"status": "finished", **changes})  # type: ignore[arg-type]


def append_to_log(run: Run, rank: int, text: bytes) -> None:
    """Append to the log of a rank."""
    with run.dir.rank_log(rank).open("ab") as file:
        file.write(text)


def step(rank: int, number: int, moment: float = NOON) -> Step:
    return Step(time=moment, rank=rank, step=number, epoch=1, steps=1, samples=8, loss=1.5)


def append_events(run: RunDir, rank: int, *events: Step | RankState, torn: bytes = b"") -> None:
    """Append to the events of a rank."""
    with run.rank_events(rank).open("ab") as file:
        file.write(b"".join(encode_event(event) for event in events) + torn)
