"""Whatever a recipe or a flag holds: the exit code of a refusal, a line for each problem, and no traceback.

Nothing that is quoted commands the terminal. The command runs within the test, where an uncaught error fails
it; what needs closed or broken descriptors is a process of its own.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import msgspec
import pytest
from examples import examples
from hypothesis import HealthCheck, example, given, settings, strategies as st

from gputrain_tui import cli
from gputrain_tui.history.run_folders import create
from gputrain_tui.history.status_file import write_status
from gputrain_tui.shell_words import shell_joined
from trainer import __main__ as trainer

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""What no terminal is to be given: all controls but the line break and the tab."""
BOUNDED = settings(
    max_examples=examples(30, 240),
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
DIGITS = "9" * 5000
ODD = [
    "",
    "--",
    "-",
    "=",
    "0",
    "-1",
    DIGITS,
    "1e999",
    "nan",
    "\x1b]52;c;eA==\x07",
    "a\nb",
    "\x9b2J",
    "\udcff",
    "x" * 5000,
]
ODD += ["~nobody-is-called-so/x", "/dev/null/x", "/", ".", "١", "²", "%s", "{}", "last", "localhost", "10.0.0.1", "1,2"]


class CommandOutput:
    """How a command ended and what it printed."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    def assert_orderly(self, program: str = "gputrain") -> None:
        assert self.code in (0, 1, 2, 3)
        assert not CONTROL.search(self.out), repr(self.out)
        assert not CONTROL.search(self.err), repr(self.err)
        lines = self.err.splitlines()
        assert all(line.startswith(f"{program}: ") for line in lines), self.err
        assert all(len(line) < 2000 for line in lines)
        if self.code == 2:
            assert len(lines) >= 1
            assert len(set(lines)) == len(lines)


def run_in_process(main: Any, *arguments: Any) -> CommandOutput:
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="surrogateescape") for _ in range(2))
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main(*arguments)
        except SystemExit as left:  # argparse's, after a command's help
            code = left.code
    out.flush()
    err.flush()
    shown = [stream.buffer.getvalue().decode("utf-8", "surrogateescape") for stream in (out, err)]  # type: ignore[attr-defined]
    return CommandOutput(code, *shown)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an ended run, where nothing can be started and no host answers."""
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("GPUTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("GPUTRAIN_SSH", "false")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("not a recipe"))
    run = create("demo", world_size=1, recipe_toml="", plan=lambda _: b"{}")
    write_status(run.dir, msgspec.structs.replace(run.status, status="finished", supervisor=None))
    run.dir.rank_log(0).write_text("a line\n")
    (tmp_path / "good.toml").write_text(
        '[[cluster.nodes]]\ncpu_ranks = 2\n[train]\ntask = "lm"\nmax_updates = 1\n[task]\ndata = "stdlib"\n'
    )
    return tmp_path


values = st.one_of(
    st.sampled_from(ODD),
    st.text(max_size=8).filter(lambda text: ":" not in text),  # a user's own task would be imported
    st.integers(-(10**20), 10**20),
    st.floats(),
    st.booleans(),
    st.none(),
    st.lists(st.one_of(st.integers(-2, 3), st.sampled_from(ODD)), max_size=3),
    st.dictionaries(st.sampled_from(["a", "host", "\x1b[2J"]), st.integers(0, 2), max_size=2),
)


def tables(*keys: str) -> st.SearchStrategy[Any]:
    return st.one_of(values, st.dictionaries(st.one_of(st.sampled_from(keys), st.text(max_size=4)), values, max_size=3))


METHODS = ["auto", "env://", "tcp://10.0.0.1:29500", "tcp://[::1]:29500", "file:///x\x1b]52;c;eA==\x07"]
ODD_METHODS = [
    "tcp://10.0.0.1:1\x1b",
    f"tcp://x:{DIGITS}",
    "tcp://\x9b:29500",
    "tcp://[::::]:29500",
    "tcp://a@b:1",
    "tcp://",
]
ODD_METHODS += [
    "tcp://[::1",
    "tcp://h:²",
    "file:///a%00b",
    "file:///",
    "http://x",
    "tcp://℀:1",
    "tcp://[v1.x]:1",
    "env://x",
]
nodes = st.lists(
    st.fixed_dictionaries(
        {"cpu_ranks": st.sampled_from([1, 2])},
        optional={"host": st.sampled_from(["localhost", "a\nb", "10.0.0.1", "gpu1"])},
    )
    | st.fixed_dictionaries({"gpus": st.one_of(values, st.just(["GPU-\n#SBATCH x", "GPU-\x1b]52"]))})
    | tables("host", "gpus", "ranks"),
    max_size=3,
)
strings = st.sampled_from([text for text in ODD if text and text.isascii()]) | st.text(
    st.characters(exclude_characters="\0:", exclude_categories=["Cs"]), min_size=1, max_size=8
)
right_nodes = st.one_of(
    st.just([{"cpu_ranks": 2}]),
    st.just([{"host": "gpu1", "gpus": 2}, {"host": "gpu2", "gpus": 2}]),
    st.just([{"host": "10.0.0.1", "gpus": ["GPU-a", "MIG-GPU-b/1/0"]}]),
)
right = st.fixed_dictionaries(
    {
        "train": st.fixed_dictionaries(
            {"task": st.just("lm"), "max_updates": st.just(1), "save_dir": strings},
            optional={"seed": st.integers(0, 2**70), "lr": st.floats(0, 2)},
        )
        | st.fixed_dictionaries({"script": strings, "args": st.lists(strings, max_size=3)}),
        "cluster": st.fixed_dictionaries({"nodes": right_nodes}, optional={"init_method": st.sampled_from(METHODS)}),
    },
    optional={"name": strings},
).map(lambda recipe: recipe | ({} if "script" in recipe["train"] else {"task": {"data": "stdlib"}}))
wrong = st.fixed_dictionaries(
    {
        "cluster": tables("nodes", "init_method", "port", "launcher", "max_restarts")
        | st.fixed_dictionaries({"init_method": st.sampled_from(ODD_METHODS)}),
        "train": tables("task", "lr", "batch_size", "resume", "script", "args"),
    },
    optional={"name": values, "task": tables("data", "dim"), "x": values},
)
pytext = st.fixed_dictionaries(
    {},
    optional={
        "task": tables("DocClassificationTask", "NoTask")
        | st.fixed_dictionaries({"DocClassificationTask": tables("trainer", "model", "data_handler", "optimizer")}),
        "cluster": tables("nodes", "port"),
        "train": tables("task", "lr"),
        "distributed_world_size": values,
        "use_cuda_if_available": values,
        "use_fp16": values,
        "random_seed": values,
        "export": values,
        "name": values,
    },
)
texts = st.one_of(
    st.text(max_size=60),
    wrong.map(json.dumps),
    pytext.map(lambda config: json.dumps({"config": config})),
    pytext.map(json.dumps),
    st.binary(max_size=40).map(lambda data: data.decode("latin-1")),
)


@BOUNDED
@given(text=texts, words=st.sampled_from([["--json"], ["--shell"], ["--sbatch"], []]), check=st.booleans())
@example(text='{"config": {"train": 1}}', words=[], check=False)
@example(text='{"config": {"cluster": [1], "distributed_world_size": 2}}', words=[], check=False)
@example(text='{"cluster": {"nodes": [{"gpus": "' + DIGITS + '"}]}}', words=[], check=False)
@example(text="[train]\nmax_updates = 0x" + "f" * 5000, words=[], check=False)
@example(
    text='[cluster]\ninit_method="tcp://[::::]:1"\n[train]\ntask="lm"\n[task]\ndata="stdlib"', words=[], check=False
)
@example(text='name = "\\u001b]52;c;eA==\\u0007"\n[train]\ntask = "lm"', words=[], check=True)
def test_any_recipe_is_planned_or_refused_in_order(folder: Path, text: str, words: list[str], check: bool) -> None:
    path = folder / "any.toml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    run_in_process(cli.main, ["check" if check else "plan", str(path), *([] if check else words)]).assert_orderly()


@BOUNDED
@given(recipe=right, words=st.sampled_from([["--json"], ["--shell"], ["--sbatch"], []]))
@example(recipe={"train": {"script": "\x1b]52;c;eA==\x07\n#SBATCH x", "args": ["a\n\x9b"]}}, words=["--sbatch"])
@example(
    recipe={"name": "\nrm", "train": {"task": "lm", "save_dir": "\n\x1b"}, "task": {"data": "x"}}, words=["--shell"]
)
def test_any_text_in_a_recipe_that_is_right_is_only_quoted(
    folder: Path, recipe: dict[str, Any], words: list[str]
) -> None:
    result, beside = (run_plan(folder, one, words) for one in (recipe, with_plain_texts(recipe)))
    result.assert_orderly()
    if result.code == beside.code == 0:
        assert len(result.out.splitlines()) == len(beside.out.splitlines()), result.out
    if result.code == 0 and words == ["--json"]:
        argv = json.loads(result.out)["nodes"][-1]["argv"]
        train = recipe["train"]
        wanted = {train.get("save_dir", train.get("script")), *train.get("args", [])}
        assert all(any(word in (text, f"--save-dir={text}", f"--script={text}") for word in argv) for text in wanted)


def run_plan(folder: Path, recipe: dict[str, Any], words: list[str]) -> CommandOutput:
    (folder / "any.json").write_text(json.dumps(recipe))
    return run_in_process(cli.main, ["plan", "any.json", *words])


def with_plain_texts(recipe: dict[str, Any]) -> dict[str, Any]:
    """Put a plain word in place of each text of the recipe that may be anything."""
    texts = {"save_dir": "plain", "script": "plain", "args": ["plain"] * len(recipe["train"].get("args", []))}
    train = recipe["train"] | {key: text for key, text in texts.items() if key in recipe["train"]}
    return {key: value for key, value in recipe.items() if key != "name"} | {"train": train}


@BOUNDED
@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), min_size=1, max_size=4))
@example(["\x1b]52;c;eA==\x07", "a\nb", "it's", "", "$(x)", "é\u00a0\u200b", "\x9bab"])
def test_quoted_words_are_read_back_by_a_shell(words: list[str]) -> None:
    line = shell_joined(words)
    assert line.isprintable()
    read = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True).stdout
    assert read.decode().split("\0")[:-1] == words


