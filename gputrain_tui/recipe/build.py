"""Reads a recipe and validates it into the model; an error is one line with file, line and key."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from gputrain_tui.recipe.model import (
    CLUSTER_KEYS,
    LAUNCH_OPTIONS,
    MAX_NAME_CHARS,
    PATTERNS,
    RANK_KEYS,
    Cluster,
    ClusterOptions,
    Node,
    NodeOptions,
    Recipe,
    ReportOptions,
    SlurmOptions,
    train_options,
)
from gputrain_tui.recipe.pytext import is_pytext, share_ranks, translate
from gputrain_tui.recipe.source import TOP_LEVEL_KEYS, Key, Source, override, parse, read
from gputrain_tui.recipe.task_description import describe_task
from gputrain_tui.recipe.values import check_env, inline_toml, parse_gpus, value_text
from trainer.contract.builtin_tasks import BUILT_IN, options_schema
from trainer.contract.errors import RequestError, nearest, quoted
from trainer.contract.fairseq_flags import NO_EFFECT, REFUSED
from trainer.contract.option_rules import require_consistent, require_one_launcher
from trainer.contract.options import Distributed, Script, Training
from trainer.contract.rendezvous_url import parse_rendezvous_url
from trainer.contract.schema import Option, check, check_values, describe

COMPUTED_FLAGS = {
    "distributed_init_method": "set cluster.init_method",
    "distributed_backend": "set cluster.backend",
    "distributed_port": "set cluster.port",
    "distributed_gpus": "set gpus of a node in [[cluster.nodes]]",
    "device_id": "list the device ids in gpus of a node in [[cluster.nodes]]",
    "cpu": "set cpu_ranks of a node in [[cluster.nodes]]",
}
"""Flags that the plan computes → the recipe's key to set instead."""

S = TypeVar("S")


def load(source: str, *, overrides: Sequence[str] = ()) -> Recipe:
    """Read and check a recipe: a TOML or JSON file, or ``-`` for standard input, with ``KEY=VALUE`` settings."""
    return _build(read(source), overrides)


def build(text: str, *, name: str, overrides: Sequence[str] = ()) -> Recipe:
    """Parse and validate the text of a recipe; messages call it ``name``."""
    return _build(parse(text, name=name), overrides)


def _build(source: Source, overrides: Sequence[str]) -> Recipe:
    notes: tuple[str, ...] = ()
    config: Source | None = None
    if is_pytext(source.data):
        before = [setting for setting in overrides if setting.strip().startswith("config.")]
        data, keys = override(source.data, before)
        config = replace(source, data=data, overridden=keys)
        source, notes = translate(config)
        overrides = [setting for setting in overrides if setting not in before]
    data, keys = override(source.data, overrides)
    source = replace(source, data=data, overridden=source.overridden | keys)
    source, world_size = (source, None) if config is None else share_ranks(config, source)
    data = dict(source.data)
    for key in data:
        if key not in TOP_LEVEL_KEYS:
            raise RequestError(f"{source.where((key,))} is not known{_table_hint(key)}")
    _refuse_unusable_text(source, data, ())
    train, launch, script = _train(source)
    slurm = _check(SlurmOptions, _table(source, "slurm"), source, "slurm") if "slurm" in source.data else None
    typed_options, task_options = _task_options(source, train.task)
    cluster = _with_slurm_nodes(_cluster(source), slurm, source)
    if slurm is not None and slurm.requeue and cluster.launcher not in ("auto", "slurm"):
        where = source.where(("slurm", "requeue"))
        raise RequestError(f'{where} needs Slurm, but cluster.launcher is "{cluster.launcher}": keep one')
    if slurm is not None and slurm.requeue and script is None and not train.save:
        where = source.where(("slurm", "requeue"))
        raise RequestError(f"{where} goes on from a checkpoint, but train.save is false: keep one")
    for word in () if slurm is None else slurm.extra:
        if re.match(r"--(array|wait|wrap|test-only)(=|$)|-[aW]", word):
            where = source.where(("slurm", "extra"))
            raise RequestError(f"{where} has {quoted(word)}, but a run is one job, which is followed: remove it")
    _check_spare(cluster, source)
    _check_restart_keys(cluster, slurm, source)
    if script is None:
        require_consistent(
            train, typed_options, where=lambda name: source.where(("train", name)), named=lambda name: f"train.{name}"
        )
    return Recipe(
        name=_name(source),
        cluster=cluster,
        slurm=slurm,
        train=train,
        launch=launch,
        script=script,
        task_options=task_options,
        report=_check(ReportOptions, _table(source, "report"), source, "report"),
        notes=notes,
        origin=source,
        world_size=world_size,
    )


