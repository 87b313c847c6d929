"""A user's script as the ranks of a run: as under torchrun, with our record."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from waiting import LIMIT_S, until

from trainer.__main__ import main
from trainer.agent.assignment import RankAssignment
from trainer.agent.rank_failure import last_error
from trainer.agent.script_environment import launcher_environment, master_address
from trainer.contract.options import Distributed
from trainer.contract.outcome import NodeOutcome
from trainer.contract.record import AnyEvent, Failure, NodeSample, RankState, RunDir, Step, decode_events
from trainer.host.cores import threads_of_quota
from trainer.host.processes import descendants

HERE = Path(__file__).parent


class ScriptRun:
    """What the node of a script left behind."""

    def __init__(self, folder: Path, code: int, stderr: str) -> None:
        self.dir = RunDir(folder / "run")
        self.code = code
        self.stderr = stderr

    def events(self, rank: int) -> list[AnyEvent]:
        path = self.dir.rank_events(rank)
        return list(decode_events(path.read_bytes())) if path.exists() else []

    def states(self, rank: int) -> list[str]:
        return [event.state for event in self.events(rank) if isinstance(event, RankState)]

    def steps(self, rank: int) -> list[Step]:
        return [event for event in self.events(rank) if isinstance(event, Step)]

    def log(self, rank: int) -> str:
        return self.dir.rank_log(rank).read_text()

    @property
    def outcome(self) -> NodeOutcome:
        return msgspec.json.decode(self.dir.node_result(0).read_bytes(), type=NodeOutcome)

    @property
    def failure(self) -> Failure:
        assert self.outcome.failure is not None
        return self.outcome.failure


def begin(
    folder: Path, script: str | Path, *arguments: str, ranks: int = 2, more: Sequence[str] = ()
) -> subprocess.Popen[str]:
    if isinstance(script, str):
        (folder / "own").mkdir(exist_ok=True)
        (folder / "own" / "script.py").write_text(script)
        script = Path("own/script.py")
    quiet = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "GPUTRAIN_LEASE")}
    flags = ["--script", str(script), "--cpu", "--distributed-world-size", str(ranks), "--run-dir", "run", *more, "--"]
    return subprocess.Popen(
        [sys.executable, "-m", "trainer", *flags, *arguments],
        cwd=folder,
        env=quiet | {"PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), *sys.path])},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(folder: Path, script: str | Path, *arguments: str, ranks: int = 2, more: Sequence[str] = ()) -> ScriptRun:
    process = begin(folder, script, *arguments, ranks=ranks, more=more)
    _, stderr = process.communicate(timeout=LIMIT_S)
    return ScriptRun(folder, process.returncode, stderr)


# --- success --------------------------------------------------------------------------------------------------------


def test_a_script_that_was_never_touched_trains_and_has_states_logs_and_machine_samples(tmp_path: Path) -> None:
    done = run(tmp_path, HERE.parents[0] / "support" / "plain_script.py", "--epochs", "3", "--", "x")
    where = f"trainer: what the script prints: {done.dir.logs}, a file for each rank\n"
    assert (done.code, done.stderr) == (0, f"trainer: 2 ranks on this node, on the CPU\n{where}")
    for rank in (0, 1):
        assert done.states(rank) == ["training", "finished"]
        assert done.log(rank) == f"rank {rank} of 2 on {rank} ['--epochs', '3', '--', 'x']\n"
        assert sum(event.steps for event in done.steps(rank)) == 8
        assert all(event.loss is not None and event.lr == 1e-4 for event in done.steps(rank))
        last = done.steps(rank)[-1]
        assert None not in (last.data_ms, last.forward_ms, last.backward_ms, last.optimizer_ms, last.sync_exposed_ms)
        assert done.outcome.ranks[rank].finished
    node = list(decode_events(done.dir.node_events(0).read_bytes()))
    assert [event.state for event in node if isinstance(event, RankState)] == ["spawned"] * 2
    assert any(isinstance(event, NodeSample) for event in node)


ODD = """\
import os, sys, torch, trainer
assert trainer.HERE
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(steps):
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
train(3)
backward = torch.autograd.backward
torch.autograd.backward = lambda *given, **named: backward(*given, **named)
child = os.fork()
if not child:
    train(5)
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
train(2)
assert ("torch._dynamo.eval_frame" in sys.modules) is ("unmeasured" in sys.argv), "torch's compiler"
for _ in range(1000):
    print("x" * 100_000)
