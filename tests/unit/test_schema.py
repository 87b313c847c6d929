from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from trainer.contract.errors import RequestError
from trainer.contract.options import Distributed, Training
from trainer.contract.schema import Option, check, check_values, describe, read_flags, to_flags
from trainer.contract.task_options import DocNNOptions, LmOptions, MaskedLmOptions


class EveryKindOfOption(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Every kind of option that a user's task may declare."""

    name: Annotated[str, Meta(description="what it is called")]
    depth: Literal[18, 34] = 18
    share: Annotated[float, Meta(gt=0, le=1)] | None = 0.5
    words: tuple[str, ...] = ()
    pair: Annotated[tuple[int, ...], Meta(min_length=2, max_length=3)] = (1, 2)
    fast: Annotated[bool, Meta(extra={"aliases": ["--quick"], "group": "Speed"})] = False


@dataclass
class DataclassOptions:
    """A user's options may be a dataclass."""

    path: str
    width: Annotated[int, Meta(ge=1)] = 3
    sizes: list[int] = field(default_factory=lambda: [1, 2])


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def option(schema: type[Any], name: str) -> Option:
    return next(option for option in describe(schema) if option.name == name)


# ---------------------------------------------------------------------------------------------------- description


def test_options_come_in_the_order_of_their_declaration() -> None:
    assert [option.name for option in describe(EveryKindOfOption)] == [
        "name",
        "depth",
        "share",
        "words",
        "pair",
        "fast",
    ]


def test_an_option_describes_itself_to_a_front_end() -> None:
    assert option(Training, "power") == Option(
        name="power",
        kind="float",
        default=1.0,
        minimum=0,
        exclusive_minimum=True,
        help="exponent of polynomial_decay and of the decay of wsd",
        group="Schedule",
    )
    assert option(Distributed, "device_id").optional
    assert option(Distributed, "device_id").aliases == ("--local_rank", "--local-rank")
    assert option(EveryKindOfOption, "name").required
    assert option(DataclassOptions, "sizes") == Option(name="sizes", kind="list", item_kind="int", default=[1, 2])


@pytest.mark.parametrize(
    ("schema", "name", "allowed"),
    [
        (Training, "shuffle", "true or false"),
        (Training, "task", "text"),
        (Training, "power", "a number > 0"),
        (Training, "momentum", "a number >= 0 and < 1"),
        (Training, "min_lr", "a number"),
        (Training, "seed", "an integer >= 0 and <= 4294967295"),
        (Training, "batch_size", "one or more integers >= 1, or balanced"),
        (Training, "adam_betas", "2 numbers >= 0 and < 1"),
        (Training, "precision", "one of bf16, fp16, fp32"),
        (Distributed, "distributed_port", "an integer >= 1 and <= 65535"),
        (EveryKindOfOption, "depth", "one of 18, 34"),
        (EveryKindOfOption, "share", "a number > 0 and <= 1"),
        (EveryKindOfOption, "words", "a list of texts"),
        (EveryKindOfOption, "pair", "2 to 3 integers"),
        (DataclassOptions, "sizes", "a list of integers"),
    ],
)
def test_allowed_values_are_described_in_words(schema: type[Any], name: str, allowed: str) -> None:
    assert option(schema, name).allowed == allowed


@pytest.mark.parametrize("schema", [Training, Distributed])
def test_every_option_of_the_trainer_has_a_help_and_a_flag_of_its_own(schema: type[Any]) -> None:
    options = describe(Training) + describe(Distributed)
    flags = [flag for option in options for flag in (option.flag, *option.aliases)]
    assert len(flags) == len(set(flags))
    assert all(option.help for option in describe(schema))


def test_a_description_survives_json() -> None:
    for schema in (Training, Distributed, EveryKindOfOption):
        options = describe(schema)
        for before, after in zip(
            options, msgspec.json.decode(msgspec.json.encode(options), type=list[Option]), strict=True
        ):
            assert after.allowed == before.allowed
            assert (after.name, after.kind, after.choices) == (before.name, before.kind, before.choices)


# ---------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("schema", "name", "value", "expected"),
    [
        (Training, "batch_size", "32,32,8", (32, 32, 8)),
        (Training, "batch_size", [32, 8], (32, 8)),
        (Training, "batch_size", "[32, 8]", (32, 8)),
        (Training, "batch_size", 64, (64,)),
        (Training, "batch_size", "64", (64,)),
        (Training, "adam_betas", "(0.9, 0.98)", (0.9, 0.98)),
        (Training, "adam_betas", [0, 0.5], (0.0, 0.5)),
        (Training, "power", "1e-3", 1e-3),
        (Training, "power", 1, 1.0),
        (Training, "lr", "0.1,0.05,0.01", (0.1, 0.05, 0.01)),
        (Training, "lr", 1, (1.0,)),
        (Training, "lr_scheduler", "PolynomialDecayScheduler", "polynomial_decay"),
        (Training, "lr_scheduler", "InverseSquareRootSchedule", "inverse_sqrt"),
        (Training, "optimizer", "Adadelta", "adadelta"),
        (Training, "optimizer", "_Adam", "adamw"),
        (Training, "min_lr", "-1", -1.0),
        (Training, "seed", " 5 ", 5),
        (Training, "shuffle", "no", False),
        (Training, "shuffle", "True", True),
        (Training, "shuffle", False, False),
        (Training, "optimizer", "sgd", "sgd"),
        (Training, "task", "my task.py:Class", "my task.py:Class"),
        (Training, "valid_batch_size", None, None),
        (Training, "valid_batch_size", "7", 7),
        (Training, "maximize_best_metric", "no", False),
        (EveryKindOfOption, "depth", "34", 34),
        (EveryKindOfOption, "depth", 34, 34),
        (EveryKindOfOption, "share", None, None),
        (EveryKindOfOption, "share", "none", None),
        (EveryKindOfOption, "share", "0.25", 0.25),
        (EveryKindOfOption, "words", "a, b", ("a", "b")),
        (EveryKindOfOption, "words", '["a, b", ""]', ("a, b", "")),
        (EveryKindOfOption, "words", "--lr 0.2 --name='a b'", ("--lr", "0.2", "--name=a b")),
        (EveryKindOfOption, "words", "", ()),
        (DataclassOptions, "sizes", "3,4", [3, 4]),
        (DataclassOptions, "width", "7", 7),
    ],
)
def test_values_are_read_as_a_person_writes_them(schema: type[Any], name: str, value: Any, expected: Any) -> None:
    required = {option.name: "x" for option in describe(schema) if option.required}
    read = getattr(check(schema, required | {name: value}, where=flag), name)
    assert read == expected
    assert type(read) is type(expected)


