"""Check that a checkpoint fits a training, entry by entry, and restoring of model, optimizer and random state."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta
from torch import nn
from torch.optim import Optimizer

from trainer.checkpoint import ENTRIES, CheckpointError, difference, kinds, restore_rng, weights_of
from trainer.contract.errors import RequestError
from trainer.contract.option_rules import flag_of
from trainer.contract.options import Training
from trainer.engine.task_state import difference as difference_of_states
from trainer.tasks.registry import is_same_task

Count = Annotated[int, Meta(ge=0, le=2**53)]
S = TypeVar("S")
OF_THE_START = frozenset(("resume", "checkpoint_run", "finetune_from", "finetune_partial", "seed"))
"""Keys of ``[train]`` by which a training starts; ``seed_effect`` speaks of the seed."""
_FIELD = re.compile(r"(?P<reason>.*) - at `\$(?P<path>.*)`")


class _Position(msgspec.Struct):
    epoch: Annotated[int, Meta(ge=1, le=2**53)]
    consumed: Count
    samples: Annotated[int, Meta(ge=1, le=2**53)]
    seed: Annotated[int, Meta(ge=0, le=2**32 - 1)]
    shuffle: Annotated[int, Meta(ge=0, le=1)]
    chunk: Annotated[int, Meta(ge=0, le=2**32)]
    # Of samples by index only:
    curriculum: Count = 0
    fixed_ranks: Count = 0
    fixed_batch: Count = 0
    max_tokens: Count = 0
    max_samples: Count = 0
    multiple: Annotated[int, Meta(ge=1, le=2**53)] = 1
    # Of a stream only:
    stream: Annotated[int, Meta(ge=0, le=1)] = 0
    shards: Count = 0
    head: str = ""
    stream_state: dict[str, Any] | None = None


class _Schedule(msgspec.Struct):
    updates: Count
    planned: Count
    end: Count


class _Best(msgspec.Struct):
    metric: str
    value: float | None
    step: Count
    since: Count


class _Scaler(msgspec.Struct, rename={"growth_tracker": "_growth_tracker"}):
    """State of torch's ``GradScaler``, of a training in fp16; it is an empty dict in another precision."""

    scale: Annotated[float, Meta(gt=1e-38, le=1e38)]
    growth_factor: Annotated[float, Meta(gt=1, le=1e9)]
    backoff_factor: Annotated[float, Meta(gt=0, lt=1)]
    growth_interval: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    growth_tracker: Annotated[int, Meta(ge=0, le=2**31 - 1)]


class _InFp16(msgspec.Struct):
    scaler: _Scaler


class DataDigests(msgspec.Struct):
    """Size of the training data, and digests of some samples."""

    samples: Count
    known: list[tuple[Count, str]]
    splits: dict[str, DataDigests] = {}
    """Those of the other splits, each without ones of its own."""


class SavedShares(msgspec.Struct, frozen=True):
    """Balanced shares of the ranks, most samples that the memory of each holds, 0 if not known, and their devices."""

    shares: list[Annotated[int, Meta(ge=1, le=2**53)]] = []
    bounds: list[Count] = []
    models: list[str] = []


class CheckpointEntries(msgspec.Struct):
    """Entries of a checkpoint; those of type ``Any`` are compared with the model and the optimizer."""

    task: str
    updates: Count
    count_estimate: Annotated[float, Meta(gt=0, le=1e300)]
    model: dict[str, Any]
    parameters: list[str]
    """Names of the parameters that the optimizer updates, in its order."""
    optimizer: dict[str, Any]
    schedule: _Schedule
    scaler: dict[str, Any]
    position: _Position
    best: _Best
    validated_at: Annotated[int, Meta(ge=-1, le=2**53)]
    data: DataDigests
    rng: list[dict[str, Any]]
    recipe: str
    task_state: dict[str, Any]
    shares: SavedShares = SavedShares()
    """Absent where they are not balanced."""
    plain: dict[str, Any] | None = None
    """The plain weights of the parameters, if ``model`` has their average."""


