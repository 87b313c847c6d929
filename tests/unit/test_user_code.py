"""Which files are the user's own code: its lines are shown where a rank hangs or fails."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

import trainer
from trainer.host.user_code import is_user_code, user_line


@pytest.mark.parametrize(
    ("file", "is_own"),
    [
        ("/home/ann/train.py", True),
        ("/home/ann/packages/model.py", True),
        ("train.py", True),
        ("<string>", False),
        ("<frozen runpy>", False),
        (f"{sysconfig.get_path('stdlib')}/threading.py", False),
        (f"{sysconfig.get_path('purelib')}/torch/distributed/distributed_c10d.py", False),
        # Of pip install --user, Debian, another environment on the path, a module of a cluster.
        ("/home/ann/.local/lib/python3.11/site-packages/torch/nn/modules/module.py", False),
        ("/usr/lib/python3/dist-packages/torch/nn/modules/module.py", False),
        ("/home/ann/base/lib/python3.11/site-packages/torch/nn/modules/module.py", False),
        ("/opt/apps/torch/2.9/lib/python3.11/site-packages/torch/nn/modules/module.py", False),
        (f"{Path(trainer.__file__).parent}/engine/loop.py", False),
    ],
)
def test_a_file_is_the_users_unless_python_a_package_or_the_trainer_has_it(file: str, is_own: bool) -> None:
    assert is_user_code(file) is is_own
    assert bool(user_line(file, 12, "augment")) is is_own
