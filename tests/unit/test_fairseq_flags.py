"""Flags of fairseq and HetSeq: those that are options here, those without an effect, and those that are refused."""

from __future__ import annotations

import pytest

from trainer.contract.builtin_tasks import options_schema
from trainer.contract.errors import RequestError
from trainer.contract.fairseq_flags import NO_EFFECT, REFUSED, remove_fairseq_flags
from trainer.contract.options import Distributed, Training
from trainer.contract.schema import describe, read_flags

OPTIONS = [*describe(Distributed), *describe(Training)]
TAKEN = {flag for option in OPTIONS for flag in (option.flag, *option.aliases, *option.switches)}


def test_a_flag_is_an_option_or_without_effect_or_refused() -> None:
    assert TAKEN.isdisjoint(NO_EFFECT)
    assert TAKEN.isdisjoint(REFUSED)
    assert set(NO_EFFECT).isdisjoint(REFUSED)


def test_the_replacements_of_refused_flags_exist() -> None:
    words = {word.strip(":;,.") for text in REFUSED.values() for word in text.split() if word.startswith("--")}
    known = TAKEN | {"--no-save", "--task", "--to", "--help"}
    known |= {option.flag for option in describe(options_schema("masked_lm") or Training)}
    assert words <= known


@pytest.mark.parametrize(
    "flags",
    [
        # HetSeq's and fairseq's checkpointing, optimisation and data flags, each with a value that they document.
        "--max-tokens 4096 --required-batch-size-multiple 8 --max-sentences 64 --max-sentences-valid 64 --curriculum 1",
        "--fix-batches-to-gpus --save-interval 1 --save-interval-updates 500 --keep-last-epochs 5 --save-dir saved",
        "--restore-file a.pt --reset-optimizer --reset-dataloader --reset-meters --no-save --log-interval 10",
        "--lr 0.1,0.05,0.01 --lr-scheduler PolynomialDecayScheduler --optimizer Adadelta --max-epoch 2 --max-update 5",
        "--learning-rate 0.25 --lr_scheduler InverseSquareRootSchedule --wd 0.01 --me 3 --mu 10 --adadelta_rho 0.9",
        "--fp16 --validate-interval 1 --validate-interval-updates 10 --disable-validation --no-epoch-checkpoints",
        "--finetune-from-model a.pt --checkpoint-activations --ema-decay 0.999 --best-checkpoint-metric loss",
    ],
)
def test_flags_equal_to_an_option_set_that_option(flags: str) -> None:
    values, rest = read_flags(flags.split(), OPTIONS)
    assert rest == []
    assert values


@pytest.mark.parametrize(
    ("words", "left", "notes"),
    [
        ([], [], []),
        (["--fast-stat-sync"], [], ["--fast-stat-sync has no effect: counts and losses are always summed by "]),
        (["--ddp-backend", "c10d", "-x"], ["-x"], ["--ddp-backend has no effect: gradients are always synchronised"]),
        (["--log-format=simple"], [], ["--log-format has no effect: lines are printed plainly"]),
    ],
)
def test_a_flag_without_effect_is_taken_out_with_one_note(words: list[str], left: list[str], notes: list[str]) -> None:
    rest, lines = remove_fairseq_flags(words)
    assert rest == left
    assert [line.startswith(note) for line, note in zip(lines, notes, strict=True)] == [True] * len(notes)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--arch x", "--arch is a flag of fairseq or HetSeq, not of this trainer: the task builds the model"),
        ("--reset-lr-scheduler", "--reset-lr-scheduler is a flag of fairseq or HetSeq, not of this trainer: the"),
        ("--ddp-backend no_c10d", "--ddp-backend is 'no_c10d', but may only be c10d or pytorch_ddp: gradients are"),
        ("--log-format", "--log-format is '', but may only be simple or none: lines are printed plainly"),
    ],
)
def test_a_flag_without_an_equal_option_is_refused_with_its_replacement(words: str, line: str) -> None:
    with pytest.raises(RequestError) as refusal:
        remove_fairseq_flags(words.split())
    assert str(refusal.value).startswith(line)
