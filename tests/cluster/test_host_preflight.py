"""The preflight of hosts of a run over ssh: each of its lines provoked on real hosts, and nothing left on any."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from fake_driver import fake_driver
from host_recipe import recipe
from network_namespaces import LIMIT_S, NamespaceHost, wait_until
from ssh_lab import PYTHONPATH, SshLab, require_ssh, ssh_lab

import gputrain_tui
from trainer.host.gpu_claims import MACHINE

GPUTRAIN = (sys.executable, "-m", "gputrain_tui")
INTERFACES = {f"h{number}": f"eth{number}" for number in range(1, 11)}
FAKE_TIME = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
ENV = f'cluster.env={{ PYTHONPATH = "{PYTHONPATH}" }}'


@pytest.fixture(scope="module")
def lab() -> Iterator[SshLab]:
    require_ssh()
    folder = Path(tempfile.mkdtemp(prefix="gt-", dir="/tmp"))
    (folder / "work").mkdir()
    with ssh_lab(folder, INTERFACES) as running:
        yield running
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def nothing_is_left(lab: SshLab) -> Iterator[None]:
    """No process is left on a host but those of ssh, nor a record where the command was typed."""
    yield
    for host in lab.hosts:
        (lab.folder / f"start_up.{host.name}").write_text("")
        wait_until(
            lambda host=host: [words for words in host.processes().values() if "ssh" not in words] == [],
            f"nothing but ssh is on {host.name}",
        )
    assert not (lab.disk_of(lab.hosts[0]) / "home" / "runs").exists()


def typed(lab: SshLab, command: str, hosts: list[str], *settings: str) -> tuple[int, str, str]:
    """Type a command about a recipe with one rank per host on the first host."""
    (lab.folder / "work" / "r.toml").write_text(recipe(hosts, [1] * len(hosts)))
    words = [*GPUTRAIN, *command.split(), "r.toml", *with_settings(ENV, *settings)]
    done = lab.hosts[0].run(*words, cwd=lab.folder / "work", env=lab.environ, check=False)
    return done.returncode, done.stdout, done.stderr


def with_settings(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def check(lab: SshLab, hosts: list[str], *settings: str) -> tuple[int, Mapping[str, list[dict[str, str]]]]:
    """Return the exit code of ``gputrain check``, and its errors and warnings by host."""
    code, stdout, stderr = typed(lab, "check --json", hosts, *settings)
    assert stderr == ""
    found: dict[str, list[dict[str, str]]] = {}
    for result in json.loads(stdout)["results"]:
        if result["status"] in ("error", "warning"):
            found.setdefault(result["host"], []).append(result)
    return code, found


def in_lines(found: Mapping[str, list[dict[str, str]]]) -> dict[str, list[str]]:
    return {
        host: [f"{each['what']} → {each['fix']} ({each['key']})" for each in lines] for host, lines in found.items()
    }


def start_up(lab: SshLab, name: str, script: str) -> None:
    (lab.folder / f"start_up.{name}").write_text(script + "\n")


def test_three_hosts_in_order_are_checked_within_three_seconds(lab: SshLab) -> None:
    start_up(lab, "h2", 'echo "Welcome, {"; printf "no end of line"; echo noise >&2')
    check(lab, ["h1"])  # the options of the test's own task are read, which imports torch, and cached
    begin = time.monotonic()
    code, found = check(lab, ["h1", "h2", "h3"])
    assert (code, found) == (0, {})
    took_s = time.monotonic() - begin
    # On a quiet machine: a load is the processes that wait for a core, and they are not this test's.
    assert took_s < 3.0 or os.getloadavg()[0] > (os.cpu_count() or 1)


def test_a_host_that_is_down_is_named_and_the_others_are_asked_at_the_same_time(lab: SshLab) -> None:
    h1, h5 = lab.hosts[0], lab.hosts[4]
    up = ["h2", "h3", "h4"]
    for name in up:  # each waits for all the others: hosts that are asked one after the other would never answer
        barrier = f"touch {lab.folder}/asked.{name}; "
        barrier += f'while [ "$(ls {lab.folder}/asked.* | wc -l)" -lt {len(up)} ]; do sleep 0.05; done'
        start_up(lab, name, barrier)
    # Its packets are dropped: without the address of its card the kernel would answer for it.
    neighbour = ("ip", "neigh", "replace", h5.address, "dev", h1.interface)
    h1.run(*neighbour, "lladdr", "02:00:00:00:00:05", "nud", "permanent")
    h5.link("down")
    try:
        for ranks in ("cpu_ranks", "ranks"):  # without and with an inventory
            for path in lab.folder.glob("asked.*"):
                path.unlink()
            nodes = ", ".join(f'{{host="{host}", {ranks}=1}}' for host in ("h1", *up, "h5"))
            code, stdout, stderr = typed(lab, "check --json", ["h1"], f"cluster.nodes=[{nodes}]")
            assert (code, stderr) == (3, "")
            results = json.loads(stdout)["results"]
            (problem,) = [each for each in results if each["status"] == "error"]
            assert (problem["check"], problem["host"], problem["key"]) == ("ssh", "h5", "cluster.nodes[4].host")
            assert problem["what"].startswith(("it does not answer", "it did not answer within "))
            assert "h1, h2, h3, h4 answered" in [each["what"] for each in results]
            assert any("the same code on 4 hosts" in each["what"] for each in results)
    finally:
        h5.link("up")
        h1.run(*neighbour, "lladdr", "02:00:00:00:00:05", "nud", "failed", check=False)
        h1.run("ip", "neigh", "flush", "dev", h1.interface)


@contextmanager
def mounted(host: NamespaceHost, *words: str | Path) -> Iterator[None]:
    """Mount something on one host for as long as the body runs."""
    host.run("mount", *words)
    try:
        yield
    finally:
        host.run("umount", words[-1])


def test_a_shortage_or_difference_of_a_host_is_one_line_with_its_fix(lab: SshLab) -> None:
    (made := lab.folder / "made").mkdir(exist_ok=True)
    (made / "meminfo").write_text("MemTotal: 4194304 kB\nMemAvailable: 51200 kB\nSwapTotal: 0 kB\n")
    for name, limit in (("group", 64 << 20), ("small_group", 10 << 20)):
        (made / name).mkdir(exist_ok=True)
        (made / name / "memory.max").write_text(f"{limit}\n")
        (made / name / "memory.current").write_text(f"{4 << 20}\n")
    (made / "sitecustomize.py").write_text("import sys\nsys.version = sys.version.replace('3.', '3.99.', 1)\n")
    (lab.folder / "books.txt").write_text("to be or not to be\n" * 1000)
    (made / "books.txt").write_text("to be or not to be\n" * 900)
    start_up(lab, "h5", "ulimit -Sn 70")
    base = os.path.realpath(sys.executable)  # without what is installed beside gputrain
    settings = [
        'train.task="lm"',
        f'task={{data="{lab.folder}/books.txt"}}',
        "train.num_workers=2",
        f'cluster.nodes[5].env.PYTHONPATH="{made}"',
        f'cluster.nodes[7].python="{base}"',
        f'cluster.nodes[7].env.PYTHONPATH="{Path(gputrain_tui.__file__).parents[1]}"',
    ]
    h2, h3, h4, _, _, h7, _, h9 = lab.hosts[1:9]
    with (
        mounted(h2, "--bind", made / "meminfo", "/proc/meminfo"),
        mounted(h3, "--bind", made / "group", "/sys/fs/cgroup"),
        mounted(h4, "-t", "tmpfs", "-o", "size=1m", "none", "/dev/shm"),
        mounted(h7, "--bind", made / "books.txt", lab.folder / "books.txt"),
        mounted(h9, "--bind", made / "small_group", "/sys/fs/cgroup"),
    ):
        code, found = check(lab, list(INTERFACES)[:9], *settings)
        _, raised = check(lab, ["h1", "h5"], *settings[:3], "cluster.nodes[1].setup='ulimit -n 4096'")
    assert (code, raised) == (3, {})
    correct = "correct cluster.nodes[7].python, or remove it and gputrain push r.toml (cluster.nodes[7].python)"
    assert in_lines(found) == {
        "h2": [
            "1 CPU rank needs 90 MiB or more, but 50 MiB of 4 GiB are available → "
            "use fewer ranks, or end the processes that use the memory (cluster.nodes[1].cpu_ranks)"
        ],
        "h3": [
            "1 CPU rank needs 90 MiB or more, but 60 MiB of 64 MiB are available → "
            "use fewer ranks, or end the processes that use the memory (cluster.nodes[2].cpu_ranks)"
        ],
        "h4": [
            "/dev/shm has 1 MiB free for 2 data loading processes, which die of a bus error when it is full → "
            "start the container with --shm-size=2g, or set train.num_workers = 0 (train.num_workers)"
        ],
        "h5": [
            "a process may have 70 files open, but 1 rank on a node may need 88 → "
            "put `ulimit -n 4096` into cluster.nodes[4].setup (cluster.nodes[4].setup)"
        ],
        "h6": ["Python 3.11 on h1, 3.99 on h6 → gputrain push r.toml (cluster.nodes[5].host)"],
        "h7": [
            "data differs: 18.6 KiB in 1 file on h1, 16.7 KiB in 1 file on h7 → copy the data of h1 to h7 (task.data)"
        ],
        "h8": [
            f"{base} has no torch → {correct}",
            f"{base} cannot import msgspec → {correct}",
        ],
        "h9": [
            "1 rank was asked for on this node, which can hold at most 0: 0.0 GiB of memory, "
            "and a rank takes 20 MiB or more → ask for fewer ranks (cluster.nodes[8].cpu_ranks)"
        ],
    }


def cuda_torch(folder: Path, cuda: str, nccl: str) -> str:
    """Make a stand-in of a torch for GPUs and of the NCCL that comes with it; return the PYTHONPATH of its host."""
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").touch()
    (folder / "torch" / "version.py").write_text(f"__version__ = '2.13.0'\ncuda = '{cuda}'\n")
    (info := folder / f"nvidia_nccl_cu12-{nccl}.dist-info").mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: nvidia-nccl-cu12\nVersion: {nccl}\n")
    return f"{folder}:{PYTHONPATH}"


def test_another_cuda_or_nccl_on_a_host_is_one_line_with_its_fix(lab: SshLab, tmp_path: Path) -> None:
    driver = fake_driver(tmp_path)
    nodes = []
    for name, cuda, nccl in (("h2", "12.8", "2.27.5"), ("h3", "12.1", "2.27.5"), ("h4", "12.8", "2.18.1")):
        start_up(lab, name, f"export LD_LIBRARY_PATH={driver} {MACHINE}={tmp_path}/claims")
        path = cuda_torch(tmp_path / name, cuda, nccl)
        nodes.append(f'{{host="{name}", gpus=[1], env={{PYTHONPATH="{path}"}}}}')
    code, found = check(lab, ["h2"], f"cluster.nodes=[{', '.join(nodes)}]")
    assert code == 3
    assert in_lines(found) == {
        "h3": ["CUDA 12.8 on h2, 12.1 on h3 → gputrain push r.toml (cluster.nodes[1].host)"],
        "h4": ["NCCL 2.27.5 on h2, 2.18.1 on h4 → gputrain push r.toml (cluster.nodes[2].host)"],
    }


def test_the_second_launch_on_a_gpu_of_a_host_is_refused_with_the_run_that_holds_it(
    lab: SshLab, tmp_path: Path
) -> None:
    (packages := tmp_path / "packages").mkdir()
    start_up(lab, "h2", f"export LD_LIBRARY_PATH={fake_driver(tmp_path)} {MACHINE}={tmp_path}/claims")
    os.mkfifo(tmp_path / "gate")
    (tmp_path / "own.py").write_text(f"import os\nos.read(os.open('{tmp_path}/gate', os.O_RDONLY), 1)\n")
    env = f'{{ PYTHONPATH = "{cuda_torch(packages, "12.8", "2.27.5")}" }}'
    node = f'[[cluster.nodes]]\nhost = "h2"\ngpus = [1]\nenv = {env}\n'
    (tmp_path / "r.toml").write_text(f'{node}[train]\nscript = "own.py"\n')

    def launch() -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return lab.hosts[0].start(*GPUTRAIN, "run", "r.toml", cwd=tmp_path, env=lab.environ, **pipes)

    def records() -> list[list[str]]:
        folders = [lab.disk_of(host) / "home" / "runs" for host in lab.hosts[:2]]
        return [sorted(entry.name for entry in folder.iterdir()) for folder in folders]

    both = [launch(), launch()]  # neither sees the other's claim during its query of the host
    gate = os.open(tmp_path / "gate", os.O_WRONLY)  # opened once the script of one of them has opened it
    try:
        refused = wait_until(lambda: [each for each in both if each.poll() is not None], "one of them has ended")[0]
        late = launch()
        reported = [(each.communicate(timeout=LIMIT_S), each.returncode) for each in (refused, late)]
        look_up = (
            "from trainer.host.gpu_claims import claims\n"
            f"print(claims(['GPU-bbbb'], {{'{MACHINE}': '{tmp_path}/claims'}})['GPU-bbbb'].text)"
        )
        holder = lab.hosts[1].run(sys.executable, "-c", look_up).stdout.strip()
        (run,), on_host = records()
        assert holder.startswith(f"run {run} (pid ")
        assert on_host == [run], "nothing is left of the others"
        (trains,) = [each for each in both if each is not refused]
        assert trains.poll() is None
    finally:
        os.close(gate)
        ended = [each.communicate(timeout=LIMIT_S) for each in both]
        for host in lab.hosts[:2]:
            shutil.rmtree(lab.disk_of(host) / "home", ignore_errors=True)
    whose = f"is taken by {holder}; choose another GPU"
    seen = f"is in use by {holder}; gpus"
    (_, at_once), (_, later) = (output for output, _ in reported)
    assert f"h2: GPU GPU-bbbb {whose}" in at_once or f"h2: GPU 1 {seen}" in at_once, at_once
    assert f"r.toml:3: cluster.nodes[0].gpus: h2: GPU 1 {seen}" in later
    assert [(stdout, code) for (stdout, _), code in reported] == [("", 3), ("", 3)]
    assert trains.returncode == 0
    assert "finished in " in ended[both.index(trains)][1]


def test_whatever_is_wrong_on_a_host_is_one_line_with_its_fix_and_exit_code_3(lab: SshLab) -> None:
    (other := lab.folder / "other").mkdir()
    (other / "host_task.py").write_text("# another task")
    (other / "torch").mkdir()
    (other / "torch" / "__init__.py").touch()
    (other / "torch" / "version.py").write_text("__version__ = '2.12.1'\n")
    h3 = lab.hosts[2]
    (lab.disk_of(h3) / "small").mkdir()
    h3.run("mount", "-t", "tmpfs", "-o", "size=1m", "none", lab.disk / "small")
    start_up(lab, "h3", f"export LD_PRELOAD={FAKE_TIME} FAKETIME=+90s" if FAKE_TIME else "")
    start_up(lab, "h7", "exec yes")
    start_up(lab, "h8", "echo '{'; exit 0")
    start_up(lab, "h9", "PATH=/nowhere")
    known = (lab.folder / "known_hosts").read_text()
    (lab.folder / "known_hosts").write_text(known.replace("h10,10.77.0.10 ", "other "))
    nowhere = f"/no where/$(touch {lab.folder}/pwned)"
    settings = [
        f'cluster.nodes[1].env.PYTHONPATH="{other}"',
        f'cluster.nodes[2].env.GPUTRAIN_HOME="{lab.disk}/small"',
        f'cluster.nodes[3].workdir="{nowhere}\\u001b]0;owned\\u0007"',
        "cluster.nodes[4].setup=\"echo 'Lmod: no module cuda/99' >&2; exit 3\"",
        f'cluster.nodes[5].python="{os.path.realpath(sys.executable)}"',
        'cluster.nodes[5].env.PYTHONPATH=""',
    ]
    hosts = [*INTERFACES, "10.77.0.2"]
    try:
        code, found = check(lab, hosts, *settings)
        ran, stdout, stderr = typed(lab, "run", hosts, *settings)
    finally:
        (lab.folder / "known_hosts").write_text(known)
        h3.run("umount", lab.disk / "small")
    assert code == 3
    reported = in_lines(found)
    setup = "cluster.nodes[4].setup"
    push = "gputrain push r.toml"
    expected = {
        "h2": [
            f"torch 2.13.0 on h1, 2.12.1 on h2 → {push} (cluster.nodes[1].host)",
            f"{other}/host_task.py differs: ",
        ],
        "h3": [
            *(["its clock is "] if FAKE_TIME else []),
            f"the disk of {lab.disk}/small is full: ",
        ],
        "h4": [
            f"there is no folder {nowhere}\x1b]0;owned\x07 → correct cluster.nodes[3].workdir, or {push} "
            "(cluster.nodes[3].workdir)"
        ],
        "h5": [f"setup ended with exit code 3: Lmod: no module cuda/99 → fix {setup} ({setup})"],
        "h6": [f"{os.path.realpath(sys.executable)} (Python "],
        "h7": [
            "it printed more than 1 MiB, but no answer → `ssh h7 python3 --version` must work (cluster.nodes[6].host)"
        ],
        "h8": ["it sent no valid answer → `ssh h8"],
        "h9": ["there is no python3 → `ssh h9"],
        "h10": ["its host key is not known yet: run `ssh h10` once →  (cluster.nodes[9].host)"],
        "10.77.0.2": ["it is the same machine as h2 → write h2 in both nodes"],
    }
    for host, lines in expected.items():
        assert len(reported[host]) >= len(lines), reported[host]
        for line in lines:
            assert any(each.startswith(line) for each in reported[host]), (line, reported[host])
    assert set(reported) == set(expected)
    assert "has no gputrain → correct cluster.nodes[5].python, or remove it and gputrain push" in reported["h6"][0]
    assert not (lab.folder / "pwned").exists()
    assert (ran, stdout) == (3, "")
    assert "gputrain: r.toml:" in stderr
    assert "h5: setup ended with exit code 3: Lmod: no module cuda/99; fix" in stderr
    assert "\x1b" not in stderr


@pytest.mark.parametrize(("offset", "status", "code"), [("+30", "warning", 0), ("-90", "error", 3)])
def test_a_clock_of_a_host_that_differs_is_a_warning_and_above_a_minute_refused(
    lab: SshLab, offset: str, status: str, code: int
) -> None:
    if FAKE_TIME is None:
        pytest.skip("needs libfaketime (Debian: libfaketime)")
    start_up(lab, "h2", f"export LD_PRELOAD={FAKE_TIME} FAKETIME={offset}s")
    ended, found = check(lab, ["h1", "h2"])
    (reported,) = found.pop("h2")
    assert (ended, found, reported["status"]) == (code, {}, status)
    side = "ahead of" if offset.startswith("+") else "behind"
    assert re.match(rf"its clock is \d+\.\d s {side} this machine's", reported["what"])
    assert abs(float(reported["what"].split()[3]) - abs(int(offset))) < 2
    assert "set-ntp true" in reported["fix"]


def test_a_host_that_refuses_the_login_is_one_line_without_a_prompt(lab: SshLab) -> None:
    names = {
        "moved": "HostKeyAlias h5",
        "stranger": f"HostKeyAlias h3\n  IdentityFile {lab.folder}/host_key.h3",
        "locked": "HostKeyAlias h4\n  PubkeyAuthentication no",  # it would ask for a password
    }
    config = lab.folder / "ssh_config"
    before = config.read_text()
    key = f"  IdentityFile {lab.folder}/key\n"
    lines = [
        f"Host {name}\n  HostName {host.address}\n  {options}\n"
        for (name, options), host in zip(names.items(), lab.hosts[1:], strict=False)
    ]
    config.write_text("".join(lines) + before.replace(key, "") + f"Host * !stranger\n{key}")
    try:
        code, found = check(lab, ["h1", *names])
        ran, stdout, stderr = typed(lab, "run", ["h1", *names])
    finally:
        config.write_text(before)
    assert {host: [each["what"] for each in lines] for host, lines in found.items()} == {
        "moved": ["its host key has changed: if expected, `ssh-keygen -R h5`"],
        "stranger": ["it refuses the key: `ssh stranger true` must work without a password or passphrase"],
        "locked": ["it refuses the key: `ssh locked true` must work without a password or passphrase"],
    }
    assert (code, ran, stdout) == (3, 3, "")
    assert [host for host in names if f"{host}: it" not in stderr] == []
    assert "assword:" not in stderr


def test_ways_ports_and_files_between_hosts_are_tried_before_anything_is_loaded(lab: SshLab) -> None:
    h2, h3, h4, h5 = lab.hosts[1:5]
    cut = ((h3, h4), (h4, h3), (h5, h2))
    for host, other in cut:
        host.run("ip", "route", "add", "unreachable", other.address)
    filters = shutil.which("nft") is not None
    if filters:  # as where an MTU on the way is too small
        table = "table inet large {\nchain sent {\ntype filter hook output priority 0\n"
        h5.run("nft", f"{table}ip daddr {h4.address} meta length > 700 drop\n}}\n}}")
    listen = "import socket; here = socket.create_server(('', 29600)); input('listening\\n')"
    listener = h2.start(sys.executable, "-c", listen, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert listener.stdout is not None
        assert listener.stdout.readline() == "listening\n"
        code, found = check(lab, ["h2", "h1", "h3", "h4", "h5"], "cluster.port=29600")
    finally:
        for host, other in cut:
            host.run("ip", "route", "del", "unreachable", other.address)
        if filters:
            h5.run("nft", "delete", "table", "inet", "large")
        listener.communicate("\n")
    assert code == 3
    (port,) = found.pop("h2")
    assert port["what"].startswith("port 29600 is in use by ")
    assert (port["key"], port["fix"]) == ("cluster.port", "set cluster.port to another one, or end that process")
    lost = "connected, but large packets did not arrive within 4 s: an MTU on the way is too small"
    assert {host: [(each["what"], each["key"]) for each in lines] for host, lines in found.items()} == {
        "h3": [(f"h3 cannot reach h4 at {h4.address} (No route to host)", "cluster.nodes[3].host")],
        "h4": [(f"h4 cannot reach h3 at {h3.address} (No route to host)", "cluster.nodes[2].host")],
        "h5": [
            ("h5 cannot reach the first node h2", "cluster.nodes[0].host"),
            *([(f"h5 cannot reach h4 at {h4.address} ({lost})", "cluster.nodes[3].host")] if filters else []),
        ],
    }
    assert "GLOO_SOCKET_IFNAME" in found["h3"][0]["fix"]

    (lab.disk_of(h2) / "meet").write_text("left")
    code, found = check(lab, ["h1", "h2", "h3"], f'cluster.init_method="file://{lab.disk}/meet"')
    (lab.disk_of(h2) / "meet").unlink()
    assert code == 3
    assert {host: [each["what"] for each in lines] for host, lines in found.items()} == {
        "h2": [
            f"{lab.disk}/meet is left from an earlier run, and a rendezvous on it would hang",
            f"the folder of {lab.disk}/meet is not the same as on the first node",
        ],
        "h3": [f"the folder of {lab.disk}/meet is not the same as on the first node"],
    }
    code, found = check(lab, ["h1", "h2"], f'cluster.init_method="file://{lab.folder}/meet"')
    assert (code, found) == (0, {})
    assert not list(lab.folder.glob(".gputrain-*"))


@pytest.mark.skipif(shutil.which("nft") is None, reason="needs nft (nftables)")
def test_the_address_that_the_ranks_will_take_is_tried_not_only_one_that_leads_to_a_host(lab: SshLab) -> None:
    pair = lab.hosts[1:3]
    files = {host: lab.folder / f"hosts.{host.name}" for host in pair}
    before = {host: file.read_text() for host, file in files.items()}
    try:
        for host, other in (pair, pair[::-1]):
            own = host.address.rpartition(".")[2]
            host.run("ip", "address", "add", f"fd00::{own}/64", "dev", host.interface, "nodad")
            files[host].write_text(f"{before[host]}fd00::{other.address.rpartition('.')[2]} {other.name}\n")
            chain = "table ip only_ssh {\nchain received {\ntype filter hook input priority 0\n"
            host.run("nft", f"{chain}iifname {host.interface} tcp dport != 22 drop\n}}\n}}")
        code, found = check(lab, [host.name for host in pair])
    finally:
        for host in pair:
            files[host].write_text(before[host])
            host.run("nft", "delete", "table", "ip", "only_ssh", check=False)
            host.run("ip", "address", "flush", "dev", host.interface, "scope", "global", "to", "fd00::/64", check=False)
    assert code == 3
    assert {host: [each["what"] for each in lines] for host, lines in found.items()} == {
        host.name: [f"{host.name} cannot reach {other.name} at {other.address} (no answer within 4 s)"]
        for host, other in (pair, pair[::-1])
    }


def test_missing_and_busy_gpus_of_a_host_are_reported_with_their_holder(lab: SshLab, tmp_path: Path) -> None:
    start_up(lab, "h2", f"export LD_LIBRARY_PATH={fake_driver(tmp_path)} {MACHINE}={tmp_path}/claims")
    nodes = ('{host="h1", cpu_ranks=1}', '{host="h2", gpus=2}', '{host="h3", gpus=1}')
    # On the host itself: a claim is seen in its network namespace.
    hold = (
        "import os, sys\nfrom trainer.host.gpu_claims import claim_gpus\n"
        f"with claim_gpus(['GPU-bbbb'], 'llm-7', shared=False, environ={{'{MACHINE}': '{tmp_path}/claims'}}):\n"
        "    print(os.getpid(), flush=True)\n    sys.stdin.read()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": lab.environ}
    with lab.hosts[1].start(sys.executable, "-c", hold, **pipes) as holder:
        assert holder.stdout is not None
        pid = int(holder.stdout.readline())
        code, found = check(lab, ["h1"], f"cluster.nodes=[{', '.join(nodes)}]")
        holder.communicate("")
    assert code == 3
    reported = [each["what"] for each in found["h2"]]
    assert any(line.startswith("GPU 0 is in use by ") for line in reported), reported
    assert any(line.startswith(f"GPU 1 is in use by run llm-7 (pid {pid} of ") for line in reported), reported
    assert "torch 2.13.0+cpu is built for CPUs only" in reported
    (missing,) = [each for each in found["h3"] if each["check"] == "GPUs"]
    assert missing["what"] == "there is no GPU 0; it has no NVIDIA driver on this machine; CPU ranks work"
    assert (missing["fix"], missing["key"]) == ("gputrain gpus --hosts h3", "cluster.nodes[2].gpus")
