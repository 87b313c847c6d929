"""Options that fairseq and HetSeq have: batches by tokens, averages, warm starts, resets, on real ranks."""

from __future__ import annotations

import importlib.util
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_on_ranks import state_of, train_on
from rank_group import Gang
from torch import Tensor
from trained import train, train_spawned

from trainer.checkpoint import fit, load_weights
from trainer.contract.errors import CheckpointError

TINY = "tiny_task:TinyTask"
SIZED = "sized_task:SizedTask"
BASE: dict[str, Any] = {"batch_size": (4,), "lr": (0.05,), "task_options": {"dropout": 0.3}}


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Gang]:
    gang = Gang(2)
    yield gang
    gang.close()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def trained(gang: Gang, folder: Path | None, task: str = TINY, **options: Any) -> dict[str, Any]:
    """Rank 0's outcome, of which the others' must not differ."""
    ranks = gang.run(train_on, task, None if folder is None else str(folder), {**BASE, **options})
    assert {rank["error"] for rank in ranks} == {ranks[0]["error"]}
    if not ranks[0]["error"]:
        assert all(same(rank["model"], ranks[0]["model"]) and rank["best"] == ranks[0]["best"] for rank in ranks)
    return {**ranks[0], "all_batches": [rank.get("batches") for rank in ranks]}


# ------------------------------------------------------------------------------------------------- resuming exactly

EXACT: dict[str, tuple[str, dict[str, Any]]] = {
    "by tokens": (
        SIZED,
        {"batch_size": None, "max_tokens": 24, "required_batch_size_multiple": 2, "update_freq": (2,)},
    ),
    "fixed batches": (TINY, {"fix_batches_to_gpus": True}),
    "a curriculum": (SIZED, {"curriculum": 1}),
    "an average": (TINY, {"ema_decay": 0.8, "valid_every_updates": 3}),
    "a learning rate per epoch": (TINY, {"lr": (0.1, 0.01)}),
    "checkpointed activations": ("sized_task:DeepTask", {"activation_checkpointing": True}),
}


