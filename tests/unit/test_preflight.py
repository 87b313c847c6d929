"""Preflight checks as a table over facts; and the facts themselves, read on this machine."""

from __future__ import annotations

import os
import resource
import socket
import time
from pathlib import Path

import pytest
from recipe_texts import TRAIN, recipe

from gputrain_tui.hosts.environment_facts import Torch
from gputrain_tui.hosts.host_names import LocalFacts
from gputrain_tui.hosts.inventory import Gpu, GpuProcess, Inventory
from gputrain_tui.hosts.machine_facts import Folder, Port, RendezvousFile
from gputrain_tui.lifecycle.prepared import prepare
from gputrain_tui.plan.planner import Plan, plan
from gputrain_tui.preflight import (
    CheckResult,
    NotReadyError,
    PreflightFacts,
    collect_facts,
    errors,
    run_checks,
    summary,
    warnings,
)
from gputrain_tui.preflight.result import error
from gputrain_tui.recipe.model import Recipe
from trainer.checkpoint import write_file
from trainer.host.cores import Cpus
from trainer.host.memory import Memory
from trainer.host.resource_limits import ResourceLimits

GIB = 1 << 30
HERE = LocalFacts(names=frozenset({"here"}), free_port=21000, python="python")


def gpu(index: int, **more: object) -> Gpu:
    known: dict[str, object] = {"index": index, "uuid": f"GPU-{index}", "pci_bus_id": f"00:{index}", "processes": ()}
    return Gpu(**{**known, **more})  # type: ignore[arg-type]


def machine(*gpus: Gpu, cuda: str = "13.0") -> Inventory:
    return Inventory(host="here", time=0.0, cpus=Cpus(), memory=Memory(), gpus=gpus, cuda=cuda)


def check_results(facts: PreflightFacts, wanted: Recipe | None = None) -> list[CheckResult]:
    wanted = wanted or recipe()
    planned: Plan = plan(wanted, facts.inventories, local=HERE)
    return run_checks(wanted, planned, facts, local=HERE)


def busy(**process: object) -> tuple[GpuProcess, ...]:
    return (GpuProcess(pid=4711, user="alice", name="python", **process),)  # type: ignore[arg-type]


ON_GPUS = recipe("gpus = 2")
SAVING = recipe(train=f'{TRAIN}\nsave_dir = "/keep"')


