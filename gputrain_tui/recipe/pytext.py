"""Translates PyText's JSON configuration: its wrapper, its world size and its document classification task.

A key that would change the training and has no counterpart is an error that names it: none is ignored silently.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from gputrain_tui.recipe.model import RANK_KEYS
from gputrain_tui.recipe.source import TOP_LEVEL_KEYS, Key, Source
from trainer.contract.errors import RequestError, nearest, quoted

DOC_CLASSIFICATION_TASKS = ("DocClassificationTask", "DocumentClassificationTask")

OPTIMIZERS = {"Adam": "adam", "AdamW": "adamw", "SGD": "sgd", "Adagrad": "adagrad"}

CLASS_NAMES = {
    *("Data", "TSVDataSource", "Batcher", "PoolingBatcher", "DocModel", "DocNNRepresentation"),
    *("Trainer", "TaskTrainer", *OPTIMIZERS),
}
"""Keys by which newer versions of PyText give a table's class: ``{"Data": {…}}``."""
DEFAULTS: dict[Key, Any] = {
    ("train", "batch_size"): 16,
    ("train", "max_epochs"): 10,
    ("train", "optimizer"): "adam",
    ("train", "lr"): 1e-3,
    ("train", "weight_decay"): 1e-5,
    ("train", "seed"): 0,
    ("train", "best_metric"): "accuracy",
}
"""PyText's own defaults that differ from the trainer's."""
SCHEMA_NAMES = {"text": "text", "label": "label", "doc_label": "label"}
"""PyText's names of the task's columns → the kind of ``docnn``'s column."""
FIELD_NAMES: tuple[Key, ...] = (("data_handler", "columns_to_read"), ("data", "source", "field_names"))
"""Keys that list a file's columns; such a file has no header."""
COLUMN_MAPPING: Key = ("data", "source", "column_mapping")
"""Key of the table that maps the file's names of columns to PyText's."""
KEY_MAP: dict[Key, Key] = {
    ("data_handler", "train_path"): ("task", "train_path"),
    ("data_handler", "eval_path"): ("task", "eval_path"),
    ("data_handler", "test_path"): ("task", "test_path"),
    ("data_handler", "train_batch_size"): ("train", "batch_size"),
    ("data_handler", "eval_batch_size"): ("train", "valid_batch_size"),
    ("data_handler", "shuffle"): ("train", "shuffle"),
    ("data", "source", "train_filename"): ("task", "train_path"),
    ("data", "source", "eval_filename"): ("task", "eval_path"),
    ("data", "source", "test_filename"): ("task", "test_path"),
    ("data", "batcher", "train_batch_size"): ("train", "batch_size"),
    ("data", "batcher", "eval_batch_size"): ("train", "valid_batch_size"),
    ("trainer", "epochs"): ("train", "max_epochs"),
    ("trainer", "early_stop_after"): ("train", "patience"),
    ("trainer", "max_clip_norm"): ("train", "clip_norm"),
    ("trainer", "num_accumulated_batches"): ("train", "update_freq"),
    ("trainer", "optimizer", "lr"): ("train", "lr"),
    ("trainer", "optimizer", "weight_decay"): ("train", "weight_decay"),
    ("trainer", "optimizer", "eps"): ("train", "adam_eps"),
    ("trainer", "optimizer", "momentum"): ("train", "momentum"),
    ("optimizer", "type"): ("train", "optimizer"),
    ("optimizer", "lr"): ("train", "lr"),
    ("optimizer", "weight_decay"): ("train", "weight_decay"),
    ("optimizer", "momentum"): ("train", "momentum"),
    ("model", "representation", "dropout"): ("task", "dropout"),
    ("model", "representation", "cnn", "kernel_num"): ("task", "kernel_num"),
    ("model", "representation", "cnn", "kernel_sizes"): ("task", "kernel_sizes"),
}
"""Path within PyText's task, without class names → the recipe's key."""
IGNORED_KEYS = {
    "version": "the keys of all versions are read the same way",
    "use_tensorboard": "all values are in the run's record; `gputrain attach` plots them",
    **dict.fromkeys(
        ("export", "export_caffe2_path", "export_onnx_path", "export_torchscript_path"),
        "`gputrain export RUN --to safetensors` writes the weights of the best checkpoint",
    ),
    "gpu_streams_for_distributed_training": "gradients are reduced on a separate stream",
    "save_snapshot_path": "checkpoints go to the run directory",
    "modules_save_dir": "checkpoints hold the whole model",
    "report_eval_results": "every validation is in the record",
}


WORLD_SIZE, CUDA = "distributed_world_size", "use_cuda_if_available"
"""PyText's keys of the number of ranks on all nodes, and of their devices; a recipe's ``origins`` have them too."""
NODES: Key = ("cluster", "nodes")


