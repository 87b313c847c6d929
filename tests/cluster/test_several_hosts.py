"""What ``gputrain plan`` prints, run on three hosts of a network as a person would: one command on each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from host_recipe import ENDLESS, ENVIRON, as_process, check_rank, events, is_training, recipe
from network_namespaces import LIMIT_S, NamespaceHost, network, require_namespaces, wait_until

INTERFACES = {"h1": "eth0", "h2": "ens3", "h3": "enp1s0f1"}


@dataclass
class NamespaceCluster:
    hosts: list[NamespaceHost]
    folder: Path
    """Of this test, seen by all hosts."""
    started: dict[NamespaceHost, subprocess.Popen[str]] = field(default_factory=dict)

    def plan(
        self, ranks: Sequence[int], *words: str, by: str = "name", task: dict[str, Any] | None = None, **train: Any
    ) -> str:
        """Return what ``gputrain plan`` prints on the first host."""
        (self.folder / "recipe.toml").write_text(
            recipe([getattr(host, by) for host in self.hosts], ranks, task=task, **train)
        )
        command = [sys.executable, "-m", "gputrain_tui", "plan", "recipe.toml", *words]
        return self.hosts[0].run(*command, cwd=self.folder, env=ENVIRON).stdout

    def home(self, host: NamespaceHost) -> Path:
        """The folder in which a host's command is typed."""
        path = self.folder / host.name
        path.mkdir(exist_ok=True)
        return path

    def start(self, host: NamespaceHost, *words: str, **environ: str) -> None:
        with (self.home(host) / "output").open("w") as output:
            self.started[host] = host.start(
                *words, cwd=self.home(host), env=ENVIRON | environ, stdout=output, stderr=subprocess.STDOUT
            )

    def start_all(self, shell: str) -> None:
        """Paste each command of ``gputrain plan --shell`` into a shell of its host, which the line above it names."""
        lines = shell.splitlines()
        for title, command in zip(lines[::2], lines[1::2], strict=True):
            (host,) = (host for host in self.hosts if f", {host.name}:" in title or f", {host.address}:" in title)
            self.start(host, "sh", "-c", as_process(command))

    def wait(self) -> dict[str, int]:
        """Wait for all commands; exit codes by host."""
        return {host.name: process.wait(LIMIT_S) for host, process in self.started.items()}

    def output(self, host: NamespaceHost) -> str:
        return (self.home(host) / "output").read_text()

    def last_line(self, host: NamespaceHost) -> str:
        return self.output(host).splitlines()[-1]

    @property
    def record(self) -> Path:
        return self.folder / "record"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[NamespaceHost]]:
    require_namespaces()
    with network(tmp_path_factory.mktemp("network"), INTERFACES) as running:
        yield running


@pytest.fixture
def cluster(hosts: list[NamespaceHost], tmp_path: Path) -> Iterator[NamespaceCluster]:
    started = NamespaceCluster(hosts, tmp_path)
    yield started
    for process in started.started.values():
        if process.poll() is None:
            process.kill()
            process.wait()
    for host in hosts:
        wait_until(lambda host=host: not host.processes(), f"no process is left on {host.name}")


def check_record(cluster: NamespaceCluster, ranks: Sequence[int]) -> None:
    """Every host has recorded its ranks and no others are there, and all of them trained together to the end."""
    first = 0
    checksums = set()
    record = cluster.record
    written = {path.stem for path in (record / "events").glob("[0-9]*.ndjson")}
    assert written == {str(rank) for rank in range(sum(ranks))}
    for node, (host, count) in enumerate(zip(cluster.hosts, ranks, strict=True)):
        for local in range(count):
            place = {"host": host.name, "node": node, "local_rank": local, "interface": host.interface}
            checksums.add(check_rank(record, first + local, **place))
        result = json.loads((record / "nodes" / f"{node}.json").read_text())
        assert (result["host"], result["exit_code"]) == (host.name, 0)
        first += count
    assert len(checksums) == 1


def test_commands_pasted_on_three_hosts_train_together_though_names_lead_to_the_loopback(
    cluster: NamespaceCluster,
) -> None:
    ranks = [2, 1, 3]
    shell = cluster.plan(ranks, "--shell", "--run-dir", "record")
    assert "tcp://h1:" in shell
    assert "--distributed-world-size 6 --distributed-gpus 3 --distributed-rank 3" in shell.splitlines()[-1]
    cluster.start_all(shell)
    assert cluster.wait() == {"h1": 0, "h2": 0, "h3": 0}, [cluster.output(host) for host in cluster.hosts]
    check_record(cluster, ranks)


