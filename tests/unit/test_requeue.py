from __future__ import annotations

import pytest

from gputrain_tui.lifecycle.launchers.slurm_cause import is_for_slurm, is_put_back
from gputrain_tui.plan.batch_script import save_before_limit_s
from gputrain_tui.recipe.model import SlurmOptions


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        (None, 120), ("1", 15), ("4", 60), ("60", 120), ("0:40", 10), ("00:04:00", 60), ("10:00:00", 120),
        ("0-00:02", 30), ("1-12", 120), ("UNLIMITED", 120), ("0", 1),
    ],
)  # fmt: skip
def test_the_signal_comes_two_minutes_before_the_limit_or_a_quarter_of_it(time: str | None, seconds: int) -> None:
    assert save_before_limit_s(SlurmOptions(time=time)) == seconds


@pytest.mark.parametrize(
    ("reason", "goes_on", "put_back"),
    [
        ("its time limit in Slurm is near", True, False),
        ("it reached its time limit in Slurm", True, False),
        ("Slurm pre-empted it for another job", True, False),
        ("Slurm put it back into its queue", True, True),
        ("Slurm lost n2 with rank 2, and put the run back into its queue", True, True),
        ("stopped by `gputrain stop`", False, False),
        ("it was cancelled in Slurm", False, False),
        ("stopped by SIGINT", False, False),
    ],
)
def test_a_run_goes_on_after_what_slurm_does_and_not_after_what_a_person_does(
    reason: str, goes_on: bool, put_back: bool
) -> None:
    assert (is_for_slurm(reason), is_put_back(reason)) == (goes_on, put_back)
