"""Peak FLOP/s of GPUs by their names, for dense matrices, from NVIDIA's data sheets and architecture white papers.

The figures that are advertised with sparsity are twice these. A GPU that is not listed has none: a share of a guess
would be worse than no figure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

NumberFormat = Literal["fp32", "tf32", "bf16", "fp16"]
"""In which the products of a training are computed."""

_TERA = 1e12
PEAKS: tuple[tuple[str, Mapping[NumberFormat, float]], ...] = (
    ("B200", {"bf16": 2250, "fp16": 2250, "tf32": 1125, "fp32": 75}),
    ("H200 NVL", {"bf16": 836, "fp16": 836, "tf32": 418, "fp32": 60}),
    ("H200", {"bf16": 989, "fp16": 989, "tf32": 494, "fp32": 67}),
    ("H100 PCIE", {"bf16": 756, "fp16": 756, "tf32": 378, "fp32": 51}),
    ("H100 NVL", {"bf16": 835, "fp16": 835, "tf32": 417, "fp32": 60}),
    ("H100", {"bf16": 989, "fp16": 989, "tf32": 494, "fp32": 67}),
    ("A100", {"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5}),
    ("A40", {"bf16": 149.7, "fp16": 149.7, "tf32": 74.8, "fp32": 37.4}),
    ("A30", {"bf16": 165, "fp16": 165, "tf32": 82, "fp32": 10.3}),
    ("A10", {"bf16": 125, "fp16": 125, "tf32": 62.5, "fp32": 31.2}),
    ("L40S", {"bf16": 362, "fp16": 362, "tf32": 183, "fp32": 91.6}),
    ("L40", {"bf16": 181, "fp16": 181, "tf32": 90.5, "fp32": 90.5}),
    ("L4", {"bf16": 121, "fp16": 121, "tf32": 60, "fp32": 30.3}),
    ("V100 SXM2", {"fp16": 125, "fp32": 15.7}),
    ("V100 PCIE", {"fp16": 112, "fp32": 14}),
    ("T4", {"fp16": 65, "fp32": 8.1}),
    # Of GeForce GPUs with sums in 32 bits, which are half as fast there as sums in 16.
    ("RTX 5090", {"bf16": 209.5, "fp16": 209.5, "tf32": 104.8, "fp32": 104.8}),
    ("RTX 4090", {"bf16": 165.2, "fp16": 165.2, "tf32": 82.6, "fp32": 82.6}),
    ("RTX 3090", {"bf16": 71, "fp16": 71, "tf32": 35.6, "fp32": 35.6}),
    ("RTX A6000", {"bf16": 154.8, "fp16": 154.8, "tf32": 77.4, "fp32": 38.7}),
)
"""TFLOP/s by words of the name, the more special name first."""


def peak_flops_per_s(gpu: str, number_format: NumberFormat) -> float | None:
    """Return the peak of a GPU with a name such as ``NVIDIA H100 80GB HBM3``; None where it is not known."""
    words = set(re.split(r"[^A-Z0-9]+", gpu.upper()))
    for name, peaks in PEAKS:
        if words.issuperset(name.split()):
            peak = peaks.get(number_format)
            return None if peak is None else peak * _TERA
    return None
