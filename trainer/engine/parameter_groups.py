"""Groups of parameters with settings of their own: by a task's hook, by weight decay, and by the optimizer's kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from trainer.contract.errors import RequestError, nearest
from trainer.contract.options import Training
from trainer.tasks.task import Task

KEYS = ("params", "lr_scale", "weight_decay", "muon")
"""What a group of a task may set."""


def parameter_groups(task: Task, model: nn.Module, options: Training) -> list[dict[str, Any]]:
    """Return the trained parameters in groups with ``params``, ``lr``, ``weight_decay`` and, for Muon, ``muon``.

    Parameters with equal settings share a group, in the order of the model. Muon trains matrices that are no embedding.

    Raises:
        RequestError: the task's hook returns something else; one line that names its class.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    names = {id(parameter): name for name, parameter in named}
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)}
    frozen = {id(parameter) for parameter in model.parameters() if not parameter.requires_grad}
    asked = [*_groups_of(task, model, {**dict.fromkeys(frozen, ""), **names})]
    taken = {id(parameter) for group in asked for parameter in group["params"]}
    asked.append({"params": [parameter for _, parameter in named if id(parameter) not in taken]})
    order = {id(parameter): index for index, (_, parameter) in enumerate(named)}
    groups: dict[tuple[tuple[str, Any], ...], list[nn.Parameter]] = {}
    for group in asked:
        for parameter in group["params"]:
            if id(parameter) in frozen:
                continue
            decays = options.decay_norms or parameter.dim() > 1 or "weight_decay" in group
            settings = {
                "lr": options.lr[0] * group.get("lr_scale", 1.0),
                "weight_decay": group.get("weight_decay", options.weight_decay) if decays else 0.0,
            }
            if options.optimizer == "muon":
                is_matrix = parameter.dim() == 2 and id(parameter) not in embeddings
                settings["muon"] = is_matrix and bool(group.get("muon", True))
            groups.setdefault(tuple(settings.items()), []).append(parameter)
    return [
        {"params": sorted(parameters, key=lambda parameter: order[id(parameter)]), **dict(settings)}
        for settings, parameters in groups.items()
    ]


def _groups_of(task: Task, model: nn.Module, names: Mapping[int, str]) -> Sequence[dict[str, Any]]:
    """Return the groups of the task's hook, checked; ``names``: of the model's parameters, by identity."""
    where = f"{type(task).__name__}.parameter_groups()"
    returned = task.parameter_groups(model)
    if not isinstance(returned, Sequence):
        raise RequestError(f"{where} returned a {type(returned).__name__}; it must return a list of dicts")
    seen: set[int] = set()
    groups = []
    for index, group in enumerate(returned):
        if not isinstance(group, Mapping) or "params" not in group:
            raise RequestError(f"{where} returned at {index} no dict with params")
        for key in group:
            if key not in KEYS:
                raise RequestError(f"{where} returned the key {key!r} at {index}{nearest(str(key), KEYS)}")
        for key in ("lr_scale", "weight_decay"):
            value = group.get(key, 0.0)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < float("inf"):
                raise RequestError(f"{where} returned {key} {value!r} at {index}; it must be a number from 0")
        parameters = list(group["params"])
        for parameter in parameters:
            if id(parameter) not in names:
                raise RequestError(f"{where} returned params at {index} with one that is not the model's")
            if id(parameter) in seen:
                raise RequestError(f"{where} returned {names[id(parameter)] or 'a frozen parameter'} twice")
            seen.add(id(parameter))
        groups.append({**group, "params": parameters})
    return groups