def _table_hint(key: str) -> str:
    """Return the table that an unknown key belongs to, or the known key that it resembles, as the end of a message."""
    if key in {option.name for option in train_options()}:
        return "; it belongs in [train]"
    if key in CLUSTER_KEYS:
        return "; it belongs in [cluster]"
    return nearest(key, TOP_LEVEL_KEYS) or f"; known are {', '.join(TOP_LEVEL_KEYS)}"


def _refuse_unusable_text(source: Source, value: Any, key: Key) -> None:
    """Raise for texts that no command line can carry: with NUL or surrogate characters."""
    if isinstance(value, str) and re.search(r"[\0\ud800-\udfff]", value):
        raise RequestError(f"{source.where(key)} is {quoted(value)}, but must be UTF-8 text without NUL characters")
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for part, item in items:
            _refuse_unusable_text(source, item, (*key, part))


def _name(source: Source) -> str:
    name, where = source.data.get("name", source.default_name[:MAX_NAME_CHARS]), source.where(("name",))
    if isinstance(name, bool | int | float):
        text = inline_toml(value_text(name))
        hint = f"--set 'name={text}'" if ("name",) in source.overridden else f"name = {text}"
        raise RequestError(f"{where} is {value_text(name)}, but name is text: write {hint}")
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise RequestError(f"{where} is {quoted(name)}, but must be one line of text")
    if len(name) > MAX_NAME_CHARS:
        raise RequestError(f"{where} has {len(name)} characters; at most {MAX_NAME_CHARS} are allowed")
    return name.strip()


def _table(source: Source, name: str) -> dict[str, Any]:
    return source.require((name,), source.data.get(name, {}), dict, "a table")


def _check(schema: type[S], values: Mapping[str, Any], source: Source, *table: str | int) -> S:
    options = check(
        schema,
        values,
        where=lambda name: source.where((*table, name)),
        is_text=lambda name: source.is_text((*table, name)),
    )
    for name, (pattern, rule) in PATTERNS.items() if table[0] == "cluster" else ():
        value = getattr(options, name, None)
        if value is not None and not re.fullmatch(pattern, value):
            raise RequestError(f"{source.where((*table, name))} is {quoted(value)}, but must be {rule}")
    return options


def _cluster(source: Source) -> Cluster:
    table = _table(source, "cluster")
    for key in table:
        if key not in CLUSTER_KEYS:
            raise RequestError(f"{source.where(('cluster', key))} is not known{nearest(key, CLUSTER_KEYS)}")
    given = {key: table[key] for key in table if key not in ("env", "nodes")}
    options = _check(ClusterOptions, given, source, "cluster")
    _check_init_method(options, source)
    if options.on_stall == "restart" and not options.max_restarts:
        where = source.where(("cluster", "on_stall"))
        raise RequestError(f'{where} is "restart", but cluster.max_restarts is 0: set it to 1 or more')
    env = _env(source, table.get("env", {}), "cluster")
    cluster = Cluster(**msgspec.structs.asdict(options), env=env)
    if "nodes" not in table:
        return cluster
    where, nodes = source.where(("cluster", "nodes")), table["nodes"]
    if not isinstance(nodes, list) or not all(isinstance(node, dict) for node in nodes):
        raise RequestError(f"{where} must be a list of tables: write [[cluster.nodes]] before each node")
    if not nodes:
        raise RequestError(f"{where} is empty: name at least one node, or leave it out to use this machine")
    nodes = tuple(_node(source, index, node) for index, node in enumerate(nodes))
    return msgspec.structs.replace(cluster, nodes=nodes)


def _check_spare(cluster: Cluster, source: Source) -> None:
    """Raise for spare hosts that are no hosts, or are nodes or spares already."""
    where, (pattern, rule) = source.where(("cluster", "spare")), PATTERNS["host"]
    nodes = {node.host for node in cluster.nodes}
    for index, host in enumerate(cluster.spare):
        if not re.fullmatch(pattern, host):
            raise RequestError(f"{where} has {quoted(host)}, but each must be {rule}")
        if host in nodes or host in cluster.spare[:index]:
            twice = "is a node" if host in nodes else "is named twice"
            raise RequestError(f"{where} has {quoted(host)}, which {twice}: name a host once, in nodes or in spare")


