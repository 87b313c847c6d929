"""How a GPU is set up, shown with stand-ins for the driver and its streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.contract.errors import RequestError
from trainer.contract.options import Training
from trainer.engine.accelerator import DeviceCopy, choose_algorithms, prepare_environment, set_numerics

GPU = torch.device("cuda", 1)


@pytest.fixture(autouse=True)
def _numerics() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    cudnn = torch.backends.cudnn
    allowed, benchmark = cudnn.allow_tf32, cudnn.benchmark
    yield
    torch.set_float32_matmul_precision(before)
    cudnn.allow_tf32, cudnn.benchmark = allowed, benchmark


@pytest.mark.parametrize(
    ("deterministic", "before", "after"),
    [
        (False, {}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        (False, {"PYTORCH_ALLOC_CONF": "backend:native"}, {"PYTORCH_ALLOC_CONF": "backend:native"}),
        (
            True,
            {"PYTORCH_CUDA_ALLOC_CONF": ""},
            {"PYTORCH_CUDA_ALLOC_CONF": "", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        ),
        (
            True,
            {"PYTORCH_CUDA_ALLOC_CONF": "", "CUBLAS_WORKSPACE_CONFIG": ":16:8"},
            {"PYTORCH_CUDA_ALLOC_CONF": "", "CUBLAS_WORKSPACE_CONFIG": ":16:8"},
        ),
    ],
)
def test_variables_of_cuda_are_set_and_those_of_the_user_stay(
    deterministic: bool, before: dict[str, str], after: dict[str, str]
) -> None:
    environ = dict(before)
    prepare_environment(Training(deterministic=deterministic), environ)
    assert environ == after


@pytest.mark.parametrize(
    ("waits", "capability", "used"), [(True, (9, 0), True), (True, (7, 5), False), (False, (8, 0), False)]
)
def test_tf32_is_used_where_the_gpu_has_it_unless_it_is_declined(
    waits: bool, capability: tuple[int, int], used: bool
) -> None:
    tf32 = set_numerics(Training(tf32=waits), GPU, capability=lambda _: capability, name=lambda _: "GPU")
    assert (tf32, torch.get_float32_matmul_precision()) == (used, "high" if used else "highest")


def test_nothing_is_set_on_a_cpu() -> None:
    assert set_numerics(Training(precision="bf16"), torch.device("cpu")) is None
    assert torch.get_float32_matmul_precision() == "highest"


def test_bf16_is_refused_in_one_line_where_the_gpu_has_none() -> None:
    with pytest.raises(RequestError) as refused:
        set_numerics(Training(precision="bf16"), GPU, capability=lambda _: (7, 5), name=lambda _: "Tesla T4")
    assert str(refused.value) == (
        "--precision bf16 needs a GPU of compute capability 8.0 or later, and Tesla T4 has 7.5: allowed here are fp32 "
        "and fp16"
    )


@pytest.mark.parametrize(
    ("deterministic", "alike", "tries"), [(False, True, True), (False, False, False), (True, True, False)]
)
def test_cudnn_tries_its_algorithms_where_batches_are_alike(deterministic: bool, alike: bool, tries: bool) -> None:
    choose_algorithms(Training(deterministic=deterministic), GPU, few_shapes=alike)
    assert torch.backends.cudnn.benchmark is tries


class Streams:
    """The streams of a device, and their waits in order."""

    def __init__(self) -> None:
        self.current = "compute"
        self.waits: list[str] = []

    def stream(self, name: str) -> Any:
        streams = self

        class FakeCudaStream:
            def wait_stream(self, other: Any) -> None:
                streams.waits.append(f"{name} waits for {other}")

            def __str__(self) -> str:
                return name

        return FakeCudaStream()

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        self.current, before = str(stream), self.current
        yield
        self.current = before

    def tensor(self) -> Tensor:
        streams = self

        class OnDevice(Tensor):
            def to(self, device: Any, non_blocking: bool = False) -> Any:  # type: ignore[override]
                how = "without waiting" if non_blocking else "waiting"
                streams.waits.append(f"copied to {device} on {streams.current} {how}")
                return self

            def record_stream(self, stream: Any) -> None:
                streams.waits.append(f"kept for {stream}")

        return torch.zeros(1).as_subclass(OnDevice)


def test_a_batch_is_copied_on_a_stream_of_its_own_which_the_computation_waits_for() -> None:
    streams = Streams()
    copy = DeviceCopy(
        GPU,
        stream=lambda _: streams.stream("copies"),
        current_stream=lambda _: streams.stream("compute"),
        on=streams.on,
    )
    batch = {"words": streams.tensor(), "more": (streams.tensor(), "a name")}
    moved = copy(batch)
    assert moved.keys() == batch.keys()
    assert streams.waits == [
        *["copied to cuda:1 on copies without waiting"] * 2,
        "compute waits for copies",
        *["kept for compute"] * 2,
    ]