class WeightEntries(msgspec.Struct):
    """Entries of a checkpoint that an evaluation needs besides the weights."""

    task: str
    updates: Count
    position: _Position
    data: DataDigests
    task_state: dict[str, Any]


def read_entries(state: Mapping[str, Any], *, source: str) -> CheckpointEntries:
    """Return a checkpoint's entries; raise if one is not as it was saved."""
    saved = state.get(ENTRIES)
    if not isinstance(saved, Mapping):
        problem = "is missing" if ENTRIES not in state else f"is {kinds(saved, ENTRIES)[ENTRIES]}, but must be a dict"
        raise CheckpointError(f"{source}: entry {ENTRIES}, the list of saved entries, {problem}")
    present = kinds({key: value for key, value in state.items() if key != ENTRIES})
    if wrong := difference(present, saved, of=f"in {ENTRIES}, its list of saved entries"):
        raise CheckpointError(f"{source}: {one_line(wrong)}")
    entries = _convert(state, CheckpointEntries, source)
    if entries.scaler:
        _convert(state, _InFp16, source)
    if entries.schedule.updates != entries.updates:
        raise CheckpointError(
            f"{source}: entry schedule['updates'] is {entries.schedule.updates}, but 'updates' is {entries.updates}"
        )
    return entries


def require_weights(
    state: Mapping[str, Any], model: nn.Module, *, task: str, task_state: Mapping[str, Any], source: str
) -> WeightEntries:
    """Return a checkpoint's entries; raise if its weights are of another task, or fit neither state nor model."""
    entries = _convert(state, WeightEntries, source)
    require_task(entries, task, task_state, source=source)
    if wrong := misfit("model", weights_of(state, source=source), model.state_dict()):
        raise RequestError(f"{source} does not fit this model: {one_line(wrong)}")
    return entries


def require_task(
    entries: CheckpointEntries | WeightEntries, task: str, task_state: Mapping[str, Any], *, source: str
) -> None:
    """Require the task, and the state of it, with which the weights of a checkpoint were trained."""
    if not is_same_task(entries.task, task):
        raise RequestError(
            f"{source} is of task {entries.task!r}, but this run's is {task!r}: a renamed file or class needs its old "
            "name; --finetune-from begins with the weights alone"
        )
    if wrong := difference_of_states(entries.task_state, task_state):
        raise RequestError(
            f"{source} does not fit this run's data: in the task's state {one_line(wrong)}, where the weights were "
            "trained"
        )