@pytest.mark.parametrize(
    ("facts", "wanted", "status", "key", "words"),
    [
        (
            PreflightFacts(data_checked=True, data=error("data", "gone", key="task.data")),
            None,
            "error",
            "task.data",
            "gone",
        ),
        (
            PreflightFacts(optimizer=error("optimizer", "no package", "pip install it", key="train.optimizer")),
            None,
            "error",
            "train.optimizer",
            "no package",
        ),
        (
            PreflightFacts(port=Port(number=22, state="busy", holder="sshd (pid 1)")),
            recipe(cluster="port = 22"),
            "error",
            "cluster.port",
            "port 22 is in use by sshd (pid 1)",
        ),
        (
            PreflightFacts(port=Port(number=22, state="root")),
            recipe(cluster='init_method = "tcp://127.0.0.1:22"'),
            "error",
            "cluster.init_method",
            "port 22 needs root",
        ),
        (
            PreflightFacts(port=Port(number=2222, state="free", address="10.9.9.9", is_own=False)),
            recipe(cluster='init_method = "tcp://10.9.9.9:2222"'),
            "warning",
            "cluster.init_method",
            "10.9.9.9 is not an address of this machine",
        ),
        (
            PreflightFacts(
                rendezvous=RendezvousFile(path="/m", problem="/m is left from an earlier run", fix="remove it")
            ),
            recipe(cluster='init_method = "file:///m"'),
            "error",
            "cluster.init_method",
            "left from an earlier run",
        ),
        (
            PreflightFacts(home=Folder(path="/h", problem="/h is not writable")),
            None,
            "error",
            "",
            "cannot make a run directory",
        ),
        (
            PreflightFacts(home=Folder(path="/h", free_files=7)),
            None,
            "error",
            "",
            "has room for 7 more files, but",
        ),
        (PreflightFacts(home=Folder(path="/h", free_bytes=1 << 20)), None, "error", "", "the disk of /h is full"),
        (PreflightFacts(home=Folder(path="/h", free_bytes=1 << 28)), None, "warning", "", "only 256 MiB free"),
        (
            PreflightFacts(save_dir=Folder(path="/keep", problem="no")),
            SAVING,
            "error",
            "train.save_dir",
            "no checkpoint can be",
        ),
        (PreflightFacts(save_dir=Folder(path="/keep", free_bytes=0)), SAVING, "error", "train.save_dir", "full"),
        (
            PreflightFacts(save_dir=Folder(path="/keep", free_bytes=1 << 28)),
            SAVING,
            "warning",
            "train.save_dir",
            "only 256 MiB",
        ),
        (
            PreflightFacts(save_dir=Folder(path="/keep", checkpoints=3)),
            SAVING,
            "error",
            "train.save_dir",
            "/keep holds 3 checkpoints of another run, which this run does not continue",
        ),
        (
            PreflightFacts(limits=ResourceLimits(processes=None, files=None, memory_bytes=8 * GIB)),
            recipe("cpu_ranks = 1000"),
            "error",
            "cluster.nodes[0].cpu_ranks",
            "1000 ranks were asked for on this node, which can hold at most 409",
        ),
        (
            PreflightFacts(memory_total_bytes=24 * GIB, memory_available_bytes=GIB),
            recipe("cpu_ranks = 16"),
            "warning",
            "cluster.nodes[0].cpu_ranks",
            "16 CPU ranks need 1.4 GiB or more, but 1 GiB of 24 GiB are available",
        ),
        (
            PreflightFacts(cores=2),
            recipe("cpu_ranks = 8"),
            "note",
            "cluster.nodes[0].cpu_ranks",
            "8 CPU ranks share 2 cores",
        ),
        (
            PreflightFacts(cores=2, cores_limit="cpu quota of 2.5 cores"),
            recipe("cpu_ranks = 8"),
            "note",
            "cluster.nodes[0].cpu_ranks",
            "8 CPU ranks share 2 cores (cpu quota of 2.5 cores): each step takes longer than with 2",
        ),
        (
            PreflightFacts(shm_free_bytes=64 << 20),
            recipe(train=f"{TRAIN}\nnum_workers = 4"),
            "warning",
            "train.num_workers",
            "/dev/shm has 64 MiB free for 8 data loading processes",
        ),
        (
            PreflightFacts(shm_free_bytes=32 << 20, inventories={"localhost": machine(gpu(0), gpu(1))}),
            ON_GPUS,
            "warning",
            "",
            "for 2 ranks on GPUs",
        ),
        (PreflightFacts(open_files=64), None, "warning", "", "a process may have 64 files open"),
        (
            PreflightFacts(inventories={"localhost": machine(gpu(0), gpu(1, processes=busy()))}),
            ON_GPUS,
            "error",
            "cluster.nodes[0].gpus",
            "GPU 1 is in use by python (pid 4711 of alice)",
        ),
        (
            PreflightFacts(inventories={"localhost": machine(gpu(0), gpu(1, processes=busy()))}),
            recipe("gpus = 2", train=f"{TRAIN}\nshare_devices = true"),
            "warning",
            "cluster.nodes[0].gpus",
            "GPU 1 is in use",
        ),
        (
            PreflightFacts(inventories={"localhost": machine(gpu(0, memory_used_bytes=4 * GIB), gpu(1))}),
            ON_GPUS,
            "warning",
            "cluster.nodes[0].gpus",
            "GPU 0 is not free: 4096 MiB in use",
        ),
        (
            PreflightFacts(inventories={"away": machine(gpu(0, processes=busy()))}),
            recipe('host = "away"\ngpus = [0]'),
            "error",
            "cluster.nodes[0].gpus",
            "GPU 0 is in use",
        ),
        (PreflightFacts(torch=Torch()), ON_GPUS, "error", "", "has no torch"),
        (
            PreflightFacts(torch=Torch(version="2.13.0+cpu")),
            ON_GPUS,
            "error",
            "cluster.nodes[0].gpus",
            "built for CPUs only",
        ),
        (
            PreflightFacts(
                torch=Torch(version="2.13.0", cuda="13.0"),
                inventories={"localhost": machine(gpu(0), gpu(1), cuda="12.4")},
            ),
            ON_GPUS,
            "warning",
            "cluster.nodes[0].gpus",
            "torch 2.13.0 needs CUDA 13.0, but the driver supports CUDA up to 12.4",
        ),
        (
            PreflightFacts(script=error("script", "own.py does not exist", key="train.script")),
            recipe(train='script = "own.py"', task=""),
            "error",
            "train.script",
            "own.py does not exist",
        ),
        (
            PreflightFacts(resume=error("resume", "/c holds no checkpoint", key="train.resume")),
            recipe(train=f'{TRAIN}\nresume = "/c"'),
            "error",
            "train.resume",
            "/c holds no checkpoint",
        ),
        (
            PreflightFacts(),
            recipe('host = "here"\ngpus = 1', 'host = "away"\ngpus = 1', cluster='port = 5\nlauncher = "slurm"'),
            "note",
            "",
            "not checked: away",
        ),
    ],
)
def test_a_problem_is_reported_with_its_key_and_severity(
    facts: PreflightFacts, wanted: Recipe | None, status: str, key: str, words: str
) -> None:
    (found,) = [result for result in check_results(facts, wanted) if words in result.what]
    assert (found.status, found.key) == (status, key)
    assert bool(found.where) is bool(key)
    assert found.fix or status != "error" or found.check in ("data", "script", "resume")


