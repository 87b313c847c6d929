"""Checks of the hosts of a run over ssh, from the reports of all hosts."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gputrain_tui.hosts import environment_facts
from gputrain_tui.hosts.environment_facts import Environment, Torch, files_beside
from gputrain_tui.hosts.host_channel import HostChannel, HostError
from gputrain_tui.hosts.host_names import LocalFacts
from gputrain_tui.hosts.inventory import Gpu, Inventory
from gputrain_tui.hosts.machine_facts import Folder, Port, RendezvousFile
from gputrain_tui.lifecycle.prepared import with_routes
from gputrain_tui.plan.planner import plan
from gputrain_tui.preflight import CheckResult
from gputrain_tui.preflight.collect_hosts import HostAnswer, HostFacts, collect_hosts, differing
from gputrain_tui.preflight.host_checks import check_hosts
from gputrain_tui.recipe.build import build
from gputrain_tui.recipe.model import Recipe
from trainer.host.cores import Cpus
from trainer.host.memory import Memory
from trainer.host.resource_limits import ResourceLimits

GIB = 1 << 30
CPUS = ('host = "h1"\ncpu_ranks = 1', 'host = "h2"\ncpu_ranks = 1\nworkdir = "/w"')
GPUS = ('host = "h1"\ngpus = [0]', 'host = "h2"\ngpus = [0]')
LM = '[train]\ntask = "lm"\nmax_updates = 2\n[task]\ndata = "books.txt"'
SCRIPT = '[train]\nscript = "own.py"'
TORCH = Torch(version="2.13.0+cu128", cuda="12.8")
ENVIRONMENT = Environment(
    python="3.11.7",
    executable="/env/bin/python",
    torch=TORCH,
    nccl="2.27.5",
    gputrain="0.1.0",
    code="c0de",
    data={"data": (1, 7)},
)
MEMORY = Memory(total_bytes=GIB, available_bytes=GIB)
MACHINE = Inventory(
    host="h", time=0.0, cpus=Cpus(usable=8), memory=MEMORY, gpus=(Gpu(index=0, uuid="GPU-0", processes=()),)
)
NO_GPU = Inventory(host="h", time=0.0, cpus=Cpus(usable=8), memory=MEMORY, note="no driver")


def recipe(*nodes: str, train: str = LM, cluster: str = "") -> Recipe:
    tables = "\n".join(f"[[cluster.nodes]]\n{node}" for node in nodes or CPUS)
    return build(f"[cluster]\n{cluster}\n{tables}\n{train}\n", name="two hosts.toml")


def host_answer(node: int, *, environment: Any = None, facts: Any = (), **more: Any) -> HostAnswer:
    """What a host in order answers, but for what is given."""
    known = {
        "machine": str(node),
        "inventory": MACHINE,
        "limits": ResourceLimits(processes=None, files=4096, memory_bytes=None),
        "environment": replace(ENVIRONMENT, **environment or {}),
    }
    host_facts = None if facts is None else HostFacts(**known | dict(facts))
    return HostAnswer(**{"node": node, "host": f"h{node + 1}", "facts": host_facts} | more)


def check_results(*answers: HostAnswer, wanted: Recipe | None = None) -> list[CheckResult]:
    wanted = wanted or recipe()
    planned = plan(wanted, {}, local=LocalFacts(python="/env/bin/python"))
    return check_hosts(wanted, planned, answers)


UNKNOWN_KEY = "its host key is not known yet: run `ssh h2` once"
OWN = {"own_file": "/w/own.py", "own_code": "0a"}


def test_code_beside_the_script_that_is_not_that_of_another_host_or_of_this_machine_is_named(tmp_path: Path) -> None:
    (tmp_path / "package" / "inner").mkdir(parents=True)
    (tmp_path / "notes").mkdir()
    for name in ("own.py", "model.py", "package/__init__.py", "package/inner/__init__.py", "notes/old.py"):
        (tmp_path / name).write_text(name)
    here = files_beside(tmp_path / "own.py")
    assert sorted(here) == ["model.py", "own.py", "package/__init__.py", "package/inner/__init__.py"]
    (tmp_path / "model.py").write_text("changed")
    (tmp_path / "package" / "__init__.py").unlink()
    changed = files_beside(tmp_path / "own.py")
    assert differing(here, changed) == ["model.py"]
    second = host_answer(1, environment=OWN | {"beside": changed}, changed=("model.py",))
    results = check_results(host_answer(0, environment=OWN | {"beside": here}), second)
    told = [(each.status, each.host, each.what) for each in results if each.check == "code"]
    assert told == [("warning", "h2", f"model.py is not as on {host}") for host in ("this machine", "h1")]


@pytest.mark.parametrize(
    ("second", "wanted", "status", "key", "words", "fix"),
    [
        ({"facts": None, "problem": UNKNOWN_KEY}, {}, "error", "cluster.nodes[1].host", UNKNOWN_KEY, ""),
        (
            {"facts": None, "problem": "it does not answer"},
            {},
            "error",
            "cluster.nodes[1].host",
            "it does not answer",
            "`ssh h2 python3 --version` must work",
        ),
        (
            {"facts": {"environment": None, "problem": "there is no folder /w", "problem_key": "workdir"}},
            {},
            "error",
            "cluster.nodes[1].workdir",
            "there is no folder /w",
            "correct cluster.nodes[1].workdir, or gputrain push 'two hosts.toml'",
        ),
        (
            {"facts": {"environment": None, "problem": "setup ended with exit code 1: no m", "problem_key": "setup"}},
            {"cluster": 'setup = "module load m"'},
            "error",
            "cluster.setup",
            "setup ended with exit code 1: no m",
            "fix cluster.setup",
        ),
        (
            {"environment": {"code": ""}},
            {},
            "error",
            "cluster.nodes[1].host",
            "/env/bin/python (Python 3.11.7) has no gputrain",
            "gputrain push",
        ),
        (
            {"environment": {"missing": "msgspec"}},
            {},
            "error",
            "cluster.nodes[1].host",
            "/env/bin/python cannot import msgspec",
            "gputrain push",
        ),
        (
            {"environment": {"open_files": 70}},
            {"cluster": 'setup = "module load m"'},
            "warning",
            "cluster.setup",
            "a process may have 70 files open, but 1 rank on a node may need 80",
            "put `ulimit -n 4096` into cluster.setup",
        ),
        ({"environment": {"torch": Torch()}}, {}, "error", "cluster.nodes[1].host", "has no torch", "gputrain push"),
        (
            {"environment": {"torch": Torch()}},
            {"train": SCRIPT},
            "error",
            "cluster.nodes[1].host",
            "/env/bin/python has no torch",
            "gputrain push",
        ),
        (
            {"environment": {"hiding": ("own/torch.py",)}},
            {"train": SCRIPT},
            "warning",
            "train.script",
            "own/torch.py is imported in place of torch",
            "rename it",
        ),
        (
            {"environment": {"hiding": ("own/logging.py",)}},
            {"train": SCRIPT},
            "warning",
            "train.script",
            "own/logging.py is imported in place of Python's own module logging, by torch too",
            "rename it",
        ),
        (
            {"environment": {"torch": Torch(version="2.12.1")}},
            {"cluster": 'python = "/env/bin/python"'},
            "error",
            "cluster.python",
            "torch 2.13.0 on h1, 2.12.1 on h2",
            "correct cluster.python, or remove it and gputrain push",
        ),
        (
            {"environment": {"python": "3.12.1"}},
            {},
            "error",
            "cluster.nodes[1].host",
            "Python 3.11 on h1, 3.12 on h2",
            "gputrain push",
        ),
        (
            {"environment": {"torch": Torch(version="2.13.0", cuda="13.0")}},
            {"nodes": GPUS},
            "error",
            "cluster.nodes[1].host",
            "CUDA 12.8 on h1, 13.0 on h2",
            "gputrain push",
        ),
        (
            {"environment": {"nccl": "2.28.3"}},
            {"nodes": GPUS},
            "error",
            "cluster.nodes[1].host",
            "NCCL 2.27.5 on h1, 2.28.3 on h2",
            "gputrain push",
        ),
        (
            {"environment": {"gputrain": "0.2.0", "code": "c1"}},
            {},
            "error",
            "cluster.nodes[1].host",
            "gputrain 0.1.0 on h1, 0.2.0 on h2",
            "gputrain push",
        ),
        (
            {"environment": {"code": "c1"}},
            {},
            "error",
            "cluster.nodes[1].workdir",
            "the code of trainer differs: c0de on h1, c1 on h2",
            "gputrain push",
        ),
        (
            {"environment": {"own_file": "/w/own.py", "own_code": "0b"}},
            {"train": SCRIPT},
            "error",
            "train.script",
            "/w/own.py differs: 0a on h1, 0b on h2",
            "gputrain push",
        ),
        (
            {"environment": {"own_file": "/w/own.py"}},
            {"train": SCRIPT},
            "error",
            "train.script",
            "/w/own.py is missing",
            "gputrain push",
        ),
        (
            {"environment": {"data": {"data": (1, 99)}}},
            {},
            "error",
            "task.data",
            "data differs: 7 B in 1 file on h1, 99 B in 1 file on h2",
            "copy the data of h1 to h2",
        ),
        (
            {"environment": {"data_problem": "books.txt does not exist"}},
            {},
            "error",
            "task.data",
            "books.txt does not exist",
            "copy the data to h2",
        ),
        (
            {"facts": {"machine": "0"}, "lost": True, "unreachable": {0: "10.0.0.1 (Connection refused)"}},
            {},
            "error",
            "cluster.nodes[1].host",
            "it is the same machine as h1",
            "write h1 in both nodes",
        ),
        ({"clock_offset_s": 90.0}, {}, "error", "", "its clock is 90.0 s ahead of this machine's", "set-ntp true"),
        ({"clock_offset_s": -2.5}, {}, "warning", "", "its clock is 2.5 s behind this machine's", "set-ntp true"),
        (
            {"facts": {"folders": (Folder(path="/big disk", free_bytes=4096),)}},
            {},
            "error",
            "",
            "the disk of /big disk is full: 4 KiB free",
            "ssh h2 df -h '/big disk'",
        ),
        (
            {"facts": {"folders": (Folder(path="/home/ada", problem="/home is not writable"),)}},
            {},
            "error",
            "",
            "/home is not writable",
            'env = { GPUTRAIN_HOME = "FOLDER" } of the node',
        ),
        (
            {"facts": {"limits": ResourceLimits(processes=0, files=4096, memory_bytes=None)}},
            {},
            "error",
            "cluster.nodes[1].cpu_ranks",
            "1 rank was asked for on this node, which can hold at most 0: 0 processes are",
            "ask for fewer ranks",
        ),
        (
            {"facts": {"inventory": NO_GPU}},
            {"nodes": GPUS},
            "error",
            "cluster.nodes[1].gpus",
            "there is no GPU 0; it has no driver",
            "gputrain gpus --hosts h2",
        ),
        (
            {"facts": {"rendezvous": RendezvousFile(path="/s/m")}, "token": False},
            {"cluster": 'init_method = "file:///s/m"'},
            "error",
            "cluster.init_method",
            "the folder of /s/m is not the same as on the first node",
            "name a folder on a disk that all nodes share",
        ),
        (
            {"facts": {"rendezvous": RendezvousFile(path="/s/m", problem="/s/m is left", fix="remove it")}},
            {"cluster": 'init_method = "file:///s/m"'},
            "error",
            "cluster.init_method",
            "/s/m is left",
            "remove it",
        ),
        (
            {"unreachable": {0: "10.0.0.1 (No route to host)"}},
            {},
            "error",
            "cluster.nodes[0].host",
            "h2 cannot reach h1 at 10.0.0.1 (No route to host)",
            "NCCL_SOCKET_IFNAME",
        ),
        (
            {"lost": True},
            {},
            "error",
            "cluster.nodes[0].host",
            "h2 cannot reach the first node h1",
            "name an address",
        ),
    ],
)
def test_a_problem_of_a_host_is_reported_with_its_key_and_fix(
    second: dict[str, Any], wanted: dict[str, Any], status: str, key: str, words: str, fix: str
) -> None:
    wanted = dict(wanted)
    made = recipe(*wanted.pop("nodes", ()), **wanted)
    results = check_results(
        host_answer(0, environment=OWN if made.script else None), host_answer(1, **second), wanted=made
    )
    (found,) = [result for result in results if result.status in ("error", "warning")]
    assert (found.status, found.key, found.host) == (status, key, "h2")
    assert words in found.what
    assert fix in found.fix
    assert bool(found.where) is bool(key)
    assert "h2: " in found.line


@pytest.mark.parametrize(
    ("environment", "train", "line"),
    [
        (
            {"start_problem": "a.pt does not exist"},
            'resume = "a.pt"',
            ("resume", "train.resume", "a.pt does not exist", "name a checkpoint or a folder of them"),
        ),
        (
            {"start_problem": "w is a folder"},
            'finetune_from = "w"',
            ("weights", "train.finetune_from", "w is a folder", "name a file of weights, or a folder of DCP"),
        ),
        (
            {"shares_problem": "/r has no balanced shares in its record"},
            'batch_size = "balanced"\nglobal_batch_size = 4\nshares_from = "/r"',
            ("shares", "train.shares_from", "/r has no balanced shares in its record", "name the folder of such a run"),
        ),
    ],
)
def test_what_rank_0_reads_on_its_host_is_checked_there(
    environment: dict[str, Any], train: str, line: tuple[str, str, str, str]
) -> None:
    wanted = recipe(train=LM.replace("[task]", f"{train}\n[task]"))
    (found,) = [
        result
        for result in check_results(host_answer(0, environment=environment), host_answer(1), wanted=wanted)
        if result.status != "ok"
    ]
    assert (found.check, found.key, found.what, found.fix) == line
    assert (found.status, found.host) == ("error", "h1")


def test_hosts_in_order_are_summarized_and_harmless_differences_are_no_error() -> None:
    other = {"torch": Torch(version="2.13.0+cpu"), "python": "3.11.9", "executable": "/other/python"}
    results = check_results(host_answer(0), host_answer(1, environment=other, clock_offset_s=2.1, round_trip_s=0.4))
    assert {result.status for result in results} == {"ok"}
    assert [result.what for result in results] == [
        "h1, h2 answered",
        "Python 3.11.7, torch 2.13.0+cu128, and the same code on 2 hosts",
        "all 2 hosts reach each other",
    ]
    assert check_results() == [], "nobody was asked"


def test_a_busy_port_of_the_first_node_is_reported_with_its_name() -> None:
    busy = host_answer(0, facts={"port": Port(number=29600, state="busy", holder="sshd (pid 1)")})
    (found,) = [result for result in check_results(busy, host_answer(1)) if result.status == "error"]
    assert (found.key, found.what) == ("cluster.port", "port 29600 is in use by sshd (pid 1)")
    assert found.line == f"{found.where}: h1: port 29600 is in use by sshd (pid 1); {found.fix}"


def test_the_interface_towards_the_other_hosts_is_set_unless_the_user_sets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    own = recipe(GPUS[0], GPUS[1] + '\nenv = { NCCL_SOCKET_IFNAME = "ib0" }')
    found = with_routes(
        plan(own, {}, local=LocalFacts()), [host_answer(0, interface="eth0"), host_answer(1, interface="ens3")]
    )
    assert [(node.env["GLOO_SOCKET_IFNAME"], node.env["NCCL_SOCKET_IFNAME"]) for node in found.nodes] == [
        ("eth0", "=eth0"),
        ("ens3", "ib0"),
    ]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    found = with_routes(plan(recipe(), {}, local=LocalFacts()), [host_answer(0, interface="eth0")])
    assert [node.env for node in found.nodes] == [{}, {}]


@pytest.mark.parametrize(
    ("cluster", "init_method", "master"),
    [("", "tcp://10.0.0.1:29600", None), ('init_method = "env://"', "env://", "10.0.0.1")],
)
def test_the_ranks_meet_at_the_first_hosts_address_where_not_all_know_its_name(
    cluster: str, init_method: str, master: str | None
) -> None:
    wanted = recipe(*GPUS, cluster=cluster)
    before = plan(wanted, {}, local=LocalFacts())
    at_first, other = host_answer(0), host_answer(1, first_address="10.0.0.1")
    assert with_routes(before, [at_first, other]) == before
    nameless = [at_first, host_answer(1, first_address="10.0.0.1", knows_first=False)]
    found = with_routes(before, nameless)
    assert (found.init_method, {node.argv[5] for node in found.nodes}) == (init_method, {init_method})
    assert {node.env.get("MASTER_ADDR") for node in found.nodes} == {master}
    (network,) = [result for result in check_results(*nameless, wanted=wanted) if result.check == "network"]
    assert network.what == "all 2 hosts reach each other; not all know the name h1, so they meet at 10.0.0.1"


@pytest.mark.parametrize(("task", "file"), [("own.tasks:Own", "own/tasks.py"), ("folder/own.py:Own", "folder/own.py")])
def test_an_environment_is_read_without_importing_it(tmp_path: Path, task: str, file: str) -> None:
    for name in ("own/tasks.py", "folder/own.py", "torch/__init__.py", "own/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise SystemExit('imported')\n")
    (tmp_path / "torch" / "version.py").write_text("__version__ = '9.9'\ncuda: str = '13.0'\n")
    (tmp_path / "books.txt").write_text("to be")
    program = Path(environment_facts.__file__).read_text()
    request = {"task": task, "script": "", "options": {"data": "books.txt", "lr": 0.1, "none": "/nowhere"}}
    words = [sys.executable, "-c", program, "mark:", json.dumps(request)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.removeprefix("mark:"))
    assert (found["torch"]["version"], found["torch"]["cuda"]) == ("9.9", "13.0")
    assert found["own_code"]
    assert Path(tmp_path, found["own_file"]).samefile(
        tmp_path / "own" / "tasks.py" if "." in task[:4] else tmp_path / "folder/own.py"
    )
    assert found["data"] == {"data": [1, 5]}
    assert found["code"], "trainer is installed where this runs"
    assert (found["start_problem"], found["shares_problem"]) == ("", "")


def test_a_script_may_do_without_torch_on_all_hosts() -> None:
    answers = [host_answer(node, environment={"torch": Torch()}) for node in (0, 1)]
    assert {each.status for each in check_results(*answers, wanted=recipe(train=SCRIPT))} == {"ok"}


@pytest.mark.parametrize(
    ("module", "file"), [("own", "own.py"), ("package.own", "package/own.py"), ("folder", "folder/__main__.py")]
)
def test_a_script_that_is_run_as_a_module_is_looked_for_in_its_folder(
    module: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("package/__init__.py", file):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise SystemExit('imported')\n")
    monkeypatch.chdir(tmp_path)
    read = environment_facts.read_environment("", module, {}, is_module=True)
    assert Path(read.own_file).samefile(file)
    assert read.own_code


@pytest.mark.parametrize("is_module", [False, True])
def test_files_that_hide_modules_of_torch_and_python_are_those_beside_the_script(
    is_module: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # sys is built in and os frozen, so they cannot be hidden; a folder without __init__.py is found last.
    hidden, others = ("torch.py", "logging.py", "queue/__init__.py"), ("sys.py", "os.py", "csv/data.py", "string.txt")
    for name in (*hidden, *others):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path if is_module else "/")
    files = environment_facts.hiding_files("own" if is_module else str(tmp_path / "own.py"), is_module=is_module)
    assert [str(Path(file).resolve().relative_to(tmp_path)) for file in files] == ["logging.py", "queue", "torch.py"]


def test_a_folder_with_a_torch_of_its_own_hides_none(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    assert environment_facts.hiding_files(str(tmp_path / "own.py"), is_module=False) == [str(tmp_path / "torch")]
    (tmp_path / "torch" / "version.py").touch()
    assert environment_facts.hiding_files(str(tmp_path / "own.py"), is_module=False) == []


def test_an_environment_tells_what_rank_0_cannot_read_before_its_first_step(tmp_path: Path) -> None:
    (tmp_path / "kept.pt").touch()
    program = Path(environment_facts.__file__).read_text()
    shares = {"folder": "old", "ranks": 2, "global_batch_size": 8}
    problems = []
    for path in ("kept.pt", "none.pt"):
        read = {"start": {"option": "resume", "path": path}, "shares": shares}
        request = {"task": "own:Task", "script": "", "options": {}, **read}
        words = [sys.executable, "-c", program, "", json.dumps(request)]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout)
        problems.append(found["start_problem"])
        assert found["shares_problem"].startswith("old is no run directory: old/events/0.ndjson cannot be read")
    assert problems == ["", "none.pt does not exist"]


def test_a_host_that_never_reads_or_never_ends_is_given_up_in_time() -> None:
    for script, words in (("read line; sleep 600", "did not answer within 0.2 s"), ("exec yes", "more than 1 MiB")):
        channel = HostChannel.started("h1", lambda command, script=script: ["sh", "-c", script, *command])
        with pytest.raises(HostError, match=words):
            channel.call("facts", msgspec.json.Decoder(dict), 0.2 if "sleep" in script else 60)
        channel.close(at_once=True)


HOSTILE = """
import json, sys
mark = sys.argv[-1]
memory = {"total_bytes": 1, "available_bytes": 1}
inventory = {"host": "\\x1b]0;x\\x07", "time": 0.0, "cpus": {}, "memory": memory}
limits = {"processes": None, "files": None, "memory_bytes": None}
facts = {"machine": "m", "inventory": inventory, "limits": limits, **json.loads(sys.argv[1])}
for line in sys.stdin.buffer:
    for call, (name, answer) in enumerate((("clock", 7.0), ("facts", facts)), 1):
        if b'"name": "%s"' % name.encode() in line[-1000:]:
            data = json.dumps(answer)
            header = {"call": call, "kind": "answer", "name": "", "offset": 0, "bytes": len(data)}
            print(mark + json.dumps(header), data, sep="\\n", end="", flush=True)