class _Values:
    """Values by the recipe's keys, and the configuration's keys from which they come."""

    def __init__(self) -> None:
        self.values: dict[Key, Any] = {}
        self.origins: dict[Key, Key] = {}

    def set(self, key: Key, value: Any, written: Key) -> None:
        self.values[key], self.origins[key] = value, written


def is_pytext(data: Mapping[str, Any]) -> bool:
    """Whether a recipe is a PyText configuration, with or without its ``config`` wrapper."""
    if "config" in data or WORLD_SIZE in data or CUDA in data:
        return True
    return _task_class(data.get("task")) is not None and "train" not in data


def translate(source: Source) -> tuple[Source, tuple[str, ...]]:
    """Return the configuration as a recipe's values, and notes about keys without effect."""
    prefix: Key = ("config",) if "config" in source.data else ()
    config = source.require(prefix, source.data["config"] if prefix else source.data, dict, "a table")
    if outside := [key for key in source.data if prefix and key != "config"]:
        raise RequestError(f"{source.where((outside[0],))} is outside of config, where PyText has all keys")
    made = _Values()
    notes: list[str] = []
    data: dict[str, Any] = {}
    task_class = _task_class(config.get("task"))
    for key, value in config.items():
        written = (*prefix, key)
        if key == "task" and task_class is not None:
            _doc_classification(source, task_class, value[task_class], (*written, task_class), made)
        elif key in TOP_LEVEL_KEYS:
            data[key] = value if key == "name" else dict(source.require(written, value, dict, "a table"))
            made.origins |= {inner: (*prefix, *inner) for inner in _paths(value, (key,))}
        elif key == "random_seed":
            made.set(("train", "seed"), value, written)
        elif key == "use_fp16":
            half = source.require(written, value, bool, "true or false")
            made.set(("train", "precision"), "fp16" if half else "fp32", written)
        elif key in IGNORED_KEYS:
            notes.append(f"{source.where(written)} has no effect: {IGNORED_KEYS[key]}")
        elif key not in (WORLD_SIZE, CUDA) and value not in (None, False, "", [], {}):
            known = [*TOP_LEVEL_KEYS, *IGNORED_KEYS, WORLD_SIZE, CUDA, "random_seed"]
            raise RequestError(f"{source.where(written)} is not understood{nearest(key, known)}")
    cuda = source.require((*prefix, CUDA), config.get(CUDA, True), bool, "true or false")
    for key in (WORLD_SIZE, CUDA):
        made.origins[(key,)] = (*prefix, key)
    if "nodes" not in data.get("cluster", {}) and (task_class is not None or WORLD_SIZE in config or not cuda):
        ranks = "ranks" if cuda else "cpu_ranks"
        made.values[NODES] = [{ranks: config.get(WORLD_SIZE, 1)}]  # one node, this machine
        made.origins |= dict.fromkeys((NODES, (*NODES, 0), (*NODES, 0, ranks)), (*prefix, WORLD_SIZE))
    for (table, name), value in made.values.items():
        data.setdefault(str(table), {})[name] = value
    return replace(source, data=data, origins=made.origins), tuple(notes)


