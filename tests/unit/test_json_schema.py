"""The JSON Schema of a recipe refuses what the loader refuses, and nothing else, but for rules between keys."""

from __future__ import annotations

import copy
import datetime
import json
import random
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from documents import ROOT, blocks
from help_tables import SCHEMA, schema_text
from jsonschema import Draft7Validator
from jsonschema.exceptions import ValidationError
from jsonschema.validators import extend

from gputrain_tui.recipe.build import build
from gputrain_tui.recipe.json_schema import recipe_schema
from gputrain_tui.recipe.model import ClusterOptions, NodeOptions, ReportOptions, SlurmOptions, train_options
from gputrain_tui.recipe.values import inline_toml
from trainer.contract.builtin_tasks import BUILT_IN, options_schema
from trainer.contract.errors import RequestError
from trainer.contract.schema import Option, describe

MUTATIONS = 6000
PARTS = 6
"""Tests that the mutations are divided into, for as many workers."""

LM = {"train": {"task": "lm", "max_epochs": 1}, "task": {"data": "stdlib"}}
HOST_NODE = {"ranks": 1, "host": "n1"}
RULES: list[tuple[str, dict[str, Any], str]] = [
    (
        "train",
        {"lr_scheduler": "cosine", "max_epochs": 0, "stop_time": 1.0},
        r"train\.lr_scheduler is \w+, which needs train\.total_num_update",
    ),
    ("train", {"lr_scheduler": "step"}, r"train\.lr_scheduler is step, which needs train\.lr_step_updates"),
    (
        "train",
        {"lr_scheduler": "cosine", "max_updates": 5, "warmup_updates": 5},
        r"train\.warmup_updates is .*the warm-up must be shorter",
    ),
    ("task", {"pattern": '["'}, r"task\.\w+ is '.*', but must be a list of texts"),
    ("docnn", {"class_weights": "even"}, r"class_weights is .*, but must be balanced, or numbers above 0"),
    ("train", {"ema_start": 5}, r"train\.ema_start needs train\.ema_decay"),
    (
        "train",
        {"lr_scheduler": "wsd", "max_updates": 5},
        r"train\.lr_scheduler is wsd, which needs train\.decay",
    ),
    (
        "train",
        {"decay_updates": 5},
        r"train\.\w+ is of train\.(optimizer|lr_scheduler|precision) [\w, ]+, and that is \w+: leave",
    ),
    ("train", {"decay_norms": False}, r"train\.decay_norms is false, but train\.weight_decay is 0"),
    ("train", {"warmup_init_lr": 1e-5}, r"train\.warmup_init_lr needs train\.warmup_updates"),
    ("train", {"curriculum": 1, "shuffle": False}, r"train\.curriculum is of shuffled data"),
    ("train", {"keep_last_epochs": 1, "save_every_epochs": 0}, r"train\.keep_last_epochs keeps checkpoints of train"),
    (
        "train",
        {"lr_scheduler": "wsd", "max_updates": 9, "warmup_updates": 5, "decay_updates": 5},
        r"train\.decay_updates is \d+, but train\.lr_scheduler wsd ends at",
    ),
    ("train", {"lr": [0.1, 0.2], "lr_scheduler": "inverse_sqrt"}, r"train\.lr has \d+ values, one per epoch, but"),
    ("train", {"optimizer": "sgd", "nesterov": True}, r"train\.nesterov needs a train\.momentum"),
    ("train", {"reset_meters": True}, r"train\.reset_\w+ needs train\.resume"),
    ("train", {"finetune_partial": True}, r"train\.finetune_partial needs train\.finetune_from"),
    ("train", {"strategy": "fsdp", "static_graph": True}, r"train\.\w+ is of DDP, and train\.strategy fsdp has none"),
    ("train", {"strategy": "fsdp", "compile": "on"}, r"train\.compile is not possible with train\.strategy fsdp"),
    ("train", {"strategy": "fsdp", "optimizer": "muon"}, r"train\.optimizer muon needs whole matrices"),
    (
        "train",
        {"strategy": "fsdp", "batch_size": "balanced", "global_batch_size": 64},
        r"train\.batch_size is balanced, which train\.strategy fsdp does not know",
    ),
    (
        "train",
        {"strategy": "fsdp", "task": "mnist"},
        r"train\.strategy fsdp divides a model by its repeated block, and that of \w+ has none",
    ),
    ("train", {"eval_only": "x", "resume": "y"}, r"train\.eval_only does not train, and train\.resume does"),
    ("train", {"checkpoint_run": "x"}, r"train\.checkpoint_run needs train\.resume or train\.eval_only"),
    ("train", {"eval_only": "x", "eval_split": "test"}, r"train\.eval_split is \w+, but the task has no such split"),
    ("cluster", {"on_stall": "restart"}, r"cluster\.on_stall is \"restart\", but cluster\.max_restarts is 0"),
    ("cluster", {"spare": "h", "nodes": [HOST_NODE], "max_restarts": 0}, r"cluster\.spare is used at a restart"),
    ("cluster", {"spare": "h", "max_restarts": 0}, r"cluster\.spare needs nodes on other hosts"),
    ("cluster", {"spare": ["h", "h"], "max_restarts": 1}, r"cluster\.spare has '.*', which is (named twice|a node)"),
    ("cluster", {"spare": "h", "launcher": "local"}, r"cluster\.spare needs cluster\.launcher = \"ssh\", but it is"),
    ("cluster", {"min_ranks": 1, "nodes": [HOST_NODE], "max_restarts": 0}, r"cluster\.min_ranks is used at a rest"),
    ("cluster", {"min_ranks": 1, "max_restarts": 0}, r"cluster\.min_ranks needs nodes on other hosts"),
    ("cluster", {"min_ranks": 1, "launcher": "local"}, r"cluster\.min_ranks needs cluster\.launcher = \"ssh\", but"),
    ("train", {"required_batch_size_multiple": 2}, r"train\.required_batch_size_multiple cuts the batches"),
    ("train", {"batch_size": [1, 2], "max_tokens": 9}, r"train\.batch_size has \d+ values, but train\.max_tokens"),
    ("train", {"global_batch_size": 9}, r"train\.global_batch_size is what train\.batch_size balanced divides"),
    ("train", {"shares_from": "x"}, r"train\.shares_from repeats the shares of train\.batch_size balanced"),
    (
        "train",
        {"batch_size": "balanced", "global_batch_size": 9, "max_tokens": 9, "drop_last": True},
        r"train\.drop_last leaves out what does not fill",
    ),
    ("train", {"batch_size": "balanced"}, r"train\.batch_size is balanced, which needs train\.global_batch_size"),
    (
        "train",
        {"batch_size": "balanced", "global_batch_size": 9, "fix_batches_to_gpus": True},
        r"train\.batch_size is balanced, so the ranks' shares change",
    ),
    ("train", {"task": "mnist", "max_tokens": 9}, r"train\.max_tokens needs the tokens of each sample"),
    ("train", {"task": "mnist", "activation_checkpointing": True}, r"train\.activation_checkpointing needs modules"),
    ("task", {"heads": 3}, r"heads is \d+, but must divide dim"),
    ("task", {"dim": 4, "heads": 4}, r"dim / heads is \d+, but must be even"),
    ("docnn", {"format": "glue", "text_column": 1}, r"(text|label)_column is '.*', but format is"),
    ("cluster", {"port": 1, "init_method": "tcp://h:2"}, r"cluster\.port is \d+, but init_method names port"),
    ("cluster", {"nodes": [{"ranks": 1}, {"ranks": 1}]}, r"slurm\.nodes is \d+, but there are"),
    ("cluster", {"nodes": [{"ranks": 1, "host": "h"}]}, r"slurm\.nodes is \d+, but cluster\.nodes\[0\] has a host"),
    # Of one key, but beyond JSON Schema: infinite numbers, and what a text means.
    ("train", {"min_lr": float("inf")}, r"is -?(inf|nan), but must be "),
    ("task", {"prompt": "a\0b"}, r"must be UTF-8 text without NUL characters"),
    ("train", {"lr": 2**1001}, r"contains a number with too many digits"),
    ("cluster", {"init_method": "tcp://h:70000"}, r"init_method names port \d+, but a port is 1 to 65535"),
    ("cluster", {"init_method": "tcp://[1:2]:1"}, r"init_method is 'tcp://\[.*must be auto, tcp://"),
]
"""What the loader alone refuses: a table, its keys, and the message. The topic ``recipe`` of the help lists it."""


