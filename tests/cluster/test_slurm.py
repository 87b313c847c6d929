"""Trainings in a real Slurm: the batch scripts that ``gputrain plan`` writes, and ``srun`` alone."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from documents import blocks
from host_recipe import (
    ENDLESS,
    ENVIRON,
    TESTS,
    check_rank,
    events,
    flags,
    is_training,
    recipe,
    script_recipe,
    torch_free_recipe,
)
from network_namespaces import LIMIT_S, NamespaceHost, wait_until
from slurm_lab import Slurm, require_slurm, slurm
from taken_names import TakenNames
from text_cache import with_task_options

from gputrain_tui.commands.runs import MAX_CAUSE_CELLS
from gputrain_tui.tables import cut

INTERFACES = {"n1": "eth0", "n2": "ens3", "n3": "enp1s0f1"}
IN_CGROUPS = {f"p{os.getpid()}n{number}": name for number, name in enumerate(INTERFACES.values(), 1)}
"""Nodes of a cluster whose jobs have cgroups: these bear the node's name, and the machine has them for all clusters."""
RECORD = ("--run-dir", "record")
TRAINER = ("python", "-P", "-m", "trainer")


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


def plan(cluster: Slurm, folder: Path, text: str) -> Path:
    """Write the batch script of a recipe into a folder, as a person does on the login host."""
    (folder / "recipe.toml").write_text(text)
    home = with_task_options(folder / "home")
    words = ("env", f"GPUTRAIN_HOME={home}", "gputrain", "plan", "recipe.toml", "--sbatch", *RECORD)
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
        (["n1", "n2"], [1, 3]),
        pytest.param(["10.0.0.1", "10.0.0.2"], [1, 2], marks=pytest.mark.slow, id="nodes without Slurm's names"),
    ],
)
def test_a_batch_script_trains_on_all_nodes_with_their_unequal_ranks(
    cluster: Slurm, tmp_path: Path, hosts: list[str], ranks: list[int]
) -> None:
    job = plan(cluster, tmp_path, recipe(hosts, ranks))
    found = cluster.wait(cluster.submit(job))
    assert (found["JobState"], found["ExitCode"]) == ("COMPLETED", "0:0"), output(job)
    check_all(tmp_path / "record", ranks)
    for node in range(len(ranks)):
        assert json.loads((tmp_path / "record" / "nodes" / f"{node}.json").read_text())["exit_code"] == 0


def srun(cluster: Slurm, folder: Path, *words: str, **train: Any) -> subprocess.CompletedProcess[str]:
    """Type ``srun … python -P -m trainer …`` on the login host, without ranks or a rendezvous."""
    given = [word for word in words if word.startswith("--distributed")]
    of_srun = [word for word in words if not word.startswith("--distributed")]
    return cluster.run("srun", *of_srun, *TRAINER, "--cpu", *flags(**train), *RECORD, *given, cwd=folder, check=False)


def test_one_task_per_node_starts_the_nodes_ranks_and_finds_the_first_node_itself(
    cluster: Slurm, tmp_path: Path
) -> None:
    ended = srun(cluster, tmp_path, "--nodelist=n[1-2]", "--ntasks-per-node=1", "--distributed-gpus=2")
    assert ended.returncode == 0, ended.stderr
    check_all(tmp_path / "record", [2, 2])


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


PRINT_RANK = "import os; print(*(os.environ[name] for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE')), flush=True)\n"
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
"""Connects to a port as soon as a process listens, and sends nothing until its standard input ends."""


def test_nodes_with_unequal_gpus_get_their_ranks_despite_foreign_connections(
    cluster: Slurm, tmp_path: Path, driver: Path
) -> None:
    (tmp_path / "print_rank.py").write_text(PRINT_RANK)
    visible = "case $SLURM_NODEID in 1) export CUDA_VISIBLE_DEVICES=0;; esac"
    train = "exec python -m trainer --script print_rank.py --distributed-port 23456 --join-timeout 40 --run-dir record"
    # The nodes of the lab have one /tmp and GPUs of the same names.
    claims = f"export GPUTRAIN_GPU_CLAIMS={tmp_path}/claims.$SLURM_NODEID"
    command = f"export LD_LIBRARY_PATH={driver}; {claims}; {visible}; {train}"
    words = ["python", "-c", KNOCK, "n1", "23457"]
    stranger = cluster.login.start(*words, env=cluster.environ, stdin=subprocess.PIPE)
    try:
        srun = ["srun", "--nodelist=n[1-3]", "--ntasks-per-node=1", "bash", "-c", command]
        ended = cluster.run(*srun, cwd=tmp_path, check=False)
        assert ended.returncode == 0, ended.stderr
    finally:
        stranger.kill()
        stranger.communicate()
    log_lines = [(tmp_path / "record" / "logs" / f"{rank}.log").read_text().splitlines()[-1] for rank in range(5)]
    assert log_lines == ["0 0 5", "1 1 5", "2 0 5", "3 0 5", "4 1 5"]


def test_a_failed_rank_fails_the_job_and_every_node_reports_the_cause(cluster: Slurm, tmp_path: Path) -> None:
    fault = {"fault": "raise", "fault_rank": 2, "fault_step": 3}
    job = plan(cluster, tmp_path, recipe(["n1", "n2"], [1, 2], task=fault))
    found = cluster.wait(cluster.submit(job))  # and until no process is left
    assert (found["JobState"], found["ExitCode"]) == ("FAILED", "1:0")
    job_output = output(job)
    assert "trainer: rank 2 on n2: ArithmeticError: the answer is not 42\n" in job_output
    assert "trainer: rank 0 on n1: rank 2 on n2 failed: ArithmeticError: the answer is not 42; " in job_output
    results = [json.loads((tmp_path / "record" / "nodes" / f"{node}.json").read_text()) for node in (0, 1)]
    assert [result["exit_code"] for result in results] == [1, 1]
    assert [result["failure"]["kind"] for result in results] == ["lost_peer", "exception"]


