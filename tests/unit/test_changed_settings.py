"""The settings of a resumed training that differ from its checkpoint's."""

from __future__ import annotations

import msgspec
import pytest

from trainer.contract.options import Training
from trainer.engine.resuming import changed_settings, typed_settings

BEFORE = """
name = "a"
[train]
lr = 0.1
ema_decay = 0.99
resume = "older.pt"
seed = 3
[task]
channels = 8
classes = ["x"]
"""


@pytest.mark.parametrize(
    ("saved", "own", "expected"),
    [
        (BEFORE, BEFORE, ""),
        (BEFORE, BEFORE.replace('"a"', '"b"').replace("seed = 3", "seed = 4").replace('resume = "older.pt"', ""), ""),
        (
            BEFORE,
            BEFORE.replace("lr = 0.1", 'lr = 0.2\nlr_scheduler = "cosine"').replace("ema_decay = 0.99", ""),
            "train.ema_decay not set (was 0.99), train.lr 0.2 (was 0.1), train.lr_scheduler cosine (was not set)",
        ),
        (BEFORE, BEFORE.replace('["x"]', '["x", "y"]'), "task.classes changed"),
        (BEFORE, BEFORE + 'token = "secret"\n', "task.token changed"),
        (
            BEFORE,
            BEFORE.replace("lr = 0.1", 'lr = 0.1\nsave_dir = "/home/me"'),
            "train.save_dir changed",
        ),
        ("", BEFORE, ""),
        (BEFORE, "", ""),
        ("train = 1", BEFORE, ""),
        ("not = [toml", BEFORE, ""),
    ],
)
def test_changed_settings_are_named_with_both_values(saved: str, own: str, expected: str) -> None:
    assert changed_settings(saved, own) == (expected and f"goes on with other settings than before: {expected}")


class Options(msgspec.Struct):
    width: int = 32
    classes: tuple[str, ...] = ()


def test_settings_typed_by_hand_are_named_as_flags_and_not_compared_with_a_recipe() -> None:
    before = typed_settings(Training(lr=(0.1,), resume="a.pt", batch_size=(4, 8)), Options())
    now = typed_settings(Training(lr=(0.2,), resume="b.pt", batch_size=(8, 4)), Options(width=64))
    assert changed_settings(before, now) == (
        "goes on with other settings than before: --width 64 (was 32), --batch-size changed, --lr 0.2 (was 0.1)"
    )
    assert changed_settings(before, before) == changed_settings(before, BEFORE) == changed_settings(BEFORE, now) == ""
