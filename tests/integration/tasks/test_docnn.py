"""PyText's DocNN: its size, what padding does to it, and data that does not fit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from trainer.contract.errors import RequestError
from trainer.contract.task_options import DocNNOptions
from trainer.tasks.docnn import PAD, UNKNOWN, DocNN, DocNNTask, read_vocabulary
from trainer.tasks.tsv import LabelledSentence

SST2 = Path(os.environ.get("GPUTRAIN_DATA", Path(__file__).parents[4] / "shared" / "data")) / "sst2"


def write(path: Path, *rows: str) -> str:
    path.write_text("".join(f"{row}\n" for row in rows))
    return str(path)


def tiny(tmp_path: Path) -> DocNNTask:
    return DocNNTask(
        DocNNOptions(
            train_path=write(tmp_path / "train.tsv", "A good film\tpos", "a bad one\tneg", "good good\tpos"),
            eval_path=write(tmp_path / "dev.tsv", "an unheard-of film\tneg"),
        )
    )


@pytest.mark.skipif(not SST2.is_dir(), reason=f"SST-2 is not in {SST2}; GPUTRAIN_DATA names the folder above it")
def test_the_network_for_sst2_has_the_1_454_602_parameters_of_pytext() -> None:
    task = DocNNTask(DocNNOptions(train_path=str(SST2 / "train.tsv"), eval_path=str(SST2 / "dev.tsv")))
    splits = task.datasets()
    assert {split: len(data) for split, data in splits.items()} == {"train": 6920, "valid": 872}
    assert sum(p.numel() for p in task.model().parameters()) == 1_454_602


@pytest.mark.parametrize(("words", "parameters"), [(13_840, 1_454_602), (14_819, 1_552_502)])
def test_the_parameters_are_those_of_pytext_for_any_vocabulary(words: int, parameters: int) -> None:
    network = DocNN(DocNNOptions(train_path=""), words=words, classes=2)
    assert sum(p.numel() for p in network.parameters()) == parameters


def test_words_are_lower_cased_and_unheard_ones_share_an_index(tmp_path: Path) -> None:
    task = tiny(tmp_path)
    splits = task.datasets()
    vocabulary = read_vocabulary([LabelledSentence("A good film", "pos", 1), LabelledSentence("a bad one", "neg", 2)])
    assert vocabulary.words == {"a": 2, "good": 3, "film": 4, "bad": 5, "one": 6}
    assert vocabulary.labels == {"neg": 0, "pos": 1}
    assert splits["train"][1][0].tolist() == [2, 5, 6]
    assert splits["valid"][0][0].tolist() == [UNKNOWN, UNKNOWN, 4]
    assert task.lengths("train") == [3, 3, 2]


def test_a_sentence_has_the_same_logits_alone_and_padded_in_a_batch(tmp_path: Path) -> None:
    task = tiny(tmp_path)
    task.datasets()
    model = task.model().eval()
    with torch.no_grad():
        model.embedding.weight[2:] *= 50  # far from the biases, so that padding would show
    alone = model(torch.tensor([[3, 2]]))
    batch, _ = task.collate([(torch.tensor([3, 2]), 0), (torch.tensor([2, 3, 4, 5, 6, 2, 3]), 1)])
    assert batch[0].tolist() == [3, 2] + [PAD] * 5
    assert torch.allclose(model(batch)[0], alone[0], atol=1e-6)


def test_padding_is_never_learned_and_one_word_is_long_enough(tmp_path: Path) -> None:
    task = tiny(tmp_path)
    splits = task.datasets()
    model = task.model()
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=1e-5)
    for _ in range(5):
        batch = task.collate([splits["train"][index] for index in range(3)])
        total, count, sums = task.loss(model, batch)
        assert count == 3
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
    assert model.embedding.weight[PAD].abs().sum() == 0
    assert 0 <= int(sums["accuracy"]) <= 3
    assert model(torch.tensor([[2]])).shape == (1, 2)


def test_a_label_that_was_never_seen_names_file_and_line(tmp_path: Path) -> None:
    train = write(tmp_path / "train.tsv", "good film\tpos", "bad film\tneg")
    dev = write(tmp_path / "dev.tsv", "good one\tpos", "so so\tnegg")
    with pytest.raises(RequestError, match=r"dev\.tsv, line 2: label 'negg' does not occur .* did you mean 'neg'"):
        DocNNTask(DocNNOptions(train_path=train, eval_path=dev)).datasets()


def test_a_header_with_unknown_names_is_refused_with_its_line(tmp_path: Path) -> None:
    train = write(tmp_path / "train.tsv", "good film\tpos", "bad film\tneg")
    dev = write(tmp_path / "dev.tsv", "phrases\tstars", "so so\tneg")
    with pytest.raises(RequestError, match=r"dev\.tsv, line 1: .* a header\? Then name its columns by text_column and"):
        DocNNTask(DocNNOptions(train_path=train, eval_path=dev)).datasets()


def test_one_label_is_nothing_to_learn(tmp_path: Path) -> None:
    train = write(tmp_path / "train.tsv", "good film\tpos", "fine film\tpos")
    with pytest.raises(RequestError, match="every row has the label 'pos'"):
        DocNNTask(DocNNOptions(train_path=train)).datasets()


def test_an_empty_split_is_refused(tmp_path: Path) -> None:
    train = write(tmp_path / "train.tsv", "good film\tpos", "bad film\tneg")
    with pytest.raises(RequestError, match=r"dev\.tsv is empty"):
        DocNNTask(DocNNOptions(train_path=train, eval_path=write(tmp_path / "dev.tsv"))).datasets()
