"""The tests' small task, which also records the network interface of its rank."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from tiny_task import TinyOptions, TinyTask
from torch import Tensor, nn

from trainer.distributed import get_rank


class HostOptions(TinyOptions):
    pause_s: float = 0.0
    """Least time of a step, for a training that must outlast a limit whose end it cannot await."""


class HostTask(TinyTask):
    Options = HostOptions

    def model(self) -> nn.Module:
        print(f"rank {get_rank()} on {os.uname().nodename} takes {os.environ.get('GLOO_SOCKET_IFNAME')}", flush=True)
        return super().model()

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | int, Mapping[str, Tensor]]:
        time.sleep(self.options.pause_s)
        return super().loss(model, batch)