@pytest.mark.parametrize(
    ("schema", "name", "value", "message"),
    [
        (Training, "batch_size", "0,1", "--batch-size is '0,1', but must be one or more integers >= 1, or balanced"),
        (Training, "batch_size", 0, "--batch-size is 0, but must be one or more integers >= 1, or balanced"),
        (Training, "batch_size", "", "--batch-size is '', but must be one or more integers >= 1, or balanced"),
        (Training, "batch_size", [1.5], "--batch-size is [1.5], but must be one or more integers >= 1, or balanced"),
        (Training, "batch_size", [True], "--batch-size is [True], but must be one or more integers >= 1, or balanced"),
        (
            Training,
            "batch_size",
            {"a": 1},
            "--batch-size is {'a': 1}, but must be one or more integers >= 1, or balanced",
        ),
        (Training, "adam_betas", "0.9", "--adam-betas is '0.9', but must be 2 numbers >= 0 and < 1"),
        (Training, "adam_betas", [0.9, 1], "--adam-betas is [0.9, 1], but must be 2 numbers >= 0 and < 1"),
        (Training, "power", "fast", "--power is 'fast', but must be a number > 0"),
        (Training, "power", 0, "--power is 0, but must be a number > 0"),
        (Training, "power", "nan", "--power is 'nan', but must be a number > 0"),
        (Training, "power", float("inf"), "--power is inf, but must be a number > 0"),
        (Training, "power", True, "--power is True, but must be a number > 0"),
        (Training, "power", None, "--power is None, but must be a number > 0"),
        (Training, "power", [1], "--power is [1], but must be a number > 0"),
        (Training, "seed", "1.0", "--seed is '1.0', but must be an integer >= 0 and <= 4294967295"),
        (Training, "seed", 2**80, f"--seed is {2**80}, but must be an integer >= 0 and <= 4294967295"),
        (Training, "seed", "", "--seed is '', but must be an integer >= 0 and <= 4294967295"),
        (Training, "shuffle", "maybe", "--shuffle is 'maybe', but must be true or false"),
        (Training, "shuffle", 1, "--shuffle is 1, but must be true or false"),
        (Training, "task", 3, '--task is 3, but must be text: write "3" with its quotes'),
        (
            Training,
            "optimizer",
            "adamm",
            "--optimizer is 'adamm', but must be one of adadelta, adagrad, adam, adamw, muon, schedulefree_adamw, "
            "sgd; did you mean 'adam'?",
        ),
        (Training, "batchsize", 3, "--batchsize is not known; did you mean 'batch_size'?"),
        (Training, "zzz", 3, "--zzz is not known"),
        (EveryKindOfOption, "depth", 50, "--depth is 50, but must be one of 18, 34"),
        (EveryKindOfOption, "words", '["a"', """--words is '["a"', but must be a list of texts"""),
        (EveryKindOfOption, "pair", "1", "--pair is '1', but must be 2 to 3 integers"),
    ],
)
def test_a_wrong_value_is_one_line_with_the_allowed_values(
    schema: type[Any], name: str, value: Any, message: str
) -> None:
    required = {option.name: "x" for option in describe(schema) if option.required}
    with pytest.raises(RequestError) as refusal:
        check(schema, required | {name: value}, where=flag)
    assert str(refusal.value) == message


