"""The byte-level language model: windows, causality, the loss's scale, and its sample."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.contract.errors import RequestError
from trainer.contract.task_options import LmOptions
from trainer.tasks.lm import LanguageModel, Windows, decode_printable

TEXT = b"".join(b"%d little bottles hanging on the wall\n" % n for n in range(200))


def task(tmp_path: Path, **options: Any) -> LanguageModel:
    (tmp_path / "text.txt").write_bytes(TEXT)
    tiny: dict[str, Any] = {"context": 16, "dim": 16, "layers": 2, "heads": 2}
    return LanguageModel(LmOptions(**({"data": str(tmp_path / "text.txt")} | tiny | options)))


def test_windows_follow_each_other_and_every_byte_but_the_first_is_predicted_once() -> None:
    windows = Windows(torch.arange(100, dtype=torch.uint8), 9)
    assert len(windows) == 11
    targets = torch.cat([windows[index][1:] for index in range(len(windows))])
    assert targets.tolist() == list(range(1, 100))


def test_a_batch_is_fetched_in_one_piece_and_equals_its_samples(tmp_path: Path) -> None:
    lm = task(tmp_path)
    train = lm.datasets()["train"]
    indices = [7, 0, 3]
    whole = lm.collate(train.__getitems__(indices))  # type: ignore[attr-defined]
    assert whole.dtype == torch.uint8
    assert torch.equal(whole, lm.collate([train[index] for index in indices]))


def test_training_and_validation_text_do_not_overlap(tmp_path: Path) -> None:
    splits = task(tmp_path, valid_fraction=0.25).datasets()
    learned, held_out = (bytes(torch.cat([split[i] for i in range(len(split))]).tolist()) for split in splits.values())
    assert b"10 little" in learned
    assert b"190 little" not in learned
    assert b"190 little" in held_out


def test_validation_text_may_come_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_bytes(b"z" * 50)
    splits = task(tmp_path, valid_data=str(tmp_path / "other.txt")).datasets()
    assert len(splits["train"]) == (len(TEXT) - 1) // 16
    assert set(splits["valid"][0].tolist()) == {ord("z")}


def test_the_first_loss_is_near_that_of_a_blind_guess_and_a_few_steps_lower_it(tmp_path: Path) -> None:
    torch.manual_seed(1)
    lm = task(tmp_path)
    batch = lm.collate(lm.datasets()["train"].__getitems__(list(range(32))))  # type: ignore[attr-defined]
    model = lm.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        total, count, _ = lm.loss(model, batch)
        assert count == 32 * 16 == 32 * (lm.count_per_sample or 0)
        losses.append(total.item() / count)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
    assert losses[0] == pytest.approx(math.log(256), abs=0.2)
    assert losses[-1] < 3.0


def test_a_prediction_does_not_depend_on_later_tokens(tmp_path: Path) -> None:
    model = task(tmp_path).model().eval()
    text = torch.randint(0, 256, (1, 16))
    changed = text.clone()
    changed[0, 10:] = 255 - changed[0, 10:]
    before, after = model(text), model(changed)
    assert torch.equal(before[0, :10], after[0, :10])
    assert not torch.equal(before[0, 10:], after[0, 10:])


def test_the_order_of_the_bytes_matters(tmp_path: Path) -> None:
    model = task(tmp_path, layers=1).model().eval()
    with torch.no_grad():
        forth, back = (model(torch.tensor([text]))[0, -1] for text in ([1, 2, 3, 4, 9], [4, 3, 2, 1, 9]))
    assert not torch.allclose(forth, back, atol=1e-7)


def test_the_output_shares_the_embedding_and_autocast_runs(tmp_path: Path) -> None:
    lm = task(tmp_path)
    model = lm.model()
    assert sum(p.numel() for p in model.parameters()) == 256 * 16 + 2 * (12 * 16 * 16 + 5 * 16 + 4 * 16) + 2 * 16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total, _, _ = lm.loss(model, torch.zeros(2, 17, dtype=torch.uint8))
    assert total.isfinite()


def test_the_sample_repeats_itself_and_leaves_the_random_state_and_the_mode_alone(tmp_path: Path) -> None:
    lm = task(tmp_path, prompt="10 lit", sample_bytes=40)
    model = lm.model().train()
    state = torch.get_rng_state()
    text = lm.sample(model)
    assert text is not None
    assert text.startswith("10 lit")
    assert text == lm.sample(model)
    assert torch.equal(state, torch.get_rng_state())
    assert model.training
    assert task(tmp_path, sample_bytes=0).sample(model) is None


def test_text_of_a_model_cannot_control_the_terminal() -> None:
    assert decode_printable(b"a\x1b[31mb\n\tc\x00\xff") == "a·[31mb\n\tc·\ufffd"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 10_000}, "but a window needs 10001"),
        ({"context": 500, "valid_fraction": 0.01}, "raise valid_fraction (0: no validation) or lower context"),
        ({"data": "nowhere.txt"}, "nowhere.txt does not exist"),
    ],
)
def test_text_that_does_not_fill_a_window_is_one_line(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as refused:
        task(tmp_path, **options).datasets()
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
