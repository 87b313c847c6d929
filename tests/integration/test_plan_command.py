from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from commands import Command, command
from fake_driver import fake_driver
from plans import named_nodes, plan_for, remote_nodes
from waiting import LIMIT_S

from gputrain_tui.plan.batch_script import script
from gputrain_tui.plan.planner import Plan
from gputrain_tui.recipe.task_description import describe_task
from trainer.contract.balanced_shares import ComputeTime
from trainer.contract.learned_speeds import LearnedSpeeds
from trainer.contract.options import Training

ROOT = Path(__file__).parents[2]


# --- Slurm -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [named_nodes(4, 4), named_nodes(4, 2, 1), remote_nodes(2, 2), ["cpu_ranks = 2"]])
def test_batch_scripts_are_valid_bash(nodes: list[str]) -> None:
    text = script(plan_for(*nodes), name="a b/c")
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""
    assert "#SBATCH --job-name=a-b-c" in text
    assert text.count("srun --nodes=1 --ntasks=1") == len(nodes)


@pytest.mark.parametrize("failing", [None, "n2"])
def test_a_batch_script_ends_with_its_steps_and_fails_with_the_first_of_them(
    tmp_path: Path, failing: str | None
) -> None:
    srun = tmp_path / "srun"
    fail = f'case "$*" in *nodelist={failing}*) exit 3;; esac\n' if failing else ""
    srun.write_text(f"#!/bin/bash\n{fail}echo started\n" + ("exec sleep 3600\n" if failing else ""))
    srun.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n[1-3]"}
    text = script(plan_for(*named_nodes(1, 1, 1)), name="x").replace("tries=50", "tries=3")
    ended = subprocess.run(["bash"], input=text, text=True, capture_output=True, env=env, timeout=LIMIT_S)
    assert ended.returncode == (3 if failing else 0)


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.chdir(ROOT)
    run = command(capsys, "plan")

    def planning(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        return run(*words)

    return planning


def test_the_command_prints_a_table_the_contract_and_lines_for_the_shell(plan: Command) -> None:
    people = plan("recipes/four_nodes.toml")
    assert (people.returncode, people.stderr) == (0, "")
    assert "16 ranks on 4 nodes, nccl, rendezvous at tcp://10.0.123.1:11111" in people.stdout
    assert "   3  10.0.123.4  12–15  GPU 0, 1, 2, 3" in people.stdout.splitlines()
    encoded = plan("recipes/four_nodes.toml", "--json")
    found = msgspec.json.decode(encoded.stdout, type=Plan)
    lines = plan("recipes/four_nodes.toml", "--shell").stdout.splitlines()
    assert lines[1::2] == [f"(cd {ROOT} && {shlex.join(node.argv)})" for node in found.nodes]
    assert all(line.startswith("# node ") for line in lines[::2])


def test_the_plan_of_balanced_shares_says_with_which_it_begins(plan: Command) -> None:
    nodes = ("--set", "cluster.nodes=[{cpu_ranks = 3}]")
    line = "shares 32, 32, 32 of 96 samples at the start: equal, until the ranks have measured their speeds, "
    line += "or by earlier runs on such devices"
    assert line in plan("recipes/mixed_gpus.toml", *nodes).stdout.splitlines()
    recorded = plan("recipes/mixed_gpus.toml", *nodes, "--set", "train.shares_from=/runs/a")
    assert "shares of 96 samples as in the run of /runs/a" in recorded.stdout.splitlines()
    told = json.loads(plan("recipes/mixed_gpus.toml", *nodes, "--json").stdout)
    assert told["shares"] == {"cause": "start", "shares": [32, 32, 32]}
    equal = ("--set", "train.batch_size=32", "--set", "train.global_batch_size=0")
    assert "shares" not in json.loads(plan("recipes/mixed_gpus.toml", *nodes, *equal, "--json").stdout)
    lines = plan("recipes/mixed_gpus.toml", *nodes, *equal).stdout.splitlines()
    assert not any(line.startswith("shares") for line in lines)
    few = plan("recipes/mixed_gpus.toml", *nodes, "--set", "train.global_batch_size=2")
    assert (few.returncode, few.stdout) == (2, "")
    assert "global_batch_size is 2, but there are 3 ranks" in few.stderr


def test_the_plan_has_the_shares_that_earlier_runs_on_such_gpus_measured(tmp_path: Path) -> None:
    environ = {**os.environ, "LD_LIBRARY_PATH": str(fake_driver(tmp_path)), "GPUTRAIN_CACHE": str(tmp_path / "cache")}
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        '[[cluster.nodes]]\ngpus = [0, 1]\n[train]\nmax_updates = 1\ntask = "lm"\nbatch_size = "balanced"\n'
        'global_batch_size = 64\n[task]\ndata = "stdlib"\n'
    )
    command = [sys.executable, "-m", "gputrain_tui", "plan", str(recipe)]
    before = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S)
    equal = "shares 32, 32 of 64 samples at the start: equal, until the ranks have measured their speeds"
    assert equal in before.stdout.splitlines(), "here it is known that no earlier run was measured"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPUTRAIN_CACHE", environ["GPUTRAIN_CACHE"])
        given = LearnedSpeeds(Training(task="lm"), describe_task("lm"), {"data": "stdlib"})
        given.learn(["NVIDIA H100", "NVIDIA T4"], [ComputeTime(0.0, 1.0), ComputeTime(0.0, 3.0)])
    after = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S)
    assert "shares 48, 16 of 64 samples at the start, by earlier runs on such devices" in after.stdout
    told = subprocess.run([*command, "--json"], env=environ, capture_output=True, text=True, timeout=LIMIT_S)
    assert json.loads(told.stdout)["shares"] == {"cause": "learned", "shares": [48, 16]}


