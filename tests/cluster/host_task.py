"""The tests' small task, which also records the network interface of its rank."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiny_task import TinyOptions, TinyTask
from torch import Tensor, nn

from trainer.distributed import get_rank


class HostOptions(TinyOptions):
    pause_s: float = 0.0
    """Least time of a step, for a training that must outlast a limit whose end it cannot await."""
    gate: str = ""
    """File for which the training waits after ``gate_after`` steps."""
    gate_after: int = 0
    slow: str = ""
    """What once takes ``slow_s``: a ``validation`` or, the third time, a ``checkpoint``."""
    slow_s: float = 75.0
    asleep: int = -1
    """Rank that falls asleep after 20 steps, once in a run."""


class HostTask(TinyTask):
    Options = HostOptions
    begun = 0

    def model(self) -> nn.Module:
        print(f"rank {get_rank()} on {os.uname().nodename} takes {os.environ.get('GLOO_SOCKET_IFNAME')}", flush=True)
        return super().model()

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | int, Mapping[str, Tensor]]:
        time.sleep(self.options.pause_s)
        if model.training:
            self.begun += 1
            while self.begun > self.options.gate_after and not Path(self.options.gate).exists():
                time.sleep(0.01)
        if not model.training and self.begun > 10:  # the loss is checked before the first step
            self._be_slow("validation", 1)
        elif model.training and self.begun == 20 and get_rank() == self.options.asleep:
            self._fall_asleep()
        return super().loss(model, batch)

    def state_dict(self) -> Mapping[str, Any]:
        self._be_slow("checkpoint", 3)
        return super().state_dict()

    def _fall_asleep(self) -> None:
        slept = Path(os.environ["GPUTRAIN_RUN"], "slept")
        if not slept.exists():
            slept.touch()
            time.sleep(3600)

    def _be_slow(self, what: str, turn: int) -> None:
        if self.options.slow == what:
            self.turns = getattr(self, "turns", 0) + 1
            if self.turns == turn:
                print(f"a slow {what}", flush=True)
                time.sleep(self.options.slow_s)
