from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from gputrain_tui import VERSION, cli
from gputrain_tui.history.run_folders import Run, create
from gputrain_tui.history.status_file import write_status
from gputrain_tui.recipe.json_schema import recipe_schema
from trainer.contract.errors import BROKEN_PIPE_CODE
from trainer.contract.outcome import ENDED_EARLY
from trainer.contract.record import Finding, encode_event
from trainer.host.process_identity import identify

ROOT = Path(__file__).parents[2]
GPUTRAIN = [sys.executable, "-m", "gputrain_tui"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run that is going on, with a long log."""
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path))
    made = create("demo", world_size=1, recipe_toml="", plan=lambda _: b"{}")
    write_status(made.dir, msgspec.structs.replace(made.status, status="running", supervisor=identify()))
    made.dir.rank_log(0).write_bytes(b"a line of the log\n" * 100_000)
    return made


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_names_every_command(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([flag]) == 0
    text = capsys.readouterr().out
    for name in cli.COMMANDS:
        assert f"\n  {name} " in text
    assert max(map(len, text.splitlines())) <= 100


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"gputrain {VERSION}\n"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_a_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main([name, "--help"])
    assert left.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith(f"usage: gputrain {name}")
    assert cli.COMMANDS[name][1:] in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpuz"], "'gpuz' is not a known command; did you mean 'gpus'?; see `gputrain --help`"),
        (
            ["resume", "last"],
            "'resume' is not a known command; did you mean `gputrain run --resume RUN`?; see `gputrain --help`",
        ),
        (["zzz"], "'zzz' is not a known command; see `gputrain --help`"),
        (["--versoin"], "'--versoin' is not a known option; did you mean '--version'?; see `gputrain --help`"),
        (["gpus", "--jsno"], "gpus: --jsno is not a known option; did you mean '--json'?"),
        (["gpus", "--jso=1"], "gpus: --jso is not a known option; did you mean '--json'?"),
        (
            ["init", "--force", "torchrun", "--nproc-per-node", "2", "my train.py"],
            "init: --nproc-per-node is not a known option; a command with options of its own stands behind --: "
            "`gputrain init --force -- torchrun --nproc-per-node 2 'my train.py'`",
        ),
        (["init", "--task", "docnn"], "init: --task is not a known option; see `gputrain init --help`"),
        (["init", "--task", "--", "docnn"], "init: --task is not a known option; see `gputrain init --help`"),
        (["init", "train.py", "--forse"], "init: --forse is not a known option; did you mean '--force'?"),
        (["gpus", "--zzz"], "gpus: --zzz is not a known option; see `gputrain gpus --help`"),
        (["gpus", "two"], "gpus: 'two' is one word too many; see `gputrain gpus --help`"),
        (["logs"], "logs: the following arguments are required: RUN; see `gputrain logs --help`"),
        (["logs", "last", "--rank", "x"], "logs: argument --rank: invalid int value: 'x'; see `gputrain logs --help`"),
        (["logs", "last", "--rank"], "logs: argument --rank: expected one argument; see `gputrain logs --help`"),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"gputrain: {message}\n"


def test_a_refusal_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path))
    assert cli.main(["logs", "last"]) == 2
    error = capsys.readouterr().err
    assert error == f"gputrain: there is no run in {tmp_path}/runs yet; start one with `gputrain run RECIPE`\n"


def test_a_wrong_choice_is_answered_by_all_and_by_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", "last", "--to", "safetensor"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("gputrain: export: argument --to: invalid choice: 'safetensor' (choose from ")
    assert error.endswith("); did you mean 'safetensors'?; see `gputrain export --help`\n")


def test_control_c_ends_a_command_with_130_and_without_a_traceback(run: Run) -> None:
    process = subprocess.Popen(
        [*GPUTRAIN, "logs", "last", "--follow"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"a line of the log\n"
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=300)
    assert (process.returncode, error) == (130, b"")


def test_a_reader_that_goes_away_ends_a_command_quietly(run: Run) -> None:
    reading, writing = os.pipe()
    process = subprocess.Popen([*GPUTRAIN, "logs", "last"], cwd=ROOT, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert os.read(reading, 7) == b"a line "
    os.close(reading)
    _, error = process.communicate(timeout=300)
    assert (process.returncode, error) == (BROKEN_PIPE_CODE, b"")


def test_a_terminal_that_knows_only_ascii_gets_the_rest_escaped(run: Run) -> None:
    run.dir.status.write_bytes(run.dir.status.read_bytes().replace(b'"recipe":"demo"', '"recipe":"訓練"'.encode()))
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*GPUTRAIN, "runs"], cwd=ROOT, env=environ, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"\u8a13\u7df4" in done.stdout


def test_help_and_the_listings_take_under_a_quarter_of_importing_torch(tmp_path: Path) -> None:
    environ = {**os.environ, "GPUTRAIN_HOME": str(tmp_path)}

    def best(words: list[str], rounds: int) -> float:
        """Return the least processor time: other work on the machine adds to it a little, to the time much."""

        def once() -> float:
            before = os.times()
            subprocess.run(
                words, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True
            )
            after = os.times()
            return after.children_user + after.children_system - before.children_user - before.children_system

        return min(once() for _ in range(rounds))

    torch = best([sys.executable, "-c", "import torch"], 1)
    for words in (["--help"], ["gpus"], ["runs"]):
        taken = best([*GPUTRAIN, *words], 2)
        assert taken < torch / 4, f"gputrain {words[0]} took {taken:.3f} s, importing torch {torch:.3f} s"


def test_a_command_without_standard_output_works_in_silence() -> None:
    words = [*GPUTRAIN, "plan", str(ROOT / "recipes/demo.toml")]
    done = subprocess.run(["sh", "-c", '"$@" <&- >&-', "sh", *words], stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_full_disk_behind_standard_output_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        words = [*GPUTRAIN, "plan", "--json", str(ROOT / "recipes/demo.toml")]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert done.returncode == 1
    assert done.stderr == "gputrain: cannot write standard output: No space left on device\n"


def test_a_finished_run_is_not_resumed_without_anything_left_to_train(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.dir.checkpoints / "step_00000006.pt").write_bytes(b"")
    write_status(run.dir, msgspec.structs.replace(run.status, status="finished", supervisor=None))
    run.dir.recipe.write_text(
        '[[cluster.nodes]]\ncpu_ranks = 2\n[train]\ntask = "lm"\nmax_epochs = 3\n[task]\ndata = "stdlib"\n'
    )
    assert cli.main(["run", "--resume", "last"]) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith(f"gputrain: --resume last: {run.id} has finished: nothing is left to train; ")
    assert stderr.endswith(" raise the limit that ended it (max_epochs 3), such as --set train.max_epochs=N\n")
    assert stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("condition", "advice"),
    [
        (
            "no lower loss in 2 validations",
            "raise the limit that ended it (patience 2), such as --set train.patience=N",
        ),
        ("stop_time 5 minutes reached", "raise the limit that ended it (stop_time 5), such as --set train.stop_time=N"),
        (
            "the learning rate is not above min_lr 0.0001",
            "lower the limit that ended it (min_lr 0.0001), such as --set train.min_lr=N",
        ),
    ],
)
def test_a_run_that_ended_early_is_resumed_with_the_limit_that_ended_it(
    run: Run, capsys: pytest.CaptureFixture[str], condition: str, advice: str
) -> None:
    (run.dir.checkpoints / "step_00000006.pt").write_bytes(b"")
    write_status(run.dir, msgspec.structs.replace(run.status, status="finished", supervisor=None))
    ended = Finding(time=1.0, kind=ENDED_EARLY, severity="info", message=f"finished: {condition}")
    run.dir.rank_events(0).write_bytes(encode_event(ended) + b"\n")
    run.dir.recipe.write_text(
        '[[cluster.nodes]]\ncpu_ranks = 2\n[train]\ntask = "lm"\nmax_epochs = 3\npatience = 2\nstop_time = 5\n'
        'min_lr = 0.0001\n[task]\ndata = "stdlib"\n'
    )
    assert cli.main(["run", "--resume", "last"]) == 2
    assert capsys.readouterr().err.endswith(f"to train further, {advice}\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_modules_load_stops_the_command_silently(number: signal.Signals) -> None:
    code = (
        "import os, runpy, sys\n"
        "class Interrupted:\n"
        "    def find_spec(name, path=None, target=None):\n"
        f"        if name == 'gputrain_tui.cli': os.kill(os.getpid(), {int(number)})\n"
        "sys.meta_path.insert(0, Interrupted)\n"
        "sys.argv = ['gputrain', 'runs']\n"
        "runpy.run_module('gputrain_tui', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_schema_of_a_recipe_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipe-schema"]) == 0
    assert json.loads(capsys.readouterr().out) == recipe_schema()
