"""Weights of the best validation, kept for the test after the last update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from trainer import distributed
from trainer.checkpoint import BEST, CheckpointError, copy_to_cpu, load, peek, step_name, weights_of
from trainer.contract.checkpoint_trailer import owner_of
from trainer.contract.outcome import BEST_NOT_TESTED
from trainer.contract.record.checkpoints import checkpoints_in
from trainer.engine import reports
from trainer.engine.stopping import Best
from trainer.engine.worker_context import WorkerContext


class BestWeights:
    """Best weights of a training, in rank 0's memory; after a resume in a checkpoint, until there are better ones.

    In memory, because there may be no file: checkpoints may be switched off, or the disk full. The copy has the weights
    alone; a checkpoint that is being written takes several times as much memory.
    """

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted
        self._weights: dict[str, Any] | None = None
        self._file: Path | None = None
        self._missing_reason = ""

    def keep(self, model: nn.Module) -> None:
        if not self._wanted:
            return
        self._file = None
        try:
            self._weights = copy_to_cpu(model.state_dict())
        except CheckpointError as error:
            self._weights, self._missing_reason = None, str(error)

    def find_beside(self, source: str, best: Best) -> Path | None:
        """Find the best checkpoint beside the one that is resumed, or that one itself; return it, None without one."""
        self._file = None
        if best.value is None:
            return None
        path = Path(source)
        folder = path.parent
        others = sorted(folder / name for name in checkpoints_in(folder))
        for candidate in dict.fromkeys((folder / BEST, folder / step_name(best.step), path, *others)):
            if candidate.is_file() and owner_of(candidate) == owner_of(path) and _is_of(candidate, best):
                self._file = candidate
                return candidate
        self._missing_reason = f"{folder}, from which the training was resumed, has no checkpoint of that step"
        return None

    def _find(self, best: Best) -> tuple[dict[str, Any] | None, str]:
        """Return the weights of the best validation, or None and the reason in one line."""
        if self._weights is not None or self._file is None:
            return self._weights, self._missing_reason
        try:
            if not _is_of(self._file, best):
                return None, f"{self._file} is gone, or was replaced"
            return weights_of(load(self._file), source=str(self._file)), ""
        except CheckpointError as error:
            return None, str(error)

    def load_into(self, model: nn.Module, best: Best, ctx: WorkerContext, *, last_step: int) -> bool:
        """Load the best weights on all ranks; return whether there are any. Every rank calls this."""
        ctx.before_wait()
        weights, reason = distributed.from_master(lambda: self._find(best))
        if weights is None:
            text = f"testing the last weights (step {last_step}), not the best (step {best.step}): {reason}"
            reports.remark(ctx, BEST_NOT_TESTED, text, severity="warning")
            return False
        model.load_state_dict(weights)
        return True


def _is_of(path: Path, best: Best) -> bool:
    """Return whether a file is the checkpoint of this best validation; another training may have left files there."""
    try:
        entries = peek(path)
    except CheckpointError:
        return False
    return entries.get("updates") == best.step and entries.get("best") == {**best.state_dict(), "since": 0}
