"""Secrets of any form in any place of a run: none is in its archive, as only values of an allow-list are."""

from __future__ import annotations

import gzip
import io
import json
import random
import tarfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import synthetic
from made_runs import append_to_log

from gputrain_tui.history.export.archive import Archive
from gputrain_tui.history.export.steps import RecordedSteps
from gputrain_tui.history.export.trace import write_trace
from gputrain_tui.history.plan_file import read_plan
from gputrain_tui.history.run_folders import Run, find
from gputrain_tui.history.status_file import write_status
from gputrain_tui.recipe.allow_list import HIDDEN, AllowList
from trainer.contract.record import Failure, Finding, RunEnded, Sample, encode_event

RANDOM = random.Random(20261124)
ALPHABETS = {
    "hex": "0123456789abcdef",
    "letters": "abcdefghijklmnopqrstuvwxyz",
    "base64": "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/",
    "words": "abcdefghijklmnopqrstuvwxyz-_.",
    "symbols": "abcdefghijklmnopqrstuvwxyz!$%^*()[]{}<>?~",
    "umlauts": "abcdefghijklmnopqrstuvwxyzäöüßéñ",
}
PREFIXES = ("", "hf_", "nvapi-", "AIza", "ghp_", "sk-proj-", "xoxb-", "AKIA", "glpat-", "eyJ", "dop_v1_", "npm_", "r8_")


def secret(alphabet: str) -> str:
    """Return a random text that no other text contains by chance."""
    return RANDOM.choice(PREFIXES) + "x" + "".join(RANDOM.choices(ALPHABETS[alphabet], k=RANDOM.randint(12, 40)))


FORMS: dict[str, Callable[[str], list[str]]] = {
    "-p VALUE": lambda value: ["-p", value],
    "-pVALUE": lambda value: [f"-p{value}"],
    "-u me:VALUE": lambda value: ["-u", f"me:{value}"],
    "--password VALUE": lambda value: ["--password", value],
    "--password=VALUE": lambda value: [f"--password={value}"],
    "key=VALUE": lambda value: [f"trainer.logger.key={value}"],
    "VALUE": lambda value: [value],
    "a URL's user": lambda value: [f"https://{value}@host/x.git"],
    "a webhook": lambda value: [f"https://hooks.example.com/services/T000/{value}"],
    "a query": lambda value: [f"https://store.example.com/blob?sv=2024&sig={value}"],
    "a header": lambda value: ["-H", f"Authorization: Bearer {value}"],
    "a line of PEM": lambda value: [f"-----BEGIN PRIVATE KEY-----\n{value}\n-----END PRIVATE KEY-----"],
    "JSON": lambda value: [json.dumps({"credentials": {"private": value}}, ensure_ascii=False)],
    "a path": lambda value: [f"/run/secrets/{value}"],
    "a relative path": lambda value: [f"secrets/{value}"],
}
VARIABLES = ("MY_CREDS", "GOOGLE_APPLICATION", "CONN", "LOGIN", "X", "SLACK_URL", "NETRC", "SLURM_JWT", "HF_TOKEN")


