"""Trainings in a real Slurm: the batch scripts that ``gputrain plan`` writes, and ``srun`` alone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from host_recipe import ENDLESS, ENVIRON, check_rank, flags, is_training, recipe
from network_namespaces import wait_until
from slurm_lab import Slurm, require_slurm, slurm

INTERFACES = {"n1": "eth0", "n2": "ens3", "n3": "enp1s0f1"}
RECORD = ("--run-dir", "record")


@pytest.fixture(scope="module")
def lab() -> Iterator[Slurm]:
    require_slurm()
    folder = Path(tempfile.mkdtemp(prefix="gt-", dir="/tmp"))  # short: a socket's path has 108 bytes
    with slurm(folder, INTERFACES, environ=ENVIRON) as running:
        yield running
    shutil.rmtree(folder)


@pytest.fixture
def cluster(lab: Slurm) -> Iterator[Slurm]:
    yield lab
    lab.run("scancel", "--user=root")
    wait_until(lambda: not lab.processes(), "no process is left")


def plan(cluster: Slurm, folder: Path, hosts: Sequence[str], ranks: Sequence[int], **options: Any) -> Path:
    """Write the batch script of a recipe into a folder, as a person does on the login host."""
    (folder / "recipe.toml").write_text(recipe(hosts, ranks, **options))
    words = ("gputrain", "plan", "recipe.toml", "--sbatch", *RECORD)
    job = folder / "job.sh"
    job.write_text(cluster.run(*words, cwd=folder).stdout)
    return job


def output(job: Path) -> str:
    """What a job has printed; there is one in a folder."""
    (path,) = job.parent.glob("slurm-*.out")
    return path.read_text()


def check_all(record: Path, ranks: Sequence[int]) -> None:
    """All ranks have trained together to the end, on the nodes in their order."""
    places = [(node, local) for node, count in enumerate(ranks) for local in range(count)]
    names = list(INTERFACES)
    checksums = {
        check_rank(record, rank, host=names[node], node=node, local_rank=local, interface=INTERFACES[names[node]])
        for rank, (node, local) in enumerate(places)
    }
    assert len(checksums) == 1
    assert len(list((record / "events").glob("[0-9]*.ndjson"))) == len(places)


@pytest.mark.parametrize(
    ("hosts", "ranks"),
    [
        (["n1", "n2", "n3"], [2, 1, 3]),
        pytest.param(["10.0.0.1", "10.0.0.2"], [1, 2], marks=pytest.mark.slow, id="nodes without Slurm's names"),
    ],
)
def test_a_batch_script_trains_on_all_nodes_with_their_unequal_ranks(
    cluster: Slurm, tmp_path: Path, hosts: list[str], ranks: list[int]
) -> None:
    job = plan(cluster, tmp_path, hosts, ranks)
    found = cluster.wait(cluster.submit(job))
    assert (found["JobState"], found["ExitCode"]) == ("COMPLETED", "0:0"), output(job)
    check_all(tmp_path / "record", ranks)
    for node in range(len(ranks)):
        assert json.loads((tmp_path / "record" / "nodes" / f"{node}.json").read_text())["exit_code"] == 0


def srun(cluster: Slurm, folder: Path, *words: str, **train: Any) -> subprocess.CompletedProcess[str]:
    """Type ``srun … python -m trainer …`` on the login host, without a word about ranks or where they meet."""
    asked = [word for word in words if word.startswith("--distributed")]
    of_srun = [word for word in words if not word.startswith("--distributed")]
    return cluster.run(
        "srun", *of_srun, "python", "-m", "trainer", "--cpu", *flags(**train), *RECORD, *asked, cwd=folder, check=False
    )


def test_one_task_per_node_starts_the_nodes_ranks_and_finds_the_first_node_itself(
    cluster: Slurm, tmp_path: Path
) -> None:
    ended = srun(cluster, tmp_path, "--nodelist=n[1-3]", "--ntasks-per-node=1", "--distributed-gpus=2")
    assert ended.returncode == 0, ended.stderr
    check_all(tmp_path / "record", [2, 2, 2])


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        (["--nodes=2", "--ntasks=3"], [2, 1]),
        pytest.param(["--nodes=3", "--ntasks-per-node=1", "--distributed-no-spawn"], [1, 1, 1], marks=pytest.mark.slow),
        pytest.param(["--nodes=1", "--ntasks=2", ":", "--nodes=1", "--ntasks=1"], [2, 1], marks=pytest.mark.slow),
    ],
    ids=["uneven", "no spawn", "heterogeneous"],
)
def test_one_task_per_rank_needs_no_flag(cluster: Slurm, tmp_path: Path, words: list[str], ranks: list[int]) -> None:
    ended = srun(cluster, tmp_path, *words)
    assert ended.returncode == 0, ended.stderr
    check_all(tmp_path / "record", ranks)


TELL = "import os; print(*(os.environ[name] for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE')), flush=True)\n"
KNOCK = """\
import socket, sys, time
while True:
    try:
        held = socket.create_connection((sys.argv[1], int(sys.argv[2])))
    except OSError:
        time.sleep(0.005)
        continue
    sys.stdin.read()
