"""Ranks with different options: refused by name before the first step, on every rank."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from forked_trainer import ForkedTrainer
from trained import ENVIRON
from waiting import LIMIT_S

import trainer
from trainer.contract.record import Checksum, RunDir, Step, decode_events

TASK = "tiny_task:TinyTask"
SUPPORT = Path(__file__).parents[1] / "support"
COMMON = ("--cpu", "--distributed-no-spawn", "--distributed-timeout", "20", "--batch-size", "4", "--threads", "1")


class TrainerProcess:
    """``python -m trainer`` in a folder whose modules come first."""

    def __init__(self, words: Sequence[str], *, cwd: Path, environ: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", "trainer", *words]
        self._process = subprocess.Popen(
            command, cwd=cwd, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def finish(self) -> subprocess.CompletedProcess[str]:
        output, _ = self._process.communicate(timeout=LIMIT_S)
        return subprocess.CompletedProcess(self._process.args, self._process.returncode, output, "")


def train(
    folder: Path,
    own: Sequence[Sequence[str]],
    *,
    task: str = TASK,
    folders: Sequence[Path] = (),
    begin: type[ForkedTrainer | TrainerProcess] = ForkedTrainer,
) -> list[tuple[int, str]]:
    """Start one process per list of flags as one group, each as a person types it; exit codes and what was printed."""
    places = folders or [folder] * len(own)
    rendezvous = ("--distributed-init-method", f"file://{folder}/rendezvous", "--distributed-world-size", str(len(own)))
    words = ["--task", task, *(rendezvous if len(own) > 1 else ()), *COMMON, "--max-epochs", "1", "--distributed-rank"]
    processes = [
        begin(
            [*words, str(rank), *flags],
            cwd=places[rank],
            environ=ENVIRON | {"PYTHONPATH": os.pathsep.join([str(SUPPORT), str(places[rank])])},
        )
        for rank, flags in enumerate(own)
    ]
    return [(done.returncode, done.stdout + done.stderr) for done in (process.finish() for process in processes)]


def without_pids(output: str) -> str:
    return re.sub(rf"\(pid \d+ on {re.escape(os.uname().nodename)}\)", "(HOST)", output)


@pytest.mark.parametrize(
    ("own", "named"),
    [
        (
            [["--lr", "0.001", "--max-updates", "9"], ["--lr", "0.5", "--max-updates", "3", "--batch-size", "8"]],
            "--batch-size: 4 on rank 0 (HOST), 8 on rank 1 (HOST); --max-updates: 9 on rank 0 (HOST), 3 on rank 1 "
            "(HOST); --lr: 0.001 on rank 0 (HOST), 0.5 on rank 1 (HOST)",
        ),
        pytest.param(
            [[], ["--resume", "elsewhere.pt"]],
            "--resume: none on rank 0 (HOST), elsewhere.pt on rank 1 (HOST)",
            marks=pytest.mark.slow,
        ),
        ([[], ["--dropout", "0.5"]], "--dropout: 0.0 on rank 0 (HOST), 0.5 on rank 1 (HOST)"),
    ],
    ids=["training", "resume", "task"],
)
def test_other_options_on_a_rank_are_refused_by_rank_host_and_name_on_every_rank(
    tmp_path: Path, own: list[list[str]], named: str
) -> None:
    ended = train(tmp_path, own)
    for code, output in ended:
        assert code == 2, output
        assert named in without_pids(output), output


def test_options_that_may_differ_between_ranks_do_not_keep_them_apart(tmp_path: Path) -> None:
    own = [["--save-dir", "kept", "--num-workers", "1"], ["--threads", "2"]]
    ended = train(tmp_path, own)
    assert [code for code, _ in ended] == [0, 0], ended
    assert list((tmp_path / "kept").glob("step_*.pt"))


def test_a_save_dir_given_only_to_a_rank_that_does_not_save_is_refused(tmp_path: Path) -> None:
    for code, output in train(tmp_path, [[], ["--save-dir", "kept"]]):
        assert code == 2, output
        assert "--save-dir is given to rank 1 and not to rank 0, which writes the checkpoints" in output


TWO_TASKS = """
from pathlib import Path
import torch
from tiny_task import TinyTask
from trainer.distributed import get_rank

class Points(torch.utils.data.Dataset):
    def __init__(self, size, first):
        self.size, self.first = size, first
    def __len__(self):
        return self.size
    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.first + index)
        return torch.randn(8, generator=generator), torch.randint(4, (3,), generator=generator)

class Sizes(TinyTask):
    def datasets(self):
        return {"train": Points(40 + 8 * get_rank(), 0), "valid": Points(8, 0)}

