"""Detection of the optimizer whose step ends an iteration, for scripts with several."""

from __future__ import annotations

from typing import Literal
from weakref import ReferenceType, WeakSet, ref

from torch.optim import Optimizer

StepRole = Literal["ends", "belongs", "extends"]


class OptimizerCycle:
    """Order in which optimizers step.

    An iteration is the cycle of optimizers up to the first that steps again: with a discriminator's and a generator's
    optimizer in turn, it ends with the second one's step; if one steps several times for each step of another, each of
    its steps is an iteration. In the first cycle the other optimizers are not known yet: its first step ends the
    iteration, and the steps of the others extend it. So does later on that of one which steps less often, on the batch
    of the iteration that has ended. Where another optimizer steps twice in a row in place of the last one, as where a
    second model is trained after the first, its first two steps are told apart too late.
    """

    def __init__(self) -> None:
        self.made: WeakSet[Optimizer] = WeakSet()
        """Optimizers that may step after a backward pass of their own."""
        self._last: ReferenceType[Optimizer] | None = None
        """The optimizer whose step ends the iteration."""
        self._known = False
        """Whether an optimizer has stepped again, so that the cycle is known."""
        self._seen: WeakSet[Optimizer] = WeakSet()
        self._since: WeakSet[Optimizer] = WeakSet()
        """Optimizers that have stepped since an iteration's end."""
        self._ended: WeakSet[Optimizer] = WeakSet()
        """Optimizers that have stepped in the iteration that has ended."""
        self._steps = 1
        """Iterations in the one that ends."""

    @property
    def may_go_on(self) -> bool:
        """Whether the step of another optimizer may extend the iteration that has ended."""
        return len(self.made) > 1 and not self.made <= self._ended

    def take_steps(self) -> int:
        """Return how many iterations have ended, as they were seen as one."""
        steps, self._steps = self._steps, 1
        return steps

    def ends_with(self, optimizer: Optimizer) -> bool:
        """Return whether this optimizer's step ends the iteration, as far as is known."""
        last = None if self._last is None else self._last()
        return last is None or last is optimizer

    def step(self, optimizer: Optimizer, *, same_batch: bool) -> StepRole:
        """Record an optimizer's step; return whether it ends or belongs to an iteration, or extends the last one.

        ``same_batch``: whether it is made on the batch of the iteration that has ended.
        """
        if not self._known:
            if optimizer in self._seen:
                self._known = True
            else:
                self._seen.add(optimizer)
                self._ended.add(optimizer)
                first = self._last is None
                self._last = ref(optimizer)
                return "ends" if first else "extends"
        if not self.ends_with(optimizer) and optimizer not in self._since:
            if same_batch and optimizer in self.made and optimizer not in self._ended:
                self._ended.add(optimizer)
                return "extends"
            self._since.add(optimizer)
            return "belongs"
        if not self.ends_with(optimizer):  # the one before is not used any more, or not each time
            self._steps = 2
        self._last = ref(optimizer)
        if len(self.made) > 1:
            self._since, self._ended = self._ended, self._since
            self._ended.add(optimizer)
        self._since.clear()
        return "ends"
