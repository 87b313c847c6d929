from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from bench import FOR_EVER, LIMIT_S, Bench, first_updates, node_agent_pid, rank_pid, supervisor_pid, until
from commands import command

from gputrain_tui.history.record_tail import last_step
from gputrain_tui.history.run_folders import Run
from gputrain_tui.lifecycle import leftovers, recipe_to_run, start
from gputrain_tui.lifecycle.prepared import prepare
from trainer.contract.record import Failure, Finding, decode_events, recorded_checkpoints


@pytest.fixture(scope="module")
def json_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Bench]:
    bench = Bench(tmp_path_factory.mktemp("narration"))
    return bench.call("run", bench.recipe(), "--json"), bench


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Bench]:
    bench = Bench(tmp_path_factory.mktemp("shown"))
    return bench.call("run", "-", stdin=bench.recipe().read_text()), bench


FinishedRun = tuple[subprocess.CompletedProcess[str], Bench]


def test_json_is_one_event_per_line_and_nothing_else(json_run: FinishedRun) -> None:
    done, _ = json_run
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert events[0]["type"] == "run_started"
    assert events[-1]["type"] == "run_ended"
    assert (events[-1]["status"], events[-1]["exit_code"]) == ("finished", 0)
    assert all(isinstance(event["time"], float) for event in events)


def test_json_is_the_merged_record_line_for_line(json_run: FinishedRun) -> None:
    done, bench = json_run
    written = [line for path in bench.runs()[0].dir.events.glob("*.ndjson") for line in path.read_text().splitlines()]
    assert Counter(done.stdout.splitlines()) == Counter(written)


def test_both_ranks_report_every_step_once_and_agree_at_the_end(json_run: FinishedRun) -> None:
    events = [json.loads(line) for line in json_run[0].stdout.splitlines()]
    for rank in (0, 1):
        covered: list[int] = []
        for event in events:
            if event["type"] == "step" and event["rank"] == rank:
                covered += range(event["step"] - event["steps"] + 1, event["step"] + 1)
        assert covered == [1, 2, 3, 4, 5]
    sums = {event["rank"]: event["parameters"] for event in events if event["type"] == "checksum"}
    assert set(sums) == {0, 1}
    assert len(set(sums.values())) == 1


def test_a_plain_run_narrates_on_stderr_and_closes_with_a_row_per_rank(plain_run: FinishedRun) -> None:
    done, bench = plain_run
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split()[0] == "rank"
    assert [line.split()[0] for line in lines[1:3]] == ["0", "1"]
    assert "parameters equal on all ranks" in lines
    assert "finished in" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert str(bench.runs()[0].dir.path) in done.stderr


def test_a_finished_run_leaves_its_record_and_nothing_else(plain_run: FinishedRun) -> None:
    run = plain_run[1].runs()[0]
    assert run.state == "finished"
    assert leftovers.processes_of(run.dir.path) == []
    assert run.dir.recipe.read_text().startswith('name = "tiny"')