flags = [
    "--hosts",
    "--hostfile",
    "--set",
    "--rank",
    "--fps",
    "--json",
    "--shell",
    "--resume",
    "--run-dir",
    "--help",
    "-f",
]
flags += ["--detach", "--follow", "-h", "--version", "--jsno"]
odd = st.one_of(st.sampled_from(ODD), st.text(max_size=6).filter(lambda text: "\0" not in text))  # no word holds one
word = st.one_of(
    odd,
    st.sampled_from(flags),
    st.tuples(st.sampled_from(flags), odd).map("=".join),
    odd.map("train.lr={}".format),
    st.just("good.toml"),
)
ENDING = [name for name in cli.COMMANDS if name != "serve"]  # which goes on where nothing is wrong
requests = st.tuples(st.sampled_from([*ENDING, "--fps", "--hostfile"]), st.lists(word, max_size=4))
REPORTED = [
    ("gpus", ["--hosts=--"]),
    ("gpus", ["--hosts=" + DIGITS]),
    ("gpus", ["--hosts=gpu1:" + DIGITS]),
    ("gpus", ["--hostfile=--"]),
    ("gpus", ["--hostfile=" + "x" * 5000]),
    ("plan", ["--set=--", "good.toml"]),
    ("plan", ["--set=train.save_dir=\x1b]52;c;eA==\x07", "good.toml"]),
    ("plan", ["--set=train.save_dir=\x1b]52;c;eA==\x07", "--shell", "good.toml"]),
    ("plan", ["--set=train.save_dir=\x1b]52;c;eA==\x07\n#SBATCH x", "--sbatch", "good.toml"]),
    ("plan", ["--set=train.save_dir=\x7f\x9b2J", "--json", "good.toml"]),
    ("plan", ["\udcff.toml"]),
    ("plan", ["x" * 5000]),
    ("logs", ["last", "--rank=--"]),
    ("logs", ["last", "--rank=" + DIGITS]),
    ("attach", ["--fps=--"]),
    ("serve", ["--port=--"]),
    ("serve", ["--port=" + DIGITS]),
    ("serve", ["--port=-1"]),
    ("serve", ["--host=\x1b]52;c;eA==\x07"]),
    ("serve", ["--host=" + "x" * 5000]),
    ("serve", ["--host=\udcff"]),
    ("serve", ["nothing"]),
    ("--fps=--", []),
    ("--hostfile=--", []),
    ("--hostfile=\x1b[2J", []),
    ("run", ["--resume=--"]),
]