@pytest.mark.parametrize(
    ("facts", "wanted"),
    [
        (PreflightFacts(), None),
        (PreflightFacts(shm_free_bytes=0), None),
        (PreflightFacts(memory_total_bytes=24 * GIB, memory_available_bytes=20 * GIB, cores=2), None),
        (PreflightFacts(inventories={"localhost": machine(gpu(0), gpu(1))}), ON_GPUS),
        (
            PreflightFacts(
                torch=Torch(version="2.13", cuda="12.8"), inventories={"localhost": machine(gpu(0), gpu(1))}
            ),
            ON_GPUS,
        ),
        (PreflightFacts(torch=Torch(version="2.13", hip="6.4")), ON_GPUS),
        (
            PreflightFacts(save_dir=Folder(path="/c", checkpoints=3)),
            recipe(train=f'{TRAIN}\nsave_dir = "/c"\nresume = "/c"'),
        ),
        (
            PreflightFacts(save_dir=Folder(path="/c", checkpoints=3)),
            recipe(train=f'{TRAIN}\nsave_dir = "/c"\nresume = "/c/step_2.pt"'),
        ),
    ],
)
def test_good_or_unknown_facts_give_no_warning(facts: PreflightFacts, wanted: Recipe | None) -> None:
    found = check_results(facts, wanted)
    assert (errors(found), warnings(found)) == ((), ())
    assert summary(found) == "ready"


def test_a_place_names_the_file_and_the_line() -> None:
    (found,) = errors(
        check_results(PreflightFacts(data_checked=True, data=error("data", "gone", "look for it", key="task.data")))
    )
    assert found.line == "one.toml:9: task.data: gone; look for it"


# --- looking at this machine -----------------------------------------------------------------------------------------


def facts_of(wanted: Recipe) -> PreflightFacts:
    planned = plan(wanted, {}, local=HERE)
    return collect_facts(wanted, planned, HERE, inventories={})


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "books.txt").write_text("to be or not to be\n" * 100)
    return tmp_path


@pytest.mark.parametrize(
    ("task", "key", "words"),
    [
        ('data = "book.txt"', "task.data", "book.txt does not exist"),
        ('data = "none/book.txt"', "task.data", "none/book.txt does not exist, nor does the folder none"),
        ('data = "books.txt"\nvalid_data = "none.txt"', "task.valid_data", "none.txt does not exist"),
        ('data = "books.txt"\npattern = ["*.c"]', None, ""),
    ],
)
def test_missing_data_is_blamed_on_the_option_that_names_it(task: str, key: str | None, words: str) -> None:
    found = facts_of(recipe(task=task)).data
    assert (found.key if found else None) == key
    assert words in (found.what if found else "")