os._exit(0)
"""
"""Has a module of our name, patches torch itself, forks a process that trains, prints 100 MB and leaves at once."""


@pytest.mark.parametrize(("more", "steps"), [((), 5), (("--no-instrument",), 0)])
def test_an_odd_script_is_measured_to_its_last_step_unless_disabled(
    tmp_path: Path, more: Sequence[str], steps: int
) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "trainer.py").write_text("HERE = True")
    done = run(tmp_path, ODD, *([] if steps else ["unmeasured"]), ranks=1, more=more)
    assert done.code == 0, done.stderr
    assert done.states(0) == ["training", "finished"]
    assert sum(event.steps for event in done.steps(0)) == steps
    more_bytes = done.dir.rank_log(0).stat().st_size - 100_001_000
    assert 0 <= more_bytes < 1000  # Python 3.12 and newer warn of a fork beside threads


@pytest.mark.parametrize(
    ("script", "line"),
    [
        (
            "import torch\n(2 * torch.ones(1, requires_grad=True)).sum().backward()",
            "gputrain: no optimizer's step was seen, so nothing of this training is measured; let an optimizer of "
            "your own inherit from torch.optim.Optimizer and call its step() outside of torch.compile\n",
        ),
        (
            "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.destroy_process_group()",
            "gputrain: neither backward() nor an optimizer's step was seen, so nothing of this training is measured; "
            "let an optimizer of your own inherit from torch.optim.Optimizer and call its step() outside of "
            "torch.compile, as loss.backward(); if the script starts the processes that train, set starts_ranks = true "
            "in [train] or call trainer.watch in them\n",
        ),
        (
            "import torch\nweight = torch.ones(1, requires_grad=True)\noptimizer = torch.optim.SGD([weight])\n"
            "weight.grad, = torch.autograd.grad(2 * weight, weight)\noptimizer.step()",
            "gputrain: no call of backward() was seen, so nothing of this training is measured; call "
            "loss.backward() outside of torch.compile and CUDA graphs\n",
        ),
        (
            "import pathlib\npathlib.Path('own/torch.py').write_text('')\nimport torch",
            "gputrain: not measured: ModuleNotFoundError: No module named 'torch.distributed'; 'torch' is not a "
            "package\n",
        ),
        ("import importlib.util\nassert importlib.util.find_spec('torch').loader.get_filename('torch')", ""),
    ],
)
def test_an_unmeasured_script_has_one_line_in_its_log(tmp_path: Path, script: str, line: str) -> None:
    done = run(tmp_path, script, ranks=1)
    assert (done.code, done.log(0), done.steps(0)) == (0, line, [])


def test_a_watched_script_reports_its_steps_and_no_state_twice(tmp_path: Path) -> None:
    done = run(tmp_path, HERE.parents[0] / "support" / "watched_script.py")
    assert done.code == 0, done.stderr
    for rank in (0, 1):
        assert done.states(rank) == ["training", "finished"]
        assert sum(event.steps for event in done.events(rank) if isinstance(event, Step)) == 12


def test_an_error_after_the_watched_training_is_a_failure(tmp_path: Path) -> None:
    done = run(tmp_path, HERE.parents[0] / "support" / "watched_script.py", "fail", ranks=1)
    assert done.code == 1
    assert re.fullmatch(r"ValueError: no more data \(watched_script.py:\d+ in train\)", done.failure.message)
    assert done.failure.rank is not None
    assert done.states(done.failure.rank) == ["training", "failed"]
    assert sum(isinstance(event, Failure) for event in done.events(done.failure.rank)) == 1


def test_a_failure_of_a_data_loading_process_is_reported_by_its_own_error(tmp_path: Path) -> None:
    script = """\
from torch.utils.data import DataLoader
class Broken:
    def __len__(self): return 4
    def __getitem__(self, index): raise OSError(5, "Input/output error", "shard-7.bin")
list(DataLoader(Broken(), num_workers=1))
"""
    done = run(tmp_path, script, ranks=1)
    assert done.code == 1
    message = "OSError: [Errno 5] Input/output error: 'shard-7.bin' (in DataLoader worker process 0)"
    assert done.failure.message == message + " (own/script.py:5 in <module>)"


def test_the_script_runs_as_in_an_interpreter_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "beside.py").write_text("HERE = True")
    script = """\