@BOUNDED
@given(request_=requests)
def test_any_flags_are_taken_or_refused_in_order(
    folder: Path, monkeypatch: pytest.MonkeyPatch, request_: tuple[str, list[str]]
) -> None:
    name, words = request_
    with monkeypatch.context() as patch:
        if name in ("run", "stop"):  # nothing starts, and no process is signalled
            patch.setenv("GPUTRAIN_HOME", "/dev/null/nowhere")
        run_in_process(cli.main, [name, *words]).assert_orderly()


@pytest.mark.parametrize(("name", "words"), REPORTED, ids=lambda value: repr(value)[:40])
def test_odd_arguments_give_no_traceback_and_no_control_characters(folder: Path, name: str, words: list[str]) -> None:
    run_in_process(cli.main, [name, *words]).assert_orderly()


trainer_flags = [
    "--task",
    "--data",
    "--max-updates",
    "--lr",
    "--script",
    "--save-dir",
    "--distributed-world-size",
    "--resume",
]
trainer_flags += [
    "--distributed-init-method",
    "--distributed-gpus",
    "--distributed-rank",
    "--device-id",
    "--help",
    "--cpu",
]
A_NULL = "--distributed-init-method=file:///a%00b"
trainer_word = st.one_of(
    odd.filter(lambda text: ":" not in text),
    st.sampled_from(["lm", "mnist", "--", *trainer_flags]),
    st.tuples(st.sampled_from(trainer_flags), odd.filter(lambda text: ":" not in text)).map("=".join),
    st.sampled_from(ODD_METHODS).map("--distributed-init-method={}".format),
)


