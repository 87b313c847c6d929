"""Seeds every source of random numbers that data and models draw from."""

from __future__ import annotations

import random
import sys

import torch


def seed_all(seed: int) -> None:
    """Seed the random numbers of Python, of torch, and of numpy where this process has imported it."""
    random.seed(seed)
    torch.manual_seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)  # it takes 32 bits