@pytest.mark.parametrize("hanging", [False, True], ids=["training", "a rank hangs in a collective"])
def test_ctrl_c_stops_all_processes_and_reports_it(bench: Bench, hanging: bool) -> None:
    options = ["train.save_every_epochs=0", "train.stop_grace=1" if hanging else "train.lr=0.1"]
    words = [word for option in options for word in ("--set", option)]
    process = bench.start("run", bench.recipe(FOR_EVER), *words)
    run = bench.await_training()
    if hanging:
        os.kill(rank_pid(run, 1), signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert ("without saving, because ranks 0, 1 did not answer" in err) == hanging
    assert any(run.dir.checkpoints.glob("step_*.pt")) != hanging
    assert leftovers.processes_of(run.dir.path) == []
    assert "stopping every process of the run" in err
    assert "no process of the run is left" in err
    assert bench.runs()[0].state == "stopped"


def test_a_second_ctrl_c_does_not_wait(bench: Bench) -> None:
    process = bench.start("run", bench.recipe(FOR_EVER), "--set", "train.stop_grace=3600")
    run = bench.await_training()
    os.kill(rank_pid(run, 1), signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    until(lambda: bench.runs()[0].state == "stopping")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert "not waiting" in err
    assert leftovers.processes_of(run.dir.path) == []


def test_killing_the_foreground_saves_as_a_closed_terminal_does_and_leaves_nothing(bench: Bench) -> None:
    process = bench.start("run", bench.recipe(FOR_EVER))
    run = bench.await_training()
    part = run.dir.checkpoints / ".step_00000001.pt.tmp"
    part.write_bytes(b"half of a checkpoint")
    process.kill()
    process.communicate()
    until(lambda: not leftovers.processes_of(run.dir.path))
    until(lambda: bench.runs()[0].state == "stopped")
    assert not part.exists()
    message = bench.runs()[0].status.message or ""
    assert re.match(r"lost contact with the command that started it at step \d+, saved \S+step_\d+\.pt", message), (
        message
    )


@pytest.mark.parametrize(
    "words", [pytest.param([], id="shown", marks=pytest.mark.slow), pytest.param(["--json"], id="json")]
)
def test_a_run_whose_directory_is_deleted_ends_with_the_reason(bench: Bench, words: list[str]) -> None:
    process = bench.start("run", bench.recipe(FOR_EVER), *words)
    run = bench.await_training()
    run.dir.path.rename(bench.folder / "deleted")
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1, err
    json_run = f"the run directory {run.dir.path} was deleted during the run"
    assert json_run in err
    assert f"record {run.dir.path}" not in err
    assert not words or (json.loads(out.splitlines()[-1])["status"], json_run in out) == ("failed", True)
    assert leftovers.processes_of(run.dir.path) == []


@pytest.mark.parametrize(
    ("victim", "words", "trains"),
    [
        (supervisor_pid, "supervisor was killed", False),
        (node_agent_pid, "SIGKILL", False),
        (lambda run: rank_pid(run, 1), "SIGKILL", True),  # the other rank fails too, for want of this one
    ],
    ids=["supervisor", "node parent", "rank"],
)
def test_killing_a_part_of_the_run_ends_all_of_it(
    bench: Bench, victim: Callable[[Run], int], words: str, trains: bool
) -> None:
    process = bench.start("run", bench.recipe(FOR_EVER) if trains else bench.torch_free_recipe())
    run = bench.await_training()
    os.kill(victim(run), signal.SIGKILL)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert leftovers.processes_of(run.dir.path) == []
    assert words in err
    assert bench.runs()[0].state == "failed"
    assert not trains or f"rank 1 on {socket.gethostname()}: the process" in bench.call("runs").stdout


def restarted(bench: Bench, *settings: str) -> Run:
    """Run to update 40; at update 20, which is saved where anything is, one rank is killed, and all start again."""
    words = [word for text in ("cluster.max_restarts=1", *settings) for word in ("--set", text)]
    process = bench.start("run", bench.gated_recipe(20, updates=40), *words)
    run = bench.await_training()
    nothing_saved = "train.save_every_epochs=0" in settings
    # The record names what was saved; a file that is there may not have been recorded yet.
    until(lambda: step_of(run, 1) == 20 and (nothing_saved or recorded_checkpoints(run.dir)))
    os.kill(rank_pid(run, 1), signal.SIGKILL)
    bench.gate.touch()  # no rank goes on alone
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    (ended,) = bench.runs()
    assert (ended.state, ended.status.restarts, ended.status.step) == ("finished", 1, 40)
    return ended


def step_of(run: Run, rank: int) -> int:
    step = last_step(run.dir, rank)
    return step.step if step is not None else 0


@pytest.mark.slow  # the next one asks as much of a folder of its own
def test_a_killed_rank_is_started_again_from_the_last_checkpoint(bench: Bench) -> None:
    run = restarted(bench, "train.save_every_updates=20")
    assert first_updates(run) == [0, 20]
    events = list(decode_events(run.dir.node_events(0).read_bytes()))
    assert [(event.rank, event.kind) for event in events if isinstance(event, Failure)] == [(1, "signal")]


def test_a_run_whose_supervisor_is_killed_starts_again_and_is_whole(bench: Bench) -> None:
    process = bench.start("run", bench.torch_free_recipe(100), "--set", "cluster.max_restarts=1")
    run = bench.await_training()
    os.kill(supervisor_pid(run), signal.SIGKILL)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    (ended,) = bench.runs()
    assert (ended.state, ended.status.restarts, ended.status.step) == ("finished", 1, 100)
    (finding,) = [each for each in decode_events(run.dir.run_events.read_bytes()) if isinstance(each, Finding)]
    assert "attempt 1 ended: killed: the run's supervisor was killed, and its ranks ended with it" in finding.message


def test_a_restart_and_a_resume_find_the_checkpoints_in_a_folder_of_ones_own(
    bench: Bench,
) -> None:
    run = restarted(bench, "train.save_every_updates=20", "train.save_dir=kept")
    assert first_updates(run) == [0, 20]
    events = list(decode_events(run.dir.node_events(0).read_bytes()))
    assert [(event.rank, event.kind) for event in events if isinstance(event, Failure)] == [(1, "signal")]
    assert bench.call("run", "--resume", run.id, "--set", "train.max_updates=42").returncode == 0
    assert first_updates(bench.runs()[0]) == [40]


@pytest.mark.timing  # the disk has a second for the checkpoint that was begun
def test_an_exception_at_one_line_ends_the_restarts_also_where_each_attempt_gets_further(bench: Bench) -> None:
    task = Path(__file__).parents[1] / "support" / "tiny_task.py"
    (bench.folder / "fault.toml").write_text(
        f'[cluster]\nmax_restarts = 9\n[[cluster.nodes]]\ncpu_ranks = 2\n[train]\ntask = "{task}:TinyTask"\n'
        "batch_size = 2\nmax_updates = 90\nsave_every_updates = 4\nthreads = 1\n"
        '[task]\nfault = "raise"\nfault_rank = 1\nfault_step = 6\nwidth = 50000\n'
    )
    done = bench.call("run", "fault.toml")
    assert done.returncode == 1
    (run,) = bench.runs()
    assert run.status.restarts == 1
    assert first_updates(run) == [0, 4]  # the checkpoint was being written when rank 1 failed
    assert re.search(r"42; it happened twice at tiny_task\.py:\d+, so the run is not restarted", done.stderr)
    assert re.search(r"^attempt 1 ended: rank 1 exception .*the answer is not 42; attempt 2 begins$", done.stderr, re.M)


def test_a_run_that_fails_before_its_first_checkpoint_begins_anew(bench: Bench) -> None:
    run = restarted(bench, "train.save_every_epochs=0", "train.valid_every_epochs=0")
    assert first_updates(run) == [0, 0]


def test_a_detached_run_goes_on_until_it_is_stopped(bench: Bench) -> None:
    done = bench.call("run", bench.recipe(FOR_EVER), "--detach")
    assert done.returncode == 0
    run = bench.await_training()
    assert done.stdout == f"{run.id}\n"
    assert run.state == "running"
    stopped = bench.call("stop", "last")
    kept = re.fullmatch(rf"{run.id} is stopped at step (\d+), saved (\S+); processes left: none\n", stopped.stdout)
    assert stopped.returncode == 0
    assert kept is not None
    assert Path(kept[2]) == run.dir.checkpoints / f"step_{int(kept[1]):08}.pt"
    assert Path(kept[2]).exists()
    assert bench.runs()[0].status.message == f"stopped by `gputrain stop` at step {kept[1]}, saved {kept[2]}"
    done = bench.call("run", "--resume", "last", "--set", f"train.max_updates={int(kept[1]) + 2}")
    assert done.returncode == 0, done.stderr
    assert first_updates(bench.runs()[0]) == [int(kept[1])]


def test_ctrl_c_while_the_supervisor_loads_its_modules_stops_the_run(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUTRAIN_HOME", str(bench.folder / "home"))
    recipe = recipe_to_run.load(str(bench.recipe(FOR_EVER)), overrides=[], resume=None)
    run, supervisor = start.launch(prepare(recipe), leased=False)
    supervisor.send_signal(signal.SIGINT)  # its interpreter has not even begun
    assert supervisor.wait(LIMIT_S) == 130
    assert bench.runs()[0].state == "stopped"
    assert leftovers.processes_of(run.dir.path) == []


def test_a_refusal_by_the_ranks_leaves_no_run_behind(bench: Bench) -> None:
    (bench.folder / "short.txt").write_text("short")
    done = bench.call("run", bench.recipe(), "--set", "task.data=short.txt")
    assert done.returncode == 2
    *narrated, line = done.stderr.splitlines()
    assert all(each.startswith(("run ", "starting ")) for each in narrated), "of a start that takes long"
    assert line.startswith("gputrain: short.txt: 4 bytes to learn, but a window needs 17")
    assert bench.runs() == []


SCRIPT_RECIPE = """\
name = "own"
[[cluster.nodes]]
cpu_ranks = 2
[train]
script = "own.py"
args = ["{end}"]
"""
OWN_SCRIPT = """\
import os, signal, sys, time
if sys.argv[1] == "save" and os.environ["RANK"] == "1":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("rank", os.environ["RANK"], "says", sys.argv[1])
if sys.argv[1] in ("wait", "save"):
    time.sleep(600)
if sys.argv[1] == "fail" and os.environ["RANK"] == "1":
    raise ValueError("no more data")
"""


def script_recipe(bench: Bench, end: str) -> Path:
    (bench.folder / "own.py").write_text(OWN_SCRIPT)
    path = bench.folder / f"{end}.toml"
    path.write_text(SCRIPT_RECIPE.format(end=end))
    return path


def test_a_recipe_runs_a_script_of_ones_own_and_keeps_its_record(bench: Bench) -> None:
    done = bench.call("run", script_recipe(bench, "hello"))
    assert done.returncode == 0, done.stderr
    assert "finished in" in done.stderr
    run = bench.runs()[0]
    assert (run.state, run.dir.rank_log(1).read_text()) == ("finished", "rank 1 says hello\n")


def test_a_script_that_fails_fails_the_run_with_its_own_words(bench: Bench) -> None:
    done = bench.call("run", script_recipe(bench, "fail"))
    assert done.returncode == 1
    assert "ValueError: no more data" in done.stderr
    assert "trainer/agent/script.py" not in done.stderr
    assert bench.runs()[0].status.message.startswith("ValueError: no more data (")


VANISHING_SCRIPT = """\
import os, pathlib, time
print("rank", os.environ["RANK"], "has worked")
other = pathlib.Path(__file__).with_name("begun")
if os.environ["RANK"] == "0":
    other.touch()
else:
    while not other.exists():  # the other rank has read its script
        time.sleep(0.01)
    pathlib.Path(__file__).unlink()
    raise ValueError("no more data")
"""


def test_a_refused_restart_deletes_nothing_and_shows_why_the_first_attempt_failed(bench: Bench) -> None:
    recipe = script_recipe(bench, "x")
    (bench.folder / "own.py").write_text(VANISHING_SCRIPT)
    done = bench.call("run", recipe, "--set", "cluster.max_restarts=1")
    assert done.returncode == 2
    (run,) = bench.runs()
    assert run.dir.rank_log(1).read_text().startswith("rank 1 has worked")
    assert "ValueError: no more data" in done.stderr
    assert "own.py does not exist" in done.stderr
    assert (run.state, run.status.restarts) == ("failed", 1)


def test_a_detached_script_is_stopped(bench: Bench) -> None:
    assert bench.call("run", script_recipe(bench, "wait"), "--detach").returncode == 0
    run = bench.runs()[0]
    until(lambda: run.dir.rank_log(1).exists() and "says wait" in run.dir.rank_log(1).read_text())
    assert bench.call("stop", "last").stdout == f"{run.id} is stopped; processes left: none\n"
    assert leftovers.processes_of(run.dir.path) == []


def test_a_rank_of_a_script_that_saves_for_longer_than_its_grace_is_named(bench: Bench) -> None:
    process = bench.start("run", script_recipe(bench, "save"), "--set", "train.stop_grace=0.5")
    run = until(lambda: next(iter(bench.runs()), None), process)
    for rank in (0, 1):
        until(
            lambda rank=rank: "says" in "".join(path.read_text() for path in run.dir.logs.glob(f"{rank}.log")), process
        )
    process.send_signal(signal.SIGINT)
    assert process.wait(LIMIT_S) == 130
    lost = "without waiting for rank 1 beyond train.stop_grace: what it saves may be lost"
    assert bench.runs()[0].status.message == f"stopped by SIGINT {lost}"


Refused = Callable[..., tuple[int, str, str]]


@pytest.fixture
def refused(bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Run a recipe of which nothing comes, and return the exit code, output and errors."""
    monkeypatch.setenv("GPUTRAIN_HOME", str(bench.folder / "home"))
    monkeypatch.chdir(bench.folder)

    def run(recipe: Path, *settings: str) -> tuple[int, str, str]:
        done = command(capsys, "run")(recipe, *(word for text in settings for word in ("--set", text)))
        assert bench.runs() == [], "no run is left behind"
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["train.lr=0"], "train.lr is 0"),
        (["train.larning_rate=1"], "train.larning_rate is not known"),
        (["train.task=ml"], "train.task is 'ml'"),
        (["train.batch_size=[1,2,3]"], "batch_size has 3 values"),
        (["train.max_updates=0"], "nothing would end this training"),
    ],
    ids=["range", "key", "task", "world size", "endless"],
)
def test_a_wrong_request_is_one_line_and_leaves_no_run_behind(
    bench: Bench, refused: Refused, settings: list[str], words: str
) -> None:
    code, out, err = refused(bench.recipe(), *settings)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert words in err


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["task.data=nowhere.txt"], "nowhere.txt does not exist"),
        (["task.data=empty.txt"], "empty.txt is empty"),
        (["cluster.nodes=[{gpus = 64}]"], "64 GPUs"),
        (["cluster.init_method=file://FOLDER/left"], "left from an earlier run"),
        (["cluster.port=PORT"], "is in use by"),
    ],
    ids=["missing data", "empty data", "gpus", "stale file", "busy port"],
)
def test_a_machine_that_is_not_ready_is_one_line_and_leaves_no_run_behind(
    bench: Bench, refused: Refused, settings: list[str], words: str
) -> None:
    (bench.folder / "empty.txt").touch()
    (bench.folder / "left").write_text("x")
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        filled = [text.replace("FOLDER", str(bench.folder)).replace("PORT", port) for text in settings]
        code, out, err = refused(bench.recipe(), *filled)
    assert (code, out, len(err.splitlines())) == (3, "", 1)
    assert words in err


def test_a_script_that_is_missing_leaves_no_run_behind(bench: Bench, refused: Refused) -> None:
    code, _, err = refused(script_recipe(bench, "x"), "train.script=oven.py")
    assert (code, len(err.splitlines())) == (3, 1)
    assert f"train.script: oven.py does not exist in {bench.folder}" in err


def test_an_unreadable_recipe_is_one_line(bench: Bench, refused: Refused) -> None:
    assert refused(bench.folder) == (2, "", f"gputrain: {bench.folder} cannot be read: Is a directory\n")


def test_a_run_that_has_finished_continues_from_its_checkpoint(json_run: FinishedRun, tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    shutil.copytree(json_run[1].folder / "home", tmp_path / "home")
    done = bench.call("run", "--resume", "last", "--set", "train.max_updates=7")
    assert done.returncode == 0, done.stderr
    run = bench.runs()[0]
    assert (first_updates(run), run.status.step) == ([5], 7)