def misfit(entry: str, saved: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Describe the first difference between saved tensors and those of this run's model; empty if they fit."""
    return difference(kinds(saved, entry), kinds(own, entry), of="in the model of this run")


def _convert(state: Mapping[str, Any], schema: type[S], source: str) -> S:
    try:
        return msgspec.convert(state, schema)
    except msgspec.ValidationError as error:
        matched = _FIELD.fullmatch(one_line(str(error)))
        where = f"entry {matched['path'].removeprefix('.')}: " if matched else ""
        raise CheckpointError(f"{source}: {where}{matched['reason'] if matched else error}") from None


def parameter_names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Return the names of an optimizer's parameters, in its order; an empty name for one that is not the model's."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names.get(id(parameter), "") for group in optimizer.param_groups for parameter in group["params"]]


def parameter_difference(saved: Sequence[str], own: Sequence[str]) -> str:
    """Describe the first difference between the names of trained parameters; empty if they are the same."""
    if len(saved) != len(own):
        return f"entry parameters names {len(saved)} trained parameters, but this run trains {len(own)}"
    for index, (was, name) in enumerate(zip(saved, own, strict=True)):
        if was != name:
            return f"entry parameters[{index}] is {was!r}, but the optimizer of this run has {name!r} there"
    return ""


def resume_rng(entries: CheckpointEntries, *, rank: int, world_size: int, source: str) -> None:
    """Restore this rank's random state from a checkpoint; do nothing if that is of another world size."""
    if len(entries.rng) != world_size:
        return
    try:
        restore_rng(entries.rng[rank])
    except (RuntimeError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise CheckpointError(f"{source}: entry rng[{rank}] cannot be restored: {one_line(str(error))}") from None


def seed_effect(position: Mapping[str, int], *, seed: int, shuffle: bool, same_ranks: bool) -> str:
    """Describe the effect of a seed that differs from the checkpoint's; empty without a difference."""
    was, epoch = position["seed"], position["epoch"]
    if was == seed:
        return ""
    numbers = (
        f"the ranks' random states continue as saved, from seed {was}"
        if same_ranks
        else "the random states start from it"
    )
    if not shuffle:
        return f"seed {seed} does not change the order of the data, which is not shuffled; {numbers}"
    if position["consumed"]:
        rest = f"the rest of epoch {epoch} keeps the order of seed {was}"
        return f"seed {seed} orders the data from epoch {epoch + 1} on, {rest}; {numbers}"
    return f"seed {seed} orders the data from epoch {epoch} on; {numbers}"


TYPED = "# typed by hand, without a recipe\n"
"""First line of the text that stands for a recipe in the checkpoints of a training without one."""


def typed_settings(options: Training, task_options: Any) -> str:
    """Return the options of a training without a recipe as the tables of one; those of ``[train]`` without defaults."""
    of_train, defaults = msgspec.to_builtins(options), msgspec.to_builtins(Training())
    tables = {
        "train": {name: value for name, value in of_train.items() if value != defaults[name]},
        "task": msgspec.to_builtins(task_options) if isinstance(task_options, msgspec.Struct) else {},
    }
    text = TYPED
    for table, values in tables.items():
        text += f"[{table}]\n"
        for name, value in values.items():
            single = value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
            if single is not None:
                text += f"{name} = {json.dumps(single)}\n"
    return text


def changed_settings(saved: str, own: str) -> str:
    """Describe the keys of ``[train]`` and ``[task]`` in which two recipes differ; empty if either is not known.

    Of two commands typed by hand they are flags; a recipe and a command are not compared.

    A resumed training follows its own recipe, whatever the checkpoint was trained with.
    """
    typed = saved.startswith(TYPED)
    before, now = _settings(saved), _settings(own)
    if not (before and now) or typed != own.startswith(TYPED):
        return ""
    changed = []
    for key in sorted(before | now):
        if before.get(key) != now.get(key):
            values = _shown(key, now), _shown(key, before)
            name = flag_of(key.partition(".")[2]) if typed else key
            changed.append(f"{name} changed" if "" in values else "{} {} (was {})".format(name, *values))
    return f"goes on with other settings than before: {', '.join(changed)}" if changed else ""


def _settings(recipe: str) -> dict[str, Any]:
    try:
        tables = tomllib.loads(recipe)
    except tomllib.TOMLDecodeError:  # it was altered
        return {}
    return {
        f"{table}.{key}": value
        for table in ("train", "task")
        for key, value in (tables[table] if isinstance(tables.get(table), dict) else {}).items()
        if table == "task" or not (key in OF_THE_START or key.startswith("reset_"))
    }


def _shown(key: str, settings: Mapping[str, Any]) -> str:
    """Return a number, or a word of ``[train]``; else empty: the record may leave this machine."""
    value = settings.get(key)
    if isinstance(value, int | float):
        return json.dumps(value)
    if isinstance(value, str) and key.startswith("train.") and re.fullmatch(r"\w{1,30}", value):
        return value
    return "not set" if value is None else ""


def one_line(text: str) -> str:
    """Return a text as one line of bounded length, without controls: a file may hold anything."""
    return "".join(char for char in " ".join(text.split()) if char.isprintable())[:300]