@pytest.mark.parametrize("what", EXACT)
def test_a_resumed_training_is_equal_to_one_without_a_stop_bit_for_bit(
    two_ranks: Gang, tmp_path: Path, what: str
) -> None:
    task, options = EXACT[what]
    straight = trained(two_ranks, tmp_path / "straight", task, **options)
    for stop in (2, straight["updates"] // 2, straight["updates"] // 2 + 1):
        folder = tmp_path / str(stop)
        first = trained(two_ranks, folder, task, **options, max_updates=stop)
        second = trained(two_ranks, folder, task, **options, resume=str(folder))
        assert (first["error"], second["error"]) == ("", "")
        assert same(second["model"], straight["model"])
        assert (second["updates"], second["lr"]) == (straight["updates"], straight["lr"])
        assert same(state_of(folder)["model"], state_of(tmp_path / "straight")["model"])


# --------------------------------------------------------------------------------------------------- the options


def test_batches_by_tokens_give_the_gradient_of_the_same_samples_on_one_rank(two_ranks: Gang, tmp_path: Path) -> None:
    options = {"batch_size": None, "max_tokens": 24, "optimizer": "sgd", "max_epochs": 1}
    options |= {"task_options": {"double": True, "masked": True}}
    two = trained(two_ranks, None, SIZED, **options)
    # What two ranks read in one micro-step, one rank reads in two.
    one = train_on(0, 1, SIZED, None, {**BASE, **options, "update_freq": (2,)})
    assert (two["error"], one["error"], two["updates"]) == ("", "", one["updates"])
    assert len(set(map(len, two["all_batches"]))) == 1
    for name, weight in one["model"].items():
        assert torch.allclose(two["model"][name], weight, rtol=0, atol=1e-12)


def test_the_average_is_validated_and_saved_and_the_plain_weights_train_on(two_ranks: Gang, tmp_path: Path) -> None:
    options = {"max_epochs": 1, "valid_every_updates": 1, "optimizer": "sgd"}
    plain = trained(two_ranks, None, **options, trace=True)
    averaged = trained(two_ranks, tmp_path / "averaged", **options, ema_decay=0.75)
    assert same(averaged["model"], plain["model"]), "training goes on with the plain weights"
    first, *others = [*plain["weights"], plain["model"]]
    expected = first
    for weights in others:
        expected = {name: torch.lerp(expected[name], weights[name], 0.25) for name in weights}
    saved = state_of(tmp_path / "averaged")
    assert saved["updates"] == len(others)
    assert same(saved["plain"], plain["model"])
    assert all(torch.allclose(saved["model"][name], expected[name], atol=1e-6) for name in expected)
    # A training that has these weights from the start validates alike.
    best = str(tmp_path / "averaged" / "best.pt")
    began = trained(two_ranks, None, finetune_from=best, max_updates=1, lr=(1e-30,), optimizer="sgd")
    assert began["best"][0] == pytest.approx(averaged["best"][0], rel=1e-6)
    assert averaged["best"][0] != plain["best"][0]


@pytest.mark.parametrize(
    ("there", "here", "warning"),
    [
        (0.0, 0.5, "the average of the weights starts from these weights"),
        (0.5, 0.0, "the average of the weights ends; training continues from the plain weights"),
    ],
)
def test_an_average_that_begins_or_ends_on_resuming_is_reported(
    two_ranks: Gang, tmp_path: Path, there: float, here: float, warning: str
) -> None:
    straight = trained(two_ranks, None, max_updates=8)
    trained(two_ranks, tmp_path, max_updates=4, ema_decay=there)
    resumed = trained(two_ranks, tmp_path, max_updates=8, ema_decay=here, resume=str(tmp_path))
    assert warning in resumed["narration"]
    assert same(resumed["model"], straight["model"])


def test_activations_that_are_computed_again_give_the_same_gradients_bit_for_bit() -> None:
    from trainer.contract.task_options import LmOptions
    from trainer.engine.ddp_model import checkpoint_activations
    from trainer.tasks.lm import LanguageModel

    found = []
    task = LanguageModel(LmOptions(data="stdlib", context=16, dim=32, layers=3, heads=2, dropout=0.2))
    batch = torch.randint(256, (4, 17), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    for again in (False, True):
        torch.manual_seed(1)
        model = task.model()
        if again:
            checkpoint_activations(task, model)
        held: list[int] = []

        def keep(tensor: Tensor, held: list[int] = held) -> Tensor:
            held.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept):
            loss = task.loss(model, batch)[0]
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        found.append((loss.detach(), gradients, sum(held)))
    (plain_loss, plain, plain_held), (loss, gradients, held) = found
    assert torch.equal(loss, plain_loss)
    assert same(gradients, plain)
    assert held < plain_held / 2, "numbers that are kept for the backward pass"


@pytest.mark.parametrize(
    ("task", "options", "line"),
    [
        (TINY, {"activation_checkpointing": True}, "--activation-checkpointing: RecordingTask names no modules whose"),
        ("sized_task:DeepNormTask", {"activation_checkpointing": True}, "--activation-checkpointing: a module whose"),
        (TINY, {"max_tokens": 8}, "--max-tokens needs the tokens of each sample of the train data: give RecordingTask"),
        (SIZED, {"batch_size": None, "max_tokens": 4}, "has 5 tokens, but --max-tokens is 4"),
        (TINY, {"reset_optimizer": True}, "--reset-optimizer needs --resume, the checkpoint"),
        (TINY, {"finetune_partial": True}, "--finetune-partial needs --finetune-from, the file"),
    ],
)  # fmt: skip
def test_a_request_that_cannot_be_met_is_one_line(
    two_ranks: Gang, task: str, options: dict[str, Any], line: str
) -> None:
    assert line in trained(two_ranks, None, task, **options)["error"]


def test_the_checkpoints_of_the_last_epoch_ends_are_kept_besides_the_newest(two_ranks: Gang, tmp_path: Path) -> None:
    options = {"max_epochs": 5, "save_every_updates": 3, "keep_last": 1}
    for name, keep, epochs in [("two", 2, [4, 5]), ("all", -1, [1, 2, 3, 4, 5]), ("none", 0, [])]:
        straight = trained(two_ranks, tmp_path / name, **options, keep_last_epochs=keep)
        found = {path.name for path in (tmp_path / name).glob("*.pt")}
        assert found == {"best.pt", "step_00000035.pt", *(f"epoch_{epoch}.pt" for epoch in epochs)}
        for epoch in epochs:
            assert state_of(tmp_path / name / f"epoch_{epoch}.pt")["position"]["epoch"] == epoch + 1
    resumed = trained(two_ranks, None, **options, resume=str(tmp_path / "all" / "epoch_2.pt"))
    assert same(resumed["model"], straight["model"])


# ------------------------------------------------------------------------------------------- warm starts and resets


@pytest.fixture(scope="module")
def pretrained(two_ranks: Gang, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretrained")
    assert trained(two_ranks, folder, max_updates=5)["error"] == ""
    return folder / "step_00000005.pt"


def test_weights_are_read_from_a_checkpoint_a_state_dict_and_other_programs_files(
    pretrained: Path, tmp_path: Path
) -> None:
    weights = state_of(pretrained)["model"]
    for what in (weights, {"state_dict": weights}, {"model": weights, "args": None},
                 {f"module.{name}": value for name, value in weights.items()}):  # fmt: skip
        torch.save(what, tmp_path / "weights.pt")
        assert same(load_weights(tmp_path / "weights.pt"), weights)
    assert same(load_weights(pretrained), weights)


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("none.pt", None, "none.pt: cannot be read (No such file or directory)"),
        ("text.pt", b"hello", "text.pt: cannot be loaded: "),
        (
            "list.pt",
            [1],
            "list.pt: holds no dict of named tensors, at the top level or under model, state_dict, model_state_dict",
        ),
        ("numbers.pt", {"lr": 0.1}, "numbers.pt: holds no dict of named tensors"),
    ],
)
def test_a_file_without_weights_is_one_line(tmp_path: Path, name: str, content: Any, line: str) -> None:
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    elif content is not None:
        torch.save(content, tmp_path / name)
    with pytest.raises(CheckpointError) as refusal:
        load_weights(tmp_path / name)
    assert str(refusal.value).startswith(f"{tmp_path}/{line}")
    assert "\n" not in str(refusal.value)