def _check_restart_keys(cluster: Cluster, slurm: SlurmOptions | None, source: Source) -> None:
    """Raise for keys about the hosts of a restart where none follows, or where its hosts are not reached over ssh."""
    launcher = "slurm" if slurm is not None and cluster.launcher == "auto" else cluster.launcher
    for name in ("spare", "min_ranks"):
        where = source.where(("cluster", name))
        if not getattr(cluster, name):
            continue
        if launcher not in ("auto", "ssh"):
            raise RequestError(
                f'{where} needs cluster.launcher = "ssh", but it is "{launcher}": change it, or remove {name}'
            )
        if not any(node.host for node in cluster.nodes):
            raise RequestError(f"{where} needs nodes on other hosts, started over ssh, but no node names a host")
        if not cluster.max_restarts:
            raise RequestError(f"{where} is used at a restart, but cluster.max_restarts is 0: set it to 1 or more")


def _node(source: Source, index: int, values: Mapping[str, Any]) -> Node:
    key: Key = ("cluster", "nodes", index)
    rest = {name: value for name, value in values.items() if name != "env" and (name != "gpus" or value is None)}
    options = _check(NodeOptions, rest, source, *key)
    node = Node(**msgspec.structs.asdict(options), env=_env(source, values.get("env", {}), *key))
    if values.get("gpus") is not None:
        gpus_key = (*key, "gpus")
        gpus = parse_gpus(values["gpus"], where=source.where(gpus_key), is_text=source.is_text(gpus_key))
        node = msgspec.structs.replace(node, gpus=gpus)
    given = [name for name in RANK_KEYS if getattr(node, name) is not None]
    if len(given) != 1:
        what = f"has {' and '.join(given)}" if given else "has no ranks"
        raise RequestError(f"{source.where(key)} {what}; give one of {', '.join(RANK_KEYS)}")
    return node


def _with_slurm_nodes(cluster: Cluster, slurm: SlurmOptions | None, source: Source) -> Cluster:
    """Return the cluster with ``slurm.nodes`` copies of its only node, if that key is set."""
    if slurm is None or slurm.nodes is None or slurm.nodes == len(cluster.nodes):
        return cluster
    where = source.where(("slurm", "nodes"))
    if len(cluster.nodes) > 1:
        raise RequestError(f"{where} is {slurm.nodes}, but there are {len(cluster.nodes)} [[cluster.nodes]]; keep one")
    if cluster.nodes[0].host is not None:
        raise RequestError(f"{where} is {slurm.nodes}, but cluster.nodes[0] has a host: remove it, as Slurm chooses")
    return msgspec.structs.replace(cluster, nodes=cluster.nodes * slurm.nodes)


def _check_init_method(options: ClusterOptions, source: Source) -> None:
    method, where = options.init_method, source.where(("cluster", "init_method"))
    if method in ("auto", "env://"):
        return
    url = parse_rendezvous_url(method)
    if url is None or url.scheme == "env":
        raise RequestError(
            f"{where} is {quoted(method)}, but must be auto, tcp://HOST:PORT, file:///SHARED/PATH (absolute) or env://"
        )
    if url.scheme == "file":
        return
    if not url.has_port:
        raise RequestError(f"{where} names port {url.port}, but a port is 1 to 65535")
    if options.port not in (0, url.port):
        where = source.where(("cluster", "port"))
        raise RequestError(f"{where} is {options.port}, but init_method names port {url.port}; keep one")


def _env(source: Source, values: Any, *table: str | int) -> dict[str, str]:
    return check_env(values, where=lambda *key: source.where((*table, *key)))