import atexit, json, multiprocessing, os, pickle, sys, threading, time
import beside
class Own: pass
assert pickle.loads(pickle.dumps(Own())).__class__ is Own
def late():
    time.sleep(0.2)
    print("a thread ends")
atexit.register(lambda: print("exit functions run"))
threading.Thread(target=late).start()
print(json.dumps([__name__, __file__, sys.argv, os.getcwd(), "torch" in sys.modules, "annotations" in globals(),
    multiprocessing.get_start_method(), multiprocessing.current_process().name]))
print("no newline", end="")
sys.exit()
"""
    done = run(tmp_path, script, "-x", ranks=1)
    assert done.code == 0, done.stderr
    first, _, rest = done.log(0).partition("\n")
    path = str(tmp_path / "own" / "script.py")
    assert json.loads(first) == [
        *("__main__", path, ["own/script.py", "-x"], str(tmp_path), False, False),
        *("fork", "MainProcess"),
    ]
    assert rest == "no newlinea thread ends\nexit functions run\n"


def test_sockets_have_room_below_a_temporary_folder_with_a_long_path() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="") as short:
        given = Path(short, "r" * (60 - len(f"{short}//tmp")), "tmp")
        (Path(short) / "script.py").write_text("")
        given.mkdir(parents=True)
        words = ["--script", f"{short}/script.py", "--cpu", "--distributed-world-size", "2", "--run-dir", given.parent]
        environ = os.environ | {"TMPDIR": str(given)}
        done = subprocess.run([sys.executable, "-m", "trainer", *words], env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_a_script_that_leaves_at_once_with_exit_code_0_has_finished(tmp_path: Path) -> None:
    done = run(tmp_path, "import os; os._exit(0)", ranks=1)
    assert (done.code, done.states(0)) == (0, ["training", "finished"])


CLOSED = """\
import os, torch
before, after = [(0, 20), (20, 0)][int(os.environ["RANK"])]
def train(steps):
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train(before)
os.closerange(3, 4096)
files = [open(f"own/{os.environ['RANK']}-{n}", "w+") for n in range(100)]
train(after)
for file in files:
    file.write("mine")
    file.close()
"""


def test_a_script_that_closes_all_descriptors_is_measured_and_finds_its_own_files_as_it_wrote_them(
    tmp_path: Path,
) -> None:
    """One rank does so before its steps and one after them."""
    done = run(tmp_path, CLOSED)
    assert done.code == 0, done.stderr + done.log(0)
    for rank in (0, 1):
        assert done.states(rank) == ["training", "finished"]
        assert done.log(rank) == ""
        assert sum(event.steps for event in done.steps(rank)) == 20
        assert {(tmp_path / "own" / f"{rank}-{n}").read_text() for n in range(100)} == {"mine"}


def test_a_script_that_fails_after_it_closed_all_descriptors_is_reported_by_its_error(tmp_path: Path) -> None:
    done = run(tmp_path, "import os\nos.closerange(3, 4096)\nraise ValueError('no data')", ranks=1)
    assert done.code == 1
    assert done.outcome.failure is not None
    assert "ValueError: no data" in done.outcome.failure.message


USED_UP = """\
import resource
from contextlib import suppress
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
files = []
with suppress(OSError):
    while True:
        files.append(open("/dev/null"))