def test_safetensors_are_read_where_the_package_is_there(pretrained: Path, tmp_path: Path) -> None:
    weights, file = state_of(pretrained)["model"], tmp_path / "weights.safetensors"
    # Its format: size of the header, header, numbers.
    places, content = {}, b""
    for key, value in weights.items():
        numbers = bytes(value.contiguous().view(torch.uint8).flatten().tolist())
        begin, content = len(content), content + numbers
        places[key] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [begin, len(content)]}
    header = json.dumps(places).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + content)
    if importlib.util.find_spec("safetensors") is None:
        with pytest.raises(CheckpointError, match="needs the package safetensors, which is not installed here"):
            load_weights(file)
        return
    assert same(load_weights(file), weights)
    file.write_bytes(struct.pack("<Q", len(header)) + header + content[:-8])
    with pytest.raises(CheckpointError, match="cannot be loaded: "):
        load_weights(file)


def test_weights_that_do_not_fit_are_reported_by_name_and_shape() -> None:
    model = {"a": torch.ones(2), "b": torch.ones(3, 4), "c": torch.ones(1)}
    assert fit(model, model) == (model, "")
    fitting, other = fit({"a": torch.ones(2), "b": torch.ones(4, 4), "d": torch.ones(1)}, model)
    assert list(fitting) == ["a"]
    assert other == "missing: c; unexpected: d; different shape: b is [4, 4] instead of [3, 4]"
    _, other = fit({}, {f"layer{index}": torch.ones(1) for index in range(8)})
    assert other == "missing: layer0, layer1, layer2, layer3 and 4 more"


