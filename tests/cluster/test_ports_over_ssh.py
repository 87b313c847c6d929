"""The rendezvous over ssh at default settings: its port, and hosts whose names only the user's ssh knows."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from host_recipe import events, is_training, recipe, torch_free_recipe
from network_namespaces import LIMIT_S, wait_until
from ssh_lab import PYTHONPATH, SshLab, require_ssh, ssh_lab
from text_cache import with_task_options

INTERFACES = dict.fromkeys(("h0", "h1", "h2"), "eth0")
GPUTRAIN = (sys.executable, "-m", "gputrain_tui")
TAKER = Path(__file__).parents[1] / "support" / "port_taker.py"
URL = re.compile(r"--distributed-init-method tcp://h1:(\d+) ")


@pytest.fixture(scope="module")
def running_lab() -> Iterator[SshLab]:
    require_ssh()
    folder = Path(tempfile.mkdtemp(prefix="gt-", dir="/tmp"))
    with ssh_lab(folder, INTERFACES) as lab:
        yield lab
    shutil.rmtree(folder)


@pytest.fixture
def lab(running_lab: SshLab) -> Iterator[SshLab]:
    """After a test no process but those of ssh is on a host, and no record."""
    yield running_lab
    for host in running_lab.hosts:
        wait_until(
            lambda host=host: all(words.startswith("sshd: /usr/sbin/sshd") for words in host.processes().values()),
            f"nothing but sshd is on {host.name}",
        )
        shutil.rmtree(running_lab.disk_of(host) / "home", ignore_errors=True)


def write(lab: SshLab, *lines: str, **train: Any) -> None:
    with_task_options(lab.disk_of(lab.hosts[0]) / "home")
    place = f'[cluster]\nenv = {{ PYTHONPATH = "{PYTHONPATH}" }}\n' + "".join(f"{line}\n" for line in lines)
    text = recipe(["h1", "h2"], [1, 1], **train).replace("[train]", f"{place}[train]")
    (lab.folder / "recipe.toml").write_text(text)


def start(lab: SshLab, *words: str) -> subprocess.Popen[str]:
    """Type a command on h0, which has no rank."""
    return lab.hosts[0].start(
        *GPUTRAIN, *words, cwd=lab.folder, env=lab.environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def records(lab: SshLab) -> list[Path]:
    return sorted((lab.disk_of(lab.hosts[0]) / "home" / "runs").glob("2*"))


def commands_of(lab: SshLab) -> Mapping[str, set[str]]:
    """By host, the ports in the commands of the nodes that run there."""
    return {
        host.name: {match[1] for words in host.processes().values() if (match := URL.search(words))}
        for host in lab.hosts[1:]
    }


def logins(lab: SshLab) -> int:
    return sum((lab.folder / f"sshd.{host.name}.log").read_text().count("Accepted publickey") for host in lab.hosts)


def test_two_runs_with_the_same_first_host_have_ports_of_their_own_with_no_more_connections(lab: SshLab) -> None:
    path = f'env = {{ PYTHONPATH = "{PYTHONPATH}" }}'
    (lab.folder / "recipe.toml").write_text(torch_free_recipe(["h1", "h2"], [1, 1], path))
    before = logins(lab)
    commands = [start(lab, "run", "recipe.toml") for _ in range(2)]
    wait_until(
        lambda: len(records(lab)) == 2 and all(is_training(record, rank) for record in records(lab) for rank in (0, 1)),
        "both train",
        commands,
    )
    assert logins(lab) - before == 4, "one connection to each host of each run"
    planned = {json.loads((record / "plan.json").read_text())["init_method"] for record in records(lab)}
    found = commands_of(lab)
    assert found["h1"] == found["h2"] == {url.rpartition(":")[2] for url in planned}
    assert len(planned) == 2
    for command in commands:
        command.send_signal(signal.SIGINT)
    for command in commands:
        output, _ = command.communicate(timeout=LIMIT_S)
        assert command.returncode == 130, output


def test_a_port_that_is_taken_on_the_first_host_before_the_ranks_meet_costs_one_try(lab: SshLab) -> None:
    taken = lab.folder / "taken"
    taken.touch()
    setup = json.dumps(f'[ "$(hostname)" != h1 ] || "{sys.executable}" "{TAKER}" 1 "{taken}" "$@"')
    write(lab, f"setup = {setup}")
    command = start(lab, "run", "recipe.toml")
    output, _ = command.communicate(timeout=LIMIT_S)
    assert command.returncode == 0, output
    (port,) = taken.read_text().split()
    match = re.search(rf"port {port} of h1 was taken before the ranks met there; starting again at port (\d+)", output)
    assert match is not None, output
    assert match[1] != port
    (record,) = records(lab)
    for rank in (0, 1):
        assert sum(event.get("steps", 1) for event in events(record, rank) if event["type"] == "step") == 5


def test_hosts_whose_names_only_ssh_knows_meet_at_an_address(lab: SshLab) -> None:
    config = lab.folder / "ssh_config"
    before = config.read_text()
    aliases = [f"Host box{number}\n  HostName {lab.hosts[number].address}\n" for number in (1, 2)]
    config.write_text("".join(aliases) + before)
    write(lab, max_updates=3)
    path = lab.folder / "recipe.toml"
    path.write_text(path.read_text().replace('"h1"', '"box1"').replace('"h2"', '"box2"'))
    done = start(lab, "run", "recipe.toml")
    output, _ = done.communicate(timeout=LIMIT_S)
    config.write_text(before)
    assert done.returncode == 0, output
    (record,) = records(lab)
    plan = json.loads((record / "plan.json").read_text())
    assert [node["host"] for node in plan["nodes"]] == ["box1", "box2"]
    assert plan["init_method"].startswith(f"tcp://{lab.hosts[1].address}:")
