"""Weights of folders that ``torch.distributed.checkpoint`` (DCP) has written: read whole, or refused in one line."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_group import FSDP_ON_CPU, Gang
from torch import Tensor, nn
from trained import train

from trainer import export_weights, predict_inputs
from trainer.checkpoint import fit, load_weights, open_weights, write_file
from trainer.contract.errors import CheckpointError, ExitCode
from trainer.contract.task_options import LmOptions
from trainer.tasks.lm import LanguageModel

LM = {"context": 16, "dim": 16, "heads": 2, "layers": 2}
LM_FLAGS = [f"--{name}={value}" for name, value in LM.items()]


def a_model() -> nn.Module:
    torch.manual_seed(3)
    return LanguageModel(LmOptions(data="none", **LM)).model()


def save_sharded(_rank: int, _world_size: int, folder: str, form: str) -> None:
    """Save a model that two ranks share, and its optimizer, in one of the forms that people give it; on each rank."""
    from torch.distributed import distributed_c10d
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    if importlib.util.find_spec("numpy") is None:  # by which torch turns the answers of the ranks to bytes
        distributed_c10d._tensor_to_object = lambda tensor, size, *_: pickle.loads(bytes(tensor[:size].tolist()))  # type: ignore[attr-defined]
    model = a_model()
    weights: dict[str, Any]
    moments: dict[str, Any]
    if hasattr(torch.cpu.Stream, "record_event"):
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
        sum(parameter.sum() for parameter in model.parameters()).full_tensor().backward()  # type: ignore[union-attr]
        optimizer.step()
        weights, moments = get_state_dict(model, optimizer)
    else:  # torch 2.6 shards no module on the CPU
        mesh = init_device_mesh("cpu", (2,))
        state_dict = model.state_dict().items()
        weights = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in state_dict}
        moments = {"state": {name: {"exp_avg": value, "exp_avg_sq": value} for name, value in weights.items()}}
    wrapped = {f"module.{name}": value for name, value in weights.items()}
    state: dict[str, Any] = {
        "top": {**weights, "optimizer": moments, "step": 3},
        "model": {"model": weights, "optimizer": moments, "step": torch.tensor(3), "text": "a"},
        "app": {"app": {"model": weights, "optimizer": moments}},
        "module": {"module": weights},
        "state_dict": {"state_dict": wrapped},
        "wrapped": wrapped,
    }[form]
    dcp.save(state, checkpoint_id=folder)
    dist.barrier()


@pytest.fixture(scope="module")
def sharded(two_ranks: Gang, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dcp") / "step-3"
    two_ranks.run(save_sharded, str(folder), "model")
    return folder


@pytest.fixture
def folder(sharded: Path, tmp_path: Path) -> Path:
    """Return a copy, to be damaged."""
    return shutil.copytree(sharded, tmp_path / "step-3")


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("form", ["top", "model", "app", "module", "state_dict", "wrapped"])
def test_the_weights_of_two_ranks_are_found_and_those_of_the_model(two_ranks: Gang, tmp_path: Path, form: str) -> None:
    two_ranks.run(save_sharded, str(tmp_path / form), form)
    assert len(list((tmp_path / form).glob("*.distcp"))) == 2
    own = a_model().state_dict()
    weights = open_weights(tmp_path / form, model=own)
    fitting, misfits = fit(weights.tensors, own)
    assert misfits == ""
    assert all(tensor.is_meta for tensor in fitting.values())  # what does not fit is never in memory
    assert same(weights.load(fitting), dict(own))
    assert same(load_weights(tmp_path / form), dict(own))  # without the names of a model


def test_one_plain_rank_writes_what_is_read_in_every_dtype(tmp_path: Path) -> None:
    weights = {
        "half": torch.randn(3, 4).bfloat16(),
        "number": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "turned": torch.randn(4, 5).t(),
        "part": torch.randn(100)[10:20],
        "bits": torch.tensor([True, False]),
    }
    dcp.save({"model": weights}, checkpoint_id=tmp_path / "plain")
    read = load_weights(tmp_path / "plain")
    assert same(read, weights)
    expected = {name: torch.zeros_like(value) for name, value in weights.items()}
    dcp.load({"model": expected}, checkpoint_id=tmp_path / "plain")
    assert same(read, expected)
    assert read["part"].untyped_storage().nbytes() == 40


def test_an_average_beside_the_weights_is_not_taken_and_two_of_a_kind_are_refused(tmp_path: Path) -> None:
    one, other = {"a": torch.ones(2)}, {"a": torch.zeros(2)}
    dcp.save({"ema": other, "model": one}, checkpoint_id=tmp_path / "ema")
    assert same(load_weights(tmp_path / "ema"), one)
    dcp.save({"first": {"model": one}, "second": {"model": other}}, checkpoint_id=tmp_path / "two")
    with pytest.raises(CheckpointError, match=r"two: holds weights at several places, first.model, second.model: save"):
        open_weights(tmp_path / "two", model=one)
    dcp.save({"generator": one}, checkpoint_id=tmp_path / "else")
    with pytest.raises(CheckpointError, match="else: holds no named tensors, at the top level or under model, state_"):
        open_weights(tmp_path / "else", model=one)


# ---------------------------------------------------------------------------------------------------- what is damaged


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def change_number(folder: Path) -> None:
    """Flip a bit of the first weight."""
    path = folder / "__0_0.distcp"
    value = a_model().state_dict()["embedding.weight"][0, :4].contiguous().view(torch.uint8)
    content = path.read_bytes()
    start = content.index(bytes(value.tolist()))
    path.write_bytes(content[:start] + bytes([content[start] ^ 1]) + content[start + 1 :])


def swap_shards(folder: Path) -> None:
    one, other = folder / "__0_0.distcp", folder / "__1_0.distcp"
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def change_metadata(change: Callable[[Any], None]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        path = folder / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        change(metadata)
        path.write_bytes(pickle.dumps(metadata))

    return changed


def first_weight(metadata: Any) -> Any:
    return metadata.state_dict_metadata["model.embedding.weight"]


def double_part(metadata: Any) -> None:
    first_weight(metadata).chunks[1] = first_weight(metadata).chunks[0]


def forget_file(metadata: Any) -> None:
    for index in [index for index in metadata.storage_data if index.fqn == "model.embedding.weight"]:
        del metadata.storage_data[index]


def lead_out(metadata: Any) -> None:
    for index, info in metadata.storage_data.items():
        if index.fqn == "model.embedding.weight":
            info.relative_path = "../other"


def other_type(metadata: Any) -> None:
    first_weight(metadata).properties.dtype = torch.float64


class Harm:
    def __reduce__(self) -> Any:
        return os.system, ("touch harmed",)


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: (folder / "__1_0.distcp").unlink(), "/__1_0.distcp: does not exist, but .metadata names it: the"),
    (lambda folder: cut(folder / "__1_0.distcp", 3000), "/__1_0.distcp: has 3,000 bytes of at least "),
    (lambda folder: (folder / "__0_0.distcp").write_bytes(bytes(10**6)), "/__0_0.distcp: is damaged: "),
    (change_number, "/__0_0.distcp: is damaged: embedding.weight cannot be loaded: Bad CRC-32"),
    (swap_shards, "_0.distcp: "),
    (lambda folder: (folder / ".metadata").unlink(), ": has no .metadata, which is written last: it was not saved to"),
    (lambda folder: cut(folder / ".metadata", 0), "/.metadata: is damaged: Ran out of input"),
    (lambda folder: cut(folder / ".metadata", 700), "/.metadata: is damaged: "),
    (lambda folder: (folder / ".metadata").write_bytes(b"hello"), "/.metadata: is damaged: "),
    (lambda folder: (folder / ".metadata").write_bytes(pickle.dumps([1])), "/.metadata: is no metadata of DCP's files"),
    (change_metadata(lambda m: first_weight(m).chunks.pop()), "/.metadata: describes no part for 2,048 elements of "),
    (change_metadata(double_part), "/.metadata: is damaged: two parts of model.embedding.weight overlap"),
    (change_metadata(forget_file), "/.metadata: names no file for a part of model.embedding.weight"),
    (change_metadata(lead_out), "/.metadata: model.embedding.weight is in '../other', which is no file of this folder"),
    (change_metadata(other_type), "but .metadata describes torch.float64"),
]


@pytest.mark.parametrize(("damage", "text"), DAMAGES, ids=[text for _, text in DAMAGES])
def test_a_damaged_folder_is_refused_in_one_line_that_names_the_file(
    folder: Path, damage: Callable[[Path], object], text: str
) -> None:
    damage(folder)
    with pytest.raises(CheckpointError) as refusal:
        load_weights(folder)
    assert str(folder) in str(refusal.value)
    assert text in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_strangers_metadata_runs_no_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for harm in (Harm(), {"state": [Harm()]}):
        (folder / ".metadata").write_bytes(pickle.dumps(harm))
        with pytest.raises(CheckpointError, match=r"\.metadata: names \w+\.system, which does not belong"):
            load_weights(folder)
    assert not (folder / "harmed").exists()
    (folder / ".metadata").write_bytes(b"cbuiltins\neval\n(V1\ntR.")
    with pytest.raises(CheckpointError, match=r"names builtins\.eval"):
        load_weights(folder)


def test_no_changed_byte_gives_other_weights(folder: Path) -> None:
    own = dict(a_model().state_dict())
    generator = random.Random(5)
    refused = 0
    for name in [".metadata"] * 60 + ["__0_0.distcp"] * 40:
        content = (folder / name).read_bytes()
        changed = bytearray(content)
        changed[generator.randrange(len(changed))] ^= 1 << generator.randrange(8)
        (folder / name).write_bytes(changed)
        try:
            weights = open_weights(folder, model=own)
            fitting, misfits = fit(weights.tensors, own)
            if misfits:
                refused += 1
            else:
                assert same(weights.load(fitting), own)
        except CheckpointError:
            refused += 1
        (folder / name).write_bytes(content)
    assert refused > 30


def test_what_the_model_does_not_need_is_not_read(folder: Path) -> None:
    path, content = folder / "__1_0.distcp", (folder / "__1_0.distcp").read_bytes()
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for index, info in metadata.storage_data.items():
        if info.relative_path == path.name and not index.fqn.startswith("model."):
            content = content[: info.offset] + bytes(info.length) + content[info.offset + info.length :]
    assert content.count(b"\0" * 1000) > 10
    path.write_bytes(content)
    assert same(load_weights(folder), dict(a_model().state_dict()))


# ---------------------------------------------------------------------------------------------------- where it is given


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(bytes(range(32, 122)) * 20)
    return path


def tuned(run_dir: Path, text: Path, start: Path, *words: object, ranks: int = 2) -> Any:
    flags = ("--task", "lm", "--data", text, "--valid-fraction", 0, "--sample-bytes", 0, *LM_FLAGS)
    steps = ("--batch-size", 2, "--max-updates", 1, "--lr", "1e-30", "--optimizer", "sgd")
    return train(run_dir, *flags, *steps, "--finetune-from", start, *words, ranks=ranks)


@pytest.mark.parametrize(
    "strategy",
    ["ddp", pytest.param("fsdp", marks=pytest.mark.skipif(not FSDP_ON_CPU, reason="FSDP2 of this torch needs a GPU"))],
)
def test_a_training_starts_from_the_weights_of_a_folder(
    sharded: Path, tmp_path: Path, text: Path, strategy: str
) -> None:
    done = tuned(tmp_path / "run", text, sharded, "--strategy", strategy)
    assert done.code == ExitCode.FINISHED, done.output
    own = a_model().state_dict()
    assert f"the model starts from {len(own)} weights of {sharded}" in done.output
    saved = load_weights(tmp_path / "run/checkpoints/step_00000001.pt")
    for name, value in own.items():  # zeros have changed by a step of 1e-30
        torch.testing.assert_close(saved[name], value, rtol=0, atol=1e-20)


def test_weights_of_another_model_are_refused_by_name_and_those_that_match_can_be_taken(
    sharded: Path, tmp_path: Path, text: Path
) -> None:
    done = tuned(tmp_path / "run", text, sharded, "--layers", 3, "--context", 24)
    assert done.code == ExitCode.BAD_REQUEST
    assert f"{sharded} does not fit this model, missing: " in done.output
    assert "--finetune-partial loads those that match" in done.output
    part = tuned(tmp_path / "part", text, sharded, "--layers", 3, "--finetune-partial")
    assert part.code == ExitCode.FINISHED, part.output
    (folder := tmp_path / "torn").mkdir()
    shutil.copy(sharded / "__0_0.distcp", folder)
    done = tuned(tmp_path / "torn-run", text, folder)
    assert done.code == ExitCode.BAD_REQUEST
    assert f"{folder}: has no .metadata" in done.output
    assert "Traceback" not in done.output


def test_a_folder_is_exported_and_predicts(
    sharded: Path, tmp_path: Path, text: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    output = tmp_path / "model.safetensors"
    assert export_weights.main([str(sharded), str(output)]) == ExitCode.FINISHED
    own = dict(a_model().state_dict())
    assert same(load_weights(output), own)
    assert json.loads(capfdbinary.readouterr().out)["step"] is None
    (tmp_path / "input").write_text("one\ntwo\n")
    flags = ("--task=lm", f"--data={text}", "--sample-bytes=3", *LM_FLAGS)
    assert predict_inputs.main([str(sharded), "--input", str(tmp_path / "input"), "--", *flags]) == ExitCode.FINISHED
    printed = capfdbinary.readouterr()
    assert len(printed.out.splitlines()) == 2
    assert b"vocabulary and labels are those of this run's data" in printed.err
    other = [*flags, "--layers=1"]
    assert predict_inputs.main([str(sharded), "--input", str(tmp_path / "input"), "--", *other]) == ExitCode.BAD_REQUEST
    printed = capfdbinary.readouterr()
    assert printed.out == b""
    assert b"does not fit this model, unexpected: " in printed.err


def test_an_exported_folder_is_loaded_by_torch_alone_and_replaced_only_by_force(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    weights, folder = dict(a_model().state_dict()), tmp_path / "weights"
    write_file(tmp_path / "best.pt", {"task": "lm", "updates": 5, "model": weights, "task_state": {"tokenizer": "a"}})
    words = [str(tmp_path / "best.pt"), str(folder), "--to=dcp"]
    assert export_weights.main(words) == ExitCode.FINISHED
    printed = capfd.readouterr()
    assert printed.err == ""
    written = json.loads(printed.out)
    assert (written["step"], written["tensors"]) == (5, len(weights))
    assert written["bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    assert written["without_task_state"] == "a folder of DCP holds the weights alone"
    loaded = {name: torch.zeros_like(value) for name, value in weights.items()}
    dcp.load({"model": loaded}, checkpoint_id=folder)
    assert same(loaded, weights)
    assert export_weights.main(words) == ExitCode.BAD_REQUEST
    assert "already exists: replace it with --force" in capfd.readouterr().err
    assert export_weights.main([*words, "--force"]) == ExitCode.FINISHED
    (folder / "mine.txt").touch()
    assert export_weights.main([*words, "--force"]) == ExitCode.BAD_REQUEST
    assert "holds other files, such as mine.txt" in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
