"""Worker context for tests: on the CPU, by default without record, narration and checkpoints."""

from __future__ import annotations

from typing import Any

import torch

from trainer.contract.record import EventWriter
from trainer.engine.worker_context import WorkerContext


def worker_context(rank: int = 0, world_size: int = 1, **fields: Any) -> WorkerContext:
    defaults: dict[str, Any] = {
        "device": torch.device("cpu"),
        "set_state": lambda state: None,
        "print_line": lambda line: None,
        "checkpoints": None,
    }
    writer = fields.pop("writer", None) or EventWriter(None, rank=rank)
    return WorkerContext(rank=rank, world_size=world_size, writer=writer, **defaults | fields)
