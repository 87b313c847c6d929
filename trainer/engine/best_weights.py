"""Keeps the weights of the best validation for the test, which comes after the last update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from trainer import distributed
from trainer.checkpoint import BEST, CheckpointError, copy_to_cpu, load, peek, step_name, weights_of
from trainer.contract.outcome import BEST_NOT_TESTED
from trainer.engine import reports
from trainer.engine.stopping import Best
from trainer.engine.worker_context import WorkerContext


class BestWeights:
    """The best weights of one training, in rank 0's memory; of a resumed one until then in its checkpoints.

    In memory, because the file may not be: checkpoints may be switched off, or the disk full. It is a copy of the
    weights alone, beside which a checkpoint that is being written is several times as large.
    """

    def __init__(self, *, wanted: bool) -> None:
        """Keep nothing yet.

        Args:
            wanted: whether they are to be kept here: on rank 0, when they will be tested.
        """
        self._wanted = wanted
        self._weights: dict[str, Any] | None = None
        self._file: Path | None = None
        self._why_not = ""

    def keep(self, model: nn.Module) -> None:
        """Keep a model's weights as the best so far."""
        if not self._wanted:
            return
        self._file = None
        try:
            self._weights = copy_to_cpu(model.state_dict())
        except CheckpointError as error:
            self._weights, self._why_not = None, str(error)

    def resumed(self, source: str, best: Best) -> Path | None:
        """Look for them beside the checkpoint from which the training goes on; return their file, None without one."""
        self._file = None
        if best.value is None:
            return None
        path = Path(source)
        folder = path.parent
        for candidate in dict.fromkeys((folder / BEST, folder / step_name(best.step), path)):
            if candidate.is_file() and _is_of(candidate, best):
                self._file = candidate
                return candidate
        self._why_not = f"no checkpoint of it in {folder}, from which the training was resumed"
        return None

    def _find(self, best: Best) -> tuple[dict[str, Any] | None, str]:
        """Return the weights of the best validation, or None and in one line why they are not there."""
        if self._weights is not None or self._file is None:
            return self._weights, self._why_not
        try:
            if not _is_of(self._file, best):
                return None, f"{self._file} is gone, or was replaced"
            return weights_of(load(self._file), source=str(self._file)), ""
        except CheckpointError as error:
            return None, str(error)

    def load_into(self, model: nn.Module, best: Best, ctx: WorkerContext, *, last_step: int) -> bool:
        """Give the model of every rank the best weights; return whether it has them. Every rank takes part.

        Args:
            model: of this rank.
            best: the best validation.
            ctx: where it is reported that they cannot be had.
            last_step: optimizer steps of the weights that the model has.
        """
        ctx.waits()
        weights, why_not = distributed.from_master(lambda: self._find(best))
        if weights is None:
            text = f"the last weights are tested, of step {last_step}, not the best, of step {best.step}: {why_not}"
            reports.remark(ctx, BEST_NOT_TESTED, text, severity="warning")
            return False
        model.load_state_dict(weights)
        return True


def _is_of(path: Path, best: Best) -> bool:
    """Whether a file is the checkpoint of this best validation: another training may have left its files there."""
    try:
        entries = peek(path)
    except CheckpointError:
        return False
    return entries.get("updates") == best.step and entries.get("best") == {**best.state_dict(), "since": 0}
