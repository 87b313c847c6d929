"""``gputrain run`` on hosts of a network of namespaces, each with an sshd and a disk of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from host_recipe import ENDLESS, TESTS, check_rank, events, is_training, recipe, torch_free_recipe
from lone_kill import kill_without_successor
from network_namespaces import LIMIT_S, NamespaceHost, wait_until
from ssh_lab import PYTHONPATH, SshLab, require_ssh, ssh_lab, start_sshd
from taken_names import TakenNames
from text_cache import with_task_options

from gputrain_tui.history.record_tail import last_step
from gputrain_tui.hosts.host_agent import LEASE_S
from trainer.contract.record import RunDir

INTERFACES = {"h0": "eth0", "h1": "ens3", "h2": "eth0", "h3": "enp1s0f1"}
NAMES = ["h1", "h2", "h3"]
RANKS = [2, 1, 1]
PLACES = [("h1", 0, 0), ("h1", 0, 1), ("h2", 1, 0), ("h3", 2, 0)]
"""Host, node and local rank of each rank."""


@pytest.fixture(scope="module")
def running_lab() -> Iterator[SshLab]:
    require_ssh()
    folder = Path(tempfile.mkdtemp(prefix="gt-", dir="/tmp"))
    with ssh_lab(folder, INTERFACES, start_up={"h2": "echo what a start-up file prints"}) as lab:
        yield lab
    shutil.rmtree(folder)


class SshCluster:
    """The lab, and the commands of one test."""

    def __init__(self, lab: SshLab, *, names: Sequence[str] = NAMES, ranks: Sequence[int] = RANKS) -> None:
        self.lab = lab
        self.names, self.ranks = names, ranks
        self.h0, self.h1, self.h2, self.h3 = lab.hosts[:4]
        self.typed_on = self.h0
        """It has no rank."""
        self.started: list[subprocess.Popen[str]] = []
        self.home = lab.disk_of(self.h0) / "home"
        """Of the launching host, as it is seen from outside."""
        self._before = self._runs()
        """Those of tests before."""

    def _runs(self) -> set[Path]:
        folder = self.home / "runs"
        return set(folder.iterdir()) if folder.is_dir() else set()

    def write_starting_script(self) -> None:
        """A recipe whose script starts two ranks on each of the hosts."""
        script = TESTS / "support" / "starting_script.py"
        nodes = "".join(f'[[cluster.nodes]]\nhost = "{name}"\ncpu_ranks = 2\n' for name in self.names)
        train = f'[train]\nscript = "{script}"\nargs = ["spawn", "30"]\nstarts_ranks = true\n'
        (self.lab.folder / "recipe.toml").write_text(nodes + train)

    def write(self, *lines: str, **options: Any) -> None:
        with_task_options(self.home)
        place = f'[cluster]\nenv = {{ PYTHONPATH = "{PYTHONPATH}" }}\n' + "".join(f"{line}\n" for line in lines)
        (self.lab.folder / "recipe.toml").write_text(
            recipe(self.names, self.ranks, **options).replace("[train]", f"{place}[train]")
        )

    def write_torch_free(self, *lines: str, steps: int = 0) -> None:
        """A recipe of ranks that train nothing, for some steps or until a signal ends them."""
        place = f'env = {{ PYTHONPATH = "{PYTHONPATH}" }}'
        (self.lab.folder / "recipe.toml").write_text(
            torch_free_recipe(self.names, self.ranks, place, *lines, steps=steps)
        )

    def use(self, names: Sequence[str], ranks: Sequence[int]) -> None:
        """Train on some of the hosts only."""
        self.names, self.ranks = names, ranks

    def start(self, *words: str, **environ: str) -> subprocess.Popen[str]:
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        env = self.lab.environ | environ
        self.started.append(self.typed_on.start(*GPUTRAIN, *words, cwd=self.lab.folder, env=env, **options))
        return self.started[-1]

    def run(self, *words: str, **environ: str) -> tuple[int, str]:
        """Type a command; return its exit code and its output."""
        process = self.start(*words, **environ)
        output, _ = process.communicate(timeout=LIMIT_S)
        return process.returncode, output

    @property
    def record(self) -> Path:
        """The newest run directory of the launching host, of this test."""
        return max(self._runs() - self._before)

    def train(self, *processes: subprocess.Popen[str]) -> None:
        """Wait until all ranks do."""
        wait_until(
            lambda: (
                self._runs() > self._before and all(is_training(self.record, rank) for rank in range(sum(self.ranks)))
            ),
            "all ranks train",
            processes,
        )

    def status(self) -> dict[str, Any]:
        return json.loads((self.record / "status.json").read_text())

    def findings(self, kind: str) -> list[str]:
        """The states of what was found of a kind, in their order."""
        return [event.get("state", "raised") for event in events(self.record, "run") if event.get("kind") == kind]

    def logins(self) -> list[int]:
        """How often each of the hosts with ranks was connected to."""
        logs = [self.lab.folder / f"sshd.{host.name}.log" for host in (self.h1, self.h2, self.h3)]
        return [log.read_text().count("Accepted publickey") for log in logs]

    def supervisor(self) -> int:
        return int(self.status()["supervisor"]["pid"])

    def on(self, host: NamespaceHost) -> dict[int, str]:
        """What runs on a host, its sshd left out."""
        return {pid: words for pid, words in host.processes().items() if not words.startswith("sshd: /usr/sbin/sshd")}

    def nothing_is_left(self) -> bool:
        return not any(self.on(host) for host in self.lab.hosts)

    def check_record(self) -> None:
        """The record here has what the hosts have, byte for byte, and every step of every rank once."""
        found = 0
        for host in (host for host in self.lab.hosts if host.name in self.names):
            theirs = self.lab.disk_of(host) / "home" / "runs" / self.record.name
            for folder in ("events", "logs", "digest", "nodes"):
                for path in (theirs / folder).iterdir():
                    assert (self.record / folder / path.name).read_bytes() == path.read_bytes(), path
                    found += 1
        ours = [path for name in ("events", "logs", "digest", "nodes") for path in (self.record / name).iterdir()]
        assert found == len([path for path in ours if path.stem not in ("run", "supervisor")])


GONE_S = 5.0
GPUTRAIN = (sys.executable, "-m", "gputrain_tui")
GPUTRAIN_SCRIPT = (str(Path(sys.executable).with_name("gputrain")),)


@pytest.fixture
def cluster(running_lab: SshLab) -> Iterator[SshCluster]:
    found = SshCluster(running_lab)
    yield found
    for process in found.started:
        if process.poll() is None:  # the test has failed
            process.kill()
    try:
        wait_until(found.nothing_is_left, "no process is left on any host")
    finally:
        for host in running_lab.hosts:
            for pid in found.on(host):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    shutil.rmtree(running_lab.folder / "shared", ignore_errors=True)
    for host in running_lab.hosts:
        shutil.rmtree(running_lab.disk_of(host) / "home", ignore_errors=True)


@pytest.mark.slow
def test_ranks_that_the_script_of_each_host_starts_are_those_of_the_run(cluster: SshCluster) -> None:
    cluster.write_starting_script()
    code, text = cluster.run("run", "recipe.toml")
    assert code == 0, text
    cluster.check_record()
    for rank in range(6):
        assert [event["state"] for event in events(cluster.record, rank) if "state" in event][-1] == "finished"
        assert f"rank {rank} of 6: " in RunDir(cluster.record).rank_log(rank).read_text()
        assert last_recorded(cluster.record, rank) == 30


def check_steps(record: Path, rank: int) -> int:
    """Every step of a rank is recorded once; return the last."""
    done = 0
    for event in events(record, rank):
        if event["type"] == "step":
            assert event["step"] - event.get("steps", 1) == done
            done = event["step"]
    return done


def test_hosts_that_share_a_disk_write_one_record_and_train_to_equal_parameters(cluster: SshCluster) -> None:
    cluster.typed_on = cluster.h1  # which has ranks as well
    cluster.home = cluster.lab.folder / "shared"
    cluster.use(["h1", "h2"], [2, 1])
    cluster.write()
    code, output = cluster.run("run", "recipe.toml", GPUTRAIN_HOME=str(cluster.home))
    assert code == 0, output
    assert "finished in " in output
    checksums = {
        check_rank(cluster.record, rank, host=host, node=node, local_rank=local, interface=INTERFACES[host])
        for rank, (host, node, local) in enumerate(PLACES[:3])
    }
    assert len(checksums) == 1
    assert not any((cluster.lab.disk_of(host) / "home").exists() for host in cluster.lab.hosts)


def test_a_detached_run_outlives_connection_and_supervisor_is_adopted_stopped_and_resumed(cluster: SshCluster) -> None:
    cluster.use(["h2", "h3"], [2, 1])
    cluster.write(**ENDLESS)
    before = cluster.logins()
    code, name = cluster.run("run", "recipe.toml", "--detach")
    assert code == 0, name
    cluster.train()
    assert [now - then for now, then in zip(cluster.logins(), before, strict=True)] == [0, 1, 1], "the checks' go on"
    (client,) = (pid for pid, words in cluster.on(cluster.h0).items() if words.startswith("ssh ") and " h2 " in words)
    os.kill(client, signal.SIGKILL)
    broken = time.time()
    wait_until(lambda: recorded_after(cluster.record, 0, broken), "the record of h2 goes on")
    cluster.h3.link("down")
    # It is raised after five seconds without an answer, so the link is down for as long.
    wait_until(lambda: cluster.findings("host_silent") == ["raised"], "host_silent is raised for h3")
    cluster.h3.link("up")
    wait_until(lambda: cluster.findings("host_silent") == ["raised", "cleared"], "it is heard of again")
    assert cluster.findings("stalled") == []
    mended = time.time()
    wait_until(lambda: recorded_after(cluster.record, 2, mended), "the record of h3 goes on")
    kill_without_successor(cluster.supervisor())
    wait_until(lambda: not any("ssh " in words for words in cluster.on(cluster.h0).values()), "its connections end")
    code, output = cluster.run("stop", "last")
    assert code == 0, output
    assert "the supervisor of " in output
    assert "is stopped at step " in output
    last = {check_steps(cluster.record, rank) for rank in range(3)}
    assert len(last) == 1
    cluster.check_record()
    kept = cluster.lab.disk_of(cluster.h2) / "home" / "runs" / cluster.record.name / "checkpoints"
    assert f"saved h2:{cluster.lab.disk}/home/runs/{cluster.record.name}/checkpoints/step_" in output
    (checkpoint,) = kept.glob("step_*.pt")
    assert int(checkpoint.stem.removeprefix("step_")) in last
    (until,) = (step + 3 for step in last)
    words = ("--set", f"train.max_updates={until}", "--set", "train.stop_time=0")
    code, output = cluster.run("run", "--resume", "last", *words)
    assert code == 0, output
    assert [event["step"] for event in events(cluster.record, 2) if event["type"] == "step"][-1] == until
    cluster.check_record()


def test_a_killed_rank_starts_all_hosts_again_and_ctrl_c_saves_on_all_of_them(cluster: SshCluster) -> None:
    cluster.use(["h1", "h3"], [2, 1])
    cluster.write("max_restarts = 1", **ENDLESS, save_every_updates=50)
    command = cluster.start("run", "recipe.toml")
    cluster.train(command)
    wait_until(lambda: list(cluster.lab.disk_of(cluster.h1).glob("home/runs/*/checkpoints/step_*.pt")), "one is saved")
    os.kill(pids(cluster.record, 2)[0], signal.SIGKILL)
    wait_until(lambda: len(pids(cluster.record, 2)) == 2, "it is started again", [command])
    again = time.time()
    wait_until(
        lambda: all(stepped_after(cluster.record, rank, again) for rank in range(3)), "all train again", [command]
    )
    command.send_signal(signal.SIGINT)
    output, _ = command.communicate(timeout=LIMIT_S)
    assert command.returncode == 130, output
    assert cluster.status()["restarts"] == 1
    assert "saved h1:" in output
    assert {result["exit_code"] for result in results(cluster)} == {130}
    assert len({result["stopped_at"] for result in results(cluster)}) == 1
    cluster.check_record()


def recorded_after(record: Path, rank: int, moment: float) -> bool:
    """Whether a rank has recorded something since a moment, Unix seconds."""
    return bool(events(record, rank)) and events(record, rank)[-1]["time"] > moment


def stepped_after(record: Path, rank: int, moment: float) -> bool:
    """Whether a rank has recorded a step since a moment, Unix seconds."""
    return any(event["type"] == "step" and event["time"] > moment for event in events(record, rank))


def pids(record: Path, rank: int) -> list[int]:
    """The processes that a rank has been, oldest first."""
    return list(dict.fromkeys(event["pid"] for event in events(record, rank) if "pid" in event))


def results(cluster: SshCluster) -> list[dict[str, Any]]:
    return [json.loads((cluster.record / "nodes" / f"{node}.json").read_text()) for node in range(len(cluster.names))]


def test_a_rank_that_hangs_on_a_host_is_seen_in_its_stacks_and_ends_the_run_everywhere(cluster: SshCluster) -> None:
    cluster.use(["h1", "h2"], [2, 1])
    cluster.write("stall_timeout = 10", **ENDLESS)
    command = cluster.start("run", "recipe.toml")
    cluster.train(command)
    spawned = [event for event in events(cluster.record, "node-1") if event.get("state") == "spawned"]
    (pid,) = (event["pid"] for event in spawned if event["rank"] == 2)
    os.kill(pid, signal.SIGSTOP)
    begun = time.monotonic()
    code, output = cluster.run("stacks", "last", "--json")
    took_s = time.monotonic() - begun
    answer = json.loads(output)
    assert (code, answer["silent"]) == (1, [])
    assert {rank: group["problem"] for group in answer["groups"] for rank in group["ranks"]} == {
        0: "", 1: "", 2: "the process is stopped (state T)",
    }  # fmt: skip
    assert took_s < LIMIT_S
    output, _ = command.communicate(timeout=LIMIT_S)
    assert command.returncode == 1
    assert re.search(r"rank 2 on h2 hangs after step \d+: the process is stopped \(state T\)", output), output
    assert cluster.nothing_is_left()


@pytest.mark.parametrize(
    ("killed", "cause"),
    [
        ("rank", "the process was ended by SIGKILL"),
        pytest.param("agent", "node 1 was killed by SIGKILL before rank 2 finished", marks=pytest.mark.slow),
    ],
)
def test_what_is_killed_without_a_supervisor_makes_the_run_a_failed_one_and_is_its_cause(
    cluster: SshCluster, killed: str, cause: str
) -> None:
    cluster.use(["h1", "h2"], [2, 1])
    cluster.write_torch_free()
    code, name = cluster.run("run", "recipe.toml", "--detach")
    assert code == 0, name
    cluster.train()
    kill_without_successor(cluster.supervisor())
    spawned = [event for event in events(cluster.record, "node-1") if event.get("state") == "spawned"]
    (pid,) = (event["pid"] for event in spawned if event["rank"] == 2)
    agents = [pid for pid, words in cluster.h2.processes().items() if "-m trainer" in words]
    for each in agents if killed == "agent" else [pid]:
        os.kill(each, signal.SIGKILL)
    code, output = cluster.run("stop", "last")
    assert code == 0, output
    assert f" has failed: {cause}" in output
    assert cluster.status()["exit_code"] == 1


@pytest.mark.timing
def test_a_lost_host_ends_the_run_on_all_others_and_the_host_ends_its_ranks_itself(cluster: SshCluster) -> None:
    cluster.use(["h1", "h3"], [2, 1])
    cluster.write("host_timeout = 8", **ENDLESS)
    command = cluster.start("run", "recipe.toml")
    cluster.train(command)
    cluster.h3.link("down")
    cut = time.monotonic()
    output, _ = command.communicate(timeout=LIMIT_S)
    assert command.returncode == 1
    assert re.search(r"h3 with rank 2 lost: no contact for \d+ s", output), output
    assert not cluster.on(cluster.h1)
    wait_until(lambda: not any("trainer" in words for words in cluster.on(cluster.h3).values()), "h3 ends its ranks")
    ended_s = time.monotonic() - cut
    cluster.h3.link("up")
    print(ended_s)
    assert ended_s <= 2 * 8, "the others may start again then"
    assert cluster.status()["exit_code"] == 1


@contextmanager
def cut_between(host: NamespaceHost, other: NamespaceHost, *, both: bool) -> Iterator[None]:
    """Drop what goes from a host to another one, on their own connections only: ssh comes from a third one.

    Not ``both``: the connections that exist, and new ones of the first host; the other one can make new ones.
    """
    if both:
        host.run("ip", "route", "add", "blackhole", other.address)
        try:
            yield
        finally:
            host.run("ip", "route", "del", "blackhole", other.address)
        return
    connections = host.run("ss", "-Htn", "dst", other.address).stdout.split("\n")
    ports = [line.split()[3].rpartition(":")[2] for line in connections if line]
    rules = [f"tcp sport {{ {', '.join(ports)} }} drop", "tcp flags & (syn | ack) == syn drop"]
    host.run("nft", "add", "table", "inet", "cut")
    host.run("nft", "add", "chain", "inet", "cut", "out", "{ type filter hook output priority 0 ; }")
    for rule in rules:
        host.run("nft", "add", "rule", "inet", "cut", "out", "ip", "daddr", other.address, *rule.split())
    try:
        yield
    finally:
        host.run("nft", "delete", "table", "inet", "cut")


@pytest.mark.parametrize(
    ("both", "distributed_timeout", "cause"),
    [
        # The stall ends it, and the time-out of gloo.
        (True, 600, "h2 and h3 cannot reach each other on tcp"),
        # What is told of one direction is a table of tests/unit/test_cut_network.py.
        pytest.param(False, 4, "h2 cannot reach h3 on tcp (h3 can reach h2)", marks=pytest.mark.slow),
    ],
)
def test_a_network_that_is_cut_between_two_hosts_is_named_and_nothing_of_gloo(
    cluster: SshCluster, both: bool, distributed_timeout: int, cause: str
) -> None:
    if not both and shutil.which("nft") is None:
        pytest.skip("needs nft")
    cluster.use(["h2", "h3"], [1, 1])
    cluster.write("host_timeout = 8", **ENDLESS, distributed_timeout=distributed_timeout)
    command = cluster.start("run", "recipe.toml")
    cluster.train(command)
    with cut_between(cluster.h2, cluster.h3, both=both):
        output, _ = command.communicate(timeout=LIMIT_S)
    assert command.returncode == 1, output
    cause += "; a firewall, a route or an MTU between them changed"
    assert f"\n  {cause}" in output, output
    (failure,) = [event for event in events(cluster.record, "run") if event["type"] == "failure"]
    assert failure["kind"] == "network"
    assert failure["message"].startswith(cause)
    assert cluster.status()["message"] == failure["message"]
    for rank in range(2):
        recorded = [event for event in events(cluster.record, rank) if event["type"] == "failure"]
        assert not any("gloo" in event["message"] or ".cc:" in event["message"] for event in recorded), recorded
    code, runs = cluster.run("runs", "--json")
    assert (code, json.loads(runs)[0]["message"]) == (0, failure["message"])
    assert cluster.nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("supervisor", ["lives", "is killed"])
def test_a_restart_waits_for_a_lost_host_and_spends_no_try_on_it(cluster: SshCluster, supervisor: str) -> None:
    cluster.write("host_timeout = 8", "max_restarts = 1", **ENDLESS, save_every_updates=100)
    command = cluster.start("run", "recipe.toml")
    cluster.train(command)
    cluster.h3.link("down")
    run_events = cluster.record / "events" / "run.ndjson"
    wait_until(lambda: '"node_lost"' in run_events.read_text(), "h3 is lost", [command])
    lost = time.time()
    if supervisor == "is killed":
        wait_until(lambda: cluster.findings("awaits_hosts"), "it is waited for", [command])
        os.kill(cluster.supervisor(), signal.SIGKILL)
    wait_until(lambda: time.time() - lost > 20, "twenty seconds have passed", [command])
    assert cluster.status().get("restarts", 0) == 0
    cluster.h3.link("up")
    back = time.time()
    wait_until(lambda: recorded_after(cluster.record, 3, back), "rank 3 trains again", [command])
    command.send_signal(signal.SIGINT)
    output, _ = command.communicate(timeout=LIMIT_S)
    assert command.returncode == 130, output
    assert cluster.status()["restarts"] == 1
    assert cluster.findings("host_silent")[-1] == "cleared"
    assert cluster.findings("awaits_hosts")[-1] == "cleared", "it trains again"


@pytest.mark.parametrize("supervisor", [pytest.param("lives", marks=pytest.mark.slow), "is gone"])
def test_stop_works_from_a_host_that_sees_the_run_and_not_its_supervisor(cluster: SshCluster, supervisor: str) -> None:
    cluster.home = cluster.lab.folder / "shared"
    cluster.use(["h1", "h2"], [2, 1])
    cluster.write_torch_free()
    code, output = cluster.run("run", "recipe.toml", "--detach", GPUTRAIN_HOME=str(cluster.home))
    assert code == 0, output
    cluster.train()
    if supervisor == "is gone":
        kill_without_successor(cluster.supervisor())
    cluster.typed_on = cluster.h2
    code, output = cluster.run("stop", "last", GPUTRAIN_HOME=str(cluster.home))
    assert code == 0, output
    assert ("on h0 is gone; taking over" in output) == (supervisor == "is gone")
    assert " is stopped; processes left: none" in output


@pytest.mark.timing
def test_a_command_that_is_killed_with_its_supervisor_leaves_nothing_on_any_host(cluster: SshCluster) -> None:
    cluster.write_torch_free()
    command = cluster.start("run", "recipe.toml")
    cluster.train(command)
    first = cluster.supervisor()
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: cluster.supervisor() != first, "another one takes over", [command])
    taken_over = time.time()
    wait_until(lambda: recorded_after(cluster.record, 3, taken_over), "they train on", [command])
    for pid in (command.pid, cluster.supervisor()):
        os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    command.communicate()
    wait_until(cluster.nothing_is_left, "no process is left on any host")
    assert time.monotonic() - began < GONE_S


def test_a_run_goes_on_when_the_sshd_of_a_host_is_restarted_with_all_its_connections(cluster: SshCluster) -> None:
    cluster.write_torch_free()
    command = cluster.start("run", "recipe.toml")
    cluster.train(command)
    for pid, words in cluster.h3.processes().items():
        if words.startswith("sshd"):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    time.sleep(LEASE_S + 1)  # without a sshd, longer than a node waits whose launching side is gone
    start_sshd(cluster.lab, cluster.h3)
    again = time.time()
    wait_until(lambda: recorded_after(cluster.record, 3, again), "its record goes on", [command])
    command.send_signal(signal.SIGINT)
    output, _ = command.communicate(timeout=LIMIT_S)
    assert command.returncode == 130, output
    cluster.check_record()


@pytest.mark.slow
def test_the_cause_of_a_run_that_lost_a_connection_has_the_reason_for_which_it_is_not_opened_again(
    cluster: SshCluster,
) -> None:
    cluster.use(["h2", "h3"], [1, 1])
    cluster.write("host_timeout = 8", **ENDLESS)
    command = cluster.start("run", "recipe.toml")
    cluster.train(command)
    known = cluster.lab.folder / "known_hosts"
    before = known.read_text()
    keys = dict(line.split(" ", 1) for line in before.splitlines())
    h2, h3 = (f"{host.name},{host.address}" for host in (cluster.h2, cluster.h3))
    known.write_text("".join(f"{name} {key}\n" for name, key in {**keys, h3: keys[h2]}.items()))
    try:
        for pid, words in cluster.h3.processes().items():
            if words.startswith("sshd: root"):
                os.kill(pid, signal.SIGKILL)
        output, _ = command.communicate(timeout=LIMIT_S)
    finally:
        known.write_text(before)
    assert command.returncode == 1, output
    assert "h3: its host key has changed" in output


@pytest.mark.slow
def test_a_stop_waits_for_a_silent_host_no_longer_than_its_time_limit(cluster: SshCluster) -> None:
    cluster.use(["h2", "h3"], [1, 1])
    cluster.write_torch_free("host_timeout = 8")
    command = cluster.start("run", "recipe.toml")
    cluster.train(command)
    cluster.h3.link("down")
    try:
        wait_until(lambda: cluster.findings("host_silent"), "h3 is silent", [command])
        begun = time.monotonic()
        code, output = cluster.run("stop", "last")
        assert (code, output.rpartition("; ")[2]) == (0, "processes left: none on the hosts that answer\n"), output
        assert time.monotonic() - begun < 40, "the ranks of a host that answers may take 65 s"
        assert command.wait(LIMIT_S) == 130
    finally:
        cluster.h3.link("up")


@pytest.mark.parametrize(
    ("stopped", "silences"),
    [("ssh", ["raised", "cleared"]), pytest.param("supervisor", [], marks=pytest.mark.slow)],
)
def test_what_was_stopped_on_the_launching_host_blames_no_host_of_a_run_that_has_finished(
    cluster: SshCluster, stopped: str, silences: list[str]
) -> None:
    cluster.use(["h1", "h2"], [1, 1])
    cluster.write_torch_free(steps=200 if stopped == "ssh" else 600)
    command = cluster.start("run", "recipe.toml")
    cluster.train(command)
    to_h2 = [pid for pid, words in cluster.h0.processes().items() if words.startswith("ssh") and " h2 " in words]
    pids = to_h2 if stopped == "ssh" else [cluster.supervisor()]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    if stopped == "ssh":
        wait_until(lambda: cluster.findings("host_silent"), "h2 is silent", [command])
        ended = "h2 has finished"
        wait_until(lambda: not any("-m trainer" in words for words in cluster.h2.processes().values()), ended)
    else:
        lock = RunDir(cluster.record).lock
        wait_until(lambda: time.time() - lock.stat().st_mtime > 7, "it hears nothing for seven seconds", [command])
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    output, _ = command.communicate(timeout=LIMIT_S)
    assert command.returncode == 0, output
    assert "is silent" not in output
    assert cluster.findings("host_silent") == silences


@pytest.mark.slow
def test_agents_without_a_supervisor_train_on_and_end_ranks_that_stand_still(
    cluster: SshCluster,
) -> None:
    cluster.write(**ENDLESS | {"distributed_timeout": 4})
    code, output = cluster.run("run", "recipe.toml", "--detach")
    assert code == 0, output
    cluster.train()
    kill_without_successor(cluster.supervisor())
    alone = time.time()
    theirs = cluster.lab.disk_of(cluster.h3) / "home" / "runs" / cluster.record.name
    wait_until(lambda: recorded_after(theirs, 3, alone + 6), "they train for longer than they may be idle")
    for rank, (host, _, _) in enumerate(PLACES):
        names = {each.name: each for each in cluster.lab.hosts}
        os.kill(pids(cluster.lab.disk_of(names[host]) / "home" / "runs" / theirs.name, rank)[-1], signal.SIGSTOP)
    wait_until(cluster.nothing_is_left, "no process is left on any host")
    code, output = cluster.run("stop", "last")
    assert "processes left: none" in output
    cluster.check_record()


def test_hosts_a_round_trip_of_40_ms_apart_train_are_followed_and_stop_with_their_work_saved() -> None:
    require_ssh()
    folder = Path(tempfile.mkdtemp(prefix="gt-", dir="/tmp"))
    interfaces = dict.fromkeys(["h0", "h1", "h2", "h3"], "eth0")
    with ssh_lab(folder, interfaces, round_trip_s={"h2": 0.04}) as lab:
        ping = "import socket, time; began = time.monotonic(); socket.create_connection(('h2', 22)); "
        ping += "print(time.monotonic() - began)"
        took_s = [float(lab.hosts[1].run(sys.executable, "-c", ping).stdout) for _ in range(3)]
        assert min(took_s) >= 0.04
        cluster = SshCluster(lab, names=["h1", "h2"], ranks=[1, 1])
        cluster.write(**ENDLESS)
        command = cluster.start("run", "recipe.toml")
        try:
            cluster.train(command)
            moment = time.time()
            wait_until(lambda: recorded_after(cluster.record, 1, moment), "the record of h2 goes on", [command])
            command.send_signal(signal.SIGINT)
            output, _ = command.communicate(timeout=LIMIT_S)
        finally:
            command.kill()
        assert command.returncode == 130, output
        assert "saved h1:" in output
        assert len({check_steps(cluster.record, rank) for rank in range(2)}) == 1
        cluster.check_record()
        wait_until(cluster.nothing_is_left, "no process is left on any host")
    shutil.rmtree(folder)


@pytest.mark.slow
def test_sixteen_hosts_are_launched_followed_and_stopped_and_nothing_is_left_on_any() -> None:
    require_ssh()
    names = [f"n{number}" for number in range(1, 17)]
    folder = Path(tempfile.mkdtemp(prefix="gt-", dir="/tmp"))
    with ssh_lab(folder, dict.fromkeys(["n0", *names], "eth0")) as lab:
        cluster = SshCluster(lab, names=names, ranks=[1] * 16)
        for _ in range(3):
            cluster.write(**ENDLESS | {"join_timeout": 300})
            code, output = cluster.run("run", "recipe.toml", "--detach")
            assert code == 0, output
            cluster.train()
            code, output = cluster.run("stop", "last")
            assert code == 0, output
            assert "is stopped at step " in output
            assert len({check_steps(cluster.record, rank) for rank in range(16)}) == 1
            cluster.check_record()
            wait_until(cluster.nothing_is_left, "no process is left on any host")
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.parametrize("on_stall", ["stop", "restart"])
def test_one_of_sixteen_ranks_asleep_in_code_of_the_user_is_named_by_its_line(on_stall: str) -> None:
    require_ssh()
    names = ["n1", "n2", "n3", "n4"]
    folder = Path(tempfile.mkdtemp(prefix="gt-", dir="/tmp"))
    with ssh_lab(folder, dict.fromkeys(["n0", *names], "eth0")) as lab:
        cluster = SshCluster(lab, names=names, ranks=[4] * 4)
        lines = (f'on_stall = "{on_stall}"', "stall_timeout = 60", "max_restarts = 1")
        train = ENDLESS if on_stall == "stop" else {"max_updates": 40}
        times = {"join_timeout": 300, "distributed_timeout": 600, "save_every_updates": 10}
        cluster.write(*lines, **train | times, task={"asleep": 9})
        command = cluster.start("run", "recipe.toml")
        cluster.train(command)
        slept = wait_until(
            lambda: next(iter(lab.disk_of(lab.hosts[3]).glob("home/runs/*/slept")), None), "it sleeps", [command]
        )
        began = slept.stat().st_mtime
        if on_stall == "stop":
            output, _ = command.communicate(timeout=2 * LIMIT_S)
            gone_s = time.time() - began
            assert cluster.nothing_is_left()
            print(gone_s)
            assert gone_s < 90
            assert command.returncode == 1
            assert re.search(r"rank 9 on n3 hangs after step 19: \S*host_task.py:\d+ in _fall_asleep", output), output
            _, output = cluster.run("stacks", "last")
            first, _, rest = output.partition("\n\n")
            assert re.search(r"^rank 9 on n3: \S*/host_task.py:\d+ in _fall_asleep\n", first, re.MULTILINE), output
            assert re.match(r"ranks 0 to 8, 10 to 15 on n1, n2, n3, n4: synchronising gradients", rest), output
        else:
            output, _ = command.communicate(timeout=3 * LIMIT_S)
            print(time.time() - began)
            assert command.returncode == 0, output
            ended = re.search("attempt 1 ended: (.*?); attempt 2 begins", " ".join(output.split()))
            assert ended is not None, output
            print(ended[1])
            assert re.search("rank 9.* on n3.* hangs after step 19", ended[1])
            assert {last_recorded(cluster.record, rank) for rank in range(16)} == {40}
            cluster.check_record()
    shutil.rmtree(folder)


def last_recorded(record: Path, rank: int) -> int:
    found = last_step(RunDir(record), rank)
    return 0 if found is None else found.step


def listed_step(cluster: SshCluster) -> int | None:
    """The step of the newest run in the list of runs."""
    entry = json.loads(cluster.run("runs", "--json")[1])[0]
    return None if entry["step"] is None else int(entry["step"])


class SmallDisk:
    """A run of a script of 300 steps that waits before two of them, with a small disk on one host."""

    def __init__(self, cluster: SshCluster, host: NamespaceHost) -> None:
        self.cluster, self.host, folder = cluster, host, cluster.lab.folder
        self.small = cluster.lab.disk / f"small-{host.name}"
        (cluster.lab.disk_of(host) / self.small.name).mkdir(exist_ok=True)
        host.run("mount", "-t", "tmpfs", "-o", "size=40m", "none", self.small)
        self.gates = {79: folder / "gate", 200: folder / "gate-end"}
        nodes = ""
        for name in ("h1", "h2"):
            home = f'env = {{ GPUTRAIN_HOME = "{self.small}" }}\n' if name == host.name else ""
            nodes += f'[[cluster.nodes]]\nhost = "{name}"\ncpu_ranks = 1\n{home}'
        args = json.dumps(["300", *(word for step, gate in self.gates.items() for word in (str(step), str(gate)))])
        script = TESTS / "faults" / "steps_script.py"
        (folder / "recipe.toml").write_text(f'name = "full"\n{nodes}[train]\nscript = "{script}"\nargs = {args}\n')

    def await_step(self, step: int, process: subprocess.Popen[str]) -> None:
        gate = self.gates[step]
        wait_until(lambda: all(gate.with_suffix(f".{rank}").exists() for rank in range(2)), f"step {step}", [process])

    def fill(self) -> None:
        self.host.run("sh", "-c", f"cat /dev/zero > {self.small}/others; true")

    def empty(self) -> None:
        self.host.run("rm", f"{self.small}/others")

    def close(self) -> None:
        self.host.run("umount", "-l", self.small)
        for path in self.cluster.lab.folder.glob("gate*"):
            path.unlink()


@contextmanager
def own_file_system(cluster: SshCluster, image: Path) -> Iterator[Path]:
    """Keep the part of the record of h2 on a file system that only it has; write a recipe of h1 and h2."""
    if missing := [name for name in ("mkfs.ext4", "fsfreeze") if shutil.which(name) is None]:
        pytest.skip(f"needs {' and '.join(missing)} (e2fsprogs, util-linux)")
    disk, recipe_file = cluster.lab.disk / "own", cluster.lab.folder / "recipe.toml"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    cluster.use(["h1", "h2"], [1, 1])
    cluster.write_torch_free("host_timeout = 5", steps=1500)
    env = f'host = "h2"\nenv = {{ GPUTRAIN_HOME = "{disk}", PYTHONPATH = "{PYTHONPATH}" }}'
    recipe_file.write_text(recipe_file.read_text().replace('host = "h2"', env))
    (cluster.lab.disk_of(cluster.h2) / disk.name).mkdir(exist_ok=True)
    cluster.h2.run("mount", "-o", "loop", image, disk)
    try:
        yield disk
    finally:
        cluster.h2.run("umount", "-l", disk)


@pytest.mark.slow
def test_a_file_system_that_stands_still_for_longer_than_a_host_may_be_silent_ends_no_ranks(
    cluster: SshCluster, tmp_path: Path
) -> None:
    with own_file_system(cluster, tmp_path / "image") as disk:
        command = cluster.start("run", "recipe.toml")
        cluster.train(command)
        cluster.h2.run("fsfreeze", "--freeze", disk)
        try:
            wait_until(lambda: cluster.findings("host_silent"), "h2 is silent", [command])
            time.sleep(10)  # longer than its agent waits for a beat
        finally:
            cluster.h2.run("fsfreeze", "--unfreeze", disk)
        output, _ = command.communicate(timeout=LIMIT_S)
    assert command.returncode == 0, output
    assert {last_recorded(cluster.record, rank) for rank in range(2)} == {1500}


@pytest.mark.slow
def test_a_host_whose_disk_stands_still_before_the_ranks_have_met_is_not_lost(
    cluster: SshCluster, tmp_path: Path
) -> None:
    with own_file_system(cluster, tmp_path / "image") as disk:
        env = f'env = {{ GPUTRAIN_HOME = "{disk}", PYTHONPATH = "{PYTHONPATH}" }}'
        cluster.write("host_timeout = 5", join_timeout=LIMIT_S)
        recipe_file = cluster.lab.folder / "recipe.toml"
        recipe_file.write_text(recipe_file.read_text().replace('host = "h2"', f'host = "h2"\n{env}'))
        command = cluster.start("run", "recipe.toml")
        outside = Path(f"/proc/{cluster.h2.holder}/root{disk}")
        wait_until(lambda: list(outside.glob("runs/*/agents/*/agent.json")), "h2's agent has started", [command])
        cluster.h2.run("fsfreeze", "--freeze", disk)
        try:
            waits = lambda: [each for each in events(cluster.record, 0) if each["type"] == "joining"]  # noqa: E731
            longer_s = 10.0  # than the run waits for a silent host, and than that host's agent waits for a beat
            wait_until(lambda: waits() and waits()[-1]["waited_ms"] > 1e3 * longer_s, "rank 0 waits", [command])
        finally:
            cluster.h2.run("fsfreeze", "--unfreeze", disk)
        output, _ = command.communicate(timeout=LIMIT_S)
    assert command.returncode == 0, output
    assert "the disk of its run directory stands still" in output


@pytest.mark.slow
def test_a_disk_of_another_host_that_becomes_read_only_is_told_while_the_run_goes_on(
    cluster: SshCluster, tmp_path: Path
) -> None:
    with own_file_system(cluster, tmp_path / "image") as disk:
        script = TESTS / "faults" / "steps_script.py"
        text = (cluster.lab.folder / "recipe.toml").read_text()
        text = re.sub(r"script = .*\nargs = .*", f'script = "{script}"\nargs = ["100000"]', text)
        (cluster.lab.folder / "recipe.toml").write_text(text)
        command = cluster.start("run", "recipe.toml")
        cluster.train(command)
        cluster.h2.run("mount", "-o", "remount,abort", disk)
        wait_until(lambda: cluster.findings("record_incomplete"), "the gap is told", [command])
        assert cluster.run("stop", "last")[0] == 0
        output, _ = command.communicate(timeout=LIMIT_S)
    assert command.returncode == 130, output
    told = r"^warning: h2's record ends at step \d+: Read-only file system; no checkpoint is saved on that disk"
    assert re.search(told, output, re.MULTILINE), output
    assert re.search(r"^stopped in .*; h2's record ends at step \d+: Read-only file system", output, re.MULTILINE), (
        output
    )


@pytest.mark.parametrize("room", ["none", pytest.param("again", marks=pytest.mark.slow)])
def test_a_full_disk_of_another_host_is_told_while_the_run_goes_on_and_all_steps_are_counted(
    cluster: SshCluster, room: str
) -> None:
    disk = SmallDisk(cluster, cluster.h2)
    try:
        process = cluster.start("run", "recipe.toml")
        disk.await_step(79, process)
        wait_until(lambda: last_recorded(cluster.record, 1) == 79, "the record here has step 79", [process])
        disk.fill()
        disk.gates[79].touch()
        wait_until(lambda: cluster.findings("record_incomplete") == ["raised"], "the gap is told", [process])
        disk.await_step(200, process)
        if room == "again":
            disk.empty()
            wait_until(lambda: cluster.findings("record_incomplete")[-1] == "cleared", "it is over", [process])
        else:
            wait_until(lambda: listed_step(cluster) == 200, "the list counts what the ranks have done", [process])
        disk.gates[200].touch()
        output, _ = process.communicate(timeout=LIMIT_S)
    finally:
        disk.close()
    assert process.returncode == 0, output
    assert "stalled" not in output
    assert "critical" not in output
    [told] = re.findall(r"^warning: (h2's record ends at step (\d+): its disk is full)", output, re.MULTILINE)
    closing = r"^finished in .*, 300 steps, 4,800 samples"
    status = cluster.status()
    assert status["step"] == 300
    if room == "again":
        assert re.search(closing + "$", output, re.MULTILINE), output
        assert "is written again and lacks no step" in output
        assert last_recorded(cluster.record, 1) == 300
        assert "message" not in status
    else:
        assert 79 <= int(told[1]) == last_recorded(cluster.record, 1) < 300
        assert re.search(f"{closing}; {told[0]}$", output, re.MULTILINE), output
        assert status["message"] == f"the end of the record is missing: {told[0]}"
        assert [found["kind"] for found in status["findings"]] == ["record_incomplete"]


@pytest.mark.parametrize("room", [pytest.param("none", marks=pytest.mark.slow), "again"])
def test_a_full_disk_of_the_launching_host_is_told_and_all_steps_are_counted(cluster: SshCluster, room: str) -> None:
    disk = SmallDisk(cluster, cluster.h0)
    reason = "the disk of the run directory is full"
    try:
        process = cluster.start("run", "recipe.toml", GPUTRAIN_HOME=str(disk.small))
        disk.await_step(79, process)
        [record] = Path(f"/proc/{cluster.h0.holder}/root{disk.small}/runs").iterdir()
        wait_until(lambda: all(last_recorded(record, rank) == 79 for rank in range(2)), "step 79 is here", [process])
        disk.fill()
        disk.gates[79].touch()
        disk.await_step(200, process)
        wait_until(lambda: reason in (record / "gaps" / "1.json").read_text(), "the copy has ended", [process])
        if room == "again":
            disk.empty()
            wait_until(lambda: all(last_recorded(record, rank) >= 199 for rank in range(2)), "it goes on", [process])
        disk.gates[200].touch()
        output, _ = process.communicate(timeout=LIMIT_S)
        status = json.loads((record / "status.json").read_text())
        recorded = [last_recorded(record, rank) for rank in range(2)]
    finally:
        disk.close()
    assert process.returncode == 0, output
    closing = r"^finished in .*, 300 steps, 4,800 samples"
    assert status["step"] == 300
    if room == "again":
        assert re.search(closing + "$", output, re.MULTILINE), output
        assert recorded == [300, 300]
    else:
        assert re.search(f"{closing}; {reason}: the end of the record is missing", output, re.MULTILINE), output
        assert max(recorded) < 300


def test_nothing_of_the_folders_of_the_hosts_is_executed(cluster: SshCluster, tmp_path: Path) -> None:
    """The start-up file of one host leads into the folder of the user, that of the other puts it on Python's path."""
    folder = tmp_path / "project"
    folder.mkdir()
    taken = TakenNames(folder, tmp_path / "executed")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    places = "".join(f'[[cluster.nodes]]\nhost = "{name}"\ncpu_ranks = 1\n' for name in ("h1", "h3"))
    task = '[train]\ntask = "lm"\nbatch_size = 4\nmax_updates = 3\n[task]\ndata = "text.txt"\n'
    (folder / "r.toml").write_text(f"{task}context = 16\ndim = 8\nlayers = 1\nheads = 1\nsample_bytes = 0\n{places}")
    start_up = {"h1": f"cd {folder}\n", "h3": f"export PYTHONPATH={folder}:$PYTHONPATH\n"}
    for name, line in start_up.items():
        (cluster.lab.folder / f"start_up.{name}").write_text(line)
    try:
        environ = {name: value for name, value in cluster.lab.environ.items() if name != "PYTHONPATH"}
        for words in (("gpus", "--hosts", "h1,h3"), ("check", "r.toml"), ("run", "r.toml")):
            done = cluster.typed_on.run(*GPUTRAIN_SCRIPT, *words, cwd=folder, env=environ, check=False)
            assert (taken.executed(), done.returncode) == ([], 0), done.stdout + done.stderr
    finally:
        for name in start_up:
            (cluster.lab.folder / f"start_up.{name}").write_text("")
