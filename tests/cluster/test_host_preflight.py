"""Hosts asked before a run over ssh: each line of the preflight provoked on real hosts, and nothing left on any."""

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
from pathlib import Path

import pytest
from fake_driver import fake_driver
from host_recipe import recipe
from network_namespaces import wait_until
from ssh_lab import PYTHONPATH, SshLab, require_ssh, ssh_lab

from trainer.host.gpu_claims import FOLDER, claim_gpus

INTERFACES = {f"h{number}": f"eth{number}" for number in range(1, 11)}
FAKE_TIME = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
ENV = f'cluster.env={{ PYTHONPATH = "{PYTHONPATH}" }}'


@pytest.fixture(scope="module")
def lab() -> Iterator[SshLab]:
    require_ssh()
    folder = Path(tempfile.mkdtemp(prefix="gt-", dir="/tmp"))  # short: a socket's path has 108 bytes
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
    words = [word for setting in (ENV, *settings) for word in ("--set", setting)]
    words = [sys.executable, "-m", "gputrain_tui", *command.split(), "r.toml", *words]
    done = lab.hosts[0].run(*words, cwd=lab.folder / "work", env=lab.environ, check=False)
    return done.returncode, done.stdout, done.stderr


def check(lab: SshLab, hosts: list[str], *settings: str) -> tuple[int, Mapping[str, list[dict[str, str]]]]:
    """Return the exit code of ``gputrain check``, and its errors and warnings by host."""
    code, stdout, stderr = typed(lab, "check --json", hosts, *settings)
    assert stderr == ""
    found: dict[str, list[dict[str, str]]] = {}
    for result in json.loads(stdout)["results"]:
        if result["status"] in ("error", "warning"):
            found.setdefault(result["host"], []).append(result)
    return code, found


def start_up(lab: SshLab, name: str, script: str) -> None:
    (lab.folder / f"start_up.{name}").write_text(script + "\n")


def test_three_hosts_in_order_are_checked_within_three_seconds(lab: SshLab) -> None:
    start_up(lab, "h2", 'echo "Welcome, {"; printf "no end of line"; echo noise >&2')
    check(lab, ["h1"])  # the options of the test's own task are asked for, which imports torch, and kept
    begin = time.monotonic()
    code, found = check(lab, ["h1", "h2", "h3"])
    assert (code, found) == (0, {})
    took_s = time.monotonic() - begin
    # On a quiet machine: a load is the processes that wait for a core, and they are not this test's.
    assert took_s < 3.0 or os.getloadavg()[0] > (os.cpu_count() or 1)


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
    told = {
        host: [f"{each['what']} → {each['fix']} ({each['key']})" for each in lines] for host, lines in found.items()
    }
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
        "h4": [f"there is no folder {nowhere}\x1b]0;owned\x07 → {push} (cluster.nodes[3].workdir)"],
        "h5": [f"setup ended with exit code 3: Lmod: no module cuda/99 → mend {setup} ({setup})"],
        "h6": [f"{os.path.realpath(sys.executable)} (Python "],
        "h7": ["it says more than 4 MiB, and no facts → `ssh h7 python3 --version` must work (cluster.nodes[6].host)"],
        "h8": ["what it answered are no facts of a host → `ssh h8"],
        "h9": ["there is no python3 → `ssh h9"],
        "h10": ["its host key is not known yet: run `ssh h10` once →  (cluster.nodes[9].host)"],
        "10.77.0.2": ["it is the same machine as h2 → write h2 in both nodes"],
    }
    for host, lines in expected.items():
        assert len(told[host]) >= len(lines), told[host]
        for line in lines:
            assert any(each.startswith(line) for each in told[host]), (line, told[host])
    assert set(told) == set(expected)
    assert "has no gputrain → gputrain push" in told["h6"][0]
    assert not (lab.folder / "pwned").exists()
    assert (ran, stdout) == (3, "")
    assert "gputrain: r.toml:" in stderr
    assert "h5: setup ended with exit code 3: Lmod: no module cuda/99; mend" in stderr
    assert "\x1b" not in stderr


@pytest.mark.parametrize(("offset", "status", "code"), [("+30", "warning", 0), ("-90", "error", 3)])
def test_a_clock_of_a_host_that_differs_is_a_warning_and_above_a_minute_refused(
    lab: SshLab, offset: str, status: str, code: int
) -> None:
    if FAKE_TIME is None:
        pytest.skip("needs libfaketime (Debian: libfaketime)")
    start_up(lab, "h2", f"export LD_PRELOAD={FAKE_TIME} FAKETIME={offset}s")
    ended, found = check(lab, ["h1", "h2"])
    (told,) = found.pop("h2")
    assert (ended, found, told["status"]) == (code, {}, status)
    side = "ahead of" if offset.startswith("+") else "behind"
    assert re.match(rf"its clock is \d+\.\d s {side} this machine's", told["what"])
    assert abs(float(told["what"].split()[3]) - abs(int(offset))) < 2
    assert "set-ntp true" in told["fix"]