@pytest.mark.parametrize(
    ("text", "words"),
    [(None, "does not exist in"), ("def f(:\n", "line 1 is not valid Python"), ("print()\n", "")],
)
def test_a_script_must_be_there_and_be_python(folder: Path, text: str | None, words: str) -> None:
    if text is not None:
        (folder / "own.py").write_text(text)
    found = facts_of(recipe(train='script = "own.py"', task="")).script
    assert words in (found.what if found else "")
    assert (found is None) is not bool(words)


@pytest.mark.parametrize("cluster", ["", 'launcher = "slurm"'])
@pytest.mark.parametrize("name", ["torch", "logging"])
def test_a_file_beside_the_script_that_hides_a_module_is_named(folder: Path, name: str, cluster: str) -> None:
    for file in ("own.py", f"{name}.py"):
        (folder / file).touch()
    wanted = recipe("cpu_ranks = 1", train='script = "own.py"', task="", cluster=cluster)
    (reported,) = [each for each in check_results(facts_of(wanted), wanted) if f"{name}.py" in each.what]
    assert (reported.status, reported.key, reported.fix) == ("warning", "train.script", "rename it")


@pytest.mark.parametrize(
    ("train", "task", "status", "what"),
    [
        ('script = "own.py"', "", "error", "own.py does not exist in "),
        ('script = "/nowhere/own.py"', "", "warning", "/nowhere/own.py does not exist in "),
        (TRAIN, 'data = "none.txt"', "warning", "none.txt does not exist, on this machine"),
        (TRAIN, 'data = "books.txt"', None, ""),
    ],
)
def test_what_a_job_reads_is_looked_for_before_it_waits(
    folder: Path, train: str, task: str, status: str | None, what: str
) -> None:
    wanted = recipe("cpu_ranks = 1", train=train, task=task, cluster='launcher = "slurm"')
    results = check_results(facts_of(wanted), wanted)
    found = [(each.status, each.what) for each in results if each.check in ("script", "data")]
    assert len(found) == (status is not None)
    for each in found:
        assert each[0] == status
        assert each[1].startswith(what)


def test_a_busy_port_is_known_and_an_address_that_is_not_ours() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        number = server.getsockname()[1]
        port = facts_of(recipe(cluster=f"port = {number}")).port
        assert port is not None
        assert (port.state, f"(pid {os.getpid()})" in port.holder) == ("busy", True)
    away = facts_of(recipe(cluster='init_method = "tcp://192.0.2.7:23456"')).port
    assert away is not None
    assert (away.is_own, away.address) == (False, "192.0.2.7")
    here = facts_of(recipe(cluster='init_method = "tcp://127.0.0.1:23456"')).port
    assert here is not None
    assert here.is_own


def test_a_port_that_the_launch_is_to_find_is_not_checked_before() -> None:
    assert facts_of(recipe(cluster="port = 0")).port is None
    assert facts_of(recipe(cluster='init_method = "env://"')).port is None


def test_another_machines_port_is_not_judged_here() -> None:
    away = ('host = "10.0.0.1"\ngpus = 1', 'host = "10.0.0.2"\ngpus = 1')
    assert facts_of(recipe(*away, cluster="port = 22")).port is None


def test_an_init_file_must_be_new_and_its_folder_there(folder: Path) -> None:
    def problem(path: Path) -> str:
        found = facts_of(recipe(cluster=f'init_method = "file://{path}"')).rendezvous
        assert found is not None
        return found.problem

    (folder / "left").write_text("x")
    (folder / "empty").touch()
    assert problem(folder / "new") == problem(folder / "empty") == ""
    assert "is left from an earlier run" in problem(folder / "left")
    assert "there is no folder" in problem(folder / "none" / "meet")
    assert "is a folder" in problem(folder)


