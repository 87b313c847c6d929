"""Host reports over a real ssh: their contents, and every way in which a host does not answer."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from ssh_server import ROOT, SshServer, free_port

from gputrain_tui.hosts.inventory import is_free, take_inventory
from gputrain_tui.hosts.ssh import Ssh
from gputrain_tui.hosts.survey import HostReport, query_host
from gputrain_tui.lifecycle.prepared import plan_with_inventories
from gputrain_tui.recipe.build import build
from trainer.contract.errors import RequestError

RECIPE = """
[[cluster.nodes]]
host = "192.0.2.77"
gpus = 1
[[cluster.nodes]]
host = "{host}"
{wants}
[train]
task = "lm"
[task]
data = "stdlib"
"""


def gputrain(environ: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gputrain_tui", *words],
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=300,
    )


def with_gpus(server: SshServer, driver: Path, name: str, before: str = "") -> str:
    """A host whose start-up file brings a driver with two GPUs."""
    setting = f'LD_LIBRARY_PATH={driver}; export LD_LIBRARY_PATH; eval "$SSH_ORIGINAL_COMMAND"'
    return server.shell(name, f"{before}\n{setting}")


def connecting(word: str) -> list[psutil.Process]:
    """Children of this process with a word in their command line."""
    return [child for child in psutil.Process().children() if any(word in part for part in child.cmdline())]


# --- answers ---------------------------------------------------------------------------------------------------------


def test_the_inventory_of_a_host_needs_nothing_installed_there(server: SshServer, ssh: Ssh, driver: Path) -> None:
    # -I and -S: neither this repository nor any package is within reach of the interpreter over there.
    bare = 'python3() { command python3 -I -S "$@"; }; eval "$SSH_ORIGINAL_COMMAND"'
    name = server.shell("bare", f"LD_LIBRARY_PATH={driver}; export LD_LIBRARY_PATH\n{bare}")
    found = query_host(name, ssh)
    assert found.problem == ""
    assert found.inventory is not None
    assert [gpu.name for gpu in found.inventory.gpus] == ["NVIDIA H100", "NVIDIA T4"]
    assert [is_free(gpu) for gpu in found.inventory.gpus] == [False, True]
    here = take_inventory()
    assert found.inventory.cpus == here.cpus
    assert found.inventory.memory.total_bytes == here.memory.total_bytes
    assert found.inventory.networks == here.networks


def test_start_up_files_that_print_are_read_over(server: SshServer, ssh: Ssh, driver: Path) -> None:
    name = with_gpus(server, driver, "chatty", 'echo "Welcome, {"; printf "no newline at the end"; echo noise >&2')
    found = query_host(name, ssh)
    assert found.inventory is not None
    assert len(found.inventory.gpus) == 2


def test_the_second_question_goes_over_the_connection_of_the_first_unless_that_has_ended(
    server: SshServer, ssh: Ssh
) -> None:
    name = server.host("again")

    def accepted() -> int:
        assert query_host(name, ssh).inventory is not None
        return (server.folder / "log").read_text().count("Accepted publickey")

    first = accepted()
    assert accepted() == first
    (connection,) = connecting("again")
    connection.kill()
    while connection.status() != psutil.STATUS_ZOMBIE:
        pass
    assert accepted() == first + 1
    ssh.close()
    assert not connecting("again")


def test_a_connection_that_the_user_shares_is_used_where_the_key_alone_is_refused(
    server: SshServer, environ: dict[str, str]
) -> None:
    with tempfile.TemporaryDirectory(prefix="gt-", dir="/tmp") as folder:  # short: a socket's path has 108 bytes
        name = server.host("second-factor", key="stranger")
        config = server.folder / "ssh_config"
        config.write_text(f"Host {name}\n  ControlPath {folder}/%C\n{config.read_text()}")
        words = [*shlex.split(server.command), "-o", f"IdentityFile={server.folder}/key", "-M", "-N", name]
        shared = subprocess.Popen(words)
        try:
            while not list(Path(folder).iterdir()):
                assert shared.poll() is None
            connections = Ssh(environ)
            assert query_host(name, connections).problem == ""
            connections.close()
            assert shared.poll() is None, "it belongs to the user"
        finally:
            shared.kill()
            shared.wait()
        assert problem(name, Ssh(environ)).startswith("it refuses the key")


def test_hosts_are_queried_in_parallel_and_listed_in_their_order(server: SshServer, ssh: Ssh) -> None:
    def query(host: str) -> str:
        together.wait(5)  # none passes before all are there
        return f"{host} answers"

    together = threading.Barrier(16)
    names = [f"node{index}" for index in range(16)]
    assert ssh.on_all(query, names) == [f"{name} answers" for name in names]


# --- failures, each one calm line ------------------------------------------------------------------------------------


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that accepts and sends nothing."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


def problem(host: str, ssh: Ssh, *, timeout_s: float = 20) -> str:
    found = query_host(host, ssh, timeout_s=timeout_s)
    assert found.inventory is None
    assert found.host == host
    assert "\n" not in found.problem
    return found.problem


def test_a_refused_key_is_reported_with_the_command_that_must_work(server: SshServer, ssh: Ssh) -> None:
    name = server.host("refused", key="stranger")
    assert problem(name, ssh) == "it refuses the key: `ssh refused true` must work without a password or passphrase"


def test_an_unknown_and_a_changed_host_key_get_different_messages(server: SshServer, ssh: Ssh) -> None:
    assert problem(server.host("unknown", alias="nobody"), ssh) == (
        "its host key is not known yet: run `ssh unknown` once"
    )
    assert problem(server.host("moved", alias="changed"), ssh) == (
        "its host key has changed: if expected, `ssh-keygen -R changed`"
    )
    assert "nobody" not in (server.folder / "known_hosts").read_text(), "it was not confirmed for the person"


def test_a_closed_port_and_a_silent_server_get_different_messages(ssh: Ssh, silent_port: int) -> None:
    assert problem(f"ssh://127.0.0.1:{free_port()}", ssh).startswith("it refuses connections")
    assert problem(f"ssh://127.0.0.1:{silent_port}", ssh) == "something listens there, but no ssh server answers"


def test_a_host_that_takes_too_long_is_given_up(ssh: Ssh, silent_port: int) -> None:
    assert problem(f"ssh://127.0.0.1:{silent_port}", ssh, timeout_s=0.2) == "it did not answer within 0.2 s"


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ('PATH=/nowhere; eval "$SSH_ORIGINAL_COMMAND"', "there is no python3"),
        ("echo gputrain-; echo '{}'", "it sent no valid answer"),
        ('eval set -- $SSH_ORIGINAL_COMMAND; echo "$5{"', "it sent no valid answer"),
        ("echo cannot allocate memory >&2; exit 3", "it failed: cannot allocate memory"),
        ("exit 3", "it failed with exit code 3"),
    ],
)
def test_a_host_that_answers_something_else_is_a_line(server: SshServer, ssh: Ssh, script: str, line: str) -> None:
    name = server.shell(f"odd{abs(hash(script)) % 10**8}", script)
    assert problem(name, ssh) == line


@pytest.mark.timing
@pytest.mark.parametrize(
    ("flood", "line"),
    [
        ("exec yes", "it printed more than 1 MiB, but no answer"),
        ("exec yes >&2", "it printed more than 1 MiB on its standard error"),
    ],
)
def test_a_host_that_floods_is_given_up_before_its_time(server: SshServer, ssh: Ssh, flood: str, line: str) -> None:
    begin = time.monotonic()
    found = query_host(server.shell(f"flood-{len(flood)}", flood), ssh, timeout_s=60)
    assert found.problem == line
    assert time.monotonic() - begin < 30
    assert not connecting("flood")


def test_leaving_ends_pending_queries(environ: dict[str, str], silent_port: int) -> None:
    connections = Ssh({**environ, "GPUTRAIN_SSH": "ssh -F /dev/null"})
    found: list[HostReport] = []
    querying = threading.Thread(target=lambda: found.append(query_host(f"ssh://127.0.0.1:{silent_port}", connections)))
    querying.start()
    while not connecting(str(silent_port)):
        assert querying.is_alive()
    connections.close()
    querying.join(5)
    assert not querying.is_alive()
    assert found[0].inventory is None


def test_without_ssh_there_is_a_line(environ: dict[str, str]) -> None:
    connections = Ssh({**environ, "GPUTRAIN_SSH": "/nowhere/ssh"})
    assert problem("gpu1", connections) == "/nowhere/ssh cannot be run: No such file or directory"
    with pytest.raises(RequestError, match=r"GPUTRAIN_SSH is 'ssh \"': No closing quotation"):
        Ssh({**environ, "GPUTRAIN_SSH": 'ssh "'})


# --- the command -----------------------------------------------------------------------------------------------------


def test_hosts_are_printed_with_the_silent_one_in_its_place(
    server: SshServer, environ: dict[str, str], driver: Path, tmp_path: Path
) -> None:
    name = with_gpus(server, driver, "gpus1")
    dead = f"ssh://127.0.0.1:{free_port()}"
    hostfile = tmp_path / "hosts"
    hostfile.write_text(f"# ours\n{name} slots=2\n127.0.0.1 port={dead.rpartition(':')[2]}\n")
    done = gputrain(environ, "gpus", "--hostfile", str(hostfile))
    assert done.returncode == 1
    assert done.stderr == "gputrain: 1 of 2 hosts could not be queried\n"
    head, first, second = done.stdout.splitlines()[:3]
    assert head.split()[:3] == ["host", "GPUs", "free"]
    assert first.split()[:3] == ["gpus1", "2", "1"]
    assert second.split()[0] == dead
    assert "it refuses connections" in second
    assert "NVIDIA H100" in done.stdout


def test_hosts_as_json_have_an_inventory_or_a_problem(server: SshServer, environ: dict[str, str], driver: Path) -> None:
    name = with_gpus(server, driver, "gpus2")
    done = gputrain(environ, "gpus", "--hosts", name, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    (host,) = json.loads(done.stdout)["hosts"]
    assert (host["host"], host["problem"]) == ("gpus2", "")
    assert [gpu["uuid"] for gpu in host["inventory"]["gpus"]] == ["GPU-aaaa", "GPU-bbbb"]


def test_there_is_no_password_prompt_even_on_a_terminal(server: SshServer, environ: dict[str, str]) -> None:
    name = server.host("keyless", key="stranger")
    primary, secondary = os.openpty()
    words = [sys.executable, "-m", "gputrain_tui", "gpus", "--hosts", name]
    done = subprocess.run(words, cwd=ROOT, env={**os.environ, **environ}, stdin=secondary, capture_output=True)
    os.close(secondary)
    assert done.returncode == 1
    assert b"it refuses the key" in done.stdout
    os.set_blocking(primary, False)
    with pytest.raises(OSError):  # nothing was written to the terminal
        os.read(primary, 1)
    os.close(primary)


# --- plans -----------------------------------------------------------------------------------------------------------


def planned(
    host: str, wants: str, environ: dict[str, str], warn: Callable[[str], None] = lambda line: None
) -> list[list[int | str]]:
    recipe = build(RECIPE.format(host=host, wants=wants), name="r.toml")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPUTRAIN_SSH", environ["GPUTRAIN_SSH"])
        try:
            planned = plan_with_inventories(recipe)
        finally:
            for channel in Ssh().take_idle([host]):
                channel.close()
    for warning in planned.warnings:
        warn(warning)
    return [node.devices for node in planned.plan.nodes]


@pytest.mark.parametrize(
    ("wants", "devices"),
    [
        ('gpus = "all"', ["GPU-aaaa", "GPU-bbbb"]),
        ('gpus = "free"', ["GPU-bbbb"]),
        ("gpus = [1]", ["GPU-bbbb"]),
        ("ranks = 2", ["GPU-aaaa", "GPU-bbbb"]),
        ("gpus = 2", [0, 1]),
        ("cpu_ranks = 1", ["cpu"]),
    ],
)
def test_a_plan_knows_the_gpus_of_another_host(
    server: SshServer, environ: dict[str, str], driver: Path, wants: str, devices: list[int | str]
) -> None:
    if not (server.folder / "planned").exists():
        with_gpus(server, driver, "planned")
    assert planned("planned", wants, environ) == [[0], devices]


def test_a_gpu_that_the_other_host_does_not_have_is_refused(
    server: SshServer, environ: dict[str, str], driver: Path
) -> None:
    name = with_gpus(server, driver, "two")
    with pytest.raises(RequestError, match=r"r.toml:7: cluster.nodes\[1\].gpus names GPU 5, but two has 0, 1"):
        planned(name, "gpus = [0, 5]", environ)


def test_an_unreachable_host_of_a_plan_is_one_line(server: SshServer, environ: dict[str, str]) -> None:
    dead = server.host("dead", port=free_port())
    with pytest.raises(RequestError, match=r"r.toml:7: cluster.nodes\[1\].gpus is 'free', but .*refuses connections"):
        planned(dead, 'gpus = "free"', environ)
    warnings: list[str] = []
    assert planned(dead, "gpus = [0, 2]", environ, warnings.append) == [[0], [0, 2]]
    assert warnings[0].endswith("its list of GPUs is used unchecked")
