"""The environment of a script's rank: torchrun's, name by name, and short paths below TMPDIR."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import LIMIT_S

SHOW = """\
import json, os, socket, sys, tempfile
found = dict(os.environ, TAG=sys.argv[1])
names = ("ray/session_2026-11-24_11-24-28_123456_1234567/sockets/plasma_store", "pymp-abcdefgh/listener-abcdefgh")
for name in names if "TMPDIR" in os.environ else ():  # as Ray and multiprocessing name their sockets
    path = os.path.join(tempfile.gettempdir(), name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    path = path[:-1] + os.environ["RANK"]
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
if "cache" in sys.argv:
    from torch._inductor.runtime.cache_dir_utils import cache_dir
    found["CACHE"] = cache_dir()
with open(f"{sys.argv[1]}-{os.environ.get('RANK', '0')}.json", "w") as file:
    json.dump(found, file)
"""
DIFFERENT = {
    "MASTER_ADDR": "the loopback by its number",
    "MASTER_PORT": "any free port",
    "TORCHELASTIC_RUN_ID": "the run's id",
    "TORCHELASTIC_USE_AGENT_STORE": "rank 0 makes the store: there is no agent of torchrun's",
    "TORCHELASTIC_ERROR_FILE": "the record has the error",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "for torchrun's own agent",
    "CUDA_DEVICE_ORDER": "devices have the numbers of nvidia-smi",
    "CUDA_VISIBLE_DEVICES": "none for ranks on the CPU",
    "ACCELERATE_USE_CPU": "otherwise accelerate's ranks on the CPU train alone",
    "GLOO_SOCKET_IFNAME": "the address of the machine's name need not be reachable",
    "TMPDIR": "deleted with what killed ranks leave there",
    "TORCHINDUCTOR_CACHE_DIR": "the value that it has without TMPDIR",
}
"""Variables that are not torchrun's, and why."""


def environment(folder: Path) -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "GPUTRAIN_LEASE", "TMPDIR", "OMP_NUM_THREADS")
    } | {"GPUTRAIN_HOME": str(folder / "home")}


def call(folder: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env=environment(folder) | more,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def recipe(folder: Path, ranks: int, tag: str, *words: str) -> str:
    (folder / "show.py").write_text(SHOW)
    arguments = json.dumps([tag, *words])
    (folder / f"{tag}.toml").write_text(
        f'name = "{"a-long-name-" * 5}"\n[[cluster.nodes]]\ncpu_ranks = {ranks}\n'
        f'[train]\nscript = "show.py"\nargs = {arguments}\n'
    )
    return f"{tag}.toml"


def found(folder: Path, tag: str, rank: int) -> dict[str, str]:
    return json.loads((folder / f"{tag}-{rank}.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_script_s_rank_has_the_variables_of_torchrun_name_by_name(tmp_path: Path, ranks: int) -> None:
    call(tmp_path, "gputrain_tui", "run", recipe(tmp_path, ranks, "ours"))
    words = ("--standalone", "--nproc-per-node", str(ranks), "show.py", "theirs")
    call(tmp_path, "torch.distributed.run", *words)
    for rank in range(ranks):
        ours, theirs = found(tmp_path, "ours", rank), found(tmp_path, "theirs", rank)
        names = {name for name in ours.keys() | theirs.keys() if not name.startswith("GPUTRAIN_") and name != "TAG"}
        unequal = {name: (ours.get(name), theirs.get(name)) for name in names if ours.get(name) != theirs.get(name)}
        if ranks == 1:  # its processes may be ranks; they are found by a folder of ours
            assert Path(unequal.pop("PYTHONPATH")[0] or "").name == "started_site"
        assert {name: values for name, values in unequal.items() if name not in DIFFERENT} == {}


def test_a_script_sees_at_a_restart_that_it_is_one_and_how_many_there_may_be(tmp_path: Path) -> None:
    path = recipe(tmp_path, 1, "ours")
    (tmp_path / "show.py").write_text(
        "import os\n"
        "print(seen := [os.environ['TORCHELASTIC_' + name] for name in ('RESTART_COUNT', 'MAX_RESTARTS')])\n"
        "assert seen == ['1', '2']\n"
    )
    call(tmp_path, "gputrain_tui", "run", path, "--set", "cluster.max_restarts=2")
    (log,) = (tmp_path / "home" / "runs").glob("*/logs/0.log")
    assert [line for line in log.read_text().splitlines() if line.startswith("[")] == ["['0', '2']", "['1', '2']"]


def test_temporary_files_are_gone_afterwards_and_caches_are_where_python_has_them(tmp_path: Path) -> None:
    call(tmp_path, "gputrain_tui", "run", recipe(tmp_path, 1, "ours", "cache"))
    subprocess.run([sys.executable, "show.py", "theirs", "cache"], cwd=tmp_path, env=environment(tmp_path), check=True)
    ours, theirs = found(tmp_path, "ours", 0), found(tmp_path, "theirs", 0)
    assert ours["CACHE"] == theirs["CACHE"]
    assert not Path(ours["TMPDIR"]).exists()


def test_a_run_in_a_temporary_folder_with_a_long_path_has_short_sockets_of_its_own(tmp_path: Path) -> None:
    longer = tmp_path / ("long" * 20)
    longer.mkdir()
    path = recipe(tmp_path, 2, "ours")
    (tmp_path / "show.py").write_text(
        "import os\nassert os.environ['TMPDIR'].startswith(os.environ['LONGER'] + '/gt')\n"
    )
    call(tmp_path, "gputrain_tui", "run", path, TMPDIR=str(longer), LONGER=str(longer))
    assert list(longer.iterdir()) == []
