"""Shell completion, in the shells themselves: commands, flags, values, runs and recipes."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from run_dirs import run_dir
from waiting import LIMIT_S

GPUTRAIN = Path(sys.executable).parent / "gputrain"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("completion")
    for day, name in enumerate(("one", "two")):
        run_dir(folder / "home" / "runs", name, started=1_790_000_000.0 + day * 86_400, steps=1)
    for name in ("mnist.toml", "mine.json", "notes.txt", "my recipe.toml"):
        (folder / name).touch()
    (folder / "recipes").mkdir()
    (folder / "recipes" / "demo.toml").touch()
    for shell in ("bash", "fish", "zsh"):
        (folder / f"completion.{shell}").write_text(completions(folder, [str(GPUTRAIN), "completion", shell]))
    return folder


def completions(home: Path, command: list[str]) -> str:
    environment = {**os.environ, "GPUTRAIN_HOME": str(home / "home"), "PATH": f"{GPUTRAIN.parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def in_bash(home: Path, line: str) -> list[str]:
    """Return what bash would put in place of the last word of a line."""
    script = f"""
        eval "$(< completion.bash)"
        compopt() {{ :; }}  # readline's, which a script has not
        COMP_LINE={shlex.quote(line)} COMP_POINT={len(line)}
        _python_argcomplete gputrain && printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    return [line for line in completions(home, ["bash", "--norc", "-c", script]).splitlines() if line]


RUNS = ["20260922-141320-two", "20260921-141320-one"]

CASES = [
    ("gputrain ru", ["run", "runs"]),
    ("gputrain lo", ["logs"]),
    ("gputrain --v", ["--version"]),
    ("gputrain export last --t", ["--to"]),
    ("gputrain export last --to saf", ["safetensors"]),
    ("gputrain eval --split ", ["test", "valid"]),
    ("gputrain logs ", ["last", *RUNS]),
    ("gputrain logs 202609", RUNS),
    ("gputrain wait 20260921-141320-one 202609", RUNS),
    ("gputrain logs --rank 3 2026092", RUNS),
    ("gputrain run --resume l", ["last"]),
    ("gputrain run m", ["mine.json", "mnist.toml", "my\\ recipe.toml"]),
    ("gputrain run recipes/", ["recipes/demo.toml"]),
    ("gputrain run rec", ["recipes/"]),
    ("gputrain gpus --hostfile no", ["notes.txt"]),
    ("gputrain run x.toml --set train.optim", ["train.optimizer="]),
    ("gputrain completion f", ["fish"]),
    ("gputrain help s", ["scripts", "ssh", "slurm", "shares", "serve"]),
    ("gputrain init --example d", ["demo", "docnn_sst2"]),
    ("gputrain nothing ", []),
    ("gputrain stop last extra", []),
]


BY_BASH = (
    "gputrain lo", "gputrain --v", "gputrain export last --t", "gputrain eval --split ", "gputrain run --resume l",
    "gputrain logs --rank 3 2026092", "gputrain gpus --hostfile no", "gputrain completion f", "gputrain help s",
    "gputrain init --example d", "gputrain stop last extra",
)  # fmt: skip
"""Lines that differ from others for the command alone, which answers all shells alike: that of bash shows them."""
OF_A_SHELL = [pytest.param(*case, marks=[pytest.mark.slow] if case[0] in BY_BASH else []) for case in CASES]


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize(("line", "found"), [*CASES, ("gputrain export x --to=saf", ["safetensors"])])
def test_bash_completes(home: Path, line: str, found: list[str]) -> None:
    assert in_bash(home, line) == found


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
@pytest.mark.parametrize(("line", "found"), OF_A_SHELL)
def test_fish_completes(home: Path, line: str, found: list[str]) -> None:
    script = f"source completion.fish; complete -C {shlex.quote(line)}"
    words = [each.partition("\t")[0] for each in completions(home, ["fish", "--no-config", "-c", script]).splitlines()]
    assert sorted(words) == sorted(word.replace("\\", "") for word in found)


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
@pytest.mark.parametrize(("line", "found"), OF_A_SHELL)
def test_zsh_completes(home: Path, line: str, found: list[str]) -> None:
    script = f"""
        compdef() {{ :; }}
        eval "$(< completion.zsh)"
        _describe() {{ print -rl -- "${{completions[@]}}"; }}  # the completion system's, which a script has not
        words=({" ".join(shlex.quote(word) if word else "''" for word in line.split(" "))}) CURRENT=$#words
        BUFFER={shlex.quote(f"cd x && A=1 {line}")} CURSOR=$#BUFFER
        _python_argcomplete; true
    """
    shown = completions(home, ["zsh", "-f", "-c", script]).splitlines()
    assert sorted(word.partition(":")[0] for word in shown if word) == sorted(found)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_says_where_to_put_it(home: Path, shell: str) -> None:
    assert completions(home, [str(GPUTRAIN), "completion", shell]).startswith(
        f"# Completion of gputrain for {shell}. In ~"
    )


@pytest.mark.parametrize("line", ["gputrain ru", "gputrain run ", "gputrain logs ", "gputrain export last --to "])
def test_completing_a_word_loads_neither_torch_nor_textual(home: Path, line: str) -> None:
    program = (
        "import os, sys; os.environ |= {'_ARGCOMPLETE': '1', 'COMP_LINE': (line := sys.argv[1])};"
        "os.environ['COMP_POINT'] = str(len(line)); os.dup2(1, 8);"
        "loaded = lambda: [name for name in ('torch', 'textual', 'tomlkit') if name in sys.modules];"
        "os._exit = lambda code: sys.exit(print(' loaded', loaded()));"
        "from gputrain_tui import cli; cli.main([])"
    )
    assert completions(home, [sys.executable, "-c", program, line]).endswith(" loaded []\n")