"""


@pytest.mark.parametrize(("end", "code"), [("", 0), ("raise ValueError('no data')", 1)])
def test_a_script_that_has_used_up_its_descriptors_ends_as_it_does_alone(tmp_path: Path, end: str, code: int) -> None:
    done = run(tmp_path, USED_UP + end, ranks=1)
    assert done.code == code, done.log(0)
    assert code == 0 or "ValueError: no data" in done.failure.message
    assert done.outcome.not_recorded == "Too many open files"


# --- failure --------------------------------------------------------------------------------------------------------

HANG = "import os, sys, time\nif os.environ['RANK'] == '0':\n    time.sleep(600)\n"


@pytest.mark.parametrize(
    ("end", "kind", "message"),
    [
        (
            "def f(): raise ValueError('no more data\\nat all')\nf()",
            "exception",
            "ValueError: no more data (own/script.py:4 in f)",
        ),
        ("sys.exit(3)", "exit", "the script called sys.exit(3) (SystemExit at own/script.py:4 in <module>)"),
        (
            "print('use it well', file=sys.stderr); sys.exit(2)",
            "exit",
            "called sys.exit(2): use it well (SystemExit at own/script.py:4 in <module>)",
        ),
        (
            "sys.exit('wrong data')",
            "exit",
            "the script exited with: wrong data (SystemExit at own/script.py:4 in <module>)",
        ),
        ("os._exit(9)", "exit", "the process ended with exit code 9 before its training was complete"),
        (
            "import traceback\ntry: 1 / 0\nexcept Exception: traceback.print_exc(); os._exit(1)",
            "exit",
            "exit code 1 before its training was complete: ZeroDivisionError: division by zero",
        ),
        ("raise MemoryError", "out_of_memory", "MemoryError"),
        (
            "class Odd(Exception):\n    def __str__(self): 1 / 0\nraise Odd",
            "exception",
            "Odd: its __str__ raises ZeroDivisionError (own/script.py:6 in <module>)",
        ),
        ("open(", "exception", "SyntaxError: '(' was never closed"),
    ],
)
def test_the_failure_of_a_script_is_reported_and_its_peers_end(
    tmp_path: Path, end: str, kind: str, message: str
) -> None:
    whole = end if end == "open(" else HANG + end
    done = run(tmp_path, whole, ranks=1 if end == "open(" else 2)
    rank = 0 if end == "open(" else 1
    assert done.code == 1
    assert (done.failure.kind, done.failure.rank) == (kind, rank)
    assert message in done.failure.message
    assert f"trainer: rank {rank} on" in done.stderr


def test_the_traceback_is_the_scripts_own(tmp_path: Path) -> None:
    done = run(tmp_path, "def f():\n    raise ValueError('x')\nf()\n", ranks=1)
    path = tmp_path / "own" / "script.py"
    lines = [line for line in done.log(0).splitlines() if line.strip(" ~^")]  # Python 3.13 points at more calls
    assert lines == [
        "Traceback (most recent call last):",
        f'  File "{path}", line 3, in <module>',
        "    f()",
        f'  File "{path}", line 2, in f',
        "    raise ValueError('x')",
        "ValueError: x",
    ]
    assert done.failure.traceback == done.log(0)
    assert done.states(0) == ["training", "failed"]


def test_the_traceback_of_a_measured_training_is_that_under_python(tmp_path: Path) -> None:
    script = """\
import torch
from torch.utils.data import DataLoader
class Points:
    def __len__(self): return 2
    def __getitem__(self, index): raise OSError("no data")
class Refuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        try: list(DataLoader(Points()))
        except OSError as error: raise ValueError("no gradient") from error