@pytest.mark.parametrize("init_method", ["file", pytest.param("env", marks=pytest.mark.slow)])
def test_a_plan_as_json_is_argv_and_environment_of_every_host(cluster: NamespaceCluster, init_method: str) -> None:
    url = {"file": f"file://{cluster.folder}/rendezvous", "env": "env://"}[init_method]
    ranks = [1, 1, 2]
    words = ("--json", "--run-dir", "record", "--set", f"cluster.init_method={url}")
    plan = json.loads(cluster.plan(ranks, *words, by="address"))
    assert (plan["world_size"], [node["first_rank"] for node in plan["nodes"]]) == (4, [0, 1, 2])
    for host, node in zip(cluster.hosts, plan["nodes"], strict=True):
        assert node["host"] == host.address
        cluster.start(host, *node["argv"], **node["env"])
    assert cluster.wait() == {"h1": 0, "h2": 0, "h3": 0}, [cluster.output(host) for host in cluster.hosts]
    check_record(cluster, ranks)
    assert not (cluster.folder / "rendezvous").exists()


def test_ranks_of_a_host_that_never_comes_are_named_on_the_others(cluster: NamespaceCluster) -> None:
    cluster.start_all("\n".join(cluster.plan([1, 1, 2], "--shell", join_timeout=6).splitlines()[:4]))
    assert cluster.wait() == {"h1": 1, "h2": 1}
    for host in cluster.hosts[:2]:
        line = cluster.last_line(host)
        assert "ranks 2, 3 of 4 did not join within 6 s at tcp://h1:" in line
        assert "on h1), 1 (pid " in line
        assert "Traceback" not in cluster.output(host)


def test_a_link_that_goes_down_ends_every_host_with_the_name_of_the_lost_peer(cluster: NamespaceCluster) -> None:
    endless = ENDLESS | {"distributed_timeout": 4}
    cluster.start_all(cluster.plan([1, 1, 2], "--shell", "--run-dir", "record", **endless))
    firsts = dict(zip(cluster.hosts, [0, 1, 2], strict=True))
    processes = list(cluster.started.values())
    wait_until(lambda: all(is_training(cluster.record, rank) for rank in firsts.values()), "they train", processes)
    lost = cluster.hosts[2]
    lost.link("down")
    try:
        assert cluster.wait() == {"h1": 1, "h2": 1, "h3": 1}
    finally:
        lost.link("up")
    for host in cluster.hosts[:2]:
        assert "no report from ranks 2, 3 on h3" in cluster.last_line(host)
    assert "h3 has lost the other machines: its interface enp1s0f1 is down" in cluster.last_line(lost)
    for rank in firsts.values():
        failures = [event for event in events(cluster.record, rank) if event["type"] == "failure"]
        assert [failure["kind"] for failure in failures] in (["lost_peer"], [])  # its node may have ended it before


def test_hosts_that_may_not_reach_each_other_are_named_before_training(cluster: NamespaceCluster) -> None:
    h1, h2, h3 = cluster.hosts
    for host, other in ((h2, h3), (h3, h2)):
        host.run("ip", "route", "add", "unreachable", other.address)
    try:
        cluster.start_all(cluster.plan([1, 1, 1], "--shell"))
        assert cluster.wait() == {"h1": 1, "h2": 1, "h3": 1}
    finally:
        for host, other in ((h2, h3), (h3, h2)):
            host.run("ip", "route", "del", "unreachable", other.address)
    for host in cluster.hosts:
        line = cluster.last_line(host)
        assert f"h2 cannot reach h3 (rank 2) at {h3.address} (No route to host)" in line
        assert f"h3 cannot reach h2 (rank 1) at {h2.address} (No route to host)" in line
        assert "Traceback" not in cluster.output(host)
    assert "training" not in cluster.output(h1)


