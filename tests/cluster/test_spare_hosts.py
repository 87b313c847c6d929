"""A host is lost for good, on hosts of a network of namespaces: a spare takes its place, or the others go on alone."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import pytest
from host_recipe import ENDLESS, check_epoch, events
from network_namespaces import LIMIT_S, NamespaceHost, wait_until
from test_run_over_ssh import INTERFACES, SshCluster, cluster, pids, recorded_after, running_lab

__all__ = ["cluster", "running_lab"]  # fixtures

SAMPLES = 1_200
SPARE = 'spare = ["h3"]'


def lose(
    cluster: SshCluster,
    hosts: Sequence[NamespaceHost],
    *lines: str,
    names: Sequence[str] = ("h1", "h2"),
    ranks: Sequence[int] = (2, 1),
    **train: Any,
) -> tuple[int, str]:
    """Train an epoch on hosts with some ranks each, and cut some off for good after a checkpoint."""
    cluster.names, cluster.ranks = names, ranks
    settings = ("host_timeout = 8", "restart_wait = 1", "max_restarts = 1", *lines)
    gate = cluster.lab.folder / "shared" / "gate"
    task = {"gate": str(gate), "gate_after": 45, "samples": SAMPLES}
    cluster.write(*settings, **{"max_updates": 0, "max_epochs": 1, "save_every_updates": 30, "task": task} | train)
    command = cluster.start("run", "recipe.toml")
    cluster.train(command)
    wait_until(
        lambda: '"checkpoint"' in (cluster.record / "events" / "0.ndjson").read_text(), "one is saved", [command]
    )
    # At once: of two hosts the first may otherwise be given up before the other is silent.
    for cut in [host.start("ip", "link", "set", host.interface, "down") for host in hosts]:
        assert cut.wait(LIMIT_S) == 0
    gate.parent.mkdir(exist_ok=True)
    gate.touch()
    try:
        output, _ = command.communicate(timeout=2 * LIMIT_S)
        wait_until(
            lambda: not any("trainer" in words for host in hosts for words in cluster.on(host).values()),
            "they end their ranks",
        )
    finally:
        for host in hosts:
            host.link("up")
    return command.returncode, output


def check(cluster: SshCluster, hosts: Sequence[str], *, before: int = 0) -> None:
    check_epoch(cluster.record, hosts, INTERFACES, samples=SAMPLES, save_every=30, before=before)


def test_a_spare_host_that_does_not_answer_is_a_warning(cluster: SshCluster) -> None:
    cluster.names, cluster.ranks = ("h1", "h2"), (1, 1)
    cluster.write_torch_free('spare = ["h3", "nowhere"]', "max_restarts = 1", steps=5)
    for word in ("check", "run"):
        command = cluster.start(word, "recipe.toml")
        output, _ = command.communicate(timeout=LIMIT_S)
        assert command.returncode == 0, output
        assert len([line for line in output.splitlines() if "nowhere: no such host" in line]) == 1, output


def test_a_spare_host_takes_the_place_of_one_that_is_lost_for_good(cluster: SshCluster) -> None:
    code, output = lose(cluster, [cluster.h2], SPARE)
    assert code == 0, output
    assert "attempt 1 ended: h2 lost; h2 is replaced by h3; attempt 2 begins" in output
    assert "over with attempt 1: no contact with h2" in output
    assert "cleared" not in output
    check(cluster, ["h1", "h1", "h3"])
    assert cluster.findings("host_silent") == ["raised", "cleared"]
    assert [node["host"] for node in json.loads((cluster.record / "plan.json").read_text())["nodes"]] == ["h1", "h3"]


def test_the_hosts_that_are_left_go_on_alone_where_the_recipe_allows_fewer_ranks(cluster: SshCluster) -> None:
    code, output = lose(cluster, [cluster.h3], "min_ranks = 2", names=("h1", "h2", "h3"), ranks=(1, 1, 1))
    assert code == 0, output
    change = "the run goes on without h3, with 2 of 3 ranks: 8 instead of 12 samples per step, the same learning rate"
    assert f"attempt 1 ended: h3 lost; {change}; attempt 2 begins" in output
    check(cluster, ["h1", "h2"], before=3)
    assert re.search(r"finished in .* 2 of 3 ranks at the end", output)
    assert cluster.findings("host_silent") == ["raised", "cleared"]
    assert [event["world_size"] for event in events(cluster.record, "run") if event["type"] == "world"] == [2]
    code, listed = cluster.run("runs", "--json")
    (found,) = json.loads(listed)
    assert (code, found["state"], found["world_size"]) == (0, "finished", 2)
    code, output = cluster.run("logs", "last", "--rank", "2")
    assert (code, "rank 2 on h3 takes" in output) == (0, True), "the record of the lost host can be read"


@pytest.mark.parametrize("min_ranks", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_of_two_lost_hosts_one_is_replaced_and_the_other_left_out_where_that_is_allowed(
    cluster: SshCluster, min_ranks: int | None
) -> None:
    lines = [SPARE] if min_ranks is None else [SPARE, f"min_ranks = {min_ranks}"]
    code, output = lose(cluster, [cluster.h1, cluster.h2], *lines, names=("h0", "h1", "h2"), ranks=(1, 1, 1))
    text = " ".join(output.split())
    if min_ranks is None:
        assert code == 1, output
        assert re.search(
            r"h1 with rank 1 and h2 with rank 2 lost: .*; 1 spare for 2 lost hosts, so the run is not", text
        ), output
        assert "h3" not in cluster.status()["message"], "the spare is not used"
        return
    assert code == 0, output
    change = "h1 is replaced by h3; the run goes on without h2, with 2 of 3 ranks: 8 instead of 12 samples per step"
    assert re.search(f"attempt 1 ended: h1( and h2)? lost; {change}", text), output
    check(cluster, ["h0", "h3"], before=3)
    assert [node["host"] for node in json.loads((cluster.record / "plan.json").read_text())["nodes"]] == ["h0", "h3"]


@pytest.mark.slow
def test_the_ranks_are_numbered_anew_where_the_first_host_is_lost(cluster: SshCluster) -> None:
    kept = str(cluster.lab.folder / "shared" / "kept")
    code, output = lose(
        cluster, [cluster.h1], "min_ranks = 2", names=("h1", "h2", "h3"), ranks=(2, 1, 1), save_dir=kept
    )
    assert code == 0, output
    assert "the run goes on without h1, with 2 of 4 ranks: 8 instead of 16 samples per step" in output
    check(cluster, ["h2", "h3"], before=4)


@pytest.mark.slow
def test_too_few_ranks_end_the_run(cluster: SshCluster) -> None:
    code, output = lose(cluster, [cluster.h3], "min_ranks = 3", names=("h1", "h2", "h3"), ranks=(1, 1, 1))
    assert code == 1, output
    assert "2 of 3 ranks are left, but cluster.min_ranks is 3, so the run is not restarted" in output


@pytest.mark.slow
@pytest.mark.parametrize("spare", [True, False])
def test_a_run_on_other_hosts_is_taken_over_and_stopped(cluster: SshCluster, spare: bool) -> None:
    cluster.names, cluster.ranks = (["h1", "h2"], [2, 1]) if spare else (["h1", "h2", "h3"], [1, 1, 1])
    own = SPARE if spare else "min_ranks = 2"  # without h2 the rank of h3 is rank 1
    settings = (own, "host_timeout = 8", "restart_wait = 0", "max_restarts = 1")
    cluster.write(*settings, **ENDLESS, save_every_updates=50)
    code, output = cluster.run("run", "recipe.toml", "--detach")
    assert code == 0, output
    cluster.train()
    cluster.h2.link("down")
    try:
        rank = 2 if spare else 1
        wait_until(lambda: len(pids(cluster.record, rank)) == 2, "the rank is on the other host")
        moved = time.time()
        wait_until(lambda: recorded_after(cluster.record, rank, moved + 1), "it trains")
        os.kill(cluster.supervisor(), signal.SIGKILL)
        code, output = cluster.run("stop", "last")
        assert code == 0, output
        assert "is stopped at step " in output
        assert "processes left: none" in output
        assert not any("trainer" in words for words in cluster.on(cluster.h3).values())
        wait_until(
            lambda: not any("trainer" in words for words in cluster.on(cluster.h2).values()), "it ends its ranks"
        )
    finally:
        cluster.h2.link("up")


@pytest.mark.slow
def test_a_spare_host_takes_the_place_of_the_first_one_where_it_sees_the_checkpoints(cluster: SshCluster) -> None:
    code, output = lose(cluster, [cluster.h1], SPARE, save_dir=str(cluster.lab.folder / "shared" / "kept"))
    assert code == 0, output
    assert "h1 is replaced by h3; attempt 2 begins" in output
    check(cluster, ["h3", "h3", "h2"])


@pytest.mark.slow
def test_a_spare_host_is_not_used_where_the_checkpoints_are_lost_with_the_first_host(cluster: SshCluster) -> None:
    code, output = lose(cluster, [cluster.h1], SPARE)
    assert code == 1, output
    assert re.search(r"h1 did not answer within 1 s: .*; spare h3: the checkpoint \S+ is on h1 alone; set", output)


@pytest.mark.slow
def test_a_spare_host_without_the_interpreter_is_not_used(cluster: SshCluster) -> None:
    for host in (cluster.h1, cluster.h2):
        python = cluster.lab.disk_of(host) / "python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
    code, output = lose(cluster, [cluster.h2], SPARE, f'python = "{cluster.lab.disk}/python"')
    assert code == 1, output
    assert re.search(r"spare h3: there is no interpreter \S+/python; .*so the run is not restarted", output)
