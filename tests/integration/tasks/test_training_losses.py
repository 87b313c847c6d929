"""Label smoothing, weights of classes and z-loss: torch's own functions and formulas, on one rank and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from double_tasks import DoubleDocNN, DoubleLanguageModel
from loop_on_ranks import train_on
from rank_group import Gang
from torch import Tensor, nn

from trainer.contract.builtin_tasks import options_schema
from trainer.contract.errors import RequestError
from trainer.contract.schema import check
from trainer.contract.task_options import DocNNOptions, LmOptions, MnistOptions
from trainer.tasks.classification import balanced_weights
from trainer.tasks.docnn import DocNNTask
from trainer.tasks.mnist import MnistTask

SMOOTHING = 0.1
WEIGHTS = [0.5, 3.0]
GROUP = {"optimizer": "sgd", "lr": (0.5,), "shuffle": False, "max_epochs": 2, "save": False}


def sentences(folder: Path) -> str:
    """Write 18 sentences of unequal length, five of them with the label ``bad``: an epoch is 2.25 batches of eight."""
    rows = [(f"{'word ' * (1 + n % 4)}w{n % 5}", "bad" if n % 4 == 1 else "good") for n in range(18)]
    (folder / "train.tsv").write_text("".join(f"{text}\t{label}\n" for text, label in rows))
    return str(folder / "train.tsv")


def docnn_options(folder: Path, **options: Any) -> dict[str, Any]:
    return {"train_path": sentences(folder), "embedding_dim": 6, "kernel_num": 4, "dropout": 0.0, **options}


def by_hand(task: Any, loss: Any, *, batch: int, lr: float) -> dict[str, Tensor]:
    """Take plain gradient steps on the mean that ``loss(model, batch)`` returns for each whole batch."""
    data = task.datasets()["train"]
    torch.manual_seed(1)
    model: nn.Module = task.model()
    for _ in range(2):
        for begin in range(0, len(data), batch):
            model.zero_grad()
            samples = [data[index] for index in range(begin, min(begin + batch, len(data)))]
            loss(model, task.collate(samples)).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= lr * parameter.grad  # type: ignore[operator]
    return {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("given", ["0.5, 3", "balanced"])
def test_class_weights_divide_by_the_weights_of_the_batches_of_all_ranks(
    two_ranks: Gang, tmp_path: Path, given: str
) -> None:
    options = docnn_options(tmp_path, label_smoothing=SMOOTHING, class_weights=given)
    weights = torch.tensor(WEIGHTS if given != "balanced" else [18 / (2 * 5), 18 / (2 * 13)], dtype=torch.float64)

    def mean(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], weight=weights, label_smoothing=SMOOTHING)

    expected = by_hand(DoubleDocNN(DocNNOptions(**options)), mean, batch=8, lr=0.5)
    settings = {**GROUP, "task_options": options}
    alone = train_on(0, 1, "double_tasks:DoubleDocNN", None, {**settings, "batch_size": (8,)})
    both = two_ranks.run(train_on, "double_tasks:DoubleDocNN", None, {**settings, "batch_size": (4,)})
    uneven = two_ranks.run(train_on, "double_tasks:DoubleDocNN", None, {**settings, "batch_size": (1, 7)})
    for done in (alone, *both, *uneven):
        assert done["error"] == ""
        for name, value in expected.items():
            torch.testing.assert_close(done["model"][name], value, rtol=0, atol=1e-13)


def test_z_loss_and_smoothing_of_a_language_model_are_means_over_all_ranks(two_ranks: Gang, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(bytes(range(32, 127)) * 3)
    options: dict[str, Any] = {
        "data": str(tmp_path / "text.txt"), "context": 16, "dim": 8, "heads": 2, "layers": 1, "sample_bytes": 0,
        "label_smoothing": SMOOTHING, "z_loss": 0.01, "valid_fraction": 0.0,
    }  # fmt: skip

    def mean(model: nn.Module, batch: Any) -> Tensor:
        text = batch.long()
        logits = model(text[:, :-1]).flatten(0, 1)
        log_z = logits.exp().sum(1).log()
        likely = logits - log_z[:, None]
        wanted = likely.gather(1, text[:, 1:].flatten()[:, None])[:, 0]
        smooth = (1 - SMOOTHING) * wanted + SMOOTHING * likely.mean(1)
        return (0.01 * log_z**2 - smooth).mean()

    expected = by_hand(DoubleLanguageModel(LmOptions(**options)), mean, batch=4, lr=0.5)
    settings = {**GROUP, "task_options": options}
    alone = train_on(0, 1, "double_tasks:DoubleLanguageModel", None, {**settings, "batch_size": (4,)})
    both = two_ranks.run(train_on, "double_tasks:DoubleLanguageModel", None, {**settings, "batch_size": (2,)})
    for done in (alone, *both):
        assert done["error"] == ""
        for name, value in expected.items():
            torch.testing.assert_close(done["model"][name], value, rtol=0, atol=1e-13)


def test_a_validation_has_the_plain_cross_entropy(tmp_path: Path) -> None:
    task = DocNNTask(DocNNOptions(**docnn_options(tmp_path, label_smoothing=0.3, class_weights="1, 9")))
    data = task.datasets()["train"]
    batch = task.collate([data[index] for index in range(18)])
    model = task.model().eval()
    total, count, sums = task.loss(model, batch)
    torch.testing.assert_close(total, F.cross_entropy(model(batch[0]), batch[1], reduction="sum"))
    assert count == 18
    assert int(sums["accuracy"]) == int((model(batch[0]).argmax(1) == batch[1]).sum())


def test_masked_words_are_smoothed_in_training_alone(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    from trainer.contract.task_options import MaskedLmOptions
    from trainer.tasks.masked_lm import MaskedLanguageModel

    (tmp_path / "text.txt").write_text("the bottle hangs on the wall, and the wall stands.\n" * 80)
    options = MaskedLmOptions(
        data=str(tmp_path / "text.txt"), vocab_size=80, sequence_length=18, dropout=0.0, label_smoothing=SMOOTHING
    )
    task = MaskedLanguageModel(options)
    tokens, indices = task.datasets()["train"].__getitems__([0, 1, 2])  # type: ignore[attr-defined]
    model = task.model()
    for training, smoothing in ((True, SMOOTHING), (False, 0.0)):
        model.train(training)
        torch.manual_seed(5)
        total, count, _ = task.loss(model, (tokens, indices))
        torch.manual_seed(5)
        inputs, predicted = task.mask(tokens.long(), indices, training=training)
        wanted = F.cross_entropy(
            model(inputs, predicted).flatten(0, 1), tokens.long().gather(1, predicted).flatten(),
            label_smoothing=smoothing,
        )  # fmt: skip
        torch.testing.assert_close(total / count, wanted)


def test_balanced_weights_give_each_class_the_same_share_and_absent_ones_one() -> None:
    classes = torch.tensor([0] * 6 + [1] * 3 + [3] * 1)
    weights = balanced_weights(classes, 4)
    assert weights.tolist() == pytest.approx([10 / 18, 10 / 9, 1.0, 10 / 3])
    assert float(weights[classes].sum()) == pytest.approx(10)


def test_balanced_weights_are_those_of_the_training_and_are_told(tmp_path: Path) -> None:
    options = DocNNOptions(**docnn_options(tmp_path, class_weights="balanced"))
    task = DocNNTask(options)
    task.datasets()
    assert task.data_note().endswith("; class weights: bad 1.8, good 0.6923")
    state = task.state_dict()
    assert state["class_weights"] == pytest.approx([1.8, 18 / 26])
    resumed = DocNNTask(options)
    resumed.load_state_dict({**state, "class_weights": [2.0, 0.5]})
    resumed.datasets()
    assert resumed.state_dict()["class_weights"] == [2.0, 0.5]
    plain = DocNNTask(DocNNOptions(**docnn_options(tmp_path)))
    plain.datasets()
    assert "class_weights" not in plain.state_dict()
    assert (plain.count_per_sample, task.count_per_sample) == (1, None)
    assert MnistTask(MnistOptions(data="none")).state_dict() == {}


@pytest.mark.parametrize(
    ("task", "value", "message"),
    [
        (
            "docnn",
            "balancd",
            "class_weights is 'balancd', but must be balanced, or numbers above 0, such as 1, 2.5",
        ),
        ("docnn", [1, 0], "class_weights is '1, 0', but must be balanced"),
        ("docnn", "1, inf", "class_weights is '1, inf', but must be balanced"),
        ("mnist", [1, 2.5], "class_weights has 2 numbers, but there are 10 digits"),
        ("docnn", 3, "task.class_weights is 3, but must be text or a list of numbers"),
    ],
)
def test_wrong_class_weights_are_one_line(task: str, value: Any, message: str) -> None:
    schema = options_schema(task)
    assert schema is not None
    with pytest.raises(RequestError) as refused:
        check(
            schema, {"train_path" if task == "docnn" else "data": "x", "class_weights": value}, where="task.{}".format
        )
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def test_weights_for_another_number_of_labels_name_the_labels(tmp_path: Path) -> None:
    options = docnn_options(tmp_path, class_weights="1, 2, 3")
    with pytest.raises(RequestError, match=r"class_weights has 3 numbers, but .*train\.tsv has 2 labels: bad, good"):
        DocNNTask(DocNNOptions(**options)).datasets()
