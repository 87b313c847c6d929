from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_group import Gang
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer.contract.record import EventWriter, Step, decode_events
from trainer.telemetry.step_meter import StepMeter

ROWS, WIDTH = 2000, 8


@pytest.fixture(scope="module")
def gang() -> Iterator[Gang]:
    gang = Gang(3)
    yield gang
    gang.close()


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.tags = nn.Embedding(ROWS, WIDTH), nn.Embedding(ROWS // 2, WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(self.words(x) + self.tags(x // 2))
        return y


def train(
    rank: int, world_size: int, folder: str, sparse: bool, record: bool, bucket_cap_mb: float, drawn: int
) -> list[Tensor]:
    """Train on words that differ between the ranks; return the parameters."""
    torch.manual_seed(1)
    bag = Bag()
    model = DistributedDataParallel(bag, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=True)
    writer = EventWriter(Path(folder) / f"{rank}.ndjson" if record else None)
    embeddings = [bag.words.weight, bag.tags.weight] if sparse else []
    meter = StepMeter(model, device=torch.device("cpu"), writer=writer, rank=rank, sparse=embeddings)
    optimizer = torch.optim.Adam(model.parameters())
    torch.manual_seed(rank)
    meter.start()
    for step in range(1, 6):
        # Rank 1 has a gradient of zeros once, as a rank without a batch has.
        factor = 0.0 if (rank, step) == (1, 3) else 1.0
        loss = factor * model(torch.randint(0, ROWS, (drawn,))).square().mean()
        meter.lap("forward")
        loss.backward()
        meter.lap("backward")
        for each in bag.parameters():
            assert each.grad is not None
            rows = meter.nonzero_rows.get(each.grad.data_ptr())
            # The norm of a gradient is that of these rows: exactly those with values on any rank.
            found = each.grad.flatten(1).any(1).nonzero().view(-1) if each.ndim > 1 else None
            assert rows is None or torch.equal(rows, found)
            assert (rows is not None) == (drawn < ROWS and any(each is embedding for embedding in embeddings))
        optimizer.step()
        optimizer.zero_grad()
        meter.lap("optimizer")
        meter.end(step=step, epoch=1, loss=loss, samples=drawn, lr=1e-3, grad_norm=torch.zeros(()))
    meter.close()
    writer.close()
    return [parameter.detach().clone() for parameter in bag.parameters()]


@pytest.mark.parametrize(
    ("record", "bucket_cap_mb", "drawn", "is_packed"),
    [(True, 25.0, 50, True), (False, 25.0, 50, True), (True, 0.001, 50, True), (True, 25.0, 4000, False)],
    ids=["one bucket", "no record", "a bucket each", "most rows"],
)
def test_rows_that_are_zero_everywhere_do_not_travel_and_the_result_is_that_of_all(
    gang: Gang, tmp_path: Path, record: bool, bucket_cap_mb: float, drawn: int, is_packed: bool
) -> None:
    dense = gang.run(train, str(tmp_path), False, False, bucket_cap_mb, drawn)
    sparse = gang.run(train, str(tmp_path), True, record, bucket_cap_mb, drawn)
    for ours, expected in zip(sparse, dense, strict=True):
        # Three ranks: gloo adds in an order that depends on a number's place in the buffer.
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-7)
    assert all(torch.equal(one, other) for rank in sparse[1:] for one, other in zip(rank, sparse[0], strict=True))
    if record:
        sent = {step.sync_bytes for step in steps(tmp_path)} - {None}  # DDP's first step is not measured
        dense_bytes = sum(parameter.nbytes for parameter in dense[0])
        assert sent
        assert all(0 < size < dense_bytes / 3 for size in sent) == is_packed


def test_two_ranks_get_bit_for_bit_the_result_of_all_rows(tmp_path: Path) -> None:
    pair = Gang(2)
    try:
        results = [pair.run(train, str(tmp_path), sparse, False, 25.0, 50) for sparse in (False, True)]
    finally:
        pair.close()
    assert all(torch.equal(*pair) for ranks in zip(*results, strict=True) for pair in zip(*ranks, strict=True))


def steps(folder: Path) -> list[Any]:
    return [event for event in decode_events((folder / "0.ndjson").read_bytes()) if isinstance(event, Step)]
