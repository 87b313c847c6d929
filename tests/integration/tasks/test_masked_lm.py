"""BERT's masked language model: its size, its masks, its vocabulary and its cache."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.contract.errors import RequestError
from trainer.contract.task_options import MaskedLmOptions
from trainer.tasks.masked_lm import PRESETS, Bert, MaskedLanguageModel, fixed_noise

pytest.importorskip("tokenizers", reason="masked_lm needs the package tokenizers")

TEXT = "".join(f"the {n}th bottle hangs on the wall, and the wall stands.\n" for n in range(400))


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


def prepared(text: str, **options: Any) -> tuple[MaskedLanguageModel, Any]:
    task = MaskedLanguageModel(MaskedLmOptions(**({"data": text, "vocab_size": 200, "sequence_length": 34} | options)))
    return task, task.datasets()


def test_the_base_preset_with_berts_vocabulary_has_berts_parameters() -> None:
    with torch.device("meta"):
        model = Bert(PRESETS["base"], vocabulary=30_522, dropout=0.1)
    assert sum(p.numel() for p in model.parameters()) == 109_514_298


def test_samples_are_full_and_every_token_is_in_one_of_them(text: str) -> None:
    task, splits = prepared(text)
    tokens, indices = splits["train"].__getitems__([2, 0])
    assert tokens.shape == (2, 34)
    assert indices.tolist() == [2, 0]
    assert set(tokens[:, 0].tolist()) == {task.vocabulary.cls}
    assert set(tokens[:, -1].tolist()) == {task.vocabulary.sep}
    single, index = splits["train"][2]
    assert torch.equal(single, tokens[0])
    assert int(index) == 2


def test_masks_are_fifteen_percent_of_them_eighty_ten_ten(text: str) -> None:
    task, splits = prepared(text, sequence_length=102)
    assert task.predictions == task.count_per_sample == 15
    tokens, indices = splits["train"].__getitems__(list(range(40)))
    tokens = tokens.long()
    torch.manual_seed(1)
    kinds = torch.zeros(3)
    for _ in range(20):
        inputs, predicted = task.mask(tokens, indices, training=True)
        assert all(len(set(row.tolist())) == 15 for row in predicted)
        before, after = tokens.gather(1, predicted), inputs.gather(1, predicted)
        assert not set(before.flatten().tolist()) & {task.vocabulary.cls, task.vocabulary.sep}
        masked, kept = after == task.vocabulary.mask, after == before
        kinds += torch.tensor([float(masked.sum()), float((~masked & ~kept).sum()), float(kept.sum())])
        rest = torch.ones_like(tokens, dtype=torch.bool).scatter(1, predicted, False)
        assert torch.equal(inputs[rest], tokens[rest])
    shares = kinds / kinds.sum()
    # A random word is sometimes the word itself or [MASK]: 200 words make that rare.
    assert shares.tolist() == pytest.approx([0.8, 0.1, 0.1], abs=0.01)


def test_training_masks_follow_the_random_state_so_that_a_resumed_run_repeats_them(text: str) -> None:
    task, splits = prepared(text)
    tokens, indices = splits["train"].__getitems__([0, 1])
    tokens = tokens.long()
    state = torch.get_rng_state()
    first = task.mask(tokens, indices, training=True)
    second = task.mask(tokens, indices, training=True)
    torch.set_rng_state(state)
    again = task.mask(tokens, indices, training=True)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert not torch.equal(first[1], second[1])  # each epoch has its own


def test_evaluation_masks_depend_on_the_sample_alone(text: str) -> None:
    task, splits = prepared(text)
    state = torch.get_rng_state()
    tokens, indices = splits["train"].__getitems__([0, 1, 2, 3])
    together = task.mask(tokens.long(), indices, training=False)
    alone_tokens, alone_index = splits["train"].__getitems__([2])
    alone = task.mask(alone_tokens.long(), alone_index, training=False)
    assert torch.equal(together[0][2], alone[0][0])
    assert torch.equal(together[1][2], alone[1][0])
    assert len({tuple(row.tolist()) for row in together[1]}) == 4
    assert torch.equal(state, torch.get_rng_state())


def test_the_fixed_noise_of_evaluation_is_uniform() -> None:
    noise = fixed_noise(torch.arange(500), 128)
    assert noise.min() >= 0
    assert noise.max() < 1
    assert noise.mean().item() == pytest.approx(0.5, abs=0.005)
    assert noise.var().item() == pytest.approx(1 / 12, abs=0.005)
    assert torch.corrcoef(noise.flatten(1))[0, 1].item() == pytest.approx(0, abs=0.02)


def test_a_few_steps_lower_the_loss_and_both_sides_are_seen(text: str) -> None:
    torch.manual_seed(1)
    task, splits = prepared(text, dropout=0.0)
    model = task.model()
    batch = task.collate(splits["train"].__getitems__(list(range(16))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(20):
        total, count, _ = task.loss(model, batch)
        assert count == 16 * task.predictions
        losses.append(total.item() / count)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert losses[-1] < losses[0] - 1
    model.eval()
    tokens = batch[0].long()
    changed = tokens.clone()
    changed[:, -2] = (changed[:, -2] + 7) % 100
    early = torch.full((16, 1), 3)
    assert not torch.equal(model(tokens, early), model(changed, early))


def test_two_trainings_of_the_vocabulary_agree(text: str, own_cache: Path) -> None:
    prepared(text)
    (first,) = own_cache.iterdir()
    kept = {file.name: file.read_bytes() for file in first.iterdir()}
    for file in first.iterdir():
        file.unlink()
    first.rmdir()
    prepared(text)
    (second,) = own_cache.iterdir()
    assert {file.name: file.read_bytes() for file in second.iterdir()} == kept


def test_a_vocabulary_of_berts_kind_is_loaded_from_either_file(text: str, tmp_path: Path, own_cache: Path) -> None:
    task, splits = prepared(text)
    (entry,) = own_cache.iterdir()
    saved = tmp_path / "tokenizer.json"
    saved.write_bytes((entry / "tokenizer.json").read_bytes())
    from tokenizers import Tokenizer

    words = Tokenizer.from_file(str(saved)).get_vocab()
    listed = tmp_path / "vocab.txt"
    listed.write_text("".join(f"{word}\n" for word in sorted(words, key=lambda word: words[word])))
    for path in (saved, listed):
        other, other_splits = prepared(text, vocab=str(path))
        assert other.vocabulary == task.vocabulary
        assert torch.equal(other_splits["train"][0][0], splits["train"][0][0])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("vocab.txt", "[PAD]\n[UNK]\n[CLS]\nword\n", r"it lacks \[SEP\], \[MASK\]"),
        ("tokenizer.json", "{}", "is not a tokenizer"),
        ("absent.txt", None, "absent.txt does not exist"),
    ],
)
def test_a_wrong_vocabulary_is_one_line(
    text: str, tmp_path: Path, own_cache: Path, name: str, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(RequestError, match=message) as refused:
        prepared(text, vocab=str(tmp_path / name))
    assert "\n" not in str(refused.value)


def test_text_shorter_than_a_sample_is_one_line(text: str) -> None:
    with pytest.raises(
        RequestError, match="tokens in the valid split, but one sample needs 510; lower sequence_length"
    ):
        prepared(text, sequence_length=512, valid_fraction=0.01)


def test_a_missing_package_is_one_line_with_the_install_command(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tokenizers" else find(name))
    with pytest.raises(RequestError, match="pip install"):
        prepared(text)


@pytest.mark.parametrize(("word", "filled_in"), [("wall", "the wall stands, wall"), ("##s", "thes stands,s")])
def test_masked_words_are_filled_in_with_their_probabilities(text: str, word: str, filled_in: str) -> None:
    torch.manual_seed(1)
    task, _ = prepared(text)
    model = task.model().eval()
    with torch.no_grad():
        model.head_bias[task._tokenizer.token_to_id(word)] = 5.0  # type: ignore[operator, index]
    alone = MaskedLanguageModel(task.options)  # as `gputrain predict` has it: without datasets
    alone.load_state_dict(task.state_dict())
    parts = ["the ", " stands, ", ""]
    ids, places = [alone.vocabulary.cls], []
    for part in parts:
        ids += task._tokenizer.encode(part, add_special_tokens=False).ids
        places.append(len(ids))
        ids.append(alone.vocabulary.mask)
    ids[-1] = alone.vocabulary.sep
    with torch.no_grad():
        (filled,) = alone.predict(model, [{"text": "[MASK]".join(parts)}])
        shares = model(torch.tensor([ids]), torch.tensor([places[:-1]]))[0].softmax(1)
    assert filled["text"] == filled_in
    assert [each["token"] for each in filled["masks"]] == [word, word]
    for each, row in zip(filled["masks"], shares, strict=True):
        assert list(each["probabilities"].values()) == pytest.approx(row.topk(5).values.tolist())
        assert next(iter(each["probabilities"])) == word


@pytest.mark.parametrize(
    ("sentence", "message"),
    [
        ("no mask", r"a row: the text has no \[MASK\], whose tokens are predicted"),
        ("[MASK]" + " wall" * 40, r"a row: the text has 43 tokens, but the model was trained on 34"),
    ],
)
def test_a_text_that_cannot_be_filled_in_is_one_line(text: str, sentence: str, message: str) -> None:
    task, _ = prepared(text)
    with pytest.raises(RequestError, match=message):
        task.predict(task.model().eval(), [{"text": sentence}])