"""
"""Connects to a port as soon as somebody listens, and says nothing until its standard input ends."""


def test_nodes_with_unequal_gpus_count_their_ranks_whoever_else_connects(
    cluster: Slurm, tmp_path: Path, driver: Path
) -> None:
    (tmp_path / "tell.py").write_text(TELL)
    visible = "case $SLURM_NODEID in 1) export CUDA_VISIBLE_DEVICES=0;; esac"
    train = "exec python -m trainer --script tell.py --distributed-port 23456 --join-timeout 40 --run-dir record"
    command = f"export LD_LIBRARY_PATH={driver}; {visible}; {train}"
    words = ["python", "-c", KNOCK, "n1", "23457"]
    stranger = cluster.login.start(*words, env=cluster.environ, stdin=subprocess.PIPE)
    try:
        srun = ["srun", "--nodelist=n[1-3]", "--ntasks-per-node=1", "bash", "-c", command]
        ended = cluster.run(*srun, cwd=tmp_path, check=False)
        assert ended.returncode == 0, ended.stderr
    finally:
        stranger.kill()
        stranger.communicate()
    told = [(tmp_path / "record" / "logs" / f"{rank}.log").read_text().splitlines()[-1] for rank in range(5)]
    assert told == ["0 0 5", "1 1 5", "2 0 5", "3 0 5", "4 1 5"]


def test_a_rank_that_fails_fails_the_job_and_its_cause_is_told_by_every_node(cluster: Slurm, tmp_path: Path) -> None:
    fault = {"fault": "raise", "fault_rank": 2, "fault_step": 3}
    job = plan(cluster, tmp_path, ["n1", "n2"], [1, 2], task=fault)
    found = cluster.wait(cluster.submit(job))  # and until no process is left
    assert (found["JobState"], found["ExitCode"]) == ("FAILED", "1:0")
    said = output(job)
    assert "trainer: rank 2 on n2: ArithmeticError: the answer is not 42\n" in said
    assert "trainer: rank 0 on n1: rank 2 on n2 failed: ArithmeticError: the answer is not 42 (" in said
    results = [json.loads((tmp_path / "record" / "nodes" / f"{node}.json").read_text()) for node in (0, 1)]
    assert [result["exit_code"] for result in results] == [1, 1]
    assert [result["failure"]["kind"] for result in results] == ["lost_peer", "exception"]


def test_scancel_ends_every_process_and_no_rank_says_that_it_has_finished(cluster: Slurm, tmp_path: Path) -> None:
    job = plan(cluster, tmp_path, ["n1", "n2"], [2, 1], **ENDLESS)
    number = cluster.submit(job)
    record = tmp_path / "record"
    wait_until(lambda: all(is_training(record, rank) for rank in range(3)), "they train")
    cluster.run("scancel", str(number))
    assert cluster.wait(number)["JobState"] == "CANCELLED"
    assert "finished" not in "".join(path.read_text() for path in (record / "events").iterdir())
    for node in (0, 1):
        result = json.loads((record / "nodes" / f"{node}.json").read_text())
        assert result["exit_code"] == 130
        assert not any(rank["finished"] for rank in result["ranks"].values())
        assert result["left"] == []


@pytest.mark.slow
def test_a_wish_to_stop_that_reaches_the_nodes_saves_and_is_told(cluster: Slurm, tmp_path: Path) -> None:
    """As scancel and a time limit reach them where Slurm tracks processes by cgroups: the tasks, not their children."""
    job = plan(cluster, tmp_path, ["n1", "n2"], [2, 1], **ENDLESS)
    number = cluster.submit(job)
    record = tmp_path / "record"
    wait_until(lambda: all(is_training(record, rank) for rank in range(3)), "they train")
    running = cluster.processes().items()
    tasks = [pid for pid, words in running if " -m trainer " in words and not words.startswith("srun")]
    for pid in tasks:
        os.kill(pid, signal.SIGTERM)
    found = cluster.wait(number)
    assert (found["JobState"], found["ExitCode"]) == ("FAILED", "130:0")
    assert output(job).count("trainer: stopped at update ") == 2
    assert len(list((record / "checkpoints").glob("step_*.pt"))) == 1


@pytest.mark.slow
def test_a_node_whose_ranks_cannot_start_ends_the_others_that_wait_for_them(cluster: Slurm, tmp_path: Path) -> None:
    job = plan(cluster, tmp_path, ["n1", "n2"], [1, 1])
    lines = job.read_text().splitlines()
    lines = [
        line.replace("python -m trainer", "python-of-nowhere -m trainer") if "=n2" in line else line for line in lines
    ]
    job.write_text("\n".join(lines) + "\n")
    found = cluster.wait(cluster.submit(job))
    assert (found["JobState"], found["ExitCode"]) == ("FAILED", "2:0")
    assert "python-of-nowhere: No such file or directory" in output(job)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--nodes=2", "--ntasks=2", "--distributed-world-size=3"], "cannot be divided evenly over the 2 nodes"),
        (
            ["--nodes=2", "--ntasks=3", "--distributed-gpus=2"],
            "each of the 2, 1 tasks that Slurm started on its nodes is a rank",
        ),
    ],
)
def test_an_allocation_that_does_not_fit_is_refused_with_the_reason(
    cluster: Slurm, tmp_path: Path, words: list[str], line: str
) -> None:
    ended = srun(cluster, tmp_path, *words)
    assert ended.returncode == 2
    ours = [text for text in ended.stderr.splitlines() if text.startswith("trainer: ")]
    assert len(ours) == int(words[1].partition("=")[2])  # a line of each task
    assert all(line in text for text in ours)
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "record").exists()


def test_a_script_in_too_small_a_job_or_outside_of_one_says_so_and_starts_nothing(
    cluster: Slurm, tmp_path: Path
) -> None:
    job = plan(cluster, tmp_path, ["10.0.0.1", "10.0.0.2", "10.0.0.3"], [1, 1, 1])
    found = cluster.wait(cluster.submit(job, "--nodes=2"))
    assert (found["JobState"], found["ExitCode"]) == ("FAILED", "2:0")
    assert output(job) == "gputrain: this plan is for 3 nodes, but the job has 2\n"
    typed = cluster.run("bash", "job.sh", cwd=tmp_path, check=False)
    assert (typed.returncode, typed.stderr) == (2, "gputrain: submit this script with sbatch\n")
    assert not (tmp_path / "record").exists()
