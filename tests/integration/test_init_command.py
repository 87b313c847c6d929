"""``gputrain init``: a recipe from a command on the line or on standard input, and as an answer on a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import LIMIT_S

from gputrain_tui.recipe.build import load
from gputrain_tui.recipe.model import Node


def init(folder: Path, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gputrain_tui", "init", *words],
        cwd=folder, input=stdin, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip


def test_a_command_becomes_a_recipe_that_is_not_written_over(tmp_path: Path) -> None:
    command = ["TOKEN=hidden", "torchrun", "--nproc-per-node", "4", "--log-dir", "x\ny", "my train.py", "--lr", "0.1"]
    done = init(tmp_path, "--", *command)
    assert (done.returncode, done.stdout) == (0, "my-train.toml\n"), done.stderr
    assert "--log-dir x␊y has no counterpart" in done.stderr
    assert "gputrain run my-train.toml" in done.stderr
    text = (tmp_path / "my-train.toml").read_text()
    recipe = load(str(tmp_path / "my-train.toml"))
    assert recipe.script is not None
    assert (recipe.name, recipe.script.script, recipe.script.args) == ("my train", "my train.py", ("--lr", "0.1"))
    assert recipe.cluster.nodes == (Node(ranks=4),)
    assert "# From: 'TOKEN=•••' torchrun --nproc-per-node 4" in text
    again = init(tmp_path, stdin="torchrun 'my train.py'\n")
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr == (
        "gputrain: init: my-train.toml already exists: replace it with --force, or name another file with -o\n"
    )
    assert (tmp_path / "my-train.toml").read_text() == text
    assert init(tmp_path, "--force", stdin="torchrun 'my train.py'\n").returncode == 0
    assert load(str(tmp_path / "my-train.toml")).cluster.nodes == (Node(ranks=1),)
    printed = init(tmp_path, "-o", "-", stdin="$ deepspeed --num_gpus 2 \\\n  train.py\n")
    assert 'script = "train.py"' in printed.stdout
    assert not (tmp_path / "train.toml").exists()


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["MY_CREDS=hunter2x", "torchrun", "t.py"], "'MY_CREDS=•••' torchrun t.py"),
        (["env", "OMP_NUM_THREADS=2", "X=hunter2x", "python", "t.py"], "env OMP_NUM_THREADS=2 'X=•••' python t.py"),
        (["torchrun", "t.py", "--password", "hunter2x"], "torchrun t.py --password '•••'"),
        (["torchrun", "t.py", "--password=hunter2x"], "torchrun t.py '--password=•••'"),
        (["deepspeed", "t.py", "-phunter2x", "--lr", "0.1", "data"], "deepspeed t.py '•••' --lr 0.1 data"),
        (["torchrun", "--", "t.py", "--", "https://me:hunter2x@host"], "torchrun -- t.py -- '•••'"),
        (["bash", "-c", "A=hunter2x torchrun t.py --key hunter2x"], "'A=•••' torchrun t.py --key '•••'"),
        (["fabric", "run", "t.py", "--key", "hunter2x", "--devices", "2"], "fabric run t.py --key '•••' --devices 2"),
        (["srun", "--export=ALL,A=hunter2x", "python", "t.py"], "srun '--export=ALL,A=•••' python t.py"),
        (["torchrun", "-m", "pkg.mod", "key=hunter2x"], "torchrun -m pkg.mod '•••'"),
        (
            ["uv", "run", "--with", "x==2", "--index=https://me:hunter2x@h/", "python", "t.py"],
            "uv run --with x==2 --index=https://•••@h/ python t.py",
        ),
        (["torchrun", "t.py", "--api-key=hunter2x"], "torchrun t.py '--api-key=•••'"),
    ],
)
def test_the_comment_with_the_command_shows_no_value_that_may_be_a_secret(
    tmp_path: Path, words: list[str], shown: str
) -> None:
    (tmp_path / "data").mkdir()
    done = init(tmp_path, "-o", "-", "--", *words)
    comments = [line for line in done.stdout.splitlines() if line.startswith("#")]
    assert comments[0] == f"# From: {shown}", done.stderr
    assert "hunter2x" not in "".join(comments)


@pytest.mark.parametrize(
    ("answers", "file", "content"),
    [
        (
            ["", "train", "trian.py", "train.py --lr 0.1"],
            "train.toml",
            {'script = "train.py"', 'args = ["--lr", "0.1"]', "ranks = 1"},
        ),
        (["docnn", "", "data/train.tsv"], "docnn.toml", {'task = "docnn"', 'train_path = "data/train.tsv"'}),
        (["torchrun --nproc-per-node 2 \\", "  fit.py"], "fit.toml", {'script = "fit.py"', "ranks = 2"}),
    ],
    ids=["script", "task", "paste"],
)
def test_an_answer_on_a_terminal_becomes_a_recipe(
    tmp_path: Path, answers: list[str], file: str, content: set[str]
) -> None:
    for name in ("train.py", "fit.py"):
        (tmp_path / name).touch()
    master, terminal = pty.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "gputrain_tui", "init"],
            cwd=tmp_path, stdin=terminal, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        os.write(master, "".join(f"{answer}\n" for answer in answers).encode())
        out, err = process.communicate(timeout=LIMIT_S)
    finally:
        os.close(terminal)
        os.close(master)
    assert (process.returncode, out) == (0, f"{file}\n"), err
    text = (tmp_path / file).read_text()
    load(str(tmp_path / file))
    for line in content:
        assert line in text


@pytest.mark.parametrize(
    "line",
    [
        "torchrun --rdzv-endpoint $MASTER:29500 t.py",
        "torchrun --master-port ${PORT} t.py",
        'torchrun --rdzv-id "$A b" t.py',
        "taskset -c `cores` torchrun t.py",
    ],
)
def test_the_comment_shows_a_variable_as_it_was_pasted(tmp_path: Path, line: str) -> None:
    assert f"# From: {line}\n" in init(tmp_path, "-o", "-", stdin=line).stdout


def test_a_recipe_is_named_like_the_file_that_is_asked_for(tmp_path: Path) -> None:
    assert init(tmp_path, "-o", "slow.toml", "--", "torchrun", "train.py").returncode == 0
    assert load(str(tmp_path / "slow.toml")).name == "slow"


def test_a_module_is_not_missed_as_a_file(tmp_path: Path) -> None:
    done = init(tmp_path, "-o", "-", stdin="torchrun --nproc_per_node=2 -m scripts.base_train -- --depth=2")
    assert (done.returncode, done.stderr) == (0, "")
    assert 'script = "scripts.base_train"\n' in done.stdout
    assert init(tmp_path, "-o", "-", "--", "torchrun", "t.py").stderr.startswith("gputrain: t.py is not here")


def test_an_example_is_copied_with_the_script_that_it_runs(tmp_path: Path) -> None:
    done = init(tmp_path, "--example", "script", "-o", "sub/mine.toml")
    assert done.returncode == 2  # there is no such folder
    (tmp_path / "sub").mkdir()
    done = init(tmp_path, "--example", "script", "-o", "sub/mine.toml")
    assert (done.returncode, done.stdout) == (0, "sub/mine.toml\nsub/train_script.py\n"), done.stderr
    assert "`gputrain run sub/mine.toml` runs it" in done.stderr
    recipe = load(str(tmp_path / "sub/mine.toml"))
    assert recipe.script is not None
    assert recipe.script.script == "sub/train_script.py"
    assert (tmp_path / "sub/train_script.py").is_file()
    assert "gputrain run sub/mine.toml" in recipe.origin.text


def test_no_file_is_written_if_one_of_an_example_is_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "train_script.py").write_text("mine")
    done = init(tmp_path, "--example", "script")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("gputrain: init: train_script.py already exists: replace it with --force")
    assert not (tmp_path / "script.toml").exists()
    assert init(tmp_path, "--example", "script", "--force").returncode == 0
    assert (tmp_path / "train_script.py").read_text() != "mine"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--example", "mnits"], "init: 'mnits' is not an example; did you mean 'mnist'?"),
        (["--example", "demo", "--", "torchrun", "x.py"], "init: --example and a command exclude each other; keep one"),
    ],
)
def test_a_wrong_request_for_an_example_is_one_line(tmp_path: Path, words: list[str], message: str) -> None:
    done = init(tmp_path, *words)
    assert done.returncode == 2
    assert done.stderr.startswith(f"gputrain: {message}")
    assert list(tmp_path.iterdir()) == []


def test_an_example_is_printed(tmp_path: Path) -> None:
    done = init(tmp_path, "--example", "demo", "-o", "-")
    assert (done.returncode, done.stderr) == (0, "")
    assert 'task = "lm"' in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_command_of_our_trainer_becomes_a_recipe_of_its_task(tmp_path: Path) -> None:
    words = ["--max-updates", "4", "--lr", "0.01,0.002", "--cpu", "--distributed-world-size=2", "--stop-grace", "7"]
    made = init(tmp_path, "-o", "r.toml", "--", "python", "-P", "-m", "trainer", "--task", "lm", "--data", "t.txt",
                "--context", "16", *words, "--run-dir", "x")  # fmt: skip
    assert made.returncode == 0, made.stderr
    recipe = load(str(tmp_path / "r.toml"))
    assert recipe.cluster.nodes == (Node(cpu_ranks=2),)
    assert "stop_grace = 7" in (tmp_path / "r.toml").read_text()
    assert (recipe.train.task, recipe.train.max_updates, recipe.train.lr) == ("lm", 4, (0.01, 0.002))
    assert recipe.task_options["context"] == 16
    assert "left out, as gputrain decides it at the start: --run-dir" in made.stderr
    assert "starts one process" not in made.stderr
    wrong = init(
        tmp_path, "-o", "-", "--", "python", "-m", "trainer", "--task", "lm", "--data", "t.txt", "--contxt", "16"
    )
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.count("\n") == 1
    assert "'--contxt' is no option of the trainer or its task; did you mean '--context'?" in wrong.stderr


def test_another_module_named_trainer_stays_a_script(tmp_path: Path) -> None:
    assert init(tmp_path, "-o", "r.toml", "--", "python", "-m", "trainer", "--epochs", "3").returncode == 0
    script = load(str(tmp_path / "r.toml")).script
    assert script is not None
    assert (script.script, script.module, script.args) == ("trainer", True, ("--epochs", "3"))