loss = Refuse.apply(torch.ones(1, requires_grad=True)).sum()
loss.clone().detach().requires_grad_().backward()
loss.backward()
"""
    done = run(tmp_path, script, ranks=1)
    own = str(tmp_path / "own" / "script.py")
    command = [sys.executable, "-W", "ignore", own]  # torch misses numpy
    alone = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.code, alone.returncode) == (1, 1)
    lines = done.log(0).splitlines()
    assert [line for line in lines if not line.startswith("gputrain: ")] == alone.stderr.splitlines()
    assert not re.search(r"gputrain_tui|/trainer/", "".join(lines[:-1]))


def test_a_killed_script_is_named_with_its_signal(tmp_path: Path) -> None:
    done = run(tmp_path, HANG + "os.kill(os.getpid(), 9)")
    assert done.code == 1
    assert (done.failure.kind, done.failure.rank) == ("signal", 1)
    assert "SIGKILL" in done.failure.message


def test_control_c_ends_scripts_and_their_child_processes(tmp_path: Path) -> None:
    script = "import subprocess, time\nsubprocess.Popen(['sleep', '600'], start_new_session=True)\nprint('up')\n"
    process = begin(tmp_path, script + "time.sleep(600)\n")
    logs = [RunDir(tmp_path / "run").rank_log(rank) for rank in (0, 1)]
    until(lambda: all(log.exists() and "up" in log.read_text() for log in logs))
    family = descendants(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert stderr.splitlines()[-1].startswith("trainer: stopped")
    assert "Traceback" not in "".join(log.read_text() for log in logs)
    assert not family & descendants(1)


def test_a_script_that_saves_on_sigterm_has_the_time_for_it(tmp_path: Path) -> None:
    script = (
        "import pathlib, signal, sys, time\ndef save(*_):\n    time.sleep(2.0)\n    pathlib.Path('saved').touch()\n"
    )
    script += "    sys.exit(0)\nsignal.signal(signal.SIGTERM, save)\nprint('up')\ntime.sleep(600)\n"
    process = begin(tmp_path, script, ranks=1)
    log = RunDir(tmp_path / "run").rank_log(0)
    until(lambda: log.exists() and "up" in log.read_text())
    process.terminate()
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert (tmp_path / "saved").exists()


@pytest.mark.timing
@pytest.mark.parametrize(("is_stopped", "code"), [(True, 130), (False, 1)])
def test_a_script_that_ends_with_143_has_been_stopped_if_its_agent_gets_the_signal_too(
    tmp_path: Path, is_stopped: bool, code: int
) -> None:
    """A scheduler signals all processes of a job, in no order."""
    script = (
        "import os, pathlib, signal, sys, time\ndef save(*_):\n    pathlib.Path('saved').touch()\n    sys.exit(143)\n"
    )
    script += "signal.signal(signal.SIGTERM, save)\nprint('up', os.getpid())\ntime.sleep(600)\n"
    process = begin(tmp_path, script, ranks=1)
    record = RunDir(tmp_path / "run")
    log = record.rank_log(0)
    until(lambda: log.exists() and log.read_text().endswith("\n"))
    os.kill(int(log.read_text().split()[-1]), signal.SIGTERM)
    until((tmp_path / "saved").exists)
    if is_stopped:
        process.terminate()
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == code
    failures = [event for event in decode_events(record.rank_events(0).read_bytes()) if isinstance(event, Failure)]
    assert [failure.message.startswith("the script called sys.exit(143): up ") for failure in failures] == (
        [] if is_stopped else [True]
    )


def test_scripts_die_with_a_killed_parent(tmp_path: Path) -> None:
    process = begin(tmp_path, "import time\nprint('up')\ntime.sleep(600)\n")
    logs = [RunDir(tmp_path / "run").rank_log(rank) for rank in (0, 1)]
    until(lambda: all(log.exists() and "up" in log.read_text() for log in logs))
    family = descendants(process.pid)
    process.kill()
    process.communicate()
    until(lambda: not family & descendants(1))


# --- pure parts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["--script", "nope.py"], "--script nope.py does not exist"),
        (["--script", str(HERE)], "is a folder"),
        (["--script", __file__, "--task", "lm"], "--script and --task exclude each other"),
        (["--script", __file__, "--batch-size", "3"], "--batch-size is for tasks, but --script runs a script"),
        (
            ["--script", __file__, "--epochs", "3"],
            "'--epochs' is not an option of the trainer; the script's own arguments",
        ),
        (["--script", __file__, "--distributed-gpu", "3"], "did you mean '--distributed-gpus'?"),
        (["--task", "lm", "--no-instrument"], "--instrument needs --script FILE"),
        (["--script", __file__, "--instrument=maybe"], "--instrument is 'maybe', but must be true or false"),
        (["--script", __file__, "--instrumen"], "did you mean '--instrument'?"),
        (["--task", "lm", "--", "x"], "the arguments after -- are for a script: name it with --script FILE"),
        (
            [
                *("--script", __file__, "--cpu", "--distributed-world-size", "2", "--distributed-gpus", "2"),
                *("--distributed-init-method", "file:///tmp/x"),
            ],
            "a script uses MASTER_ADDR and MASTER_PORT for its rendezvous, not a file; use tcp://HOST:PORT",
        ),
    ],
)
def test_a_wrong_request_is_refused_in_one_line(
    arguments: list[str], fragment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments, {}) == 2
    message = capsys.readouterr().err
    assert fragment in message
    assert message.count("\n") == 1


def assignment(device_id: int | None = None, local_world_size: int = 2) -> RankAssignment:
    return RankAssignment(
        rank=5,
        local_rank=1,
        world_size=6,
        local_world_size=local_world_size,
        node=2,
        host="here",
        device_id=device_id,
        device="cpu",
        init_method=None,
        backend="gloo",
        parent_pid=None,
        distributed=Distributed(),
        script_argv=("s.py",),
        run_dir="/runs/x",
        run_id="x",
        report=lambda _: None,
    )


def test_a_rank_has_the_environment_variables_of_torchrun() -> None:
    found = launcher_environment(assignment(), ("10.0.0.1", 29600), {})
    assert {name: found[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")} == {
        "RANK": "5",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "2",
    }
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.0.0.1", "29600")
    assert (found["GPUTRAIN_RUN_DIR"], found["TORCHELASTIC_RUN_ID"]) == ("/runs/x", "x")


def test_in_a_slurm_step_a_rank_is_a_task_of_it() -> None:
    """Its own step has one of the three nodes, and one task."""
    names = ("PROCID", "LOCALID", "NODEID", "NTASKS", "STEP_NUM_NODES", "STEP_TASKS_PER_NODE", "STEP_NODELIST")
    step = {f"SLURM_{name}": "1" for name in names}

    def found(**given: bool) -> list[str | None]:
        variables = launcher_environment(assignment(), ("10.0.0.1", 29600), step | {"GROUP_WORLD_SIZE": "3"}, **given)
        assert len([name for name in variables if name.startswith("SLURM_")]) == len(step), "no more than the step has"
        return [variables[name] for name in step]

    assert found() == ["5", "1", "2", "6", "3", "2(x3)", None]
    assert found(starts_ranks=True) == ["2", "0", "2", "3", "3", "1(x3)", None], "a task for each node"


@pytest.mark.parametrize(
    ("device_id", "ranks", "environ", "name", "value"),
    [
        (None, 2, {}, "CUDA_VISIBLE_DEVICES", ""),
        (None, 2, {}, "ACCELERATE_USE_CPU", "true"),
        (None, 2, {"ACCELERATE_USE_CPU": "false"}, "ACCELERATE_USE_CPU", "false"),
        (None, 2, {}, "OMP_NUM_THREADS", "1"),
        (None, 1, {}, "OMP_NUM_THREADS", threads_of_quota()),
        (None, 2, {"OMP_NUM_THREADS": "4"}, "OMP_NUM_THREADS", "4"),
    ],
)
def test_settings_of_a_machine(
    device_id: int | None, ranks: int, environ: dict[str, str], name: str, value: str | None
) -> None:
    found = launcher_environment(assignment(device_id, ranks), ("127.0.0.1", 1), environ)
    assert found[name] == value


def test_gpus_stay_visible_and_gloo_uses_the_loopback_only_for_a_local_rendezvous() -> None:
    on_a_gpu = launcher_environment(assignment(1), ("10.0.0.1", 1), {})
    assert not {"CUDA_VISIBLE_DEVICES", "ACCELERATE_USE_CPU"} & on_a_gpu.keys()
    assert launcher_environment(assignment(), ("127.0.0.1", 1), {})["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in launcher_environment(assignment(), ("10.0.0.1", 1), {})
    assert "GLOO_SOCKET_IFNAME" not in launcher_environment(assignment(), ("::1", 1), {"GLOO_SOCKET_IFNAME": "x"})


def test_the_master_address_follows_the_init_method() -> None:
    assert master_address("tcp://[fd00::1]:4711", {}) == ("fd00::1", 4711)
    assert master_address("env://", {"MASTER_ADDR": "a", "MASTER_PORT": "2"}) == ("a", 2)
    host, port = master_address(None, {})
    assert host == "127.0.0.1"
    assert port > 0


TRACEBACK = 'Traceback (most recent call last):\n  File "x.py", line 1\n    f()\n    ^^^\n\n'


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("all is well\n", ""),
        (TRACEBACK + "ValueError: x\nbye\n", "ValueError: x"),
        (TRACEBACK + "KeyError: 1\n\nDuring handling\n\n" + TRACEBACK + "ValueError: x\n", "ValueError: x"),
        ("terminate called after throwing\n  what():  no memory\n", "no memory"),
        ("Fatal Python error: Segmentation fault\n\n", "Fatal Python error: Segmentation fault"),
        (TRACEBACK, ""),
    ],
)
def test_the_last_error_of_a_log_is_found(tmp_path: Path, text: str, error: str) -> None:
    log = tmp_path / "0.log"
    log.write_text(TRACEBACK + "OldError: of an earlier attempt\n" + text)
    assert last_error(log, since=len(TRACEBACK) + len("OldError: of an earlier attempt\n")) == error
    assert last_error(tmp_path / "missing") == last_error(None) == ""
