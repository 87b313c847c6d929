"""Peak FLOP/s of GPUs by their names, for dense matrices, from NVIDIA's data sheets and architecture white papers.

Figures advertised with sparsity are twice these. No figure is given for a GPU that is not listed, for a part of a GPU
such as a MIG slice, and for a name with additional words: a share of a guessed peak would be worse than none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

NumberFormat = Literal["fp64", "fp32", "tf32", "bf16", "fp16"]
"""Number format of matrix products."""

_BRAND = re.compile(r"(NVIDIA )?(TESLA |GEFORCE )?")


class _GpuKind(NamedTuple):
    """GPU models with the same peaks."""

    name: str
    """Pattern of the whole name without the brand, in capitals."""
    multiprocessors: int
    """Number on a whole GPU: a MIG slice, a share by MPS and a custom part of the same name have fewer."""
    teraflops: Mapping[NumberFormat, float]
    """Peak by number format; a format that is missing is unknown, or not supported by the tensor cores."""


_KINDS = (
    _GpuKind("B200", 148, {"bf16": 2250, "fp16": 2250, "tf32": 1125, "fp32": 75}),
    _GpuKind("H200 NVL", 132, {"bf16": 836, "fp16": 836, "tf32": 418, "fp32": 60}),
    _GpuKind(r"H200|GH200( \d+GB?( HBM3E?)?)?", 132, {"bf16": 989, "fp16": 989, "tf32": 494, "fp32": 67}),
    _GpuKind("H100 PCIE", 114, {"bf16": 756, "fp16": 756, "tf32": 378, "fp32": 51}),
    _GpuKind("H100 NVL", 132, {"bf16": 835, "fp16": 835, "tf32": 417, "fp32": 60}),
    _GpuKind("H100 80GB HBM3", 132, {"bf16": 989, "fp16": 989, "tf32": 494, "fp32": 67}),
    _GpuKind("H20", 78, {"bf16": 148, "fp16": 148, "tf32": 74, "fp32": 44}),
    _GpuKind(
        "A100-(SXM4?|PCIE)-(40|80)GB|A100 80GB PCIE|A100 PCIE", 108,
        {"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5},
    ),
    _GpuKind("A40", 84, {"bf16": 149.7, "fp16": 149.7, "tf32": 74.8, "fp32": 37.4}),
    _GpuKind("A30", 56, {"bf16": 165, "fp16": 165, "tf32": 82, "fp32": 10.3}),
    _GpuKind("A10", 72, {"bf16": 125, "fp16": 125, "tf32": 62.5, "fp32": 31.2}),
    _GpuKind("L40S", 142, {"bf16": 362, "fp16": 362, "tf32": 183, "fp32": 91.6}),
    _GpuKind("L40", 142, {"bf16": 181, "fp16": 181, "tf32": 90.5, "fp32": 90.5}),
    _GpuKind("L4", 58, {"bf16": 121, "fp16": 121, "tf32": 60, "fp32": 30.3}),
    _GpuKind("V100-SXM2-(16|32)GB", 80, {"fp16": 125, "fp32": 15.7}),
    _GpuKind("V100-PCIE-(16|32)GB", 80, {"fp16": 112, "fp32": 14}),
    _GpuKind("V100S-PCIE-32GB", 80, {"fp16": 130, "fp32": 16.4}),
    _GpuKind("T4", 40, {"fp16": 65, "fp32": 8.1}),
    # GeForce GPUs: with 32-bit accumulation, which has half the rate of 16-bit accumulation there.
    _GpuKind("RTX 5090", 170, {"bf16": 209.5, "fp16": 209.5, "tf32": 104.8, "fp32": 104.8}),
    _GpuKind("RTX 4090", 128, {"bf16": 165.2, "fp16": 165.2, "tf32": 82.6, "fp32": 82.6}),
    _GpuKind("RTX 3090", 82, {"bf16": 71, "fp16": 71, "tf32": 35.6, "fp32": 35.6}),
    _GpuKind("RTX A6000", 84, {"bf16": 154.8, "fp16": 154.8, "tf32": 77.4, "fp32": 38.7}),
    _GpuKind("RTX 6000 ADA GENERATION", 142, {"fp32": 91.1}),
)  # fmt: skip


def peak_flops_per_s(gpu: str, multiprocessors: int, number_format: NumberFormat) -> float | None:
    """Return the peak of a GPU, by its name in CUDA (``NVIDIA H100 80GB HBM3``); None if it is not known.

    A process may use fewer multiprocessors than the GPU has; its peak is then not known.
    """
    name = gpu.upper()
    brand = _BRAND.match(name)
    assert brand is not None, "every part of the pattern may be absent"
    tera = 1e12
    for kind in _KINDS:
        if re.fullmatch(kind.name, name[brand.end() :]):
            peak = kind.teraflops.get(number_format)
            return None if peak is None or multiprocessors != kind.multiprocessors else peak * tera
    return None
