"""Commands typed in a folder with a file of every module name: nothing of it is executed but what a recipe names."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest
from lone_kill import kill_without_successor
from taken_names import NAMES, TakenNames, importable
from waiting import LIMIT_S, until

from gputrain_tui.history.record_tail import last_step
from gputrain_tui.history.run_folders import list_runs
from trainer.telemetry.instrument.started_process import SITE_FOLDER

TESTS = Path(__file__).parents[1]
PYTHON = Path(sys.executable)
GPUTRAIN, TORCHRUN = PYTHON.with_name("gputrain"), PYTHON.with_name("torchrun")
SMALL = {"data": "text.txt", "context": 16, "dim": 8, "layers": 1, "heads": 1, "sample_bytes": 0}
LM = ["--task", "lm", "--batch-size", "4", "--max-updates", "3", "--cpu"]
LM += [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
TWO_RANKS = "[[cluster.nodes]]\ncpu_ranks = 2\n"
BUILT_IN = '[train]\ntask = "lm"\nbatch_size = 4\nmax_updates = {updates}\n[task]\n'
BUILT_IN += "".join(f"{name} = {json.dumps(value)}\n" for name, value in SMALL.items()) + TWO_RANKS
OWN = '[train]\ntask = "own_tasks:Own"\nbatch_size = 4\nmax_updates = 3\n' + TWO_RANKS
SCRIPT = '[train]\nscript = "scripts/plain_script.py"\n' + TWO_RANKS


class Folder:
    """A folder in which commands are typed."""

    def __init__(self, path: Path, names: Iterable[str] = NAMES) -> None:
        self.path = path / "project"
        self.path.mkdir()
        self.home = path / "home"
        self.taken = TakenNames(self.path, path / "executed", names)
        (self.path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
        (self.path / "scripts").mkdir()
        shutil.copy(TESTS / "support" / "plain_script.py", self.path / "scripts")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "GPUTRAIN_"))}
        self.environ = kept | {"GPUTRAIN_HOME": str(self.home), "OMP_NUM_THREADS": "1"}
        self.environ["PATH"] = f"{PYTHON.parent}:{kept['PATH']}"

    def call(self, *words: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(word) for word in words], cwd=self.path, env=self.environ | environ, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip

    def run(self, recipe: str, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        (self.path / "r.toml").write_text(recipe)
        return self.call(GPUTRAIN, "run", "r.toml", *words, **environ)

    def check(self, *done: subprocess.CompletedProcess[str]) -> None:
        outputs = "".join(each.stdout + each.stderr for each in done)
        assert (self.taken.executed(), [each.returncode for each in done]) == ([], [0] * len(done)), outputs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("names"))


def test_a_run_executes_nothing_of_the_folder_but_its_script(folder: Folder) -> None:
    folder.check(folder.run('[report]\non_end = "true"\n' + SCRIPT))


@pytest.mark.parametrize("place", [".", "code"], ids=["working folder", "PYTHONPATH"])
def test_a_task_of_the_folder_finds_its_neighbours_behind_all_other_modules(tmp_path: Path, place: str) -> None:
    folder = Folder(tmp_path, importable())
    code = folder.path / place
    code.mkdir(exist_ok=True)
    if place == "code":
        TakenNames(code, tmp_path / "executed", ["random", "signal", "trainer"])
    shutil.copy(TESTS / "support" / "tiny_task.py", code / "tiny_base.py")
    (code / "own_tasks.py").write_text("from tiny_base import TinyTask\n\n\nclass Own(TinyTask):\n    pass\n")
    folder.check(folder.run(OWN, PYTHONPATH="" if place == "." else "code"))


def test_a_file_of_the_folder_hides_no_package_of_torch_that_has_no_file_of_its_own(tmp_path: Path) -> None:
    installed, folder = tmp_path / "site", Folder(tmp_path, ["cuda"])
    (installed / "cuda").mkdir(parents=True)
    (installed / "cuda" / "bindings.py").touch()
    shutil.copy(TESTS / "support" / "tiny_task.py", folder.path / "own_tasks.py")
    code = "from trainer.tasks.registry import load_task; load_task('own_tasks:TinyTask'); import cuda.bindings"
    folder.check(folder.call(PYTHON, "-P", "-c", code, PYTHONPATH=str(installed)))
    refused = folder.call(PYTHON, "-P", "-c", code.replace("own_tasks", "cuda"), PYTHONPATH=str(installed))
    assert "cuda has the same name and comes first: rename yours, or name the task by its file" in refused.stderr
    assert folder.taken.executed() == []


def test_a_task_with_the_name_of_another_module_is_refused(folder: Folder) -> None:
    done = folder.run(OWN.replace("own_tasks", "random"))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "random.py has the same name and comes first: rename yours, or name the task by its file" in done.stderr
    assert folder.taken.executed() == []


def test_commands_about_a_built_in_task_execute_nothing_of_the_folder(folder: Folder) -> None:
    (folder.path / "r.toml").write_text('[report]\non_end = "true"\n' + BUILT_IN.format(updates=3))
    commands = "check r.toml, run r.toml, runs, logs last, export last --to safetensors, eval last --split valid, gpus"
    for command in commands.split(", "):
        done = folder.call(GPUTRAIN, *command.split())
        assert (done.returncode, folder.taken.executed()) == (0, []), (command, done.stderr)


def test_a_stop_that_takes_over_a_lost_run_executes_nothing_of_the_folder(folder: Folder) -> None:
    folder.check(folder.run(BUILT_IN.format(updates=10_000_000), "--detach"))
    run = list_runs(folder.home / "runs")[0]
    until(lambda: all(last_step(run.dir, rank) is not None for rank in (0, 1)))
    supervisor = list_runs(folder.home / "runs")[0].status.supervisor
    assert supervisor is not None
    kill_without_successor(supervisor.pid)
    until(lambda: list_runs(folder.home / "runs")[0].state == "lost")
    done = folder.call(GPUTRAIN, "stop", run.id)
    folder.check(done)
    assert done.stdout.endswith("processes left: none\n")


# --- typed by hand and under torchrun -------------------------------------------------------------------------------

WORKERS = ("--nproc-per-node", "2")


def test_the_commands_of_a_plan_execute_nothing_of_the_folder(folder: Folder) -> None:
    (folder.path / "r.toml").write_text(BUILT_IN.format(updates=3))
    shell = folder.call(GPUTRAIN, "plan", "r.toml", "--shell").stdout
    (line,) = [line for line in shell.splitlines() if not line.startswith("#")]
    assert " -P -m trainer " in line
    assert line.startswith(f"(cd {folder.path} && ")
    folder.check(folder.call("sh", "-c", line))


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(["python", "-P", "-m", "trainer"], id="by hand"),
        pytest.param(
            ["torchrun", *WORKERS, "--no-python", "python", "-P", "-m", "trainer"],
            id="torchrun",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_trainer_alone_executes_nothing_of_the_folder(folder: Folder, launcher: Sequence[str]) -> None:
    """By hand a task's ranks are spawned; forked they are those of a plan's commands, above."""
    spawned = [] if "torchrun" in launcher else ["--distributed-world-size", "2", "--start-method", "spawn"]
    script = folder.call(*launcher, "--script", "scripts/plain_script.py", "--cpu")
    folder.check(folder.call(*launcher, *LM, *spawned), script)


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(["python", "-m", "trainer"], id="by hand"),
        pytest.param(["torchrun", *WORKERS, "-m", "trainer"], id="torchrun", marks=pytest.mark.slow),
    ],
)
def test_without_the_flag_only_what_python_imports_first_can_be_of_the_folder(
    tmp_path: Path, launcher: Sequence[str]
) -> None:
    first = "import sys, runpy, importlib.util, __future__; print(*sys.modules)"
    found = subprocess.run([PYTHON, "-c", first], capture_output=True, text=True, check=True)
    folder = Folder(tmp_path, NAMES - {"trainer", *found.stdout.split()})
    folder.check(folder.call(*launcher, *LM))


# --- what a script finds --------------------------------------------------------------------------------------------

PROBE = """\
import os, sys
found = {{"path": sys.path, "environ": {{name: os.environ[name] for name in os.environ if name.startswith("PYTHON")}}}}
for name in {names}:
    try:
        found[name] = getattr(__import__(name), "__file__", None)
    except BaseException as error:
        found[name] = repr(error)
