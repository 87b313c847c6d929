"""Classification: its loss with label smoothing and weights of the classes, and its predictions.

Shapes: N items, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.contract.errors import RequestError
from trainer.contract.task_options import DocNNOptions, MnistOptions, listed_weights
from trainer.tasks.task import Task


class Classifier(Task):
    """Base of the tasks that choose one of several classes.

    A validation's loss is the plain cross-entropy: that of trainings with other smoothing or weights compares with it.
    """

    options: DocNNOptions | MnistOptions
    loss_unit = "nats"

    def __init__(self, options: DocNNOptions | MnistOptions) -> None:
        super().__init__(options)
        # With weights the items of a step are the weights of its samples, which the ranks sum.
        self.count_per_sample = None if options.class_weights else 1
        self._class_weights: Tensor | None = None
        """``[C]``, float64; None: all alike."""
        self._restored_weights: list[float] | None = None
        """Balanced weights of the checkpoint's training."""
        self._weights_note = ""

    def data_note(self) -> str:
        return self._weights_note

    def state_dict(self) -> Mapping[str, Any]:
        """Return the weights of the classes, if they were computed from data."""
        return {} if self._restored_weights is None else {"class_weights": self._restored_weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved = state.get("class_weights")
        self._restored_weights = None if saved is None else [float(weight) for weight in saved]

    def weigh_classes(self, classes: Tensor, labels: Sequence[str], *, source: str) -> None:
        """Set the weights of the classes, of the options or balanced by the training samples' ``classes`` [N]."""
        if self.options.class_weights is None:
            return
        weights = listed_weights(self.options.class_weights)
        if weights is None:
            if self._restored_weights is None or len(self._restored_weights) != len(labels):
                self._restored_weights = balanced_weights(classes, len(labels)).tolist()
            weights = tuple(self._restored_weights)
        if len(weights) != len(labels):
            known = ", ".join(labels[:10]) + (", …" if len(labels) > 10 else "")
            raise RequestError(
                f"class_weights has {len(weights)} numbers, but {source} has {len(labels)} labels: {known}"
            )
        self._class_weights = torch.tensor(weights, dtype=torch.float64)
        listed = ", ".join(f"{label} {weight:.4g}" for label, weight in zip(labels[:10], weights, strict=False))
        self._weights_note = f"class weights: {listed}{', …' if len(labels) > 10 else ''}"

    def parameter_groups(self, model: nn.Module) -> Sequence[Mapping[str, Any]]:
        """Return the output layer, which Muon does not train."""
        return [{"params": [p for name, p in model.named_parameters() if name.startswith("output.")], "muon": False}]

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | int, Mapping[str, Tensor]]:
        """Return the loss of items and their classes ``[N]``: with smoothing and weights, but plain in a validation."""
        items, classes = batch
        logits = model(items)  # [N, C]
        if not model.training:
            return classification_loss(logits, classes)
        smoothing = self.options.label_smoothing
        if self._class_weights is None:
            return classification_loss(logits, classes, label_smoothing=smoothing)
        self._class_weights = weights = self._class_weights.to(logits.device)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = F.cross_entropy(
            logits, classes, weight=weights.to(logits.dtype), label_smoothing=smoothing, reduction="sum"
        )
        return loss, weights[classes].sum(), {}


def balanced_weights(classes: Tensor, count: int) -> Tensor:
    """Return weights ``[C]`` in inverse proportion to the samples of each of ``count`` classes; float64.

    Samples weigh 1 on average, and classes alike in all; a class without a sample weighs 1.
    """
    samples = torch.bincount(classes, minlength=count).double()
    present = samples > 0
    return torch.where(present, len(classes) / (present.sum() * samples.clamp(min=1)), 1.0)


def class_predictions(logits: Tensor, labels: Sequence[str], name: str) -> list[dict[str, Any]]:
    """Return for each row of logits ``[N, C]`` the most probable label, as ``name``, and all ``probabilities``."""
    chosen, shares = logits.argmax(dim=1).tolist(), logits.float().softmax(dim=1).tolist()
    return [
        {name: labels[best], "probabilities": dict(zip(labels, each, strict=True))}
        for best, each in zip(chosen, shares, strict=True)
    ]


def classification_loss(
    logits: Tensor, classes: Tensor, *, label_smoothing: float = 0.0
) -> tuple[Tensor, int, Mapping[str, Tensor]]:
    """Return the summed cross-entropy in nats, the number of items, and of those with the right class.

    Args:
        logits: ``[N, C]``.
        classes: ``[N]``, int64.
        label_smoothing: share of the target that is spread over all classes (Szegedy et al. 2016, section 7).
    """
    correct = (logits.detach().argmax(dim=1) == classes).sum()
    loss = F.cross_entropy(logits, classes, reduction="sum", label_smoothing=label_smoothing)
    return loss, classes.numel(), {"accuracy": correct}
