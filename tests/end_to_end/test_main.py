from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from forked_trainer import ForkedTrainer
from waiting import LIMIT_S, until

from gputrain_tui.history.record_tail import last_step
from trainer.__main__ import main
from trainer.contract.builtin_tasks import BUILT_IN
from trainer.contract.options import Distributed, Training
from trainer.contract.outcome import NodeOutcome
from trainer.contract.record import RankState, RunDir, Step, decode_events
from trainer.contract.schema import Option, describe
from trainer.host.ports import free_port
from trainer.host.processes import descendants
from trainer.host.visible_devices import Device, label, select

TEXT = "To be, or not to be, that is the question.\n" * 400
TINY = ["--context", "16", "--dim", "16", "--layers", "1", "--heads", "2", "--sample-bytes", "0"]
QUIET = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "GPUTRAIN_LEASE")}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def words(data: Path, *more: str) -> list[str]:
    return ["--task", "lm", "--data", str(data), "--cpu", "--max-updates", "3", "--batch-size", "4", *TINY, *more]


def begin(arguments: list[str], cwd: Path, environ: dict[str, str] | None = None) -> subprocess.Popen[str]:
    cache = {"XDG_CACHE_HOME": str(cwd / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-m", "trainer", *arguments],
        cwd=cwd,
        env=QUIET | cache | (environ or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    stdout, stderr = process.communicate(timeout=LIMIT_S)
    return process.returncode, stdout, stderr


# --- help and description -------------------------------------------------------------------------------------------


def test_a_reader_of_the_help_may_go_away() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "trainer", "--help"]
    done = subprocess.run(command, env=QUIET, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=300)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_the_help_names_every_option_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"], {}) == 0
    text = capsys.readouterr().out
    for option in [*describe(Distributed), *describe(Training)]:
        assert option.flag in text or f"--no-{option.flag[2:]}" in text
    assert "Options of task" not in text


@pytest.mark.parametrize("task", list(BUILT_IN))
def test_the_help_of_a_task_names_its_options_and_the_description_is_their_json(
    task: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--task", task, "--help"], {}) == 0
    text = capsys.readouterr().out
    assert main(["--describe-task", task], {}) == 0
    options = msgspec.json.decode(capsys.readouterr().out, type=list[Option])
    assert options
    for option in options:
        assert option.flag in text or f"--no-{option.flag[2:]}" in text


def test_a_task_of_ones_own_is_described_by_importing_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "import os\nimport msgspec\nfrom trainer.tasks.task import Task\n"
        "print('loading')\nos.write(1, b'by other means\\n')\n"
        "class Own(Task):\n    class Options(msgspec.Struct, kw_only=True):\n        width: int = 3\n"
    )
    assert main(["--describe-task", f"{file}:Own"], {}) == 0
    printed = capfd.readouterr()
    assert [(entry["name"], entry["default"]) for entry in json.loads(printed.out)] == [("width", 3)]
    assert sorted(printed.err.splitlines()) == ["by other means", "loading"], "what its file prints is no answer"


# --- requests that are refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["--task", ""], "no task is named"),
        (["--task", "lmm"], "did you mean 'lm'?"),
        (
            ["--batch-sise", "4"],
            "--batch-sise is not an option of the trainer or of task lm; did you mean '--batch-size'?",
        ),
        (["--dimm=4"], "--dimm is not an option of the trainer or of task lm; did you mean '--dim'?"),
        (["stray"], "unexpected argument 'stray'"),
        (["--lr", "fast"], "--lr is 'fast', but must be one or more numbers > 0"),
        (["--lr"], "--lr needs a value"),
        (["--layers", "0"], "--layers is '0', but must be an integer >= 1"),
        (["--optimizer", "adamm"], "did you mean 'adam'?"),
        (["--distributed-world-size", "0"], "--distributed-world-size is '0'"),
        (["--distributed-world-size", "4", "--distributed-gpus", "2"], "--distributed-init-method"),
        (["--distributed-init-method", "tcp://127.0.0.1"], "must be tcp://HOST:PORT"),
        (["--distributed-init-method", "tcp://127.0.0.1:29500", "--distributed-world-size", "1"], "world size is 1"),
        (["--distributed-backend", "nccl", "--distributed-world-size", "2"], "nccl needs GPUs"),
        (["--run-dir", "/proc/nowhere"], "--run-dir /proc/nowhere cannot be made"),
    ],
)
def test_a_wrong_request_is_one_line_and_nothing_starts(
    arguments: list[str], fragment: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(data, *arguments), {}) == 2
    stderr = capsys.readouterr().err
    assert fragment in stderr
    assert stderr.startswith("trainer: ")
    assert stderr.count("\n") == 1