def test_a_missing_value_is_named_with_its_help() -> None:
    with pytest.raises(RequestError) as refusal:
        check(EveryKindOfOption, {}, where=lambda name: f"recipe.toml: task.{name}")
    assert str(refusal.value) == "recipe.toml: task.name is missing: what it is called"


# ----------------------------------------------------------------------------------------------------------- flags


@pytest.mark.parametrize(
    ("words", "values", "rest"),
    [
        (["--lr", "-1"], {"lr": "-1"}, []),
        (["--lr=-1"], {"lr": "-1"}, []),
        (["--lr", "1", "--lr", "2"], {"lr": "2"}, []),
        (["--task=a=b"], {"task": "a=b"}, []),
        (["--seed="], {"seed": ""}, []),
        (["--shuffle", "--lr", "2"], {"shuffle": True, "lr": "2"}, []),
        (["--no-shuffle"], {"shuffle": False}, []),
        (["--shuffle=no"], {"shuffle": "no"}, []),
        (["--max-epoch", "3", "--max-sentences", "8"], {"max_epochs": "3", "batch_size": "8"}, []),
        (["--foo", "1", "--lr", "2", "bar", "--no-lr"], {"lr": "2"}, ["--foo", "1", "bar", "--no-lr"]),
        ([], {}, []),
    ],
)
def test_flags_are_read_and_others_left(words: list[str], values: dict[str, Any], rest: list[str]) -> None:
    assert read_flags(words, describe(Training)) == (values, rest)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lr"], "--lr needs a value: one or more numbers > 0"),
        (["--lr", "--seed", "3"], "--lr needs a value: one or more numbers > 0"),
        (["--no-shuffle=yes"], "--no-shuffle takes no value; write --no-shuffle or --shuffle"),
    ],
)
def test_a_flag_that_cannot_be_read_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(RequestError) as refusal:
        read_flags(words, describe(Training))
    assert str(refusal.value) == message


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["--fp16"], {"precision": "fp16"}),
        (["--compile", "--lr", "1"], {"compile": "on", "lr": "1"}),
        (["--lr", "1", "--compile"], {"compile": "on", "lr": "1"}),
        (["--compile", "auto"], {"compile": "auto"}),
        (["--compile=off"], {"compile": "off"}),
        (["--compile", "--no-compile"], {"compile": "off"}),
        (["--disable-validation", "--save-interval", "2"], {"valid_every_epochs": "0", "save_every_epochs": "2"}),
        (["--restore-file", "a.pt", "--save-interval-updates=5"], {"resume": "a.pt", "save_every_updates": "5"}),
    ],
)
def test_flags_of_the_seeds_stand_for_options_here(words: list[str], values: dict[str, Any]) -> None:
    assert read_flags(words, describe(Training)) == (values, [])


