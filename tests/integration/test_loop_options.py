"""Ways to train that change how a step is computed: each trains on two ranks, which agree in the end."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_on_ranks import train_on
from rank_group import Gang

from trainer.contract.errors import RequestError
from trainer.contract.options import Training
from trainer.engine.ddp_model import compression

UPDATES = 12


def train(
    rank: int, world_size: int, options: dict[str, Any], record: str | None, task: str = "TinyTask"
) -> dict[str, Any]:
    """Run on each rank: train a little, and return how it went."""
    import tiny_task
    from tiny_task import TinyOptions
    from worker_contexts import worker_context

    from trainer.contract.record import EventWriter
    from trainer.engine.loop import Loop

    writer = EventWriter(Path(record) / f"{rank}.ndjson" if record is not None else None, rank=rank)
    masked = task != "TinyTask"
    common: dict[str, Any] = {
        "task": "tiny",
        "batch_size": (8,),
        "max_updates": UPDATES,
        "optimizer": "adam",
        "lr": (0.01,),
    }
    loop = Loop(
        getattr(tiny_task, task)(TinyOptions(samples=192, dropout=0.0 if masked else 0.1, width=32, masked=masked)),
        Training(**{**common, **options}),
        worker_context(rank, world_size, writer=writer),
    )
    before = torch.cat([p.detach().flatten() for p in loop.parameters]).clone()
    outcome = loop.run()
    loop.data.train.close()
    writer.close()
    after = torch.cat([p.detach().flatten() for p in loop.parameters])
    return {
        "updates": outcome.updates,
        "parameters": after.tolist(),
        "finite": bool(after.isfinite().all()),
        "moved": float((after - before).norm()),
        "loss": outcome.best.value,
    }


CONFIGURATIONS = {
    "plain": {},
    "workers": {"num_workers": 2},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "fp16 clipped": {"precision": "fp16", "clip_norm": 0.1, "update_freq": (2,)},
    "wire fp16": {"ddp_comm_hook": "fp16"},
    "wire bf16": {"ddp_comm_hook": "bf16"},
    "static graph": {"static_graph": True},
    "static graph, accumulated": {"static_graph": True, "update_freq": (3,)},
    "unused parameters": {"find_unused_parameters": True},
    "unused parameters, accumulated": {"find_unused_parameters": True, "update_freq": (3,)},
    "no views": {"gradient_as_bucket_view": False},
    "no detail": {"sync_detail_every": 0},
    "small buckets": {"bucket_cap_mb": 0.001},
    "wire fp16 in fp16": {"ddp_comm_hook": "fp16", "precision": "fp16", "update_freq": (2,)},
}


@pytest.mark.parametrize("options", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_two_ranks_train_and_agree(two_ranks: Gang, tmp_path: Path, options: dict[str, Any]) -> None:
    agree(two_ranks.run(train, options, str(tmp_path)))


@pytest.mark.parametrize("hook", ["fp16", "bf16"])
def test_compression_needs_no_record(two_ranks: Gang, hook: str) -> None:
    agree(two_ranks.run(train, {"ddp_comm_hook": hook}, None))


@pytest.mark.parametrize("options", [{}, {"update_freq": (2,)}], ids=["each step", "accumulated"])
def test_counts_that_jump_from_step_to_step_cost_a_compressed_gradient_nothing(
    two_ranks: Gang, options: dict[str, Any]
) -> None:
    """What is compressed is the mean, which half precision holds, however many items the step before had."""
    given = {"lr": (0.002,), **options}
    compressed = two_ranks.run(train, {"ddp_comm_hook": "fp16", **given}, None, "JumpingCounts")
    exact = two_ranks.run(train, given, None, "JumpingCounts")
    agree(compressed, moved=0.01)
    assert compressed[0]["parameters"] == pytest.approx(exact[0]["parameters"], abs=2e-3)


@pytest.mark.skipif(find_spec("numpy") is None, reason="torch's PowerSGD needs numpy")
def test_two_ranks_train_with_powersgd_and_agree(two_ranks: Gang, tmp_path: Path) -> None:
    agree(two_ranks.run(train, {"ddp_comm_hook": "powersgd"}, str(tmp_path)))


@pytest.mark.skipif(find_spec("numpy") is not None, reason="numpy is installed")
def test_powersgd_without_numpy_is_refused_in_one_line() -> None:
    with pytest.raises(RequestError, match="powersgd needs numpy"):
        compression(Training(ddp_comm_hook="powersgd"))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for the CPU needs a C++ compiler")
def test_two_ranks_train_a_compiled_model_and_agree(two_ranks: Gang, tmp_path: Path) -> None:
    agree(two_ranks.run(train, {"compile": "on"}, str(tmp_path)))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for the CPU needs a C++ compiler")
@pytest.mark.parametrize(("before", "after"), [("on", "off"), ("off", "on")])
def test_a_checkpoint_is_continued_with_and_without_compilation(
    two_ranks: Gang, tmp_path: Path, before: str, after: str
) -> None:
    def trained(folder: str, **options: Any) -> dict[str, Any]:
        given = {"batch_size": (8,), "lr": (0.02,), "update_freq": (2,), "clip_norm": 0.5, **options}
        result: dict[str, Any] = two_ranks.run(train_on, "block_tasks:BlockTask", str(tmp_path / folder), given)[0]
        assert result["error"] == ""
        return result

    through = trained("through", max_epochs=6)
    first = trained("first", max_epochs=3, compile=before)
    rest = trained("rest", max_epochs=6, compile=after, resume=str(tmp_path / "first"))
    assert rest["updates"] == through["updates"] > first["updates"]
    assert rest["best"] == pytest.approx(through["best"], rel=1e-12)
    for name, weight in through["model"].items():
        torch.testing.assert_close(rest["model"][name], weight, rtol=0, atol=1e-12)


def test_gradients_of_what_no_optimizer_holds_do_not_add_up(tmp_path: Path) -> None:
    from tiny_task import TinyOptions, TinyTask
    from worker_contexts import worker_context

    from trainer.engine.loop import Loop

    class LeftOut(TinyTask):
        def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD(list(model.parameters())[:1], 0.0)

    def last_gradients(updates: int) -> torch.Tensor:
        options = Training(task="tiny", batch_size=(16,), max_updates=updates, valid_every_epochs=0)
        loop = Loop(LeftOut(TinyOptions(samples=16, double=True)), options, worker_context())
        loop.run()
        return torch.cat([each.grad.flatten() for each in loop.parameters if each.grad is not None])

    torch.testing.assert_close(last_gradients(3), last_gradients(1), rtol=1e-12, atol=1e-12)


def agree(results: list[dict[str, Any]], *, moved: float = 0.05) -> None:
    first, second = results
    assert first["updates"] == second["updates"] == UPDATES
    assert first["finite"]
    assert first["moved"] > moved
    assert first["parameters"] == second["parameters"]
    assert first["loss"] == second["loss"]
