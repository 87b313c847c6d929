"""The tests' small task, which also records the network interface of its rank."""

from __future__ import annotations

import os

from tiny_task import TinyOptions, TinyTask
from torch import nn

from trainer.distributed import get_rank


class HostTask(TinyTask):
    Options = TinyOptions

    def model(self) -> nn.Module:
        print(f"rank {get_rank()} on {os.uname().nodename} takes {os.environ.get('GLOO_SOCKET_IFNAME')}", flush=True)
        return super().model()