def test_folders_that_do_not_exist_yet_are_judged_by_their_parents(folder: Path) -> None:
    (folder / "file").touch()
    (folder / "kept").mkdir()
    write_file(folder / "kept" / "step_00000002.pt", {"updates": 2}, run="other")
    found = {
        name: facts_of(recipe(train=f'{TRAIN}\nsave_dir = "{name}"')).save_dir for name in ("new/deep", "file", "kept")
    }
    assert (found["new/deep"].problem, found["new/deep"].checkpoints) == ("", 0)  # type: ignore[union-attr]
    assert "is not a folder" in found["file"].problem  # type: ignore[union-attr]
    assert found["kept"].checkpoints == 1  # type: ignore[union-attr]
    assert (found["kept"].free_bytes or 0) > 0  # type: ignore[union-attr]


def test_the_limits_of_this_machine_are_read() -> None:
    facts = facts_of(recipe())
    assert 1 <= (facts.cores or 0) <= len(os.sched_getaffinity(0))
    assert facts.memory_total_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < (facts.memory_available_bytes or 0) < (facts.memory_total_bytes or 0)
    assert facts.open_files == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert facts.torch is None, "ranks on CPUs take any torch"


def test_collecting_the_facts_is_fast() -> None:
    wanted = recipe()
    took = []
    for _ in range(5):
        begin = time.process_time()
        facts_of(wanted)
        took.append(time.process_time() - begin)
    assert min(took) < 0.05


# --- the way to a run ------------------------------------------------------------------------------------------------


def test_gpus_that_are_missing_are_the_machines_fault() -> None:
    with pytest.raises(NotReadyError, match=r"cluster\.nodes\[0\]\.gpus: asks for 64 GPUs") as refused:
        prepare(recipe("gpus = 64"))
    (result,) = refused.value.results
    assert (result.key, result.check) == ("cluster.nodes[0].gpus", "GPUs")


def test_a_run_on_slurm_without_sbatch_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # without Slurm
    wanted = recipe('host = "far"\ncpu_ranks = 1', cluster='launcher = "slurm"')
    with pytest.raises(NotReadyError) as refused:
        prepare(wanted)
    (result,) = (found for found in refused.value.results if found.check == "Slurm")
    assert (result.status, result.key) == ("error", "cluster.launcher")
    assert result.where.endswith(": cluster.launcher")
    assert "there is no sbatch on this machine" in result.line


# --- models of GPUs --------------------------------------------------------------------------------------------------

MIXED = machine(
    gpu(0, name="NVIDIA A100", capability=(8, 0), memory_total_bytes=80 * GIB),
    gpu(1, name="NVIDIA T4", capability=(7, 5), memory_total_bytes=15 * GIB),
)


def results_of(check: str, train: str) -> list[CheckResult]:
    facts = PreflightFacts(inventories={"localhost": MIXED})
    return [each for each in check_results(facts, recipe("gpus = 2", train=train)) if each.check == check]


def test_bf16_on_a_gpu_that_lacks_it_is_refused_with_what_to_do() -> None:
    (found,) = results_of("precision", f'{TRAIN}\nprecision = "bf16"')
    assert (found.status, found.key) == ("error", "train.precision")
    assert found.text == (
        "precision is bf16, which GPU 1 (NVIDIA T4, compute capability 7.5) cannot compute: that needs 8.0; "
        'train.precision = "fp16" is fast on all, or leave it out of cluster.nodes[0].gpus'
    )
    assert not results_of("precision", f'{TRAIN}\nprecision = "fp16"')


def test_several_models_of_gpus_are_named_with_how_many_there_are() -> None:
    (found,) = results_of("GPU models", TRAIN)
    models = "1 x NVIDIA A100 of 80 GiB, 1 x NVIDIA T4 of 15 GiB"
    helps = 'a step takes as long as the slowest needs; train.batch_size = "balanced" helps'
    assert (found.status, found.what) == ("note", f"{models}: {helps}")
    (found,) = results_of("GPU models", f'{TRAIN}\nbatch_size = "balanced"\nglobal_batch_size = 64')
    assert found.what == models