def test_a_switch_has_its_aliases() -> None:
    assert read_flags(["--quick"], describe(EveryKindOfOption))[0] == {"fast": True}
    assert read_flags(["--no-quick"], describe(EveryKindOfOption))[0] == {"fast": False}


@pytest.mark.parametrize(
    "options",
    [
        Training(),
        Training(task="a b", batch_size=(32, 8), shuffle=False, lr=(0.1,), adam_betas=(0.9, 0.98), min_lr=-0.5),
        Training(maximize_best_metric=False, valid_batch_size=3, lr=(1 / 3,), update_freq=(4, 2, 1), save_dir="--odd"),
        Distributed(distributed_init_method="tcp://[::1]:29500", distributed_world_size=4, cpu=True),
        EveryKindOfOption(name="x"),
        EveryKindOfOption(
            name="", depth=34, share=None, words=("a b", "", "(c)", "d,e", '"'), pair=(1, 2, 3), fast=True
        ),
        EveryKindOfOption(name="--name=x", words=("plain", "words")),
        DataclassOptions(path="/x y", sizes=[4]),
    ],
)
def test_flags_carry_every_value_over(options: Any) -> None:
    schema = type(options)
    values, rest = read_flags(to_flags(options), describe(schema))
    assert rest == []
    assert check(schema, values, where=flag) == options


def test_flags_are_those_that_differ_from_the_defaults() -> None:
    assert to_flags(Training()) == []
    assert to_flags(Training(lr=(0.5,), shuffle=False, batch_size=(8, 4))) == [
        "--batch-size", "8,4", "--no-shuffle", "--lr", "0.5",
    ]  # fmt: skip


VALUES = [0, 1, -1, 7, 1.5, -0.5, "x", "1", "none", "true", True, [], [0], [2, 3, 4], ["a"], [1.5], None, 1 << 70]


@pytest.mark.parametrize(
    "schema", [Training, Distributed, EveryKindOfOption, DataclassOptions, LmOptions, DocNNOptions, MaskedLmOptions]
)
def test_options_that_were_sent_as_json_take_the_values_that_their_class_takes(schema: type[Any]) -> None:
    options = msgspec.json.decode(msgspec.json.encode(describe(schema)), type=list[Option])
    required = {option.name: "x" for option in options if option.required}
    for option in options:
        for value in VALUES:
            results = []
            for read in (partial(check_values, options), partial(check, schema)):
                try:
                    found = read({**required, option.name: value}, where=flag)
                    results.append(found[option.name] if isinstance(found, dict) else getattr(found, option.name))
                except RequestError as error:
                    # Rules between options are of the class alone.
                    results.append(str(error) if str(error).startswith(flag(option.name)) else None)
            sent, own = (tuple(result) if isinstance(result, list) else result for result in results)
            assert sent == own or None in results, (option.name, value)
