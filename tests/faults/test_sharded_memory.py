"""A model that does not fit a rank's memory: DDP ends with a message, ``--strategy fsdp`` trains it.

The limit is RLIMIT_DATA of each rank, from the building of its model on, and once that of a cgroup, where the kernel
ends a rank.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from trained import ENVIRON, train, train_spawned
from waiting import LIMIT_S, until

from trainer.contract.errors import ExitCode
from trainer.host.proc_files import CGROUP

LIMIT_MIB = 140
"""DDP takes 175: four times the model's 25, and 70 for all else. Two ranks that divide the model take 105."""
TASK = f"{Path(__file__).parents[1] / 'support/limited_lm.py'}:LimitedLm"
OWN_LIMIT_MIB = 60
"""Of one rank from the building of its model on, which is a third of what DDP takes."""
MODEL = ("--context", 16, "--dim", 256, "--layers", 8, "--heads", 2, "--sample-bytes", 0)
"""It takes 25 MiB."""
GROUP_LIMIT_MIB = 720
"""Of all processes together, with a model of 55 MiB: two ranks take more than 800 with DDP, 640 with FSDP."""


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """Return a cgroup with a limit of memory, where this user may make one."""
    with made_group(uuid.uuid4().hex, GROUP_LIMIT_MIB) as group:
        yield group


@contextmanager
def made_group(name: str, limit_mib: int) -> Iterator[Path]:
    """Yield a new cgroup with a limit of memory; skip the test where this user may not make one."""
    files = ("memory/memory.limit_in_bytes", "memory.max")
    base, file = next(
        ((file.parent, file.name) for file in (CGROUP / each for each in files) if file.parent.is_dir()), (CGROUP, "")
    )
    group = base / f"gputrain-test-{name}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"needs to make a cgroup with the controller memory: {error}")
    try:
        if not (group / file).is_file():
            pytest.skip("needs to make a cgroup with the controller memory")
        (group / file).write_text(str(limit_mib << 20))
        yield group
        until(lambda: not (group / "cgroup.procs").read_text(), "the cgroup is empty")
    finally:
        group.rmdir()


def write_text(folder: Path) -> Path:
    data = folder / "text.txt"
    data.write_bytes((bytes(range(32, 122)) * 9)[:584])
    return data


def test_ddp_runs_out_of_memory_with_one_line_that_names_the_other_strategy(tmp_path: Path) -> None:
    request = ("--task", TASK, "--data", write_text(tmp_path), "--valid-fraction", 0, *MODEL)
    steps = ("--batch-size", 6, "--max-epochs", 2, "--save-every-epochs", 0)
    done = train(tmp_path / "run", *request, "--limit-mib", LIMIT_MIB, *steps, ranks=2)
    assert done.code == ExitCode.FAILED
    assert "or --strategy fsdp, which divides the model among the ranks" in done.output
    assert not list((tmp_path / "run").glob("checkpoints/*.pt"))


def test_in_a_cgroup_ddp_is_ended_with_its_limit_and_the_other_strategy_in_the_message_and_that_trains(
    tmp_path: Path, limited_group: Path
) -> None:
    words = (sys.executable, "-m", "trainer", "--task", "lm", "--data", write_text(tmp_path), "--valid-fraction", 0,
             "--context", 16, "--dim", 384, "--layers", 8, "--heads", 2, "--sample-bytes", 0, "--batch-size", 6,
             "--max-updates", 2, "--cpu", "--threads", 1, "--distributed-world-size", 2)  # fmt: skip
    for strategy, code, text in (
        (
            "ddp",
            ExitCode.FAILED,
            f"at the limit of {GROUP_LIMIT_MIB} MiB for the processes of this node; less is taken by",
        ),
        ("fsdp", ExitCode.FINISHED, "finished: max_updates 2 reached"),
    ):
        command = shlex.join(map(str, (*words, "--run-dir", tmp_path / strategy, "--strategy", strategy)))
        joins = f"echo $$ > {limited_group}/cgroup.procs && exec {command}"
        done = subprocess.run(["sh", "-c", joins], capture_output=True, text=True, timeout=LIMIT_S, env=ENVIRON)
        assert done.returncode == code, done.stderr
        assert text in done.stdout + done.stderr
        assert ("--strategy fsdp, which divides the model" in done.stderr) == (strategy == "ddp")


def test_a_rank_in_a_cgroup_of_its_own_is_ended_with_the_limit_of_that_in_the_message(tmp_path: Path) -> None:
    name = uuid.uuid4().hex
    with made_group(f"{name}-0", 1000), made_group(f"{name}-1", OWN_LIMIT_MIB) as group:
        own = str(group).removesuffix("1")
        request = ("--task", TASK, "--data", write_text(tmp_path), "--valid-fraction", 0, *MODEL, "--own-group", own)
        done = train_spawned(tmp_path / "run", *request, "--batch-size", 6, "--max-updates", 2, ranks=2)
    assert done.code == ExitCode.FAILED
    assert "trainer: rank 1 on " in done.output
    killed = "the process was ended by SIGKILL by the kernel's out-of-memory killer, "
    assert f"{killed}at the limit of {OWN_LIMIT_MIB} MiB of its own cgroup {group}; less is taken by" in done.output