RICH = """
name = "rich"
[cluster]
port = 29500
init_method = "auto"
env = { NCCL_DEBUG = "INFO" }
workdir = "/data/me"
nodes = [{ host = "gpu1", gpus = 4, env = { A = 1 } }, { host = "gpu2", cpu_ranks = 2, setup = "module load cuda" }]
[slurm]
partition = "long"
extra = ["--exclusive"]
[train]
task = "lm"
max_epochs = 2
lr = [0.1, 0.05]
batch_size = 8
[task]
data = "stdlib"
pattern = ["*.txt"]
[report]
tensorboard = true
wandb = "project"
"""
RECIPES = [tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "recipes").glob("*.toml"))]
RECIPES += [tomllib.loads(RICH)] * 6

NUMBERS: list[Any] = [
    -1, 0, 1, 2, 7, 8, 63, 64, 512, 513, 1024, 1025, 65535, 65536, 10_000, 10_001, 2**32 - 1, 2**32, 2**63 - 1, 2**63,
    2**70, -(2**63), -1.5, -0.0, 0.0, 1e-300, 0.3, 0.999, 1.0, 1.5, 3.0, 1e300, float("inf"), float("nan"),
]  # fmt: skip
TEXTS = [
    "", " ", "auto", "none", "true", "3", "0.5", "1,2", "[1]", '["', "all", "free", "GPU-1a", "MIG-x/1/0", "-x",
    "--rank", "x\n", "two\nlines", "a\0b", "é", "x" * 100, "x" * 101, "lm", "mnist", "docnn", "masked_lm", "bert",
    "own.py:Task", "Adam", "adam", "cosine", "CosineSchedule", "step", "bf16", "gloo", "slurm", "test", "glue",
    "no_header", "tiny", "/abs", "rel/x", "~", "~/x", "~x", "gpu1", "me@gpu1", "ssh://gpu1:22", "bad host",
    "[fe80::1]", "GPU-", "INFO", "balanced",
    "tcp://gpu1:29500", "tcp://gpu1:70000", "tcp://gpu1", "tcp://[::1]:1", "tcp://[zz]:1", "tcp://[1:2]:1", "env://",
    "env://x", "file:///shared/x", "file://x", "run.py", "mod",
]  # fmt: skip
OTHERS: list[Any] = [True, False, [], [True], {}, {"a": 1}, {"1a": "x"}, {"MASTER_ADDR": "x"}, {"A": True}, [[]],
    [{}], [1, 2], [0], [0.5], [0.1, 0.2, 0.3], ["a"], ["GPU-1"], ["1"], [1, "a"], [-1],
    datetime.date(2026, 1, 2)]  # fmt: skip