def toml(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def archived(run: Run, project: Path, *, logs: bool, environment: dict[str, str]) -> dict[str, bytes]:
    """Return the files of the archive of a run, by name."""
    file = io.BytesIO()
    Archive(run, logs=logs).write(file, environment=environment, project=project)
    with tarfile.open(fileobj=io.BytesIO(file.getvalue()), mode="r:gz") as tar:
        found = {info.name.partition("/")[2]: (tar.extractfile(info) or io.BytesIO()).read() for info in tar}
    assert gzip.decompress(file.getvalue())
    return found


@pytest.mark.parametrize("given", ["secrets/xiugcw/Z3mAcm", "https://xiugcw/Z3mAcm@host", "--key=a:xiugcw/Z3mAcm&b"])
def test_a_secret_of_short_parts_is_hidden_as_a_whole(tmp_path: Path, given: str) -> None:
    values = AllowList({}, tmp_path)
    values.arguments([given])
    assert values.mask(b"with xiugcw/Z3mAcm") == b"with " + b"*" * 13


def test_our_own_name_is_shown_though_the_folder_of_every_run_has_it(tmp_path: Path) -> None:
    values = AllowList({}, tmp_path)
    values.arguments(["--run-dir", "/home/someone/.local/state/gputrain/runs/20261129-120000-a"])
    assert values.mask(b"stopped by `gputrain stop`") == b"stopped by `gputrain stop`"
    assert b"someone" not in values.mask(b"/home/someone/.local/state/gputrain/runs/20261129-120000-a")


@pytest.mark.parametrize("logs", [False, True], ids=["without logs", "with logs"])
@pytest.mark.parametrize("alphabet", ALPHABETS)
@pytest.mark.parametrize("form", FORMS)
def test_no_secret_of_any_form_is_in_an_archive_or_a_timeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, alphabet: str, logs: bool
) -> None:
    names = ("argument", "cluster", "node", "setup", "task", "shell", "on_end", "on_finding")
    known = {name: secret(alphabet) for name in names}
    said = {name: secret(alphabet) for name in ("exception", "status", "sample", "comment", "source line")}
    variable = RANDOM.choice(VARIABLES)
    args = [*FORMS[form](known["argument"]), "--lr", "0.1", "--fp16"]
    words = [word for value in known.values() for word in FORMS[form](value)]
    run = synthetic.run(tmp_path / "runs", steps=20, status="failed")
    run.dir.recipe.write_text(
        f"""name = "demo"  # {toml(said["comment"])}
[cluster]
setup = {toml(" ".join(FORMS[form](known["setup"])))}
env = {{ {variable} = {toml(FORMS[form](known["cluster"])[-1])} }}
[[cluster.nodes]]
cpu_ranks = 2
env = {{ {variable} = {toml(known["node"])} }}
[train]
script = "train.py"
args = {toml(args)}
[task]
option = {toml(known["task"])}
[report]
on_end = {toml(" ".join(FORMS[form](known["on_end"])))}
on_finding = {toml(" ".join(FORMS[form](known["on_finding"])))}
""",
        encoding="utf-8",
    )
    plan = read_plan(run.dir)
    plan.nodes[0].env = {variable: known["node"]}
    plan.nodes[0].setup = " ".join(FORMS[form](known["setup"]))
    plan.nodes[0].argv += ["--script", "train.py", "--", *args]
    run.dir.plan.write_bytes(msgspec.json.encode(plan))
    text = f"ValueError: {said['exception']}"
    code = f'    f("{said["source line"]}")'
    traceback = f'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n{code}\n{text}'
    message = f"rank 0 failed: {said['status']} with {known['argument']}"
    with run.dir.rank_events(0).open("ab") as events:
        for event in (
            Failure(time=synthetic.BEGIN + 9, rank=0, kind="exception", message=text, traceback=traceback),
            Sample(time=synthetic.BEGIN + 9, step=20, text=said["sample"]),
            Finding(time=synthetic.BEGIN + 9, rank=0, kind="not_measured", message=f"with {known['argument']}"),
            RunEnded(time=synthetic.BEGIN + 9, status="failed", exit_code=1, message=message),
        ):
            events.write(encode_event(event))
        events.write(f'{{"type": "note", "text": {toml(said["exception"])}}}\n{known["task"]}'.encode())
    write_status(run.dir, msgspec.structs.replace(run.status, message=message))
    append_to_log(run, 0, "\n".join(words).encode())
    run = find(run.id, tmp_path / "runs")

    found = archived(run, tmp_path / "project", logs=logs, environment={variable: known["shell"]})
    if not logs:
        monkeypatch.setenv(variable, known["shell"])
        timeline = io.BytesIO()
        write_trace(RecordedSteps(run, range(run.status.world_size)), timeline)
        found["timeline"] = timeline.getvalue()
        assert b"failed: exception" in found["timeline"]

    whole = b"".join(found.values()).decode()
    shown = [name for name, value in known.items() if value in whole or toml(value)[1:-1] in whole]
    assert shown == [], known
    assert logs or [name for name, value in said.items() if value in whole] == []
    assert said["comment"] not in whole
    assert "--lr" in whole
    assert "ValueError" in whole
    assert ("logs/0.log" in found) == logs
    if logs:
        assert len(found["logs/0.log"]) == run.dir.rank_log(0).stat().st_size


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--lr", "1e-3", "--batch-size=64", "-j", "4"], ["--lr", "1e-3", "--batch-size=64", "-j", "4"]),
        (["--optimizer", "adamw", "--fp16"], ["--optimizer", "adamw", "--fp16"]),
        (["--data", "data/train.tsv", "--out", "out/new"], ["--data", "data/train.tsv", "--out", HIDDEN]),
        (["--task", "data/train.tsv:Cnn", "new.py:Cnn"], ["--task", "data/train.tsv:Cnn", HIDDEN]),
        (["--model=resnet", "resnet", "-xvf"], [f"--model={HIDDEN}", HIDDEN, HIDDEN]),
    ],
)
def test_numbers_own_words_flags_and_files_of_the_project_are_shown(
    tmp_path: Path, words: list[str], shown: list[str]
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.tsv").touch()
    assert AllowList({}, tmp_path).arguments(words) == shown


def test_variables_of_launchers_and_libraries_are_shown_and_no_other(tmp_path: Path) -> None:
    given = {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "4", "SLURM_JWT": "eyJ", "MY_SETTING": "1"}
    assert AllowList({}, tmp_path).variables(given) == {
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "4",
        "SLURM_JWT": HIDDEN,
        "MY_SETTING": HIDDEN,
    }


def test_the_command_of_a_node_keeps_its_flags_and_loses_its_paths(tmp_path: Path) -> None:
    command = ["/home/ada/.venv/bin/python", "-P", "-m", "trainer", "--task", "mnist", "--data", "/home/ada/mnist",
               "--distributed-init-method", "tcp://10.0.0.1:29500", "--distributed-rank", "4"]  # fmt: skip
    assert AllowList({}, tmp_path).command(command) == [
        "python", "-P", "-m", "trainer", "--task", "mnist", "--data", HIDDEN,
        "--distributed-init-method", "tcp://10.0.0.1:29500", "--distributed-rank", "4",
    ]  # fmt: skip


@pytest.mark.parametrize("elsewhere", [True, False], ids=["from another folder", "from the project"])
def test_files_of_code_stay_readable_in_an_archive_with_logs(tmp_path: Path, elsewhere: bool) -> None:
    project = tmp_path / "experiments-of-ada" / "transformer"
    (project / "networks").mkdir(parents=True)
    (project / "train_networks.py").touch()
    run = synthetic.run(tmp_path / "runs", steps=5, status="failed")
    plan = read_plan(run.dir)
    plan.nodes[0].workdir = str(project)
    run.dir.plan.write_bytes(msgspec.json.encode(plan))
    run.dir.recipe.write_text(
        'name = "demo"\n[cluster]\npython = "/home/ada/python-venvs/bin/python"\n[train]\n'
        'script = "train_networks.py"\n'
        f'args = ["--password", "hunter2-abcdefgh", "--model", "{project}/networks", "--arch", "functional"]\n'
    )
    packages = "lib/python3.11/site-packages/torch/nn/functional.py"
    places = {
        f"{project}/train_networks.py": "train_networks.py",
        f"{project}/networks/hunter2/unet.py": "networks/hunter2/unet.py",
        f"{project}/.venv/{packages}": f".venv/{packages}",
        f"/home/ada/python-venvs/{packages}": f"~/************/{packages}",
        "/usr/lib/python3.11/functional/x.py": "/usr/lib/python3.11/functional/x.py",
        "/home/ada/hunter2-abcdefgh/tool.py": "~/****************/tool.py",
    }
    text = "".join(f'  File "{path}", line 3, in f\n    f("hunter2-abcdefgh")\n' for path in places)
    warning = f"{project}/train_networks.py:3: UserWarning: hunter2-abcdefgh\n"
    log = f"Traceback (most recent call last):\n{text}ValueError: hunter2-abcdefgh\n{warning}the model is of ada\n"
    append_to_log(run, 0, log.encode())
    failure = Failure(time=synthetic.BEGIN + 9, rank=0, kind="exception", message="x", traceback=text)
    with run.dir.rank_events(0).open("ab") as events:
        events.write(encode_event(failure))

    found = archived(run, tmp_path if elsewhere else project, logs=True, environment={"HOME": "/home/ada"})

    shown = found["logs/0.log"].decode()
    assert len(shown) == run.dir.rank_log(0).stat().st_size
    for path in places.values():
        assert f'  File "{path}", line 3, in f' in shown
        assert f'File \\"{path}\\", line 3, in f' in found["events/0.ndjson"].decode()
    assert "\ntrain_networks.py:3: UserWarning: ****************" in shown
    assert not any(b"hunter2-abcdefgh" in data for data in found.values())
    assert "the model is of ada" in shown
    assert 'script = "train_networks.py"' in found["recipe.toml"].decode()


def test_a_line_that_is_no_event_is_left_out_and_said(tmp_path: Path) -> None:
    run = synthetic.run(tmp_path / "runs", steps=20, status="finished")
    with run.dir.rank_events(1).open("ab") as events:
        events.write(b"token hidden-value-1\n")
    file = io.BytesIO()
    written = Archive(run).write(file, environment={}, project=tmp_path)
    assert "1 lines of the record that are no events" in written.left_out
    assert b"hidden-value-1" not in gzip.decompress(file.getvalue())


def test_a_note_that_repeats_a_hidden_value_shows_it_no_more_than_the_recipe_does(tmp_path: Path) -> None:
    run = synthetic.run(tmp_path / "runs", steps=5, status="finished")
    run.dir.recipe.write_text('name = "demo"\n[train]\nscript = "s.py"\nargs = ["--password", "hunter2-abcdefgh"]\n')
    run.dir.notes.write_text('{"note":"uses hunter2-abcdefgh","tags":["baseline"]}')
    found = archived(run, tmp_path, logs=False, environment={})
    assert json.loads(found["notes.json"]) == {"note": "uses ****************", "tags": ["baseline"]}
