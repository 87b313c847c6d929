"""A training's model under torch.compile, with backends that take no compiler of the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_task import TinyOptions, TinyTask
from torch import Tensor, nn
from worker_contexts import worker_context

from trainer.contract.errors import MachineNotReadyError, TrainingError
from trainer.contract.options import Training
from trainer.contract.record import Doing, EventWriter, Finding, ModelFlops, decode_events
from trainer.engine.compilation import Compilation
from trainer.engine.model_flops import FlopCount

NO_COMPILER = "No working C++ compiler found in torch._inductor.config.cpp.cxx: (None, 'g++')"


@pytest.fixture(autouse=True)
def own_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.clear_compilation_metrics()  # the numbers of code begin again
    yield
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


def batch(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 8), torch.randint(0, 4, (samples, 3))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 12))


class Trained:
    """A compiled network with its record."""

    def __init__(self, folder: Path, compile: str, backend: Any = "eager", stops: bool = False) -> None:
        self.raw = network()
        self.model: Any = torch.compile(self.raw, backend=backend, dynamic=False)
        self.writer, self._file = EventWriter(folder / "0.ndjson"), folder / "0.ndjson"
        self.lines: list[str] = []
        ctx = worker_context(writer=self.writer, print_line=self.lines.append, stop_requested=lambda: stops)
        options = Training(compile=compile, count_flops="on")  # type: ignore[arg-type]
        self.compilation = Compilation(TinyTask(TinyOptions()), self.model, options, ctx, nullcontext())
        self.flops = FlopCount(options, ctx, self.compilation)

    def events(self, kind: type[Any]) -> list[Any]:
        self.writer.flush()
        return [event for event in decode_events(self._file.read_bytes()) if type(event) is kind]


def fails(message: str) -> Callable[..., Any]:
    def compiler(graph: Any, inputs: Any) -> Any:
        raise RuntimeError(message)

    return compiler


def fails_backward(message: str) -> Callable[..., Any]:
    from torch._dynamo.backends.common import aot_autograd

    return aot_autograd(fw_compiler=lambda graph, inputs: graph.forward, bw_compiler=fails(message))


def test_compiling_ahead_changes_nothing_of_the_training_and_is_told_while_it_lasts(tmp_path: Path) -> None:
    trained = Trained(tmp_path, "on")
    torch.manual_seed(3)
    buffers = {name: each.clone() for name, each in trained.raw.named_buffers()}
    first = batch(4)
    numbers = torch.get_rng_state()
    trained.compilation.begin(first, step=1)
    assert torch.equal(torch.get_rng_state(), numbers)
    assert all(torch.equal(each, buffers[name]) for name, each in trained.raw.named_buffers())
    assert all(each.grad is None for each in trained.raw.parameters())
    assert not trained.compilation.due
    (doing,) = trained.events(Doing)
    assert (doing.part, doing.step) == ("compile", 1)
    assert trained.events(Finding) == []
    assert list(trained.raw.state_dict()) == list(network().state_dict()), "checkpoints have the task's own names"


@pytest.mark.parametrize("backend", [fails, fails_backward])
@pytest.mark.parametrize("message", [NO_COMPILER, "no such instruction"])
def test_where_the_model_cannot_be_compiled_it_trains_without_or_ends_in_one_line(
    tmp_path: Path, backend: Callable[[str], Any], message: str
) -> None:
    trained = Trained(tmp_path, "auto", backend(message))
    trained.compilation.begin(batch(4), step=1)
    (finding,) = trained.events(Finding)
    assert (finding.kind, finding.severity) == ("not_compiled", "warning")
    assert finding.message.startswith("the model trains without torch.compile: torch.compile fails: ")
    assert message in finding.message
    trained.model(batch(5)[0]).sum().backward()
    assert all(each.grad is not None for each in trained.raw.parameters())

    torch.compiler.set_stance("default")
    (tmp_path / "on").mkdir()
    required = Trained(tmp_path / "on", "on", backend(message))
    refused = MachineNotReadyError if message == NO_COMPILER else TrainingError
    with pytest.raises(refused, match=r"^--compile on: torch\.compile fails: .* or give --compile") as info:
        required.compilation.begin(batch(4), step=1)
    assert "\n" not in str(info.value)


def test_a_stop_that_ends_the_compiler_is_a_stop(tmp_path: Path) -> None:
    trained = Trained(tmp_path, "on", fails("C++ compile error"), stops=True)
    trained.compilation.begin(batch(4), step=1)
    assert trained.events(Finding) == []
    trained.model(batch(5)[0]).sum().backward()


def test_an_error_of_the_task_is_not_called_one_of_the_compiler(tmp_path: Path) -> None:
    wrong = Trained(tmp_path, "on")
    wrong.compilation.begin((torch.randn(4, 9), torch.zeros(4, 3, dtype=torch.int64)), step=1)
    assert wrong.events(Finding) == []
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        wrong.model(torch.randn(4, 9))


def test_recompilations_are_told_once_with_their_cause_and_once_more_when_torch_gives_up(tmp_path: Path) -> None:
    if not hasattr(torch._dynamo.utils.CompilationMetrics, "recompile_reason"):
        pytest.skip("this torch gives no reason of a recompilation")
    trained = Trained(tmp_path, "on")
    trained.compilation.begin(batch(4), step=1)
    found: dict[int, list[Finding]] = {}
    for step in range(1, 16):
        trained.model(torch.randn(3 + step, 8))  # the first has the shape that is compiled already
        trained.compilation.after_step(step)
        found[step] = trained.events(Finding)
    assert found[3] == []
    (told,) = found[4]
    assert (told.kind, told.severity) == ("recompiled", "warning")
    assert told.message == "recompiled 3 times by step 4: the shapes of its batches vary"
    assert "--max-tokens" in told.advice
    limit = torch._dynamo.config.recompile_limit
    assert found[limit] == [told]
    assert len(found[15]) == 2
    assert found[15][1].message == (
        f"recompiled {limit - 1} times by step {limit + 1}: the shapes of its batches vary; torch compiles no more, "
        "and runs what is new without"
    )


def test_operations_are_counted_beside_the_compiled_model_which_stays_as_it_is(tmp_path: Path) -> None:
    trained = Trained(tmp_path, "on")
    trained.compilation.begin(batch(4), step=1)
    for _ in range(3):
        inputs, _ = made = batch(4)
        with trained.flops.count(made, 4):
            trained.model(inputs)
    (counted,) = trained.events(ModelFlops)
    assert counted.flops_per_sample == 4 * 8 * 16 + 6 * 16 * 12, "two products of the first layer, three of the second"
    assert all(each.grad is None for each in trained.raw.parameters())
    trained.compilation.after_step(3)
    assert trained.events(Finding) == []