def _train(source: Source) -> tuple[Training, Distributed, Script | None]:
    table = _table(source, "train")
    known = {option.name for option in train_options()}
    for key in table:
        where = source.where(("train", key))
        if key in known:
            continue
        if key in COMPUTED_FLAGS:
            raise RequestError(f"{where} is computed; {COMPUTED_FLAGS[key]}")
        if key in Distributed.__struct_fields__:
            raise RequestError(f"{where} is computed for every node; remove it")
        hint = "; it belongs in [cluster]" if key in CLUSTER_KEYS else ""
        hint = hint or _task_table_hint(table.get("task"), key) or _seed_hint(key) or nearest(key, known)
        if not hint and table.get("task") and table["task"] not in BUILT_IN:
            hint = "; an option of your own task belongs in [task]"
        raise RequestError(f"{where} is not known{hint}")

    def options(schema: type[S], names: Sequence[str]) -> S:
        return _check(schema, {key: table[key] for key in table if key in names}, source, "train")

    train = options(Training, Training.__struct_fields__)
    launch = options(Distributed, LAUNCH_OPTIONS)
    if not table.keys() & set(Script.__struct_fields__):
        if not train.task:
            where, tasks = source.where(("train", "task")), ", ".join(BUILT_IN)
            own = "or your own as module:Class or path.py:Class; for a script set train.script instead"
            raise RequestError(f"{where} is missing: {tasks}, {own}")
        return train, launch, None
    script = options(Script, Script.__struct_fields__)
    require_one_launcher(script, where=lambda name: source.where(("train", name)))
    if train.task:
        raise RequestError(f"{source.where(('train', 'script'))} and train.task exclude each other; keep one of them")
    for key in table:  # a script has its own loop and would not receive the options of ours
        where = source.where(("train", key))
        if key == "resume":
            raise RequestError(f"{where} is for tasks: a script takes its own option in train.args")
        if key in Training.__struct_fields__ and key != "task":
            raise RequestError(f"{where} is for tasks, but train.script runs a script; use train.args")
    return train, launch, script


def _task_table_hint(task: Any, key: str) -> str:
    """Return the hint to use ``[task]`` if a key of ``[train]`` is an option of the built-in task; else empty."""
    schema = options_schema(task) if isinstance(task, str) and task in BUILT_IN else None
    known = [option.name for option in describe(schema)] if schema is not None else []
    return "; it belongs in [task]" if key in known else ""


def _seed_hint(key: str) -> str:
    """Return the replacement of a flag of fairseq or HetSeq, as the end of a message; empty for another key."""
    flag = "--" + key.replace("_", "-")
    if flag in NO_EFFECT:
        return f": remove it, {NO_EFFECT[flag].why}"
    return f": {REFUSED[flag]}" if flag in REFUSED else ""


def _import_path_hint(source: Source) -> str:
    """Return that PYTHONPATH in the recipe does not serve its reader, as the end of a message; empty without one."""
    cluster = _table(source, "cluster")
    nodes = cluster.get("nodes", [])
    tables = [cluster, *(nodes if isinstance(nodes, list) else [])]
    envs = [table.get("env") for table in tables if isinstance(table, dict)]
    if not any(isinstance(env, dict) and "PYTHONPATH" in env for env in envs):
        return ""
    return "; PYTHONPATH in a table env is for the ranks: export it where gputrain runs, too"


def _task_options(source: Source, task: str) -> tuple[Any, dict[str, Any]]:
    """Return the options of a built-in task, None for another; and those that the recipe gives, as plain values."""
    values = _table(source, "task")
    if not task:
        if values:
            where = source.where(("task",))
            raise RequestError(f"{where} is for a task, but train.script runs a script; use train.args")
        return None, {}
    if task in BUILT_IN:
        schema: Any = options_schema(task)
        _refuse_training_options(source, values, describe(schema))
        typed: Any = _check(schema, values, source, "task")
        return typed, _plain({name: getattr(typed, name) for name in values})
    try:
        options = describe_task(task)
    except RequestError as error:
        hint = "" if "No module named" not in str(error) else _import_path_hint(source)
        raise RequestError(f"{source.where(('train', 'task'))} is {quoted(task)}: {error}{hint}") from None
    _refuse_training_options(source, values, options)
    given = check_values(
        options,
        values,
        where=lambda name: source.where(("task", name)),
        is_text=lambda name: source.is_text(("task", name)),
    )
    return None, _plain(given)


def _refuse_training_options(source: Source, values: Collection[str], options: Iterable[Option]) -> None:
    """Raise for the first key of ``[task]`` that is none of the task's options, but one of ``[train]``."""
    own = {option.name for option in options}
    for name in values:
        if name not in own and name in {option.name for option in train_options()}:
            raise RequestError(f"{source.where(('task', name))} is not known; it belongs in [train]")


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as JSON has them, with lists for tuples."""
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(values))
    return plain