ENV = Option(name="env", kind="str")
OPTIONS = {
    "train": [*train_options(), Option(name="distributed_rank", kind="int"), Option(name="cpu", kind="bool")],
    "cluster": [*describe(ClusterOptions), ENV, Option(name="nodes", kind="str")],
    "slurm": describe(SlurmOptions),
    "report": describe(ReportOptions),
    "node": [*describe(NodeOptions), ENV],
    "task": [option for name in BUILT_IN for option in describe(options_schema(name) or object)],
}
"""Options by kind of table, with some keys that no recipe takes."""


def as_of_toml(checker: object, value: object) -> bool:
    """TOML tells 3.0 from 3, which JSON Schema does not."""
    return isinstance(value, int) and not isinstance(value, bool)


def whole_pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[ValidationError]:
    """Search a pattern of ECMAScript, where ``$`` is the end of the text, and not the place before a last newline."""
    if isinstance(value, str) and not re.search(pattern.replace("$", r"\Z"), value):
        yield ValidationError(f"{value!r} does not match {pattern!r}")


Validator = extend(
    Draft7Validator,
    {"pattern": whole_pattern},
    type_checker=Draft7Validator.TYPE_CHECKER.redefine("integer", as_of_toml),
)
VALIDATOR = Validator(recipe_schema())


def refusal(data: dict[str, Any]) -> str:
    """Return the message of the loader; empty if it takes the recipe."""
    try:
        build("\n".join(f"{inline_toml(key)} = {inline_toml(value)}" for key, value in data.items()), name="r.toml")
    except RequestError as error:
        return str(error)
    return ""


def any_value(source: random.Random) -> Any:
    return copy.deepcopy(source.choice(source.choice([NUMBERS, TEXTS, OTHERS])))


def value_for(option: Option, source: random.Random) -> Any:
    """Return a value that an option may well take, or any other."""
    if source.random() < 0.4:
        return any_value(source)
    small = [number for number in NUMBERS[:10] if number >= 0]
    kinds: dict[str, list[Any]] = {
        "bool": [True, False], "int": small, "float": [*small, 0.3, 0.999, 1.5, 1e-300], "str": TEXTS,
    }  # fmt: skip
    one = source.choice([*option.choices, *option.spellings] or kinds[option.item_kind or option.kind])
    return [one] * source.choice([1, 2]) if option.kind == "list" and source.random() < 0.5 else one