def test_scancel_ends_every_process_and_no_rank_is_recorded_as_finished(cluster: Slurm, tmp_path: Path) -> None:
    job = plan(cluster, tmp_path, recipe(["n1", "n2"], [2, 1], **ENDLESS))
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
def test_a_stop_request_that_reaches_the_nodes_saves_and_is_reported(cluster: Slurm, tmp_path: Path) -> None:
    """As scancel and a time limit reach them where Slurm tracks processes by cgroups: the tasks, not their children."""
    job = plan(cluster, tmp_path, recipe(["n1", "n2"], [2, 1], **ENDLESS))
    number = cluster.submit(job)
    record = tmp_path / "record"
    wait_until(lambda: all(is_training(record, rank) for rank in range(3)), "they train")
    running = cluster.processes().items()
    tasks = [pid for pid, words in running if " -m trainer " in words and not words.startswith("srun")]
    for pid in tasks:
        os.kill(pid, signal.SIGTERM)
    found = cluster.wait(number)
    assert (found["JobState"], found["ExitCode"]) == ("FAILED", "130:0")
    assert output(job).count("trainer: stopped at step ") == 2
    assert len(list((record / "checkpoints").glob("step_*.pt"))) == 1


@pytest.mark.slow
def test_a_node_whose_ranks_cannot_start_ends_the_others_that_wait_for_them(cluster: Slurm, tmp_path: Path) -> None:
    job = plan(cluster, tmp_path, recipe(["n1", "n2"], [1, 1]))
    lines = job.read_text().splitlines()
    lines = [
        re.sub(r"\S*python\S* -P -m trainer", "python-of-nowhere -P -m trainer", line) if "=n2" in line else line
        for line in lines
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


def test_a_script_in_too_small_a_job_or_outside_of_one_is_refused(cluster: Slurm, tmp_path: Path) -> None:
    job = plan(cluster, tmp_path, recipe(["10.0.0.1", "10.0.0.2", "10.0.0.3"], [1, 1, 1]))
    found = cluster.wait(cluster.submit(job, "--nodes=2"))
    assert (found["JobState"], found["ExitCode"]) == ("FAILED", "2:0")
    assert output(job) == "gputrain: this plan is for 3 nodes, but the job has 2\n"
    refused = cluster.run("bash", "job.sh", cwd=tmp_path, check=False)
    assert (refused.returncode, refused.stderr) == (2, "gputrain: submit this script with sbatch\n")
    assert not list((tmp_path / "record" / "events").iterdir())


# --- `gputrain run` with the launcher slurm ---------------------------------------------------------------------------


@dataclass
class SlurmUser:
    """``gputrain`` as a person types it on the hosts of a cluster, with a folder of runs that all of them see."""

    cluster: Slurm
    folder: Path

    def words(self, *words: str) -> list[str]:
        return ["env", f"GPUTRAIN_HOME={with_task_options(self.folder / 'home')}", "gputrain", *words]

    def run(
        self, *words: str, host: NamespaceHost | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        host = host or self.cluster.login
        return host.run(*self.words(*words), cwd=self.folder, env=self.cluster.environ, check=check)

    def record(self) -> Path:
        (found,) = (self.folder / "home" / "runs").glob("2*")
        return found

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Type a command and leave it running until its run has a folder."""
        process = self.cluster.start(*self.words(*words), cwd=self.folder)
        wait_until(lambda: list((self.folder / "home" / "runs").glob("2*")), "there is a run", [process])
        return process

    def status(self) -> dict[str, Any]:
        return dict(json.loads((self.record() / "status.json").read_text()))

    def job(self) -> int:
        return int(json.loads((self.record() / "slurm.json").read_text())["number"])

    def await_steps(self, ranks: int = 3) -> None:
        wait_until(lambda: all(is_training(self.record(), rank) for rank in range(ranks)), "all ranks train")


@pytest.fixture
def user(cluster: Slurm, tmp_path: Path) -> SlurmUser:
    (tmp_path / "recipe.toml").write_text(recipe([None, None], [2, 1]) + "[slurm]\n")
    endless = ENDLESS | {"stop_time": 60.0}
    (tmp_path / "endless.toml").write_text(recipe([None, None], [2, 1], **endless) + "[slurm]\n")
    (tmp_path / "single.toml").write_text(recipe([None], [1], **endless) + "[slurm]\n")
    (tmp_path / "torch_free.toml").write_text(torch_free_recipe([None, None], [2, 1]) + "[slurm]\n")
    return SlurmUser(cluster, tmp_path)


TASKS = """\
import os
print(*(os.environ[name] for name in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID")))
"""


@pytest.mark.slow
def test_a_script_finds_its_rank_by_slurms_variables_or_starts_the_ranks_of_its_node(user: SlurmUser) -> None:
    script = TESTS / "support" / "starting_script.py"
    (user.folder / "tasks.py").write_text(TASKS)
    nodes = "[[cluster.nodes]]\ncpu_ranks = 2\n" * 2
    own = {"script": "tasks.py"}, {"script": str(script), "args": ["spawn", "30"], "starts_ranks": True}
    for number, train in enumerate(own):
        keys = "".join(f"{name} = {json.dumps(value)}\n" for name, value in train.items())
        (user.folder / "own.toml").write_text(f"{nodes}[train]\n{keys}[slurm]\n")
        done = user.run("run", "own.toml", check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        record = sorted((user.folder / "home" / "runs").glob("2*"))[number]
        logs = [(record / "logs" / f"{rank}.log").read_text() for rank in range(4)]
        if number == 0:
            assert logs == [f"{rank} 4 {rank % 2} {rank // 2}\n" for rank in range(4)]
        else:
            assert all(f"rank {rank} of 4: " in log for rank, log in enumerate(logs))


@pytest.mark.parametrize(
    "way", ["run", *(pytest.param(way, marks=pytest.mark.slow) for way in ("batch script", "srun"))]
)
def test_nothing_of_the_folder_is_executed(cluster: Slurm, tmp_path: Path, way: str) -> None:
    user = SlurmUser(cluster, tmp_path / "project")
    user.folder.mkdir()
    taken = TakenNames(user.folder, tmp_path / "executed")
    shutil.copy(__file__, user.folder / "text.txt")
    train = {"task": "lm", "batch_size": 4, "max_updates": 3, "threads": 1}
    task = {"data": "text.txt", "context": 16, "dim": 8, "layers": 1, "heads": 1, "sample_bytes": 0}
    tables = [f"{name} = {json.dumps(value)}\n" for name, value in (train | task).items()]
    tables.insert(len(train), "[task]\n")
    nodes = "[[cluster.nodes]]\ncpu_ranks = 1\n" * 2
    (user.folder / "r.toml").write_text(f"[train]\n{''.join(tables)}[slurm]\n{nodes}")
    if way == "run":
        done = user.run("run", "r.toml", check=False)
    elif way == "srun":
        words = [word for name, value in (train | task).items() for word in (f"--{name.replace('_', '-')}", str(value))]
        done = cluster.run("srun", "--nodes=2", "--ntasks-per-node=1", *TRAINER, "--cpu", *words, cwd=user.folder)
    else:
        job = user.folder / "job.sh"
        job.write_text(user.run("plan", "r.toml", "--sbatch").stdout)
        done = cluster.run("sbatch", "--wait", job.name, cwd=user.folder, check=False)
    assert (taken.executed(), done.returncode) == ([], 0), done.stdout + done.stderr


@pytest.mark.parametrize("way", ["salloc", *(pytest.param(way, marks=pytest.mark.slow) for way in ("login", "sbatch"))])
def test_one_recipe_trains_from_the_login_node_and_inside_an_allocation(user: SlurmUser, way: str) -> None:
    """The ranks of each node start in the node's folder, after its line of setup."""
    cluster, folder, code = user.cluster, user.folder, user.folder / "the code"
    code.mkdir()
    place = ("--set", f"cluster.workdir={code}", "--set", "cluster.setup=pwd > at.$(hostname)")
    words = user.words("run", "recipe.toml", *place)
    if way == "sbatch":
        (folder / "job.sh").write_text(f"#!/bin/bash\n{shlex.join(words)}\n")
        assert cluster.wait(cluster.submit(folder / "job.sh", "--nodes=2", "--exclusive"))["JobState"] == "COMPLETED"
    else:
        heterogeneous = ["salloc", "--nodes=1", ":", "--nodes=1"] if way == "salloc" else []
        cluster.run(*heterogeneous, *words, cwd=folder)
    assert user.status()["status"] == "finished"
    check_all(user.record(), [2, 1])
    job = json.loads((user.record() / "slurm.json").read_text())
    assert (job["nodes"], job["batch"]) == (["n1", "n2"], way == "login")
    assert job["number"] > 0
    assert {path.name: path.read_text() for path in code.glob("at.*")} == {
        f"at.{name}": f"{code}\n" for name in ("n1", "n2")
    }


def test_a_run_that_is_typed_in_a_step_starts_once_and_does_not_wait_for_that_step(user: SlurmUser) -> None:
    """As in ``srun --pty bash``, whose step holds all that the job has."""
    words = user.words("run", "torch_free.toml", "--set", 'train.args=["3"]')
    done = user.cluster.run("srun", "--nodes=2", "--ntasks-per-node=1", *words, cwd=user.folder, check=False)
    assert done.returncode == 3
    (refused,) = [line for line in done.stderr.splitlines() if "this is task 1 of a step in job " in line]
    assert refused.endswith("start gputrain without srun, or by srun --ntasks=1")
    assert user.status()["status"] == "finished"


def test_a_run_that_waits_for_the_hosts_of_another_one_in_its_job_says_so(user: SlurmUser) -> None:
    run, check = (shlex.join(user.words(name, "torch_free.toml")) for name in ("run", "check"))
    (user.folder / "two.sh").write_text(
        f'{run} &\nuntil grep -qs \'"type":"step"\' {user.folder}/home/runs/2*/events/*.ndjson; do sleep 0.1; done\n'
        f"{check} > checked\nkill -TERM $!\nwait\n"
    )
    user.cluster.run("salloc", "--nodes=2", "bash", user.folder / "two.sh", cwd=user.folder)
    what = f"where this run waits for the hosts of step {user.record().name}"
    checked = (user.folder / "checked").read_text()
    assert what in checked
    assert "wait, stop what runs there, or start gputrain in another job" in checked


SAVES = """\
import signal, sys
import torch_free_rank
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
torch_free_rank.main()
"""
"""Ends as a shell's script that a signal has ended, once it has saved."""


@pytest.mark.parametrize(
    ("way", "words", "reason"),
    [
        pytest.param("login", ["stop", "last"], "stopped by `gputrain stop`", marks=pytest.mark.slow),
        ("salloc", ["stop", "last"], "stopped by `gputrain stop`"),
        ("login", [], "stopped by the command that started it"),
        ("scancel of a script that saves", [], "it was cancelled in Slurm"),
    ],
)
def test_the_reason_of_a_stop_names_its_origin(user: SlurmUser, way: str, words: list[str], reason: str) -> None:
    allocation = ["salloc", "--nodes=2", "--exclusive"] if way == "salloc" else []
    if way.startswith("scancel"):
        (user.folder / "saves.py").write_text(SAVES)
        train = f'[train]\nscript = "{user.folder}/saves.py"'
        (user.folder / "torch_free.toml").write_text(script_recipe([None, None], [2, 1], train) + "[slurm]\n")
    process = user.cluster.start(*allocation, *user.words("run", "torch_free.toml"), cwd=user.folder)
    wait_until(lambda: list((user.folder / "home" / "runs").glob("2*")), "there is a run", [process])
    user.await_steps()
    if words:
        user.run(*words)
    elif way == "login":
        process.send_signal(signal.SIGINT)
    else:
        user.cluster.run("scancel", str(user.job()))
    assert process.wait(LIMIT_S) == 130, (user.folder / "output").read_text()
    assert user.status()["message"] == reason
    assert not [event for rank in range(3) for event in events(user.record(), rank) if event["type"] == "failure"]


def test_the_stacks_of_ranks_on_two_nodes_are_asked_for_from_the_login_host(user: SlurmUser) -> None:
    user.run("run", "torch_free.toml", "--detach")
    user.await_steps()

    def pids() -> list[int]:  # the node agent's record may be behind that of a rank
        spawned = [event for event in events(user.record(), "node-1") if event.get("state") == "spawned"]
        return [event["pid"] for event in spawned if event["rank"] == 2]

    wait_until(pids, "the node agent has recorded its rank")
    (pid,) = pids()
    os.kill(pid, signal.SIGSTOP)
    try:
        printed = user.run("stacks", "last", check=False)
        answer = json.loads(user.run("stacks", "last", "--json", check=False).stdout)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert "rank 2 on n2: the process is stopped (state T)" in printed.stdout, printed.stdout + printed.stderr
    assert re.search(r"^ranks? [01].* on n1: ", printed.stdout, re.MULTILINE), printed.stdout
    assert (printed.returncode, answer["silent"]) == (1, [])
    hosts = {rank: group["hosts"] for group in answer["groups"] for rank in group["ranks"]}
    assert hosts == {0: ["n1"], 1: ["n1"], 2: ["n2"]}
    whole = user.run("stacks", "last", "--json", host=user.cluster.nodes[2])  # the run has gone on; exit code 0
    assert all(group["threads"] for group in json.loads(whole.stdout)["groups"])
    user.run("stop", "last")


@pytest.mark.timing
def test_a_run_waits_in_the_queue_trains_and_is_cancelled_in_slurm_within_three_seconds_with_its_work_saved(
    user: SlurmUser,
) -> None:
    cluster, folder = user.cluster, user.folder
    (folder / "other.sh").write_text("#!/bin/bash\nsleep 600\n")
    other = cluster.submit(folder / "other.sh", "--nodes=3", "--exclusive")
    wait_until(lambda: cluster.job(other)["JobState"] == "RUNNING", "another job has all nodes")
    process = cluster.start(*user.words("run", "single.toml"), cwd=folder)
    narration = folder / "output"
    wait_until(lambda: ": Resources" in narration.read_text(), "it prints why it waits", [process])
    (entry,) = json.loads(user.run("runs", "--json").stdout)
    assert entry["state"] == "queued"
    waits = user.run("stacks", "last", check=False)
    assert (waits.returncode, waits.stdout) == (1, "")
    assert waits.stderr.endswith(f" waits in Slurm's queue as job {user.job()}: no rank runs\n")
    second = SlurmUser(cluster, folder / "second")
    second.folder.mkdir()
    shutil.copy(folder / "single.toml", second.folder)
    second.run("run", "single.toml", "--detach")
    second.run("stop", "last", host=cluster.nodes[2])
    assert (second.status()["status"], second.status()["message"]) == ("stopped", "stopped by `gputrain stop`")
    cluster.run("scancel", str(other))
    user.await_steps(1)
    cancelled_at = time.time()
    cluster.run("scancel", str(user.job()))
    assert process.wait(LIMIT_S) == 130
    seen_s = time.time() - cancelled_at
    status = user.status()
    assert "it was cancelled in Slurm at step " in status["message"]
    assert status["status"] == "stopped"
    assert seen_s < 3
    assert len(list((user.record() / "checkpoints").glob("step_*.pt"))) == 1
    assert f"queued as job {user.job()} in main: Resources" in narration.read_text()
    assert "it was cancelled in Slurm at step " in narration.read_text()


def test_a_run_of_slurm_is_stopped_from_any_node_and_one_that_is_requeued_goes_on(user: SlurmUser) -> None:
    cluster = user.cluster
    user.run("run", "endless.toml", "--detach")
    user.await_steps()
    waiting = cluster.start(*user.words("wait", "last"), cwd=user.folder)
    number = user.job()
    cluster.run("scontrol", "requeue", str(number))
    wait_until(lambda: cluster.job(number)["JobState"] == "PENDING", "it is in the queue again")
    assert "Slurm put it back into its queue at step " in user.status()["message"]
    (kept,) = (user.record() / "checkpoints").glob("step_*.pt")
    before = len(events(user.record(), 0))
    cluster.run("scontrol", "update", f"JobId={number}", "ExcNodeList=n1")

    release(cluster, number)
    again = wait_until(
        lambda: [event for event in events(user.record(), 0)[before:] if event["type"] == "step"], "it trains again"
    )
    assert again[0]["step"] - again[0]["steps"] == int(kept.stem.removeprefix("step_"))
    stopped = user.run("stop", "last", host=cluster.nodes[2])
    assert re.search(r" is stopped at step \d+, saved \S+; processes left: none$", stopped.stdout.strip())
    assert user.status()["message"].startswith("stopped by `gputrain stop` at step ")
    cluster.wait(number)
    assert waiting.wait(LIMIT_S) == 130, "the wait goes on while the job is in the queue again"
    assert f"{user.record().name} stopped in " in (user.folder / "output").read_text()
    assert json.loads((user.record() / "slurm.json").read_text())["nodes"] == ["n3", "n2"]
    assert len(list((user.record() / "checkpoints").glob("step_*.pt"))) == 2


def release(cluster: Slurm, number: int) -> None:
    """Cut short the two minutes for which Slurm lets a requeued job wait, and wait until it runs.

    A host refuses a job whose credential is not of a later second than the end of its start before.
    """
    wait_until(lambda: cluster.job(number)["JobState"] == "PENDING", "it is in the queue again")
    first = time.time() + 2

    def is_running() -> bool:
        if time.time() >= first and cluster.job(number)["JobState"] == "PENDING":
            # Slurm may set that time once more when the nodes are free.
            cluster.run("scontrol", "update", f"JobId={number}", "StartTime=now", check=False)
        return cluster.job(number)["JobState"] == "RUNNING"

    wait_until(is_running, "it has left the queue")


@pytest.mark.parametrize(
    "ways",
    [
        ("requeue", "successor"),
        pytest.param(("limit", "limit", "limit"), marks=pytest.mark.slow),
        pytest.param(("successor", "successor", "successor"), marks=pytest.mark.slow),
    ],
)
def test_a_run_with_requeue_goes_on_after_each_time_limit_as_one_run(user: SlurmUser, ways: tuple[str, ...]) -> None:
    """The signal that the job asks for comes before the limit.

    It is sent at once, except at a ``limit``, where Slurm sends it within half a minute.
    """
    steps, pause_s = (1000, 0.1) if "limit" in ways else (100, 0.08)  # the signal comes long before the last
    cluster = user.cluster
    straight = SlurmUser(cluster, user.folder / "straight")
    straight.folder.mkdir()
    (straight.folder / "long.toml").write_text(recipe([None], [3], max_updates=steps))
    assert straight.start("run", "long.toml").wait(3 * LIMIT_S) == 0
    text = recipe([None], [3], max_updates=steps, task={"pause_s": pause_s}) + "[slurm]\n"
    (user.folder / "long.toml").write_text(text + "requeue = true\n")
    process = user.start("run", "long.toml")
    for times, way in enumerate(ways, 1):
        wait_until(lambda: starts(user.record()) == times, "it trains", [process])  # noqa: B023
        job = user.job()
        if way == "successor":
            cluster.run("scontrol", "update", f"JobId={job}", "Requeue=0")
        if way == "limit":
            _, minutes, _ = cluster.job(job)["RunTime"].split(":")
            cluster.run("scontrol", "update", f"JobId={job}", f"TimeLimit={int(minutes) + 2}")
        else:
            cluster.run("scancel", "--batch", "--signal=USR1", str(job))
        wait_until(lambda: requeues(user.record()) == times, "it is in the queue", [process])  # noqa: B023
        if way == "successor":
            assert cluster.job(job)["JobState"] != "PENDING"
            assert user.job() != job
        else:
            cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=UNLIMITED")
            release(cluster, job)
    assert process.wait(3 * LIMIT_S) == 0, (user.status(), (user.folder / "output").read_text()[-3000:])
    assert (user.status()["status"], user.status().get("restarts", 0)) == ("finished", 0)
    assert starts(user.record()) == len(ways) + 1
    assert losses(user.record()) == losses(straight.record())
    assert parameters(user.record()) == parameters(straight.record())
    own = events(user.record(), "run")
    assert [event["message"].split(" at step ")[0] for event in own if event.get("kind") == "requeued"] == [
        "its time limit in Slurm is near"
    ] * len(ways)
    assert sum(event["type"] == "run_ended" for event in own) == 1
    (entry,) = json.loads(user.run("runs", "--json").stdout)
    assert entry["jobs"] == json.loads(user.run("report", "last", "--json").stdout)["jobs"] == len(ways) + 1
    closing = rf"^finished in [\d: s]+, in {len(ways) + 1} jobs, {steps} steps, [\d,]+ samples$"
    assert re.search(closing, (user.folder / "output").read_text(), re.MULTILINE)
    if "successor" in ways:
        note = f"; job {user.job()} follows job {user.job() - 1} (Slurm does not requeue job {user.job() - 1})"
        printed = " ".join((user.folder / "output").read_text().split())
        assert note in printed
        assert f"queued as job {user.job()} in main: " in printed
        words = ("python", "-P", "-m", "gputrain_tui.lifecycle.supervisor", user.record())
        late = cluster.run("env", f"SLURM_JOB_ID={user.job() - 1}", *words, check=False)
        assert (late.returncode, late.stderr) == (
            3,
            f"gputrain: job {user.job() - 1} may not train {user.record().name}, whose job is {user.job()} now\n",
        )


def requeues(record: Path) -> int:
    return sum(event.get("kind") == "requeued" for event in events(record, "run"))


def losses(record: Path) -> list[list[str]]:
    """Return the loss of each step on each rank, as several in an event are rounded; every step must be there once."""
    curves = []
    for rank in range(3):
        curve: list[str] = []
        for event in events(record, rank):
            if event["type"] == "step":
                assert event["step"] - event.get("steps", 1) == len(curve)
                single = event.get("losses") or [event.get("loss")]  # none where the rank's batch was empty
                curve += ["" if loss is None else f"{loss:.7g}" for loss in single]
                assert event["step"] == len(curve)
        curves.append(curve)
    return curves


NO_REQUEUE_AT_ALL = '[slurm]\nrequeue = true\nextra = ["--no-requeue"]\n'


def test_a_run_goes_on_without_the_node_that_failed_in_a_successor_that_stop_reaches(user: SlurmUser) -> None:
    cluster = user.cluster
    text = (user.folder / "endless.toml").read_text().replace("[slurm]\n", NO_REQUEUE_AT_ALL)
    (user.folder / "endless.toml").write_text(text)
    user.run("run", "endless.toml", "--detach")
    user.await_steps()
    lost = user.job()
    cluster.run("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=lost")
    try:
        wait_until(lambda: requeues(user.record()) == 1, "there is a successor")
    finally:
        cluster.run("scontrol", "update", "NodeName=n2", "State=RESUME", check=False)
    wait_until(lambda: starts(user.record()) == 2, "it trains again")
    (finding,) = [event for event in events(user.record(), "run") if event.get("kind") == "requeued"]
    assert finding["host"] == "n2"
    assert re.match(
        rf"{LOST_N2}; .*; job {user.job()} follows job {lost}; leaving out n2, which failed", finding["message"]
    )
    assert json.loads((user.record() / "slurm.json").read_text())["nodes"] == ["n1", "n3"]
    assert cluster.job(user.job())["ExcNodeList"] == "n2"
    user.run("stop", "last")
    assert user.status()["message"].startswith("stopped by `gputrain stop` at step ")
    cluster.wait(user.job())


@pytest.mark.slow
def test_the_command_that_follows_a_run_submits_the_successor_of_a_job_whose_first_host_died(user: SlurmUser) -> None:
    cluster, host = user.cluster, user.cluster.nodes[0]
    text = (user.folder / "endless.toml").read_text().replace("[slurm]\n", NO_REQUEUE_AT_ALL)
    (user.folder / "endless.toml").write_text(text)
    process = user.start("run", "endless.toml")
    user.await_steps()
    first = user.job()
    cluster.kill_node(host)
    for pid in host.processes():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    try:
        wait_until(lambda: starts(user.record()) == 2, "it trains again", [process])
        (finding,) = [event for event in events(user.record(), "run") if event.get("kind") == "requeued"]
        assert (
            finding["message"] == f"Slurm lost n1; job {user.job()} follows job {first}; leaving out n1, which failed"
        )
        assert json.loads((user.record() / "slurm.json").read_text())["nodes"] == ["n3", "n2"]
        user.run("stop", "last")
        assert process.wait(LIMIT_S) == 130
        assert user.status()["message"].startswith("stopped by `gputrain stop` at step ")
    finally:
        cluster.start_node(host)
        cluster.run("scancel", "--user=root")
        cluster.wait_idle()


@pytest.mark.parametrize("way", ["stop", pytest.param("scancel", marks=pytest.mark.slow), "refused"])
def test_a_successor_that_waits_is_cancelled_and_one_that_slurm_refuses_is_named(user: SlurmUser, way: str) -> None:
    cluster = user.cluster
    text = (user.folder / "single.toml").read_text().replace("[slurm]\n", NO_REQUEUE_AT_ALL)
    (user.folder / "single.toml").write_text(text.replace('requeue"]', 'requeue", "--begin=now+1hour"]'))
    process = user.start("run", "single.toml")
    wait_until(lambda: (user.record() / "slurm.json").exists(), "it is submitted", [process])
    first = user.job()
    cluster.run("scontrol", "update", f"JobId={first}", "StartTime=now")
    user.await_steps(1)
    if way == "refused":
        cluster.run("scontrol", "update", "PartitionName=main", "State=INACTIVE")
    try:
        cluster.run("scancel", "--batch", "--signal=USR1", str(first))
        if way != "refused":
            wait_until(lambda: user.status()["status"] == "queued", "it is in the queue", [process])
            queued = f"queued as job {user.job()} in main: "
            wait_until(lambda: queued in (user.folder / "output").read_text(), "the wait is shown", [process])
            if way == "stop":
                user.run("stop", "last")
            else:
                cluster.run("scancel", str(user.job()))
            assert cluster.job(user.job())["JobState"] == "CANCELLED"
        assert process.wait(LIMIT_S) == 130
    finally:
        cluster.run("scontrol", "update", "PartitionName=main", "State=UP")
    message = user.status()["message"]
    assert (user.job() == first) == (way == "refused")
    if way == "refused":
        assert message.startswith("its time limit in Slurm is near, and does not go on: ")
        assert f"Slurm does not requeue job {first}; its successor was refused: sbatch: " in message
    else:
        by_whom = "stopped by `gputrain stop`" if way == "stop" else "it was cancelled in Slurm"
        assert message.startswith(f"{by_whom} at step ")
        (entry,) = json.loads(user.run("runs", "--json").stdout)
        assert (entry["jobs"], entry["lr"]) == (1, 0.001)
        assert entry["steps_per_s"] > 0, "figures of the job before stay"


def starts(record: Path) -> int:
    """Return how often rank 0 was started and has made a step since."""
    found = [event["type"] for event in events(record, 0) if event["type"] in ("training_plan", "step")]
    return sum((before, after) == ("training_plan", "step") for before, after in itertools.pairwise(found))


def parameters(record: Path) -> str:
    """Return the checksum of the final parameters of rank 0."""
    return str([event["parameters"] for event in events(record, 0) if event["type"] == "checksum"][-1])


@pytest.mark.parametrize(
    ("setting", "code", "line"),
    [
        ("slurm.partition=nowhere", 3, "slurm.partition: sbatch: invalid partition specified: nowhere"),
        ("slurm.nodes=9", 2, "slurm.nodes is 9, but there are 2 [[cluster.nodes]]"),
        ("slurm.setup=echo no such module >&2; false", 1, "no such module; slurm.setup ended with exit code 1"),
        ("cluster.workdir=/nowhere", 1, " has no folder /nowhere, the workdir of its node"),
        (
            "cluster.setup=case $(hostname) in n2) echo broken; false;; esac",
            1,
            "did not finish: setup ended with exit code",
        ),
    ],
)
def test_a_refusal_of_slurm_or_a_node_is_reported_verbatim(user: SlurmUser, setting: str, code: int, line: str) -> None:
    ended = user.run("run", "recipe.toml", "--set", setting, check=False)
    assert ended.returncode == code
    assert line in ended.stderr
    if failed := re.search(
        r"^the run failed on n(\d): .*\n.*\n  its last output, of .*/node-(\d).log:", ended.stderr, re.M
    ):
        assert int(failed[1]) == int(failed[2]) + 1
    assert bool(failed) == setting.startswith("cluster.")
    assert not user.cluster.run("squeue", "--noheader").stdout


def test_a_job_that_waits_for_a_drained_node_is_not_refused(user: SlurmUser) -> None:
    cluster = user.cluster
    cluster.run("scontrol", "update", "NodeName=n2,n3", "State=DRAIN", "Reason=a disk is changed")
    try:
        done = user.run("check", "torch_free.toml")
    finally:
        cluster.run("scontrol", "update", "NodeName=n2,n3", "State=RESUME")
        cluster.wait_idle()
    assert "configuration is not available; the job may wait for n2, n3, down or drained" in done.stdout


@pytest.mark.parametrize(
    ("alone", "who"),
    [pytest.param(0, "n[1-2], which", marks=pytest.mark.slow), (2, "n2")],
    ids=["login", "second node"],
)
def test_a_run_directory_that_a_node_does_not_see_is_reported_in_one_line(
    user: SlurmUser, alone: int, who: str
) -> None:
    host, home = [user.cluster.login, *user.cluster.nodes][alone], user.folder / "home"
    home.mkdir(exist_ok=True)
    host.run("mount", "-t", "tmpfs", "tmpfs", home)
    try:
        ended = user.run("run", "recipe.toml", check=False)
        assert ended.returncode == 1
        assert f"{who} does not see the run directory {home}/runs/" in ended.stderr
    finally:
        host.run("umount", "--lazy", home)


def test_requeue_with_a_save_folder_that_a_node_does_not_see_is_refused_before_the_training(user: SlurmUser) -> None:
    saves, host = user.folder / "saves", user.cluster.nodes[1]
    saves.mkdir()
    host.run("mount", "-t", "tmpfs", "tmpfs", saves)
    try:
        words = ("run", "recipe.toml", "--set", "slurm.requeue=true", "--set", f"train.save_dir={saves}")
        ended = user.run(*words, check=False)
    finally:
        host.run("umount", "--lazy", saves)
    assert ended.returncode == 3, ended.stderr
    assert f"record {user.record()}" in ended.stderr
    line = f"n2 does not see the save folder {saves}: slurm.requeue needs one that all nodes see; remove train.save_dir"
    assert line in " ".join(ended.stderr.split())
    assert not list(saves.iterdir())


def test_data_that_the_nodes_lack_are_told_in_one_line_with_a_node_and_the_record(user: SlurmUser) -> None:
    """The login host only warns of them: a node may have them."""
    data = user.folder / "absent" / "text.txt"
    keys = 'task = "lm"\nmax_updates = 1\nbatch_size = 4\n'
    nodes = "[slurm]\nnodes = 2\n[[cluster.nodes]]\ncpu_ranks = 1\n"
    (user.folder / "lm.toml").write_text(f'[train]\n{keys}[task]\ndata = "{data}"\n{nodes}')
    ended = user.run("run", "lm.toml", check=False)
    refusal, record = ended.stderr.splitlines()[-2:]
    assert ended.returncode == 3, ended.stderr
    told = f"{data} does not exist, nor does the folder {data.parent}; check the path"
    assert refusal in [f"gputrain: n{number}: {told}" for number in (1, 2)]
    assert record == f"record {user.record()}"
    (entry,) = json.loads(user.run("runs", "--json").stdout)
    assert (entry["state"], entry["exit_code"]) == ("failed", 3)
    assert entry["message"].startswith(told)


@pytest.mark.slow
def test_a_run_whose_time_limit_is_over_has_saved(user: SlurmUser) -> None:
    """Slurm then sends SIGTERM, SIGCONT and SIGTERM within a second."""
    user.run("run", "endless.toml", "--detach", "--set", "train.stop_time=0")
    user.await_steps()
    user.cluster.run("scontrol", "update", f"JobId={user.job()}", "TimeLimit=00:00:01")
    user.cluster.wait(user.job())
    assert "it reached its time limit in Slurm at step " in user.status()["message"]
    assert len(list((user.record() / "checkpoints").glob("step_*.pt"))) == 1


def test_a_run_with_requeue_whose_time_limit_is_near_waits_in_the_queue(user: SlurmUser) -> None:
    text = (user.folder / "single.toml").read_text()
    (user.folder / "single.toml").write_text(f"{text}requeue = true\n")
    user.run("run", "single.toml", "--detach", "--set", "train.stop_time=0")
    user.await_steps(1)
    user.cluster.run("scontrol", "update", f"JobId={user.job()}", "TimeLimit=00:00:01")
    wait_until(lambda: user.cluster.job(user.job())["JobState"] == "PENDING", "it is in the queue")
    assert user.status()["message"].startswith("its time limit in Slurm is near at step ")
    assert user.status()["status"] == "queued"
    user.run("stop", "last")
    assert user.status()["status"] == "stopped"


@pytest.mark.parametrize("mode", [pytest.param("cancel", marks=pytest.mark.slow), "requeue"])
def test_a_preempted_run_is_reported_as_such_and_has_saved(user: SlurmUser, mode: str) -> None:
    cluster = user.cluster
    (user.folder / "urgent.sh").write_text("#!/bin/bash\nsleep 600\n")
    user.run("run", "single.toml", "--detach", "--set", f"slurm.partition={mode}")
    user.await_steps(1)
    urgent = cluster.submit(user.folder / "urgent.sh", "--partition=urgent", "--nodes=3", "--exclusive")
    wait_until(lambda: cluster.job(urgent)["JobState"] == "RUNNING", "the other job has its nodes")
    wait_until(lambda: " at step " in user.status().get("message", ""), "the status has its end")
    assert "Slurm pre-empted it for another job at step " in user.status()["message"]
    assert len(list((user.record() / "checkpoints").glob("step_*.pt"))) == 1
    user.run("stop", "last")
    cluster.run("scancel", str(urgent))


NO_REQUEUE = ("--set", 'slurm.extra=["--no-requeue"]')
LOST_N2 = "Slurm lost n2 with rank 2"


@contextmanager
def down(cluster: Slurm, node: str) -> Iterator[None]:
    """Declare a node lost, as its administrator does or Slurm when it does not answer; at the end it is back."""
    cluster.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")
    try:
        yield
    finally:
        cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)  # it may be back already
        cluster.run("scancel", "--user=root")
        cluster.wait_idle()


def test_a_run_whose_node_slurm_loses_has_failed(user: SlurmUser) -> None:
    process = user.start("run", "torch_free.toml", *NO_REQUEUE)
    user.await_steps()
    with down(user.cluster, "n2"):
        assert process.wait(LIMIT_S) == 1
        status = user.status()
        assert (status["status"], status["exit_code"]) == ("failed", 1)
        assert status["message"].startswith(LOST_N2)
        failure = events(user.record(), "run")[-2]
        assert (failure["type"], failure["kind"], failure["host"]) == ("failure", "node_lost", "n2")
        assert f"the run failed on n2: node lost\n  {LOST_N2}" in (user.folder / "output").read_text()


def test_a_run_that_slurm_requeues_as_it_loses_a_node_is_stopped_until_it_goes_on(user: SlurmUser) -> None:
    process = user.start("run", "torch_free.toml")
    user.await_steps()
    with down(user.cluster, "n2"):
        assert process.wait(LIMIT_S) == 130
        status = user.status()
        assert (status["status"], status["exit_code"]) == ("stopped", 130)
        assert status["message"].startswith(f"{LOST_N2}, and put the run back into its queue")
        user.run("stop", "last")


def check_killed_node(user: SlurmUser, node: NamespaceHost, ranks: str) -> None:
    """Kill Slurm on a node while a run trains there; the run has failed within ten seconds, and nothing is left."""
    cluster, lost = user.cluster, f"Slurm lost {node.name} {ranks}"
    process = user.start("run", "endless.toml", *NO_REQUEUE)
    user.await_steps()
    killed = time.time()
    cluster.kill_node(node)
    try:
        wait_until(lambda: not cluster.processes(), "no process of the run is left on any node")
        freed_s = time.time() - killed
        assert process.wait(LIMIT_S) == 1
        status = user.status()
        assert (status["status"], status["exit_code"]) == ("failed", 1)
        assert status["message"].startswith(lost)
        assert f"the run failed on {node.name}: node lost\n  {lost}" in (user.folder / "output").read_text()
        assert max(status["ended"] - killed, freed_s) < 10, (status["ended"] - killed, freed_s)
    finally:
        cluster.start_node(node)
        cluster.run("scancel", "--user=root")
        cluster.wait_idle()


@pytest.mark.timing
@pytest.mark.parametrize(
    ("node", "ranks"),
    [
        pytest.param(0, "with ranks 0, 1", id="the supervisor's"),
        pytest.param(1, "with rank 2", id="another", marks=pytest.mark.slow),
    ],
)
def test_a_node_whose_slurmd_and_steps_are_killed_is_named_within_ten_seconds_and_nothing_is_left(
    user: SlurmUser, node: int, ranks: str
) -> None:
    check_killed_node(user, user.cluster.nodes[node], ranks)


HOG = """\
import os, time
held = []
while True:
    if os.environ["RANK"] == os.environ["HOG"]:
        held.append(bytearray(b"x" * (20 << 20)))
    time.sleep(0.2)
"""
"""One rank takes 100 MiB a second."""


@pytest.mark.parametrize(
    ("memory", "hog", "who", "node"),
    [
        ("cgroup", 2, "rank 2", 1),
        pytest.param("cgroup", 1, "rank 1", 0, marks=pytest.mark.slow),
        pytest.param("polled", 2, "rank 2", 1, marks=pytest.mark.slow),
        ("polled", 1, "ranks 0, 1 (rank 1 used the most)", 0),
    ],
)
def test_a_job_over_its_memory_limit_is_reported_with_rank_host_limit_and_key(
    tmp_path: Path, memory: str, hog: int, who: str, node: int
) -> None:
    require_slurm()
    if memory == "cgroup" and not Path("/sys/fs/cgroup/memory/memory.oom_control").exists():
        pytest.skip("needs the memory controller of cgroups of version 1")
    (tmp_path / "hog.py").write_text(HOG)
    nodes = "[[cluster.nodes]]\ncpu_ranks = 2\n[[cluster.nodes]]\ncpu_ranks = 1\n"
    (tmp_path / "hog.toml").write_text(f'[train]\nscript = "hog.py"\n{nodes}[slurm]\nmem = "400M"\n')
    folder = Path(tempfile.mkdtemp(prefix="gt-", dir="/tmp"))
    proctrack = "cgroup" if memory == "cgroup" else "linuxproc"
    try:
        environ = ENVIRON | {"HOG": str(hog)}
        with slurm(folder, IN_CGROUPS, environ=environ, proctrack=proctrack, memory=memory) as running:
            user = SlurmUser(running, tmp_path)
            done = user.run("run", "hog.toml", "--json", check=False)
            running.wait(user.job())
            (entry,) = json.loads(user.run("runs", "--json").stdout)
            table = user.run("runs").stdout
    finally:
        shutil.rmtree(folder)
    host = list(IN_CGROUPS)[node]
    cause = f"{who} on {host} ran out of memory: Slurm enforced the job's limit of 400 MiB per node; raise slurm.mem"
    assert (done.returncode, entry["state"], entry["exit_code"], entry["message"]) == (1, "failed", 1, cause)
    assert f"failed on {host}: out of memory" in done.stderr
    assert cause in done.stderr
    assert table.rstrip().endswith(cut(cause, MAX_CAUSE_CELLS))
    seen = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(event["kind"], event["host"]) for event in seen if event["type"] == "failure"} == {("out_of_memory", host)}
    assert seen[-1] == {
        "type": "run_ended",
        "time": seen[-1]["time"],
        "status": "failed",
        "exit_code": 1,
        "message": cause,
        "elapsed_ms": seen[-1]["elapsed_ms"],
    }


SEES_GPUS = """\
import os
print("GPUs", os.environ["CUDA_VISIBLE_DEVICES"], "of rank", os.environ["RANK"])
"""


def test_gpus_that_are_requested_by_their_type_reach_the_steps_of_a_job(tmp_path: Path, driver: Path) -> None:
    """Submitted, by a batch script, and in allocations with the type and without; fewer of them are named."""
    require_slurm()
    (tmp_path / "gpus.py").write_text(SEES_GPUS)
    text = '[train]\nscript = "gpus.py"\n[[cluster.nodes]]\ngpus = 2\n[slurm]\nnodes = 2\n'
    (tmp_path / "typed.toml").write_text(f'{text}gpu_type = "h100"\n')
    (tmp_path / "other.toml").write_text(f'{text}gpu_type = "a100"\n')
    (tmp_path / "gres.toml").write_text(f'{text}extra = ["--gres=gpu:h100:2"]\n')
    folder = Path(tempfile.mkdtemp(prefix="gt-", dir="/tmp"))
    try:
        environ = ENVIRON | {"LD_LIBRARY_PATH": str(driver)}
        with slurm(folder, dict(list(IN_CGROUPS.items())[:2]), environ=environ, gpus=2) as running:
            user = SlurmUser(running, tmp_path)
            home = tmp_path / "home" / "runs"
            for start, name in (
                ([], "typed.toml"),
                ([], "gres.toml"),
                (["salloc", "--nodes=2", "--gpus-per-node=h100:2"], "typed.toml"),
                (["salloc", "--nodes=2", "--gpus=h100:4"], "typed.toml"),
                (["salloc", "--nodes=2", "--gpus-per-task=h100:1", "--ntasks-per-node=2"], "typed.toml"),
            ):
                done = running.run(*start, *user.words("run", name), cwd=tmp_path, check=False)
                assert done.returncode == 0, (start, name, done.stderr)
                for rank in range(4):
                    (log,) = home.glob(f"2*/logs/{rank}.log")
                    assert f"GPUs 0,1 of rank {rank}\n" in log.read_text()
                shutil.rmtree(home)
            (tmp_path / "job.sh").write_text(user.run("plan", "typed.toml", "--sbatch").stdout)
            assert running.wait(running.submit(tmp_path / "job.sh"))["JobState"] == "COMPLETED"
            printed = output(tmp_path / "job.sh")
            assert sorted(re.findall(r"GPUs 0,1 of rank (\d)", printed)) == ["0", "1", "2", "3"]
            words = ("salloc", "--nodes=2", "--gpus-per-node=1", *user.words("run", "typed.toml"))
            fewer = running.run(*words, cwd=tmp_path, check=False)
            other = user.run("check", "other.toml", check=False)
    finally:
        shutil.rmtree(folder)
    assert fewer.returncode == 1
    assert "has fewer GPUs in this job than the 2 of the plan; salloc and sbatch take --gpus-per-node=2" in fewer.stderr
    assert other.returncode == 3
    assert "requested were --nodes=2 --exclusive --gpus-per-node=a100:2\n" in other.stdout


@pytest.mark.slow
@pytest.mark.timing
def test_a_run_is_saved_and_a_killed_node_named_where_slurm_signals_only_a_steps_tasks(
    tmp_path: Path,
) -> None:
    """As most clusters do, by ``proctrack/cgroup``."""
    require_slurm()
    if not Path("/sys/fs/cgroup/freezer").is_dir():
        pytest.skip("needs cgroups of version 1")
    folder = Path(tempfile.mkdtemp(prefix="gt-", dir="/tmp"))
    try:
        with slurm(folder, IN_CGROUPS, environ=ENVIRON, proctrack="cgroup") as running:
            (tmp_path / "endless.toml").write_text(recipe([None, None], [2, 1], **ENDLESS) + "[slurm]\n")
            user = SlurmUser(running, tmp_path)
            user.run("run", "endless.toml", "--detach")
            user.await_steps()
            running.run("scancel", str(user.job()))
            running.wait(user.job())
            assert "it was cancelled in Slurm at step " in user.status()["message"]
            assert len(list((user.record() / "checkpoints").glob("step_*.pt"))) == 1
            shutil.rmtree(user.record())
            check_killed_node(user, running.nodes[1], "with rank 2")
    finally:
        shutil.rmtree(folder)


def test_the_page_about_slurm_is_followed_word_for_word(user: SlurmUser) -> None:
    (text,) = blocks("slurm", "toml")
    (user.folder / "slurm.toml").write_text(text)
    for block in blocks("slurm", "sh slurm"):
        script = f"export GPUTRAIN_HOME={shlex.quote(str(user.folder / 'home'))}\n{block}"
        user.cluster.run("bash", "-euo", "pipefail", "-c", script, cwd=user.folder)
    runs = sorted((user.folder / "home" / "runs").glob("2*"))
    ends = [json.loads((run / "status.json").read_text())["status"] for run in runs]
    assert ends == ["finished", "stopped", "finished"]
