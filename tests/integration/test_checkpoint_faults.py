from __future__ import annotations

import random
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_log import CheckpointLog, checkpoint_names, newest, step_of
from gloo_group import Member, Processes, Raised

from trainer import distributed
from trainer.checkpoint import (
    CheckpointWriter,
    capture_rng,
    load,
    restore_rng,
)


@pytest.fixture
def log() -> CheckpointLog:
    return CheckpointLog()


def save_with_little_disk(folder: str) -> dict[str, Any]:
    """Save a small state, one that the limit on a file's size does not let through, and a small one again."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    log = CheckpointLog()
    writer = log.writer(Path(folder))
    for step, size in ((1, 10), (2, 1 << 20), (3, 10)):
        writer.save({"step": step, "weight": torch.zeros(size)}, step=step, best=True)
        writer.wait()
    writer.close()
    return {"saved": [saved.step for saved in log.saved], "failed": log.failed, "names": checkpoint_names(Path(folder))}


def test_a_full_disk_is_reported_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    member = Member()
    member.begin(save_with_little_disk, str(tmp_path))
    seen = member.outcome()
    member.kill()
    assert not isinstance(seen, Raised), seen
    assert seen["saved"] == [1, 3]
    assert seen["failed"] == [(2, "checkpoint of step 2 was not written: File too large")]
    assert seen["names"] == ["best.pt", "step_00000001.pt", "step_00000003.pt"]


def save_until_there_is_room(folder: str) -> dict[str, Any]:
    """Have saves fail at a limit on a file's size, and lift the limit before the writer is closed."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    log = CheckpointLog()
    writer = log.writer(Path(folder))
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, most))
    for step in (1, 2, 3):
        writer.save({"step": step, "weight": torch.zeros(1 << 20)}, step=step, best=step == 2)
        writer.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    lost = writer.close()
    seen = newest(folder)
    return {"lost": lost, "saved": [(one.step, one.best) for one in log.saved], "newest": step_of(seen)}


def test_the_last_save_and_the_best_are_tried_again_at_the_end(tmp_path: Path) -> None:
    member = Member()
    member.begin(save_until_there_is_room, str(tmp_path))
    seen = member.outcome()
    member.kill()
    assert not isinstance(seen, Raised), seen
    assert seen == {"lost": [], "saved": [(2, True), (3, False)], "newest": 3}
    assert load(tmp_path / "best.pt")["step"] == 2


def save_for_ever(folder: str) -> None:
    writer = CheckpointWriter(folder, keep_last=3)
    step = 0
    while True:
        step += 1
        writer.save({"step": step, "weight": torch.full((500_000,), float(step))}, step=step)
        writer.wait()


def test_a_process_killed_while_writing_leaves_a_good_checkpoint(tmp_path: Path, log: CheckpointLog) -> None:
    for delay_ms in (0, 3, 7, 12):
        member = Member()
        member.begin(save_for_ever, str(tmp_path))
        while not list(tmp_path.glob("step_*.pt")) or not list(tmp_path.glob(".step_*.tmp")):
            time.sleep(0.0005)
        time.sleep(delay_ms / 1000)  # into the middle of a write
        member.kill()
        found = newest(tmp_path, on_skipped=lambda line: pytest.fail(line))
        assert found is not None
        assert found[1]["weight"].eq(found[1]["step"]).all()
    (tmp_path / ".step_00000099.pt.tmp").touch()
    writer = log.writer(tmp_path)
    assert [name for name in checkpoint_names(tmp_path) if name.endswith(".tmp")] == []
    writer.close()


# -------------------------------------------------------------------------------------------------- random numbers


def draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), *torch.rand(3).tolist(), *torch.randn(3).tolist()]


def draw_after_exchange(*, url: str, rank: int, world_size: int) -> tuple[list[float], list[float]]:
    distributed.distributed_init(
        init_method=url,
        world_size=world_size,
        rank=rank,
        backend="gloo",
        device=torch.device("cpu"),
        timeout_s=30,
        join_timeout_s=20,
    )
    random.seed(rank)
    torch.manual_seed(rank)
    states = distributed.all_gather_list(capture_rng())
    expected = draw()
    restore_rng(states[rank])
    again = draw()
    distributed.shutdown()
    return expected, again


def test_every_rank_finds_its_own_random_state_in_the_gathered_checkpoint(processes: Processes, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/rendezvous"
    joins = [{"url": url, "rank": rank, "world_size": 2} for rank in range(2)]
    drawn = processes.results(draw_after_exchange, joins)
    assert all(expected == again for expected, again in drawn)
    assert drawn[0] != drawn[1]