@pytest.mark.slow
def test_a_host_that_cannot_reach_the_first_one_fails_before_the_others_time_out(cluster: NamespaceCluster) -> None:
    h2 = cluster.hosts[1]
    # Long enough for the other two to join on a loaded machine; the way is gone before anybody starts.
    shell = cluster.plan([1, 1, 1], "--shell", join_timeout=15)
    h2.run("ip", "route", "del", "10.77.0.0/24")
    try:
        cluster.start_all(shell)
        assert cluster.started[h2].wait(LIMIT_S) == 1
        assert cluster.started[cluster.hosts[0]].poll() is None, "the others still wait for it"
        assert cluster.wait() == {"h1": 1, "h2": 1, "h3": 1}
    finally:
        h2.run("ip", "route", "add", "10.77.0.0/24", "dev", h2.interface)
    assert "there is no route from h2 to rank 0 at h1:" in cluster.last_line(h2)
    assert "Network is unreachable" in cluster.last_line(h2)
    assert "rank 1 of 3 did not join within 15 s" in cluster.last_line(cluster.hosts[0])


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_that_is_killed_is_named_by_its_own_host_and_its_machine_by_the_others(
    cluster: NamespaceCluster, rank: int
) -> None:
    cluster.start_all(cluster.plan([1, 1, 2], "--shell", "--run-dir", "record", **ENDLESS))
    where = {0: 0, 3: 2}[rank]
    processes = list(cluster.started.values())
    wait_until(lambda: is_training(cluster.record, rank), "it trains", processes)
    pids = [event["pid"] for event in events(cluster.record, rank) if "pid" in event]
    os.kill(pids[-1], 9)
    codes = cluster.wait()
    assert all(codes.values())
    for index, host in enumerate(cluster.hosts):
        if index != where:
            lost = "h1 (rank 0) is down" if rank == 0 else "no report from"
            assert lost in cluster.last_line(host)
            assert ["h1", "", "h3"][where] in cluster.last_line(host)


@pytest.mark.slow
def test_the_error_of_a_rank_is_reported_on_every_host(cluster: NamespaceCluster) -> None:
    cluster.start_all(cluster.plan([1, 1, 2], "--shell", task={"fault": "raise", "fault_rank": 3, "fault_step": 3}))
    assert cluster.wait() == {"h1": 1, "h2": 1, "h3": 1}
    for host in cluster.hosts:
        assert "rank 3 on h3" in cluster.last_line(host)
        assert "ArithmeticError: the answer is not 42" in cluster.last_line(host)


@pytest.mark.slow
def test_an_interface_that_is_not_there_is_refused_with_those_that_are(cluster: NamespaceCluster) -> None:
    plan = json.loads(cluster.plan([1, 1, 1], "--json", join_timeout=30))
    for host, node in zip(cluster.hosts, plan["nodes"], strict=True):
        cluster.start(host, *node["argv"], **node["env"], GLOO_SOCKET_IFNAME="eth0")
    codes = cluster.wait()
    assert codes.pop("h1") == 1
    assert set(codes.values()) <= {1, 2}  # the first of the two, and those that got its report before their own check
    assert 2 in codes.values()
    lines = [
        cluster.last_line(host).partition("GLOO_SOCKET_IFNAME is 'eth0', but the interfaces of ")[2]
        for host in cluster.hosts
    ]
    assert all(line.startswith(("h2 are ", "h3 are ")) for line in lines)


def test_a_nameserver_that_does_not_answer_delays_a_run_and_does_not_end_it(
    cluster: NamespaceCluster, tmp_path: Path
) -> None:
    (tmp_path / "resolv.conf").write_text("nameserver 10.77.0.200\n")
    for host in cluster.hosts:
        host.run("mount", "--bind", str(tmp_path / "resolv.conf"), "/etc/resolv.conf")
        # Packets to the nameserver leave, and nobody says that there is none.
        host.run("ip", "neigh", "replace", "10.77.0.200", "lladdr", "02:00:00:00:00:99", "dev", host.interface)
    try:
        ranks = [1, 1, 1]
        cluster.start_all(cluster.plan(ranks, "--shell", "--run-dir", "record", by="address"))
        assert cluster.wait() == dict.fromkeys(INTERFACES, 0), cluster.output(cluster.hosts[0])
        check_record(cluster, ranks)
        log = (cluster.record / "logs" / "0.log").read_text()
        assert "timed out after" in log, "the first attempt fails while names are looked up"
    finally:
        for host in cluster.hosts:
            host.run("umount", "/etc/resolv.conf")