def test_a_warm_start_has_the_weights_and_everything_else_fresh(pretrained: Path, tmp_path: Path) -> None:
    """As a whole command, in which rank 1 sees no such file."""
    flags = (
        *["--batch-size", "4", "--max-updates", "1", "--lr", "1e-30", "--optimizer", "sgd", "--finetune-from"],
        pretrained,
    )
    done = train_spawned(tmp_path / "fits", *flags, ranks=2)
    assert done.code == 0, done.output
    found = state_of(tmp_path / "fits" / "checkpoints")
    assert same(found["model"], state_of(pretrained)["model"])
    assert (found["updates"], found["position"]["epoch"], found["position"]["consumed"]) == (1, 1, 8)
    assert [event["message"] for event in done.events_of("finding")] == [
        f"the model starts from 4 weights of {pretrained}"
    ]
    wider = train_spawned(tmp_path / "wider", *flags, "--width", 17, ranks=2)
    assert wider.code == 2
    line = f"{pretrained} does not fit this model, different shape: 0.weight is [16, 8] instead of [17, 8], "
    assert len([text for text in wider.output.splitlines() if line in text]) == 1
    some = train(tmp_path / "some", *flags, "--width", 17, "--finetune-partial")
    assert some.code == 0, some.output
    assert torch.equal(
        state_of(tmp_path / "some" / "checkpoints")["model"]["3.bias"], state_of(pretrained)["model"]["3.bias"]
    )
    assert "not loaded: different shape: 0.weight is" in some.events_of("finding")[0]["message"]


def test_without_saving_nothing_is_written_and_every_step_may_be_printed(tmp_path: Path) -> None:
    done = train(tmp_path, "--batch-size", 4, "--max-updates", 3, "--no-save", "--log-interval", 1)
    assert done.code == 0, done.output
    assert not list((tmp_path / "checkpoints").glob("*.pt"))
    assert done.events_of("checkpoint") == []
    lines = (tmp_path / "logs" / "0.log").read_text().splitlines()
    assert [line.partition(":")[0] for line in lines if " step " in line and line.startswith("epoch")] == [
        "epoch 1 step 1",
        "epoch 1 step 2",
        "epoch 1 step 3",
    ]


def test_a_run_that_resumes_takes_no_weights_from_elsewhere(pretrained: Path, tmp_path: Path) -> None:
    flags = ("--batch-size", 4, "--finetune-from", pretrained)
    assert train(tmp_path, *flags, "--max-updates", 3).code == 0
    resumed = train(tmp_path, *flags, "--max-updates", 6, "--resume", tmp_path / "checkpoints")
    straight = train(tmp_path / "straight", *flags, "--max-updates", 6)
    assert torch.equal(resumed.parameters, straight.parameters)


@pytest.mark.parametrize(
    ("reset", "updates", "epoch"), [("reset_optimizer", 14, 3), ("reset_dataloader", 19, 3), ("reset_meters", 14, 3)]
)
def test_a_reset_leaves_out_that_part_of_a_checkpoint(
    two_ranks: Gang, pretrained: Path, tmp_path: Path, reset: str, updates: int, epoch: int
) -> None:
    plain = trained(two_ranks, None, resume=str(pretrained))
    changed = trained(two_ranks, tmp_path, resume=str(pretrained), **{reset: True})
    assert (changed["error"], plain["updates"], changed["updates"]) == ("", 14, updates)
    assert state_of(tmp_path)["position"]["epoch"] == epoch
    assert same(changed["model"], plain["model"]) == (reset == "reset_meters")
    again = trained(two_ranks, None, resume=str(pretrained), again=True, **{reset: True})
    assert same(again["model"], plain["model"]), "a run that is started again goes on"