@pytest.mark.parametrize("missing", ["/no/such/text", "no*such", "."])
def test_missing_data_are_one_line_and_code_3_as_by_the_preflight(
    missing: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = [*(["--pattern", "*.absent"] if missing == "." else []), "--data", missing]
    assert main(words(data, *more), {}) == 3
    assert re.fullmatch(
        r"trainer: .*(does not exist|matches no file|has no file that matches).*\n", capsys.readouterr().err
    )


def test_several_ranks_without_gpus_need_the_cpu_flag(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [word for word in words(data, "--distributed-world-size", "2") if word != "--cpu"]
    for more in ([], ["--distributed-init-method", "tcp://127.0.0.1:29500", "--distributed-gpus", "2"]):
        assert main([*arguments, *more], {"CUDA_VISIBLE_DEVICES": ""}) == 2
        assert "add --cpu" in capsys.readouterr().err


def test_a_busy_port_is_refused_before_a_run_directory_is_made(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        more = ["--distributed-world-size", "2", "--distributed-port", port, "--run-dir", str(tmp_path / "run")]
        assert main(words(data, *more), {}) == 2
    assert f"port {port} is in use" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_node_agent_imports_neither_torch_nor_slow_modules(data: Path) -> None:
    code = (
        "import sys, trainer.__main__, trainer.agent.launch\n"
        f"trainer.__main__.main({words(data, '--distributed-init-method', 'tcp://127.0.0.1')!r}, {{}})\n"
        "print([name for name in ('torch', 'pynvml', 'psutil', 'textual', 'asyncio', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- training -------------------------------------------------------------------------------------------------------


def test_two_ranks_train_and_their_node_keeps_the_record(data: Path, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    more = ["--distributed-world-size", "2", "--run-dir", str(run_dir.path), "--node", "3"]
    code, _, stderr = finish(begin(words(data, *more), tmp_path))
    assert (code, stderr) == (0, "trainer: 2 ranks on this node, on the CPU\n")
    outcome = msgspec.json.decode(run_dir.node_result(3).read_bytes(), type=NodeOutcome)
    assert [outcome.ranks[rank].finished for rank in (0, 1)] == [True, True]
    for rank in (0, 1):
        events = list(decode_events(run_dir.rank_events(rank).read_bytes()))
        assert sum(event.steps for event in events if isinstance(event, Step)) == 3
        assert [event.state for event in events if isinstance(event, RankState)][-1] == "finished"


def test_two_nodes_typed_by_hand_and_a_launchers_ranks_train(data: Path, tmp_path: Path) -> None:
    """Started together, because they meet."""
    tcp, env = (str(free_port()) for _ in range(2))
    file = tmp_path / "rendezvous"
    processes: list[ForkedTrainer] = []
    for url in (f"tcp://127.0.0.1:{tcp}", f"file://{file}"):
        for rank in ("0", "1"):
            node = ["--distributed-init-method", url, "--distributed-world-size", "2", "--distributed-gpus", "1"]
            processes.append(ForkedTrainer(words(data, *node, "--distributed-rank", rank), environ=QUIET))
    for rank in ("0", "1"):
        launcher = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": env,
        }
        processes.append(ForkedTrainer(words(data), environ=QUIET | launcher))
    for process in processes:
        done = process.finish()
        assert (done.returncode, done.stderr) == (0, "")
    assert not file.exists()


def test_one_process_is_its_own_rank_and_keeps_the_same_record(data: Path, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    done = ForkedTrainer(words(data, "--run-dir", str(run_dir.path)), environ=QUIET).finish()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("finished: max_updates 3 reached\n"), "progress is shown where the command was typed"
    outcome = msgspec.json.decode(run_dir.node_result(0).read_bytes(), type=NodeOutcome)
    assert (outcome.exit_code, outcome.ranks[0].finished) == (0, True)
    assert "finished" in run_dir.rank_log(0).read_text()


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_ctrl_c_stops_training_with_a_message_and_leaves_no_process(data: Path, tmp_path: Path, ranks: int) -> None:
    run_dir = RunDir(tmp_path / "run")
    more = ["--distributed-world-size", str(ranks), "--run-dir", str(run_dir.path), "--max-updates", "1000000"]
    more += ["--num-workers", "1"]
    process = begin(words(data, *more), tmp_path)
    until(lambda: all(last_step(run_dir, rank) is not None for rank in range(ranks)))
    family = descendants(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    code, _, stderr = finish(process)
    assert code == 130, stderr
    assert stderr.splitlines()[-1].startswith("trainer: stopped")
    assert "Traceback" not in stderr
    assert not family & descendants(1)
    outcome = msgspec.json.decode(run_dir.node_result(0).read_bytes(), type=NodeOutcome)
    assert (outcome.exit_code, outcome.failure) == (130, None)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_an_error_that_only_a_rank_finds_is_still_a_refusal(data: Path, tmp_path: Path, ranks: int) -> None:
    more = ["--distributed-world-size", str(ranks), "--resume", str(tmp_path / "missing.pt")]
    code, _, stderr = finish(begin(words(data, *more), tmp_path))
    assert code == 2
    assert "Traceback" not in stderr
    assert "missing.pt" in stderr.splitlines()[-1]


# --- devices --------------------------------------------------------------------------------------------------------

INSTALLED = [Device(f"GPU-{letter * 8}", "H200") for letter in "abc"]


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        (None, "abc"),
        ("0,1,2", "abc"),
        ("2,0", "ca"),
        ("GPU-b", "b"),
        ("GPU-bbbbbbbb,0", "ba"),
        ("1,-1,2", "b"),
        ("1,7,2", "b"),
        ("-1", ""),
        ("0,0", ""),
        ("GPU-x", ""),
        ("GPU-", ""),
    ],
)
def test_visible_devices_are_chosen_as_the_driver_chooses_them(wanted: str | None, chosen: str) -> None:
    assert "".join(device.uuid[4] for device in select(INSTALLED, wanted)) == chosen


def test_a_device_is_recorded_with_its_index_and_uuid() -> None:
    assert label(None, []) == "cpu"
    assert label(1, INSTALLED) == "cuda:1 GPU-bbbbbbbb"