class Contents(TinyTask):
    def datasets(self):
        return {"train": Points(40, 1000 * get_rank()), "valid": Points(8, 0)}

class Validation(TinyTask):
    def datasets(self):
        return {"train": Points(40, 0), "valid": Points(8, 1000 * get_rank())}

class Splits(TinyTask):
    def datasets(self):
        return {"train": Points(40, 0)} | ({"valid": Points(8, 0)} if get_rank() == 0 else {})

class Noisy(TinyTask):
    def datasets(self):
        return {"train": Noise(40, 0), "valid": Noise(8, 0)}

class Noise(Points):
    def __getitem__(self, index):
        import os
        data, target = super().__getitem__(index)
        return data + int.from_bytes(os.urandom(2), "little"), target
"""


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("Sizes", "samples of train: 40 on rank 0 (HOST), 48 on rank 1 (HOST)"),
        ("Contents", "contents of train: "),
        pytest.param("Validation", "contents of valid: ", marks=pytest.mark.slow),
        ("Splits", "samples of valid: 8 on rank 0 (HOST), none on rank 1 (HOST)"),
    ],
)
def test_other_data_on_a_rank_is_refused_before_the_first_step(tmp_path: Path, kind: str, named: str) -> None:
    (tmp_path / "two_tasks.py").write_text(TWO_TASKS)
    for code, output in train(tmp_path, [[], []], task=f"two_tasks:{kind}"):
        assert code == 2, output
        assert named in without_pids(output), output
        assert "step 1" not in output


def test_samples_that_differ_at_each_reading_are_no_other_data(tmp_path: Path) -> None:
    (tmp_path / "two_tasks.py").write_text(TWO_TASKS)
    assert [code for code, _ in train(tmp_path, [[], []], task="two_tasks:Noisy")] == [0, 0]


OWN_TASK = "from tiny_task import TinyTask\nclass Own(TinyTask):\n    def model(self):\n        import widths\n"
OWN_TASK += "        self.options.width = widths.WIDTH\n        return super().model()\n"


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("own.py", "code of task own:Own: "),
        ("widths.py", "code of widths.py, which task own:Own imports: "),
        ("trainer/seeds.py", "code of trainer: "),
    ],
)
def test_other_code_on_a_rank_is_refused_by_name(tmp_path: Path, file: str, named: str) -> None:
    folders = [tmp_path / "host0", tmp_path / "host1"]
    for rank, folder in enumerate(folders):
        folder.mkdir()
        (folder / "own.py").write_text(OWN_TASK)
        (folder / "widths.py").write_text("WIDTH = 16\n")
        if file.startswith("trainer"):
            shutil.copytree(Path(trainer.__file__).parent, folder / "trainer")
        with (folder / file).open("a") as written:
            written.write(f"# of rank {rank}\n")
    begin = TrainerProcess if file.startswith("trainer") else ForkedTrainer
    for code, output in train(tmp_path, [[], []], task="own:Own", folders=folders, begin=begin):
        assert code == 2, output
        assert named in output
        assert output.count("code of ") == 1


@pytest.mark.parametrize("updates", [[4], [4, 2]], ids=["only rank 0 has one", "each host has another one"])
def test_every_rank_goes_on_from_the_checkpoint_of_rank_0(tmp_path: Path, updates: list[int]) -> None:
    folders = [tmp_path / "host0", tmp_path / "host1"]
    for folder in folders:
        folder.mkdir()
    for folder, done in zip(folders, updates, strict=False):
        [(code, output)] = train(folder, [["--save-dir", "kept", "--max-updates", str(done)]])
        assert code == 0, output
    words = ["--resume", "kept", "--max-epochs", "3", "--max-updates", "20", "--run-dir", "record"]
    for code, output in train(tmp_path, [words, words], folders=folders):
        assert code == 0, output
    events = [
        list(decode_events(RunDir(folder / "record").rank_events(rank).read_bytes()))
        for rank, folder in enumerate(folders)
    ]
    assert [min(event.step for event in each if isinstance(event, Step)) for each in events] == [5, 5]
    last = [[event.parameters for event in each if isinstance(event, Checksum)][-1] for each in events]
    assert last[0] == last[1]


def test_a_checkpoint_that_rank_0_cannot_use_is_refused_in_the_same_words_on_every_rank(tmp_path: Path) -> None:
    folders = [tmp_path / "host0", tmp_path / "host1"]
    for folder in folders:
        folder.mkdir()
    (folders[0] / "broken.pt").write_bytes(b"nothing")
    ended = train(tmp_path, [["--resume", "broken.pt"]] * 2, folders=folders)
    for code, output in ended:
        assert code == 2, output
        assert "broken.pt: " in output
        assert "No such file" not in output