def test_commands_for_several_machines_have_one_fixed_port_and_a_note_says_so(plan: Command) -> None:
    nodes = "cluster.nodes=[{host = '10.0.123.1', gpus = 1}, {host = '10.0.123.2', gpus = 1}]"
    words = ("recipes/four_nodes.toml", "--shell", "--set", nodes)
    ended = plan(*words, "--set", "cluster.port=0")
    assert ended.stdout.count("tcp://10.0.123.1:29600 ") == 2
    assert (ended.returncode, len(ended.stderr.splitlines())) == (0, 1)
    assert "these commands meet at port 29600; if it is in use there, set cluster.port to another one" in ended.stderr
    fixed = plan(*words, "--set", "cluster.port=29700")
    assert (fixed.stdout.count("tcp://10.0.123.1:29700 "), fixed.stderr) == (2, "")
    named = plan(*(word.replace("10.0.123.1", "box1") for word in words), "--set", "cluster.port=29700")
    (note,) = named.stderr.splitlines()
    assert "all hosts must know the name box1; if only your ~/.ssh/config does, set cluster.init_method" in note
    assert '"tcp://ADDRESS:29700"' in note


def test_the_command_reads_standard_input_and_settings(plan: Command) -> None:
    train = '{"task": "mnist", "max_epochs": 1}'
    text = f'{{"train": {train}, "task": {{"data": "/d"}}, "cluster": {{"nodes": [{{"cpu_ranks": 2}}]}}}}'
    ended = plan("-", "--json", "--set", "train.lr=0.25", "--set", "cluster.nodes[0].cpu_ranks=3", stdin=text)
    found = msgspec.json.decode(ended.stdout, type=Plan)
    assert (found.world_size, ended.stderr) == (3, "")
    argv = found.nodes[0].argv
    assert argv[argv.index("--lr") + 1] == "0.25"


@pytest.mark.parametrize(
    ("words", "stdin", "message"),
    [
        (
            ["recipes/four_node.toml"],
            "",
            "recipes/four_node.toml: there is no such file; did you mean 'four_nodes.toml'?",
        ),
        (["recipes/four_nodes.toml", "--set", "train.lrr=1"], "", "--set train.lrr is not known; did you mean 'lr'?"),
        (["-"], "[train]\ntaks = 1\n", "stdin:2: train.taks is not known; did you mean 'task'?"),
        (["-"], "[train", "stdin:1: is not valid TOML"),
        (["recipes/four_nodes.toml", "--jsn"], "", "--jsn is not a known option; did you mean '--json'?"),
        ([], "", "the following arguments are required: RECIPE"),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_code_2(plan: Command, words: list[str], stdin: str, message: str) -> None:
    ended = plan(*words, stdin=stdin)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.count("\n") == 1
    assert message in ended.stderr


def test_a_plan_that_cannot_start_now_is_shown_with_a_note(plan: Command, tmp_path: Path) -> None:
    (tmp_path / "left").write_text("x")
    setting = f'cluster={{init_method = "file://{tmp_path}/left", nodes = [{{cpu_ranks = 2}}]}}'
    ended = plan("recipes/four_nodes.toml", "--json", "--set", setting)
    assert ended.returncode == 0
    assert msgspec.json.decode(ended.stdout, type=Plan).init_method == f"file://{tmp_path}/left"
    assert "is left from an earlier run" in ended.stderr


def test_planning_imports_neither_torch_nor_textual() -> None:
    code = (
        "import sys; from gputrain_tui.cli import main; code = main(sys.argv[1:]); "
        "print(code, [name for name in ('torch', 'textual', 'tomlkit') if name in sys.modules], file=sys.stderr)"
    )
    words = [sys.executable, "-c", code, "plan", "recipes/four_nodes.toml"]
    ended = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert ended.stderr.strip() == "0 []"


def test_a_plan_for_slurm_says_that_its_hosts_are_not_chosen_yet(plan: Command, tmp_path: Path) -> None:
    recipe = tmp_path / "slurm.toml"
    recipe.write_text(
        "[slurm]\nnodes = 2\n[[cluster.nodes]]\ncpu_ranks = 2\n"
        '[train]\ntask = "lm"\nmax_updates = 1\n[task]\ndata = "stdlib"\n'
    )
    head = plan(str(recipe)).stdout.partition("\n")[0]
    assert head.endswith("by slurm, which chooses the hosts: node-0.slurm.invalid stands for the first of them")
