"""Import of a fork server whose ranks compile or shard: torch's compiler, after ``trainer.agent.preload_torch``."""

from __future__ import annotations

import gc

gc.disable()
import torch._dynamo  # noqa: E402, F401

gc.freeze()
gc.enable()