@BOUNDED
@given(words=st.lists(trainer_word, max_size=5))
@example(words=["--task", "lm", "--lr", "\x1b]52;c;eA==\x07"])
@example(words=["--task", "lm", "--save-dir", "\udcff"])
@example(words=["--task", "lm", "--max-updates", DIGITS])
@example(words=["--script", "x" * 5000])
@example(words=["--task=lm", "--data=stdlib", "--cpu", "--distributed-world-size=2", "--distributed-gpus=1", A_NULL])
@example(words=["--task", ".x:Y", "--help"])
@example(words=["--task", "~nobody-is-called-so/x.py:Y", "--help"])
def test_any_flags_of_the_trainer_are_refused_in_order(folder: Path, words: list[str]) -> None:
    # The record's folder cannot be made, so that what is right otherwise starts nothing.
    run_in_process(trainer.main, ["--run-dir", "/dev/null/nowhere", *words], {"PATH": os.defpath}).assert_orderly(
        "trainer"
    )


HOSTILE_SSH = """
import json, sys
inventory = json.dumps({inventory!r}).encode()
for line in sys.stdin.buffer:
    if line.startswith(b'{{"call"'):  # not the program, which comes first
        call = json.loads(line)
        sys.stdin.buffer.read(call["bytes"])
        answer = b"1e300" if call["name"] == "clock" else inventory
        header = {{**call, "kind": "answer", "bytes": len(answer)}}
        sys.stdout.buffer.write(sys.argv[-1].encode() + json.dumps(header).encode() + b"\\n" + answer)
        sys.stdout.flush()
"""
EVIL = "\x1b]52;c;eA==\x07\r\n\x9b2J\u202e\x7f"


def hostile_inventory(largest: int) -> dict[str, Any]:
    """An inventory whose every text is a command to the terminal."""
    process = {"pid": largest, "user": EVIL, "name": EVIL, "memory_bytes": largest, "kind": EVIL}
    gpu = {"index": largest, "uuid": f"GPU-{EVIL}", "pci_bus_id": EVIL, "name": EVIL, "throttle_reasons": [EVIL]}
    sizes = {"memory_used_bytes": 0, "memory_total_bytes": largest}
    return {
        "host": EVIL,
        "time": 1e300,
        "system": EVIL,
        "cpus": {"model": EVIL, "logical": largest},
        "memory": {"total_bytes": largest, "available_bytes": largest},
        "uptime_s": 1e300,
        "networks": [{"name": EVIL, "addresses": [EVIL]}],
        "driver": EVIL,
        "cuda": EVIL,
        "gpus": [gpu | sizes, gpu | {"uuid": "GPU-b", "processes": [process]}],
        "note": EVIL,
    }