def share_ranks(config: Source, source: Source) -> tuple[Source, int | None]:
    """Reconcile the world size of a configuration with nodes that are given beside it, in a table or by ``--set``.

    Nodes without a number of ranks share the world size equally: 40 ranks on five servers are eight on each. Returns
    the translation with the ranks of all nodes, and the world size that given nodes must have together, else None.
    """
    keys = config.data.get("config", config.data)
    cluster = source.data.get("cluster")
    nodes = cluster.get("nodes") if isinstance(cluster, dict) else None
    replaced = not source.overridden.isdisjoint({NODES, NODES[:1]})
    derived = source.origins.get(NODES) == source.origins.get((WORLD_SIZE,)) and not replaced
    if derived or not isinstance(nodes, list) or not nodes or not all(isinstance(node, dict) for node in nodes):
        return source, None
    cuda = keys.get(CUDA, True)
    for index, node in enumerate(nodes):
        if not cuda and "cpu_ranks" not in node and (used := [key for key in RANK_KEYS if key in node]):
            raise RequestError(
                f"{source.where((CUDA,))} is false, but cluster.nodes[{index}] has {used[0]}: use cpu_ranks for CPUs"
            )
    if WORLD_SIZE not in keys:
        return source, None
    world_size, where = keys[WORLD_SIZE], source.where((WORLD_SIZE,))
    if type(world_size) is not int or world_size < 1:
        raise RequestError(f"{where} is {quoted(world_size)}, but must be an integer >= 1")
    if any(key in node for node in nodes for key in RANK_KEYS):
        return source, world_size
    if world_size % len(nodes):
        raise RequestError(
            f"{where} is {world_size}, which {len(nodes)} nodes cannot share equally: give each of cluster.nodes its "
            f"{'gpus' if cuda else 'cpu_ranks'}"
        )
    share = {"gpus" if cuda else "cpu_ranks": world_size // len(nodes)}
    shared = {**source.data, "cluster": {**source.data["cluster"], "nodes": [{**node, **share} for node in nodes]}}
    return replace(source, data=shared), world_size


def _doc_classification(source: Source, name: str, table: Any, written: Key, made: _Values) -> None:
    if name not in DOC_CLASSIFICATION_TASKS:
        raise RequestError(
            f"{source.where(written)} has no counterpart here{nearest(name, DOC_CLASSIFICATION_TASKS)}; "
            f"of PyText's tasks {DOC_CLASSIFICATION_TASKS[0]} is supported, as docnn"
        )
    made.set(("train", "task"), "docnn", written)
    made.values = DEFAULTS | made.values
    names: tuple[Any, Key] | None = None
    mapping: dict[str, tuple[Any, Key]] = {}
    for path, value in _leaves(table, ()):
        key = (*written, *path)
        for part in path:
            if part in OPTIMIZERS:
                made.set(("train", "optimizer"), OPTIMIZERS[str(part)], key)
        class_free = tuple(part for part in path if part not in CLASS_NAMES)
        if value is None or value == {}:
            continue
        if class_free in FIELD_NAMES:
            names = (value, key)
        elif class_free == COLUMN_MAPPING:
            rule = "a table from the file's columns to text and label"
            raise RequestError(f"{source.where(key)} is {quoted(value)}, but must be {rule}")
        elif class_free[:-1] == COLUMN_MAPPING:
            mapping[str(class_free[-1])] = (value, key)
        elif class_free in KEY_MAP:
            target = KEY_MAP[class_free]
            is_optimizer = target == ("train", "optimizer") and isinstance(value, str)
            made.set(target, value.lower() if is_optimizer else value, key)
        else:
            known = [".".join(map(str, rule)) for rule in (*KEY_MAP, *FIELD_NAMES, COLUMN_MAPPING)]
            guess = nearest(".".join(map(str, class_free)), known)
            raise RequestError(f"{source.where(key)} is not understood{guess}")
    if names is not None:
        made.set(("task", "format"), "no_header", names[1])
    for column, (name, key) in _columns(source, names, mapping).items():
        made.set(("task", column), name, key)


def _columns(
    source: Source, names: tuple[Any, Key] | None, mapping: Mapping[str, tuple[Any, Key]]
) -> dict[str, tuple[str, Key]]:
    """Return ``docnn``'s columns with the keys that give them: numbers if PyText lists a file's columns, else names."""
    for value, key in mapping.values():
        if not isinstance(value, str) or value not in SCHEMA_NAMES:
            guess = nearest(value, SCHEMA_NAMES) if isinstance(value, str) else ""
            raise RequestError(f"{source.where(key)} is {quoted(value)}, but must be text or label{guess}")
    listed, names_key = names or (None, ())
    columns = {name: name for name in mapping}
    if names is not None:
        if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
            raise RequestError(f"{source.where(names_key)} is {quoted(listed)}, but must be a list of column names")
        columns = {name: str(index) for index, name in enumerate(listed)}
        for name, (_, key) in mapping.items():
            if name not in columns:
                raise RequestError(f"{source.where(key)} is not a column in {quoted(listed)}{nearest(name, columns)}")
    kinds: dict[str, tuple[str, Key]] = {}
    for name, column in columns.items():
        value, key = mapping.get(name, (name, names_key))
        kind = SCHEMA_NAMES.get(value)
        if kind in kinds:
            raise RequestError(f"{source.where(key)}: two columns map to {kind}; keep one of them")
        if kind is not None:
            kinds[kind] = (column, key)
    if names is not None and len(kinds) < 2:
        rule = 'must have a "text" and a "doc_label"'
        raise RequestError(f"{source.where(names_key)} is {quoted(listed)}, but {rule}")
    return {f"{kind}_column": column for kind, column in kinds.items()}


def _task_class(task: Any) -> str | None:
    """Return the class of a PyText task: the only key of its table, if capitalised and a table; else None."""
    if not isinstance(task, dict) or len(task) != 1:
        return None
    name, table = next(iter(task.items()))
    return name if name[:1].isupper() and isinstance(table, dict) else None


def _leaves(table: Mapping[str, Any], path: Key) -> Iterator[tuple[Key, Any]]:
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def _paths(value: Any, path: Key) -> Iterator[Key]:
    yield path
    if isinstance(value, dict | list):
        for part, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _paths(item, (*path, part))