"""


def test_hosts_are_queried_again_once_the_save_folder_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ssh").write_text(f"#!/bin/sh\necho >> {tmp_path}/started\nexit 1\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("GPUTRAIN_SSH", str(tmp_path / "ssh"))
    local = LocalFacts(python=sys.executable)
    starts = []
    for folder in ("/a", "/a", "/b"):
        wanted = recipe(train=LM.replace("\n[task]", f'\nsave_dir = "{folder}"\n[task]'))
        collect_hosts(wanted, plan(wanted, {}, local=local), local, env={}, max_age_s=600)
        starts.append(len((tmp_path / "started").read_text().splitlines()))
    assert starts == [2, 2, 4]


@pytest.mark.parametrize(
    "answered",
    [
        {"probe_port": 10**9},
        {"probe_port": 7, "addresses": ["$(reboot)"]},
        {"probe_port": 7, "problem": "x" * 5000},
        {"probe_port": 10**400},
        {"probe_port": 7, "folders": [{"path": 7}]},
    ],
)
def test_a_host_that_lies_is_blamed_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answered: dict[str, Any]
) -> None:
    (tmp_path / "liar.py").write_text(HOSTILE)
    # Of ssh's words the last is the mark.
    script = f"exec {sys.executable} {tmp_path}/liar.py '{json.dumps(answered)}' \"$@\""
    (tmp_path / "ssh").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("GPUTRAIN_SSH", str(tmp_path / "ssh"))
    wanted = recipe()
    local = LocalFacts(python=sys.executable)
    found = collect_hosts(wanted, plan(wanted, {}, local=local), local, env={})
    assert [(each.host, each.problem) for each in found] == [
        ("h1", "it sent no valid answer"),
        ("h2", "it sent no valid answer"),
    ]


@pytest.mark.parametrize(
    "folder",
    [
        "nvidia_nccl_cu12-2.27.5.dist-info",
        "Nvidia.NCCL-cu12-2.27.5.dist-info",
        "nvidia_nccl_cu12-2.27.5.egg-info",
        "nvidia_nccl_cu12-2.27.5",
        "nvidia_nccl_cu121-2.27.5.dist-info",
    ],
)
def test_versions_of_packages_are_those_that_importlib_finds(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / folder).mkdir()
    text = "Metadata-Version: 2.1\nName: nvidia-nccl-cu12\nVersion: 2.27.5+own\n\nVersion: of the description\n"
    (tmp_path / folder / ("PKG-INFO" if folder.endswith("egg-info") else "METADATA")).write_text(text)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.13.0+cu128'\ncuda: Optional[str] = '12.8'\n")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        nccl = importlib.metadata.version("nvidia-nccl-cu12")
    except importlib.metadata.PackageNotFoundError:
        nccl = None
    found = environment_facts.read_environment("", "own.py", {})
    assert (found.nccl, found.gputrain) == (nccl, importlib.metadata.version("gputrain"))


def test_versions_are_read_without_the_imports_of_importlib_metadata() -> None:
    request = {"task": "own:Task", "script": "", "options": {}}
    words = f"import sys; from gputrain_tui.hosts import environment_facts as e; e.read_environment(**{request})"
    source = f"{words}; assert not {{'importlib.metadata', 'email'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", source], check=True)
