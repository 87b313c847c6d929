"""State of a task, such as its vocabulary: taken for checkpoints, restored before the data is read, and compared.

Without it, weights that were trained with one numbering of words and labels would be used with another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from trainer.checkpoint import CheckpointError, copy_to_cpu
from trainer.contract.errors import MachineNotReadyError, RequestError, quoted
from trainer.distributed.encoding import encode
from trainer.engine.data_sample import hex_digest
from trainer.tasks.task import Task

TASK_STATE = "task_state"
"""Key of the state in a checkpoint and in the metadata of exported weights."""
_ABSENT = object()


def state_of(task: Task) -> dict[str, Any]:
    """Return a copy of a task's state; refuse one that is no dict, or that a checkpoint cannot hold."""
    state = task.state_dict()
    where = f"{type(task).__name__}.state_dict()"
    if not isinstance(state, Mapping):
        raise RequestError(f"{where} returned a {type(state).__name__}; it must return a dict")
    try:
        copied: dict[str, Any] = copy_to_cpu(dict(state))
    except CheckpointError as error:
        raise RequestError(f"{where}: {error}") from None
    return copied


def digest(state: Mapping[str, Any]) -> str:
    """Return a digest of a state, by which the ranks compare theirs."""
    return hex_digest(encode(dict(state)), size=6)


def restore(task: Task, state: Mapping[str, Any], *, source: str) -> None:
    """Restore a state of a checkpoint, before the task reads its data."""
    try:
        task.load_state_dict(state)
    except MachineNotReadyError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        text = str(error) if isinstance(error, RequestError) else f"{type(error).__name__}: {error}"
        raise RequestError(f"{source} does not fit this task: entry {TASK_STATE}: {' '.join(text.split())}") from None


def without_task_state(source: str) -> str:
    """Describe a file of weights that holds no state of a task which has one."""
    return (
        f"{source} does not hold the state of its task (another program wrote it): vocabulary "
        "and labels are those of this run's data, which must be the data of that training"
    )


def difference(saved: Any, own: Any, path: str = "") -> str:
    """Describe the first difference of two states, at ``path`` in the whole ones; empty if they are equal."""
    where = path or "the state"
    if saved is _ABSENT:
        return f"{where} is {_short(own)} here, and absent there"
    if own is _ABSENT:
        return f"{where} is absent here, and {_short(saved)} there"
    if isinstance(saved, Mapping) and isinstance(own, Mapping):
        pairs = [
            (f"{path}.{key}" if path else str(key), saved.get(key, _ABSENT), own.get(key, _ABSENT))
            for key in {**saved, **own}
        ]
    elif isinstance(saved, list | tuple) and isinstance(own, list | tuple):
        longest = max(len(saved), len(own))
        padded = ([*each, *[_ABSENT] * (longest - len(each))] for each in (saved, own))
        pairs = [(f"{path}[{index}]", was, now) for index, (was, now) in enumerate(zip(*padded, strict=True))]
    elif isinstance(saved, Tensor) and isinstance(own, Tensor):
        same = saved.dtype == own.dtype and saved.shape == own.shape and saved.equal(own)
        return "" if same else f"{where} has other numbers"
    else:
        same = type(saved) is type(own) and (saved == own or (saved != saved and own != own))
        return "" if same else f"{where} is {_short(own)} here, and {_short(saved)} there"
    return next((text for at, was, now in pairs if (text := difference(was, now, at))), "")


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    if isinstance(value, str) and len(value) > 40:
        return f"a text of {len(value):,} characters"
    return quoted(value) if value is None or isinstance(value, str | int | float) else f"a {type(value).__name__}"
