"""The gradient noise scale that two ranks record, against the noise of the gradients of their samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from numeric_tasks import noisy_gradients
from rank_group import Gang

from trainer.contract.record import EventWriter, NoiseScale, decode_events


def train(rank: int, world_size: int, options: dict[str, Any], record: str | None) -> float:
    """Run on each rank; return a parameter in the end."""
    from numeric_tasks import KnownNoise
    from worker_contexts import worker_context

    from trainer.contract.options import Training
    from trainer.engine.loop import Loop

    writer = EventWriter(None if record is None else Path(record) / f"{rank}.ndjson", rank=rank)
    common: dict[str, Any] = {"task": "noise", "optimizer": "sgd", "lr": (0.01,)}
    loop = Loop(
        KnownNoise(KnownNoise.Options()),
        Training(**common | options),
        worker_context(rank, world_size, writer=writer),
    )
    loop.run()
    loop.data.train.close()
    writer.close()
    return float(loop.parameters[0].detach().sum())


def scales(folder: Path) -> list[NoiseScale]:
    return [event for event in decode_events((folder / "0.ndjson").read_bytes()) if type(event) is NoiseScale]


@pytest.mark.parametrize("more", [{}, {"update_freq": (3,)}, {"clip_norm": 0.1}, {"ddp_comm_hook": "fp16"}])
def test_two_ranks_with_unequal_batches_find_the_noise_of_their_samples(
    two_ranks: Gang, tmp_path: Path, more: dict[str, Any]
) -> None:
    steps = 400
    options = {"batch_size": (6, 2), "max_updates": steps, "sync_detail_every": 1, **more}
    two_ranks.run(train, options, str(tmp_path))
    found = scales(tmp_path)
    assert [event.step for event in found] == list(range(4, steps + 1)), "each but those of DDP's warm-up"
    batch = 8 * (more.get("update_freq") or (1,))[0]
    assert {event.batch for event in found} <= {batch, *range(1, batch)}, "an epoch's end has fewer"
    assert [event.samples for event in found[:4]] == [None] * 4
    gradients = noisy_gradients()
    true_sq, noise_sq = float(gradients.mean(0).square().sum()), float(gradients.var(0).sum())
    assert sum(event.noise_sq for event in found) / len(found) == pytest.approx(noise_sq, rel=0.15)
    assert sum(event.gradient_sq for event in found) / len(found) == pytest.approx(true_sq, rel=0.3)
    last = [event.samples for event in found if event.samples is not None][-100:]
    assert sorted(last)[50] == pytest.approx(noise_sq / true_sq, rel=0.5)


def test_the_training_is_the_same_where_a_rank_has_no_record_and_nothing_is_said(
    two_ranks: Gang, tmp_path: Path
) -> None:
    options = {"batch_size": (4,), "max_updates": 40, "sync_detail_every": 4}
    measured = two_ranks.run(train, options, str(tmp_path))
    assert [event.step for event in scales(tmp_path)] == list(range(5, 41, 4))
    assert two_ranks.run(train, options, None) == measured
    assert two_ranks.run(train, {**options, "sync_detail_every": 0}, str(tmp_path)) == measured
