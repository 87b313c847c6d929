"""Compute of a rank's steps, by which shares of the batch are balanced."""

from __future__ import annotations

import time
from collections.abc import Sequence

from trainer.contract.record import Step
from trainer.host.cpu_cgroup import cpu_cgroup


class RankCompute:
    """What this rank computes in its steps: the time that no other rank waits for, and no other process takes.

    A wait for a core is left out. Processes beside the ranks take now one core and now another, for seconds: shares
    that follow are late, and make it worse. A wait that this rank's CPU quota imposes lasts, and is not; as a quota is
    used up once in a few steps, it is divided among all of them.
    """

    def __init__(self) -> None:
        self._quotas, self._since = cpu_cgroup().quotas(), time.monotonic()

    def of(self, steps: Sequence[Step]) -> list[float | None]:
        """Return the compute of each step since the last call, ms; None where its waits for others are not known."""
        before, since = self._quotas, self._since
        self._quotas, self._since = cpu_cgroup().quotas(), time.monotonic()
        seconds = self._since - since
        shares = [
            quota.held_back_share(before[path], seconds) for path, quota in self._quotas.items() if path in before
        ]
        held_ms = min(max(shares, default=0.0) * seconds * 1e3, sum(map(core_wait_ms, steps)))
        return [compute_ms(step, held_ms=held_ms / len(steps)) for step in steps]


def core_wait_ms(step: Step) -> float:
    """Return how long a rank waited for a core in a step, ms, but for the time in which it waited for others anyway."""
    return sum(ms for phase, ms in (step.core_wait_ms or {}).items() if phase != "sync")


def compute_ms(step: Step, *, held_ms: float) -> float | None:
    """Return the compute of a step, ms, for ``held_ms`` of which a quota held it back; None: not known."""
    if step.step_ms is None or step.sync_exposed_ms is None:
        return None
    return max(step.step_ms - step.sync_exposed_ms - core_wait_ms(step) + held_ms, 1e-6)
