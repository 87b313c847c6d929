from __future__ import annotations

import pytest

from gputrain_tui.state import RunState
from trainer.contract.record import ModelFlops, Step
from trainer.host.peak_flops import NumberFormat, peak_flops_per_s


@pytest.mark.parametrize(
    ("name", "number_format", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H200", "tf32", 494e12),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5e12),
        ("Tesla V100-SXM2-32GB", "fp16", 125e12),
        ("Tesla V100-SXM2-32GB", "bf16", None),
        ("NVIDIA L4", "bf16", 121e12),
        ("NVIDIA L40S", "bf16", 362e12),
        ("NVIDIA A10G", "bf16", None),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2e12),
        ("a GPU of tomorrow", "bf16", None),
    ],
)
def test_a_peak_is_known_by_the_words_of_a_gpus_name_or_absent(
    name: str, number_format: NumberFormat, peak: float | None
) -> None:
    assert peak_flops_per_s(name, number_format) == peak


def state(flops: ModelFlops | None) -> RunState:
    found = RunState(world_size=2)
    for number in (1, 2, 3):
        for rank in range(2):
            found.apply(
                Step(
                    time=float(number), rank=rank, step=number, epoch=1, steps=1, samples=8, tokens=800, loss=1.0,
                    step_ms=100.0,
                )
            )  # fmt: skip
    if flops is not None:
        found.apply(flops)
    return found


def test_the_utilization_is_a_share_of_the_peak_of_all_gpus() -> None:
    flops = ModelFlops(time=0.0, flops_per_sample=1e12, number_format="bf16", device_name="G", peak_flops_per_s=4e14)
    figures = state(flops).figures
    assert figures.samples_per_s == pytest.approx(160)
    assert figures.tokens_per_s == pytest.approx(16_000)
    assert figures.mfu == pytest.approx(160e12 / 8e14)


def test_without_a_known_peak_there_is_no_utilization() -> None:
    unknown = ModelFlops(time=0.0, flops_per_sample=1e12, number_format="bf16", device_name="G")
    assert state(unknown).figures.mfu is None
    assert state(None).figures.mfu is None
