"""The language model: windows, causality, the loss's scale, its sample, and tokens in place of bytes."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.contract.errors import MachineNotReadyError, RequestError
from trainer.contract.task_options import LmOptions
from trainer.tasks import byte_bpe
from trainer.tasks.lm import LanguageModel, Windows, decode_printable
from trainer.tasks.sources import Piece, text_splits

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


def trained_bpe(tmp_path: Path, **options: Any) -> tuple[LanguageModel, Any]:
    pytest.importorskip("tokenizers")
    lm = task(tmp_path, vocab_size=300, **options)
    return lm, lm.datasets()


def tokens_of(split: Any) -> list[int]:
    return [int(token) for index in range(len(split)) for token in split[index][int(index > 0) :]]


def test_a_trained_tokenizer_is_shorter_than_bytes_and_gives_the_text_back(tmp_path: Path) -> None:
    lm, splits = trained_bpe(tmp_path)
    assert lm._tokenizer is not None
    tokens = tokens_of(splits["train"])
    text = lm._tokenizer.decode(tokens).encode()
    assert TEXT.startswith(text)
    assert len(text) > 2 * len(tokens)
    assert lm.model().embedding.weight.shape[0] == 300  # type: ignore[union-attr]
    held_out = TEXT[len(TEXT) - sum(map(len, TEXT.splitlines(True)[-9:])) :]
    assert lm._bytes_per_token == pytest.approx(
        len(held_out) / len(lm._tokenizer.encode(held_out.decode()).ids), rel=0.2
    )
    assert f"tokenizer trained on {tmp_path / 'text.txt'}: 300 tokens, " in lm.data_note()


def test_two_trainings_of_a_tokenizer_agree_in_two_processes(tmp_path: Path, own_cache: Path) -> None:
    trained_bpe(tmp_path)
    (entry,) = own_cache.iterdir()
    code = (
        "import sys; from pathlib import Path; from trainer.tasks import byte_bpe;"
        "from trainer.tasks.sources import Piece;"
        "path = Path(sys.argv[1]); piece = Piece(path=path, start=0, end=int(sys.argv[2]));"
        "print(byte_bpe.train([piece], 300).to_str())"
    )
    end = sum(piece.end for piece in text_splits(task(tmp_path).options)["train"])
    argv = [sys.executable, "-c", code, str(tmp_path / "text.txt"), str(end)]
    printed = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    assert json.loads(printed) == json.loads((entry / "tokenizer.json").read_text())


def test_long_text_in_odd_bytes_is_read_whole(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    text = "ä" * 70_001 + "\n" + "x y\n" * 40_000 + "ünd"
    (tmp_path / "long.txt").write_bytes(text.encode() + b"\xff")
    pieces = [Piece(path=tmp_path / "long.txt", start=0, end=(tmp_path / "long.txt").stat().st_size)]
    blocks = list(byte_bpe.kind_of(vocab_size=300).read(pieces))
    assert "".join(blocks) == text + "\ufffd"
    assert max(map(len, blocks)) <= 1 << 16
    assert sum(not block.endswith("\n") for block in blocks) == 2  # the line of 70,001 letters, and the end


def test_bits_per_byte_are_the_loss_of_the_validation_text_by_its_bytes(tmp_path: Path) -> None:
    for lm, splits in (trained_bpe(tmp_path), ((one := task(tmp_path)), one.datasets())):
        model = lm.model().double().eval()
        split = splits["valid"]
        batch = lm.collate([split[index] for index in range(len(split))])
        with torch.no_grad():
            total, count, sums = lm.loss(model, batch)
            logits = model(batch.long()[:, :-1])
        wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.long()[:, 1:].flatten(), reduction="sum")
        torch.testing.assert_close(total, wanted)
        predicted = tokens_of(split)[1:]
        text = predicted if lm._tokenizer is None else lm._tokenizer.decode(predicted).encode()
        bits = lm.metrics({"bits_per_byte": float(sums["bits_per_byte"])}, count)["bits_per_byte"]
        assert bits == pytest.approx(float(total) / math.log(2) / len(text), rel=0.05)
        assert lm.loss(model.train(), batch)[2] == {}


def test_a_tokenizer_of_a_file_stands_alone_in_the_state(tmp_path: Path) -> None:
    lm, splits = trained_bpe(tmp_path, sample_bytes=20)
    assert lm._tokenizer is not None
    file = tmp_path / "tokenizer.json"
    lm._tokenizer.enable_truncation(8)  # as the files of trained models have it
    lm._tokenizer.save(str(file))
    named = task(tmp_path, tokenizer=str(file), sample_bytes=20)
    assert tokens_of(named.datasets()["train"]) == tokens_of(splits["train"])
    file.unlink()
    alone = task(tmp_path, sample_bytes=20)
    alone.load_state_dict(named.state_dict())
    model = alone.model().eval()
    with torch.no_grad():
        (continued,) = alone.predict(model, [{"text": "10 little"}])
    assert continued["text"].startswith("10 little")
    assert 20 <= len(continued["text"].encode()) - len("10 little") < 60
    assert tokens_of(alone.datasets()["train"]) == tokens_of(splits["train"])
    assert alone.state_dict() == named.state_dict()
    assert task(tmp_path).state_dict() == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [("{}", "tokenizer.json is not a tokenizer of the package tokenizers"), (None, "tokenizer.json does not exist")],
)
def test_a_wrong_tokenizer_is_one_line(tmp_path: Path, own_cache: Path, content: str | None, message: str) -> None:
    pytest.importorskip("tokenizers")
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(RequestError, match=message):
        task(tmp_path, tokenizer=str(tmp_path / "tokenizer.json")).datasets()


def test_a_missing_package_is_found_before_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tokenizers" else find(name))
    with pytest.raises(MachineNotReadyError, match=r"package tokenizers: pip install 'gputrain\[tokenizers\]'"):
        task(tmp_path, vocab_size=300).options.check_data()
    task(tmp_path).options.check_data()