def test_a_host_that_does_not_let_us_in_is_one_line_and_nobody_is_asked(lab: SshLab) -> None:
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
        "moved": ["its host key has changed: `ssh-keygen -R moved` if that is right"],
        "stranger": ["it refuses the key: `ssh stranger true` must work without a password"],
        "locked": ["it refuses the key: `ssh locked true` must work without a password"],
    }
    assert (code, ran, stdout) == (3, 3, "")
    assert [host for host in names if f"{host}: it" not in stderr] == []
    assert "assword:" not in stderr


def test_ways_ports_and_files_between_hosts_are_tried_before_anything_is_loaded(lab: SshLab) -> None:
    h2, h3, h4, h5 = lab.hosts[1:5]
    cut = ((h3, h4), (h4, h3), (h5, h2))
    for host, other in cut:
        host.run("ip", "route", "add", "unreachable", other.address)
    listen = "import socket; here = socket.create_server(('', 29600)); input('listening\\n')"
    listener = h2.start(sys.executable, "-c", listen, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert listener.stdout is not None
        assert listener.stdout.readline() == "listening\n"
        code, found = check(lab, ["h2", "h1", "h3", "h4", "h5"])
    finally:
        for host, other in cut:
            host.run("ip", "route", "del", "unreachable", other.address)
        listener.communicate("\n")
    assert code == 3
    (port,) = found.pop("h2")
    assert port["what"].startswith("port 29600 is in use by ")
    assert (port["key"], port["fix"]) == ("cluster.port", "set cluster.port to another one, or end that process")
    assert {host: [(each["what"], each["key"]) for each in lines] for host, lines in found.items()} == {
        "h3": [(f"h3 cannot reach h4 at {h4.address} (No route to host)", "cluster.nodes[3].host")],
        "h4": [(f"h4 cannot reach h3 at {h3.address} (No route to host)", "cluster.nodes[2].host")],
        "h5": [("there is no way from h5 to the first node h2", "cluster.nodes[0].host")],
    }
    assert "GLOO_SOCKET_IFNAME" in found["h3"][0]["fix"]

    (lab.disk_of(h2) / "meet").write_text("left")
    code, found = check(lab, ["h1", "h2", "h3"], f'cluster.init_method="file://{lab.disk}/meet"')
    (lab.disk_of(h2) / "meet").unlink()
    assert code == 3
    assert {host: [each["what"] for each in lines] for host, lines in found.items()} == {
        "h2": [
            f"{lab.disk}/meet is left from an earlier run, and ranks would wait for it in vain",
            f"the folder of {lab.disk}/meet is another one than on the first node",
        ],
        "h3": [f"the folder of {lab.disk}/meet is another one than on the first node"],
    }
    code, found = check(lab, ["h1", "h2"], f'cluster.init_method="file://{lab.folder}/meet"')
    assert (code, found) == (0, {})
    assert not list(lab.folder.glob(".gputrain-*"))


def test_gpus_of_a_host_are_there_and_free_and_else_it_says_whose_they_are(lab: SshLab, tmp_path: Path) -> None:
    environ = {FOLDER: str(tmp_path / "claims")}
    start_up(lab, "h2", f"export LD_LIBRARY_PATH={fake_driver(tmp_path)} {FOLDER}={tmp_path}/claims")
    nodes = ('{host="h1", cpu_ranks=1}', '{host="h2", gpus=2}', '{host="h3", gpus=1}')
    with claim_gpus(["GPU-bbbb"], "llm-7", shared=False, environ=environ):
        code, found = check(lab, ["h1"], f"cluster.nodes=[{', '.join(nodes)}]")
    assert code == 3
    told = [each["what"] for each in found["h2"]]
    assert any(line.startswith("GPU 0 is in use by ") for line in told), told
    assert any(line.startswith(f"GPU 1 is in use by run llm-7 (pid {os.getpid()} of ") for line in told), told
    assert "torch 2.13.0+cpu is built for CPUs only" in told
    (missing,) = [each for each in found["h3"] if each["check"] == "GPUs"]
    assert missing["what"] == "GPU 0 is not there; it has no NVIDIA driver on this machine; CPU ranks work"
    assert (missing["fix"], missing["key"]) == ("gputrain gpus --hosts h3", "cluster.nodes[2].gpus")
