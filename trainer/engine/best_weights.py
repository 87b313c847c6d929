"""Keeps the weights of the best validation for the test, which comes after the last update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from trainer.checkpoint import BEST, CheckpointError, copy_to_cpu, load, step_name, weights_of
from trainer.engine.stopping import Best


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
        self._resumed_from: Path | None = None
        self._why_not = ""

    def keep(self, model: nn.Module) -> None:
        """Keep a model's weights as the best so far."""
        if not self._wanted:
            return
        self._resumed_from = None
        try:
            self._weights = copy_to_cpu(model.state_dict())
        except CheckpointError as error:
            self._weights, self._why_not = None, str(error)

    def resumed(self, source: str) -> None:
        """Look for them beside the checkpoint from which the training goes on, unless better ones come."""
        self._resumed_from = Path(source)

    def find(self, best: Best) -> tuple[dict[str, Any] | None, str]:
        """Return the weights of the best validation, or None and in one line why they are not there."""
        if self._weights is not None or self._resumed_from is None:
            return self._weights, self._why_not
        folder = self._resumed_from.parent
        why_not = f"no checkpoint of it in {folder}, from which the training was resumed"
        for path in dict.fromkeys((folder / BEST, folder / step_name(best.step), self._resumed_from)):
            if not path.is_file():
                continue
            try:
                state = load(path)
                # Another training may have left its files there.
                if state.get("updates") == best.step and state.get("best") == {**best.state_dict(), "since": 0}:
                    return weights_of(state, source=str(path)), ""
            except CheckpointError as error:
                why_not = str(error)
        return None, why_not