@pytest.mark.parametrize("largest", [7, 10**30, 10**400, -(10**400)], ids=["7", "1e30", "1e400", "-1e400"])
def test_answers_of_a_hostile_host_are_only_shown(folder: Path, monkeypatch: pytest.MonkeyPatch, largest: int) -> None:
    (folder / "ssh.py").write_text(HOSTILE_SSH.format(inventory=hostile_inventory(largest)))
    monkeypatch.setenv("GPUTRAIN_SSH", f"{sys.executable} {folder}/ssh.py")
    recipe = {"cluster": {"nodes": [{"host": "evil", "gpus": "all"}]}, "train": {"script": "x.py"}}
    (folder / "evil.json").write_text(json.dumps(recipe))
    for words in (
        ["gpus", "--hosts", "evil,bad"],
        ["gpus", "--hosts", "evil", "--json"],
        *(["plan", "evil.json", *form] for form in ([], ["--json"], ["--shell"], ["--sbatch"])),
    ):
        result = run_in_process(cli.main, words)
        result.assert_orderly()
        if largest == 7:
            assert result.code == 0
            assert "GPU-" in result.out or words[-1] == "--sbatch"
        if result.code == 0 and "--shell" in words:
            assert len(result.out.splitlines()) == 2


def run_in_shell(line: str, folder: Path, **environ: Any) -> subprocess.CompletedProcess[bytes]:
    words = {"GPUTRAIN": f"{sys.executable} -m gputrain_tui", "TRAINER": f"{sys.executable} -m trainer"}
    env = {os.fsencode(key): os.fsencode(value) for key, value in {**os.environ, **words, **environ}.items()}
    return subprocess.run(["bash", "-c", line], cwd=folder, env=env, capture_output=True, timeout=300)


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("$GPUTRAIN attach last <&-", 2, "gputrain: the console needs a terminal"),
        ("$GPUTRAIN <&-", 2, "gputrain: the console needs a terminal"),
        ("$GPUTRAIN run - <&-", 2, "gputrain: stdin"),
        ("$GPUTRAIN plan $'\\xff.toml'", 2, "is not UTF-8 text"),
        ("GPUTRAIN_HOME=$'/tmp/\\xff' $GPUTRAIN runs", 2, "is not UTF-8 text"),
        ("GPUTRAIN_HOME=$'/tmp/\\xff' $GPUTRAIN run good.toml", 2, "is not UTF-8 text"),
        ("GPUTRAIN_HOME=~nobody-is-called-so $GPUTRAIN runs", 0, "no run in"),
        ("$TRAINER --task lm --data $'\\xff'", 2, "is not UTF-8 text"),
    ],
)
def test_an_odd_environment_is_one_line(folder: Path, line: str, code: int, message: str) -> None:
    done = run_in_shell(line, folder)
    assert done.returncode == code
    assert message in done.stderr.decode()
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["gputrain_tui", "--help"],
        ["gputrain_tui", "run", "--help"],
        ["gputrain_tui", "plan", "good.toml"],
        ["trainer", "--help"],
        ["trainer", "--describe-task", "lm"],
    ],
    ids=" ".join,
)
def test_a_closed_pipe_of_a_reader_is_no_error(folder: Path, words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        done = subprocess.run([sys.executable, "-m", *words], cwd=folder, stdout=pipe, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_log_whose_name_is_no_text_is_printed_like_the_others(folder: Path) -> None:
    logs = next((folder / "home/runs").iterdir()) / "logs"
    (Path(os.fsdecode(bytes(logs) + b"/\xff\x1b]52.log"))).write_text("what it says\n")
    (logs / ("²" + ".log")).write_text("two\n")
    (logs / (DIGITS[:200] + ".log")).write_text("many\n")
    done = run_in_shell("$GPUTRAIN logs last", folder)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"[\\udcff\xe2\x90\x9b]52] what it says\n" in done.stdout
    assert not CONTROL.search(done.stdout.decode())
