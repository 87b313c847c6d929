"""Names of the backends of process groups; torch-free, for ranks and console."""

from __future__ import annotations

NCCL = frozenset(("nccl", "nccl2", "nccl-lazy", "nccl-legacy"))
"""Names of torch's backends over NCCL; those after the first came with torch 2.14."""


def is_nccl(backend: str) -> bool:
    """Whether a backend is NCCL: its ranks have a GPU each, and its collectives take CUDA tensors."""
    return backend in NCCL
