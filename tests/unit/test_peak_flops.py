from __future__ import annotations

from typing import get_args

import pytest

from trainer.host.peak_flops import NumberFormat, peak_flops_per_s


@pytest.mark.parametrize(
    ("name", "multiprocessors", "number_format", "peak"),
    [
        ("NVIDIA B200", 148, "bf16", 2250e12),
        ("NVIDIA GB200", 152, "bf16", None),
        ("NVIDIA H200", 132, "tf32", 494e12),
        ("NVIDIA H200 NVL", 132, "bf16", 836e12),
        ("NVIDIA GH200 480GB", 132, "bf16", 989e12),
        ("NVIDIA H100 80GB HBM3", 132, "bf16", 989e12),
        ("NVIDIA H100 PCIe", 114, "bf16", 756e12),
        ("NVIDIA H100 NVL", 132, "fp16", 835e12),
        ("NVIDIA H100 64GB HBM2", 132, "bf16", None),
        ("NVIDIA H800", 132, "bf16", None),
        ("NVIDIA H20", 78, "bf16", 148e12),
        ("NVIDIA A100-SXM4-80GB", 108, "fp32", 19.5e12),
        ("NVIDIA A100 80GB PCIe", 108, "bf16", 312e12),
        ("NVIDIA A100-PCIE-40GB", 108, "tf32", 156e12),
        ("NVIDIA A100-SXM-64GB", 124, "bf16", None),
        ("NVIDIA A100X", 108, "bf16", None),
        ("NVIDIA A800-SXM4-80GB", 108, "bf16", None),
        ("NVIDIA A10", 72, "bf16", 125e12),
        ("NVIDIA A10G", 80, "bf16", None),
        ("NVIDIA L4", 58, "bf16", 121e12),
        ("NVIDIA L40", 142, "bf16", 181e12),
        ("NVIDIA L40S", 142, "bf16", 362e12),
        ("Tesla V100-SXM2-16GB", 80, "fp16", 125e12),
        ("Tesla V100-SXM2-32GB", 80, "bf16", None),
        ("Tesla V100-SXM2-32GB", 80, "tf32", None),
        ("Tesla V100-PCIE-16GB", 80, "fp16", 112e12),
        ("Tesla V100S-PCIE-32GB", 80, "fp16", 130e12),
        ("Tesla T4", 40, "fp16", 65e12),
        ("Tesla T4", 40, "bf16", None),
        ("NVIDIA T4G", 40, "fp16", None),
        ("NVIDIA GeForce RTX 4090", 128, "bf16", 165.2e12),
        ("NVIDIA GeForce RTX 4090 D", 114, "bf16", None),
        ("NVIDIA GeForce RTX 3090", 82, "tf32", 35.6e12),
        ("NVIDIA GeForce RTX 3090 Ti", 84, "bf16", None),
        ("NVIDIA RTX A6000", 84, "bf16", 154.8e12),
        ("NVIDIA RTX 6000 Ada Generation", 142, "fp32", 91.1e12),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 188, "bf16", None),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 188, "bf16", None),
        ("Quadro RTX 6000", 72, "fp16", None),
        ("NVIDIA H100 80GB HBM3", 132, "fp64", None),
        ("a GPU of tomorrow", 132, "bf16", None),
        ("", 0, "bf16", None),
    ],
)
def test_a_peak_is_that_of_a_gpus_own_kind_in_the_number_format_or_absent(
    name: str, multiprocessors: int, number_format: NumberFormat, peak: float | None
) -> None:
    assert peak_flops_per_s(name, multiprocessors, number_format) == peak


@pytest.mark.parametrize(
    ("name", "multiprocessors"),
    [
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 76),
        ("NVIDIA GeForce RTX 3090 with Max-Q Design", 82),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 16),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 42),
        ("NVIDIA A100-SXM4-40GB", 42),  # a slice that has the name of the whole, or a share of it by MPS
        ("GRID A100-10C", 108),  # a virtual GPU
        ("NVIDIA A40-48Q", 84),
        ("GRID T4-16Q", 40),
    ],
)
def test_a_part_or_a_smaller_form_of_a_gpu_has_no_peak_of_the_whole(name: str, multiprocessors: int) -> None:
    for number_format in get_args(NumberFormat):
        assert peak_flops_per_s(name, multiprocessors, number_format) is None