def tables_of(data: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the tables of a recipe that are still tables, with the kind of each."""
    cluster = data.get("cluster")
    nodes = cluster.get("nodes") if isinstance(cluster, dict) else None
    found = [(name, data.get(name)) for name in ("cluster", "slurm", "train", "train", "task", "report")]
    found += [("node", node) for node in (nodes if isinstance(nodes, list) else ())]
    return [(kind, table) for kind, table in found if isinstance(table, dict)]


def mutate(data: dict[str, Any], source: random.Random) -> None:
    """Change one key of a recipe."""
    kind = source.random()
    if kind < 0.05:
        data[source.choice([*data, "nam", "task", "slurm", "report", "cluster"])] = any_value(source)
        return
    tables = tables_of(data)
    if not tables:
        return
    name, table = source.choice(tables)
    if kind < 0.12 and table:
        del table[source.choice(list(table))]
    elif kind < 0.17:
        other = source.choice(OPTIONS[source.choice(list(OPTIONS))]).name
        table[source.choice([other, other[:-1] + "x"])] = any_value(source)
    elif kind < 0.25 and table:
        table[source.choice(list(table))] = any_value(source)
    else:
        option = source.choice(OPTIONS[name])
        table[option.name] = value_for(option, source)


def mutated(number: int) -> dict[str, Any]:
    source = random.Random(number)
    data = copy.deepcopy(source.choice(RECIPES))
    for _ in range(source.choice([1, 1, 1, 2, 3])):
        mutate(data, source)
    if isinstance(data.get("train"), dict) and ":" in str(data["train"].get("task")):
        data["train"]["task"] = "lm"  # a user's own task would be imported
    return data


@pytest.mark.parametrize("part", [0, 1, *(pytest.param(part, marks=pytest.mark.slow) for part in range(2, PARTS))])
def test_schema_and_loader_agree_on_mutated_recipes(part: int) -> None:
    numbers = range(part * MUTATIONS // PARTS, (part + 1) * MUTATIONS // PARTS)
    taken = 0
    for number in numbers:
        data = mutated(number)
        message = refusal(data)
        fits = VALIDATOR.is_valid(data)
        taken += not message
        if not fits:
            assert message, f"mutation {number} is refused by the schema alone: {data}"
        elif message:
            assert any(re.search(rule, message) for _, _, rule in RULES), (
                f"mutation {number} is refused by the loader alone: {message}"
            )
    assert 0.1 < taken / len(numbers) < 0.6, "most are refused, and many are taken"


@pytest.mark.parametrize(("table", "keys", "rule"), RULES, ids=[rule for _, _, rule in RULES])
def test_what_the_loader_alone_refuses_is_so(table: str, keys: dict[str, Any], rule: str) -> None:
    data = copy.deepcopy(LM)
    if table == "docnn":
        data |= {"train": {"task": "docnn"}, "task": {"train_path": "x"}}
    elif keys.get("task") == "mnist":
        data["task"] = {"data": "x"}
    elif "nodes" in keys and "max_restarts" not in keys:
        data["slurm"] = {"nodes": 3}
    data.setdefault(table if table != "docnn" else "task", {}).update(keys)
    VALIDATOR.validate(data)
    assert re.search(rule, refusal(data))


def test_a_users_own_task_has_its_options_in_the_schema(tmp_path: Path) -> None:
    (tmp_path / "mytask.py").write_text(blocks("tasks", "python")[0], encoding="utf-8")
    task = f"{tmp_path / 'mytask.py'}:Spiral"
    validator = Validator(recipe_schema(task))
    data = {"train": {"task": task}, "task": {"width": 3}}
    assert validator.is_valid(data)
    for wrong in ({"width": "a"}, {"widht": 3}):
        assert not validator.is_valid(data | {"task": wrong})


def test_the_recipes_of_the_repository_name_the_schema_and_fit_it() -> None:
    for path in sorted((ROOT / "recipes").glob("*.toml")):
        text = path.read_text(encoding="utf-8")
        line, _, _ = text.partition("\n")
        assert (path.parent / line.removeprefix("#:schema ")).resolve() == SCHEMA
        VALIDATOR.validate(tomllib.loads(text))


def test_the_file_that_editors_read_is_the_one_that_the_code_gives() -> None:
    text = SCHEMA.read_text(encoding="utf-8")
    assert text == schema_text(), "write it anew: .venv/bin/python tests/support/help_tables.py"
    Draft7Validator.check_schema(json.loads(text))