with open(sys.argv[1], "w") as file:
    print(*found.items(), sep='\\n', file=file)
os.system(f"{{sys.executable}} -c 'import sys; print(sys.flags.safe_path, sys.path)' >> {{sys.argv[1]}}")
"""


LOADED_FIRST = ("_frozen", "_distutils_hack", "runpy")
"""Modules that a process has from its start, whatever there is in the script's folder."""


@pytest.mark.parametrize("environ", [{}, {"PYTHONPATH": "code:"}, {"PYTHONSAFEPATH": "1"}], ids=str)
def test_a_script_finds_what_a_new_interpreter_finds(tmp_path: Path, environ: Mapping[str, str]) -> None:
    folder = Folder(tmp_path, [])
    # To import all of them takes seconds; where the folder of the script stands among others, a few show as well.
    names = sorted(name for name in NAMES if not name.startswith(LOADED_FIRST)) if not environ else ["json", "uuid"]
    places = {folder.path: ["trainer", "random"], folder.path / "code": ["trainer"], folder.path / "own": names}
    for place, files in places.items():
        place.mkdir(exist_ok=True)
        for name in files:
            (place / f"{name}.py").touch()
    script = folder.path / "own" / "probe.py"
    script.write_text(PROBE.format(names=names))
    folder.check(folder.call(PYTHON, script, "fresh", **environ))
    ran = folder.run(f'[train]\nscript = "own/probe.py"\nargs = ["ran"]\n{TWO_RANKS.replace("2", "1")}', **environ)
    folder.check(ran)
    # The only process of a plan sees the folder by which processes that it starts may become ranks, and nothing else.
    text = (folder.path / "ran").read_text()
    assert SITE_FOLDER in text
    text = text.replace(f", 'PYTHONPATH': '{SITE_FOLDER}'", "").replace(f"'PYTHONPATH': '{SITE_FOLDER}'", "")
    assert text.replace(f"{SITE_FOLDER}:", "") == (folder.path / "fresh").read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise SystemExit('mine')", "the script exited with: mine (SystemExit at own/random.py:1 in <module>)"),
        ("x = undefined", "NameError: name 'undefined' is not defined (own/random.py:1 in <module>)"),
        ("", "has no attribute 'seed' (own/main.py:3 in <module>)"),
    ],
)
def test_a_script_that_its_neighbour_breaks_ends_with_the_line_of_it(tmp_path: Path, text: str, message: str) -> None:
    folder = Folder(tmp_path, [])
    own = folder.path / "own"
    own.mkdir()
    (own / "random.py").write_text(text)
    (own / "main.py").write_text("import sys\nimport random\nrandom.seed(0)\n")
    done = folder.run(f'[train]\nscript = "own/main.py"\n{TWO_RANKS.replace("2", "1")}')
    assert done.returncode == 1
    assert message in done.stderr
    assert message in list_runs(folder.home / "runs")[0].status.message


def test_a_measured_script_has_its_own_package_and_modules_of_names_that_we_use(tmp_path: Path) -> None:
    folder = Folder(tmp_path, [])
    scripts = folder.path / "scripts"
    (scripts / "trainer").mkdir()
    for file in ("trainer/__init__.py", "trainer/loop.py", "msgspec.py", "gputrain_tui.py", "psutil.py"):
        (scripts / file).write_text("THEIRS = True\n")
    theirs = "import gputrain_tui, msgspec, psutil, trainer, trainer.loop\n"
    theirs += "assert all(each.THEIRS for each in (gputrain_tui, msgspec, psutil, trainer, trainer.loop))\n"
    script = scripts / "plain_script.py"
    script.write_text(theirs + script.read_text() + theirs)
    done = folder.run(SCRIPT.replace("2", "1"))
    folder.check(done)
    assert "not measured" not in done.stderr
    assert last_step(list_runs(folder.home / "runs")[0].dir, 0) is not None
