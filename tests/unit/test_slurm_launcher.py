"""Requests to Slurm and the meaning of its answers; without any Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from gputrain_tui.hosts.host_names import LocalFacts
from gputrain_tui.hosts.slurm_commands import parse_job
from gputrain_tui.lifecycle.attempt import AttemptResult
from gputrain_tui.lifecycle.launchers.slurm_cause import log_sizes, with_slurm_cause
from gputrain_tui.lifecycle.launchers.slurm_launcher import SlurmLauncher, place_on_allocation
from gputrain_tui.plan.batch_script import sbatch_arguments, script, supervisor_script
from gputrain_tui.plan.planner import Plan, plan
from gputrain_tui.recipe.build import build
from gputrain_tui.recipe.model import Recipe, SlurmOptions
from gputrain_tui.recipe.toml_writer import dump_toml
from trainer.contract.errors import RequestError
from trainer.contract.outcome import NodeOutcome
from trainer.contract.record import Failure, RunDir
from trainer.host.stop_request import LEASE_LOST

TRAIN = '[train]\ntask = "mnist"\nmax_updates = 1\n[task]\ndata = "/d"\n'
LOGIN = LocalFacts(names=frozenset({"login"}), free_port=20123, python="/venv/python")


def recipe(text: str, *settings: str) -> Recipe:
    return build(text + TRAIN, name="r.toml", overrides=settings)


def planned(*gpus: int, slurm: str = "[slurm]\n", local: LocalFacts = LOGIN) -> Plan:
    return plan(recipe(slurm + "".join(f"[[cluster.nodes]]\ngpus = {count}\n" for count in gpus)), {}, local=local)


@pytest.mark.parametrize(
    ("gpus", "options", "words"),
    [
        ((2, 2), {}, "--nodes=2 --ntasks-per-node=1 --exclusive --gpus-per-node=2"),
        (
            (4, 4, 1),
            {"gpu_type": "h200", "partition": "gpu", "extra": ("--cpus-per-task=8",)},
            "--nodes=2 --ntasks-per-node=1 --partition=gpu --gpus-per-node=h200:4 --cpus-per-task=8 : "
            "--nodes=1 --ntasks-per-node=1 --partition=gpu --gpus-per-node=h200:1 --cpus-per-task=8",
        ),
        (
            (2, 2),
            {"extra": ("--gres=gpu:h100:2",)},
            "--nodes=2 --ntasks-per-node=1 --exclusive --gres=gpu:h100:2",
        ),
    ],
    ids=["alike", "heterogeneous", "GPUs as the cluster asks for them"],
)
def test_sbatch_requests_the_nodes_of_the_recipe(gpus: tuple[int, ...], options: dict[str, object], words: str) -> None:
    found = sbatch_arguments(planned(*gpus), SlurmOptions(**options), name="a b", output="/runs/100%")  # type: ignore[arg-type]
    assert " ".join(found) == f"--job-name=a-b --output=/runs/100%% --open-mode=append {words}"


def test_a_batch_script_requests_the_type_of_gpu_of_the_recipe() -> None:
    for options, line in ((None, "=4"), (SlurmOptions(gpu_type="h100"), "=h100:4")):
        lines = script(planned(4, 4), name="a", options=options).splitlines()
        assert [each for each in lines if "--gpus-per-node" in each] == [f"#SBATCH --gpus-per-node{line}"]


def test_one_entry_stands_for_all_nodes_and_the_table_is_kept_when_a_recipe_is_written() -> None:
    text = '[slurm]\nnodes = 3\npartition = "gpu"\nextra = ["--exclusive"]\n[[cluster.nodes]]\ngpus = 2\n'
    found = recipe(text, "train.lr=0.5")
    assert [node.gpus for node in found.cluster.nodes] == [2, 2, 2]
    again = build(dump_toml(found), name="r.toml")
    assert (again.slurm, again.cluster, again.train) == (found.slurm, found.cluster, found.train)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[slurm]\npartiton = 'a'\n", "r.toml:2: slurm.partiton is not known; did you mean 'partition'?"),
        ("[slurm]\nnodes = 0\n", "r.toml:2: slurm.nodes is 0, but must be an integer >= 1"),
        (
            "[slurm]\nrequeue = true\n[cluster]\nlauncher = 'ssh'\n",
            'r.toml:2: slurm.requeue needs Slurm, but cluster.launcher is "ssh": keep one',
        ),
        ("slurm = 3\n", "r.toml:1: slurm is 3, but must be a table"),
        (
            "[slurm]\nnodes = 2\n[[cluster.nodes]]\nhost = 'n1'\ngpus = 1\n",
            "r.toml:2: slurm.nodes is 2, but cluster.nodes[0] has a host: remove it, as Slurm chooses",
        ),
        (
            "[slurm]\nextra = ['--wait-all-nodes=1', '--array=0-3']\n",
            "r.toml:2: slurm.extra has '--array=0-3', but a run is one job, which is followed: remove it",
        ),
        ("[slurm]\n[[cluster.nodes]]\ngpus = 'all'\n", "cluster.nodes[0].gpus must be a count of GPUs, or cpu_ranks"),
    ],
)
def test_a_recipe_that_slurm_cannot_run_is_refused(text: str, message: str) -> None:
    with pytest.raises(RequestError) as refused:
        plan(recipe(text), {}, local=LOGIN)
    assert message in str(refused.value)


def test_requeue_needs_checkpoints_and_a_job_that_is_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "[slurm]\nrequeue = true\n[[cluster.nodes]]\ngpus = 1\n"
    with pytest.raises(
        RequestError, match=r"r.toml:2: slurm.requeue goes on from a checkpoint, but train.save is false"
    ):
        recipe(text, "train.save=false")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    (result,) = SlurmLauncher().check(recipe(text), plan(recipe(text), {}, local=LOGIN))
    assert (result.status, result.key) == ("warning", "slurm.requeue")
    assert result.text.startswith("in job 7, which is not put back into the queue: slurm.requeue is for a run that ")


def test_nodes_without_a_name_get_the_hosts_of_the_allocation_and_a_port_of_the_job() -> None:
    environ = {
        "SLURM_JOB_ID": "7",
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "a",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "b",
    }
    found = place_on_allocation(planned(2, 1), environ)
    assert [node.host for node in found.nodes] == ["a", "b"]
    assert found.init_method == "tcp://a:12007"
    assert all("tcp://a:12007" in node.argv for node in found.nodes)
    assert not any("CUDA_VISIBLE_DEVICES" in node.env for node in found.nodes), "Slurm chooses the GPUs"
    fixed = plan(recipe("[slurm]\nnodes = 2\n[cluster]\nport = 29600\n[[cluster.nodes]]\ngpus = 1\n"), {}, local=LOGIN)
    assert place_on_allocation(fixed, environ).init_method == "tcp://a:29600"
    moved = environ | {"SLURM_JOB_NODELIST_HET_GROUP_0": "c", "SLURM_RESTART_COUNT": "1"}
    assert [node.host for node in place_on_allocation(found, moved).nodes] == ["c", "b"]
    with pytest.raises(RequestError, match="the plan needs 2 hosts, but Slurm has allocated 1"):
        place_on_allocation(planned(2, 1), {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a"})


def test_hosts_that_are_not_in_the_job_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    text = "".join(f"[[cluster.nodes]]\nhost = '{host}'\ngpus = 1\n" for host in ("n1", "gpu8", "ada@gpu9"))
    (result,) = SlurmLauncher().check(recipe(text), plan(recipe(text), {}, local=LOGIN))
    assert (result.status, result.what) == ("error", "gpu8, gpu9 are not in job 7, which has n1")
    text = "[slurm]\n[[cluster.nodes]]\ngpus = 1\n"
    (result,) = SlurmLauncher().check(recipe(text), plan(recipe(text), {}, local=LOGIN))
    assert result.status == "ok"


@pytest.mark.parametrize(("reason", "known"), [("JobHeldUser", False), ("Resources", True)])
def test_a_job_that_is_held_has_no_expected_start(reason: str, known: bool) -> None:
    line = f"JobId=12 JobState=PENDING Reason={reason} StartTime=2026-11-29T18:51:00 ExitCode=0:0"
    assert (parse_job(line).starts is not None) is known


def test_a_job_is_read_from_the_lines_of_its_components() -> None:
    line = "JobId=12 HetJobId=12 JobName=x JobState={} Reason=Resources Partition=gpu NodeList={} ExitCode=3:0"
    found = parse_job("\n".join([line.format("PENDING", "(null)"), line.format("PENDING", "(null)")]))
    assert (found.number, found.state, found.reason, found.nodes, found.is_over) == (
        12,
        "PENDING",
        "Resources",
        "",
        False,
    )
    found = parse_job("\n".join([line.format("CANCELLED", "a1"), line.format("CANCELLED", "b[1-2]")]))
    assert (found.reason, found.nodes, found.exit_code, found.is_over) == ("", "a1,b[1-2]", 3, True)


BY_NODE = AttemptResult(status="stopped", reason="node 0 was stopped on node-0")
STEP = "slurmstepd-n2: error: *** STEP 5.1 ON n2 CANCELLED AT 2026-11-23T06:27:18"
BY_SIGNAL = AttemptResult(status="stopped", reason="stopped by SIGTERM")
BY_USER = AttemptResult(status="stopped", reason="stopped by SIGUSR1")
FAULTY = AttemptResult(status="failed", failure=Failure(time=1.0, kind="exception", message="division by zero", rank=0))
HOST = "node-1.slurm.invalid"
LOST_NODE = f"Slurm lost {HOST} with rank 1; see `scontrol show node {HOST}`"
OVER_LIMIT = "slurmstepd-n2: error: StepId=2.1 exceeded memory limit (521363456 > 314572800), being killed"
NO_MEMORY = "ran out of memory: Slurm enforced the job's limit of"
LOST = AttemptResult(status="failed", failure=Failure(time=1.0, kind="lost_peer", message="Connection closed by peer"))


@pytest.mark.parametrize(
    ("ended", "log", "kind", "words"),
    [
        (BY_SIGNAL, f"{STEP} ***", None, "it was cancelled in Slurm"),
        (BY_SIGNAL, f"{STEP} DUE TO TIME LIMIT ***", None, "it reached its time limit in Slurm"),
        (BY_SIGNAL, f"{STEP} DUE TO PREEMPTION ***", None, "Slurm pre-empted it for another job"),
        (BY_SIGNAL, f"{STEP} DUE TO JOB REQUEUE ***\n{STEP} ***", None, "it was cancelled in Slurm"),
        (BY_SIGNAL, "a rank printed CANCELLED AT", None, "stopped by SIGTERM"),
        (BY_USER, f"{STEP} ***", None, "stopped by SIGUSR1"),
        (LOST, f"{STEP} DUE TO NODE FAILURE, SEE SLURMCTLD LOG ***", "node_lost", "Slurm lost one of its nodes"),
        (LOST, f"{STEP} ***", "lost_peer", "Connection closed by peer"),
        (LOST, "srun: error: Node failure on node-1", "node_lost", LOST_NODE),
        (BY_SIGNAL, "srun: error: Node failure on node-1", "node_lost", LOST_NODE),
        (BY_USER, "srun: error: Node failure on node-1", None, "stopped by SIGUSR1"),
        (FAULTY, "srun: error: Node failure on node-1", "exception", "division by zero"),
        (FAULTY, OVER_LIMIT, "exception", "division by zero"),
        (LOST, OVER_LIMIT, "out_of_memory", f"rank 1 on {HOST} {NO_MEMORY} 300 MiB per node; raise slurm.mem"),
        (
            LOST,
            "slurmstepd-n2: error: Detected 1 oom_kill event in StepId=5.1. Some tasks have been OOM Killed.",
            "out_of_memory",
            f"rank 1 on {HOST} {NO_MEMORY} 400 MiB per node; raise slurm.mem",
        ),
    ],
)
def test_the_reason_of_a_run_ended_by_slurm_is_read_from_its_output(
    tmp_path: Path, ended: AttemptResult, log: str, kind: str | None, words: str
) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.logs.mkdir()
    run_dir.node_log(1).write_text(log + "\n")
    environ = {"SLURM_MEM_PER_NODE": "400"}
    found = with_slurm_cause(ended, planned(1, 1), run_dir, environ=environ, requeues=lambda _: False)
    assert (found.failure and found.failure.kind) == kind
    assert (found.failure.message if found.failure else found.reason) == words


@pytest.mark.parametrize(
    ("is_script", "log", "status", "reason"),
    [
        (True, f"{STEP} DUE TO TIME LIMIT ***", "stopped", "it reached its time limit in Slurm"),
        (True, f"{STEP} ***", "stopped", "it was cancelled in Slurm"),
        (True, "srun: Job step created", "finished", None),
        (False, f"{STEP} DUE TO TIME LIMIT ***", "finished", None),
    ],
    ids=["time limit", "scancel", "by itself", "a task has made all steps"],
)
def test_a_script_that_ends_with_0_after_slurm_has_cancelled_its_step_has_not_finished(
    tmp_path: Path, is_script: bool, log: str, status: str, reason: str | None
) -> None:
    run_dir, there = RunDir(tmp_path), planned(1, 1)
    for node in there.nodes:
        node.argv.extend(["--script", "a.py"] if is_script else [])
    run_dir.logs.mkdir()
    run_dir.node_log(1).write_text(log + "\n")
    found = with_slurm_cause(AttemptResult(status="finished"), there, run_dir, requeues=lambda _: False)
    assert (found.status, found.reason) == (status, reason)


def test_a_node_whose_step_broke_off_is_lost_and_a_run_that_is_requeued_is_stopped_only(tmp_path: Path) -> None:
    run_dir, there = RunDir(tmp_path), planned(1, 1)
    for node, reason in ((0, "stopped by the command that started it"), (1, LEASE_LOST)):
        outcome = NodeOutcome(node=node, host=f"node-{node}", exit_code=130, stop_reason=reason)
        run_dir.node_result(node).parent.mkdir(exist_ok=True)
        outcome.write(run_dir.node_result(node))
    found = with_slurm_cause(BY_NODE, there, run_dir, requeues=lambda _: True)
    assert (found.failure and found.failure.message) == LOST_NODE, "Slurm has not noticed, and requeues nothing"
    run_dir.logs.mkdir()
    run_dir.node_log(0).write_text(f"{STEP} DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***\n")
    found = with_slurm_cause(BY_NODE, there, run_dir, requeues=lambda _: True)
    assert (found.status, found.reason) == (
        "stopped",
        f"Slurm lost {HOST} with rank 1, and put the run back into its queue",
    )


def test_slurm_output_of_an_earlier_attempt_explains_nothing(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.logs.mkdir()
    run_dir.node_log(1).write_text(f"srun: error: Node failure on node-1\n{OVER_LIMIT}\n")
    since = log_sizes(run_dir)
    assert with_slurm_cause(LOST, planned(1, 1), run_dir, since=since) == LOST
    assert with_slurm_cause(LOST, planned(1, 1), run_dir) != LOST


def test_a_path_is_a_word_of_the_jobs_script_whatever_it_holds() -> None:
    text = supervisor_script("/runs/a $(id)", python="/venv/python", setup="module load cuda")
    assert text.splitlines()[-1] == "exec /venv/python -P -m gputrain_tui.lifecycle.supervisor '/runs/a $(id)'"
    assert "module load cuda" in text.splitlines()
