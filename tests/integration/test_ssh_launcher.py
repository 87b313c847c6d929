"""The ssh launcher with a stand-in for ssh that runs everything on this machine, or does what a broken host does."""

from __future__ import annotations

import select
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from waiting import until

from gputrain_tui.hosts.ssh import Ssh
from gputrain_tui.lifecycle.launchers.ssh_launcher import SshLauncher, forwarded_environment
from gputrain_tui.lifecycle.leftovers import processes_of
from gputrain_tui.lifecycle.node_process import NodeProcess
from gputrain_tui.plan.planner import Plan, PlannedNode, rendezvous_port
from trainer.contract.record import RunDir, read_stack_request
from trainer.contract.stop_level import StopLevel
from trainer.host.ports import FIRST_PORT, LAST_PORT

LIMIT_S = 60.0
HERE = 'while [ "$1" != -- ]; do shift; done; shift 2; exec sh -c "$*"'
"""Runs the command that ssh gets on this machine."""
STARTS_NOTHING = """for mark; do :; done
printf '%s{"call": 1, "kind": "started", "name": "", "offset": 0, "bytes": 2}\\n{}' "$mark"; sleep 600"""
PRINTS = "import os, sys; print(sys.argv[1:], os.environ.get('NCCL_DEBUG'), os.getcwd(), flush=True)"
WAITS = f"{PRINTS}; sys.stdin.read()"
"""Until the end of its lease."""


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    found = RunDir(tmp_path / "runs" / "20260101-000000-run")
    for folder in (found.events, found.logs, found.checkpoints, found.nodes):
        folder.mkdir(parents=True)
    ssh_is(HERE, tmp_path, monkeypatch)
    return found


def ssh_is(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "ssh"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("GPUTRAIN_SSH", str(path))


def node(*argv: str, env: Mapping[str, str] | None = None, workdir: str = "", setup: str = "") -> PlannedNode:
    words = list(argv) or [sys.executable, "-c", PRINTS]
    return PlannedNode(
        node=0, host="far", first_rank=0, ranks=[0], devices=["cpu"], argv=words, env=dict(env or {}),
        workdir=workdir, setup=setup,
    )  # fmt: skip


def launch(planned: PlannedNode, run_dir: RunDir) -> NodeProcess:
    return SshLauncher().launch(planned, run_dir, env={}, leased=True)


def ended(process: NodeProcess) -> int:
    """Wait for the end of a node; return its exit code."""
    while (code := process.poll()) is None:
        assert select.select([process], [], [], LIMIT_S)[0], "nothing comes of the node"
    process.close()
    return code


@pytest.mark.parametrize(
    ("ssh", "planned", "line"),
    [
        (HERE, node(workdir="/no/such folder"), "there is no folder /no/such folder"),
        (HERE, node("/no/such/python"), "there is no interpreter /no/such/python"),
        (HERE, node(setup="module load nothing"), "setup ended with exit code 127"),
        (HERE, node(setup='echo "$HOME"; exit 3'), str(Path.home())),
        ("exec yes", node(), "it printed more than 1 MiB, but no answer"),
        ("yes >&2", node(), "it printed more than 1 MiB on its standard error"),
        pytest.param(
            "exec sleep 60 >&2", node(), "it closed its standard output before it answered", marks=pytest.mark.slow
        ),
        ("exit 127", node(), "there is no python3"),
        (STARTS_NOTHING, node(), "it sent no valid answer"),
        ("echo 'Host key verification failed.' >&2; exit 255", node(), "its host key is not known yet: run"),
    ],
)
def test_a_node_that_cannot_be_started_is_one_line(
    run_dir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ssh: str, planned: PlannedNode, line: str
) -> None:
    ssh_is(ssh, tmp_path, monkeypatch)
    process = launch(planned, run_dir)
    assert ended(process) not in (0, None)
    assert (process.host_error or run_dir.node_log(0).read_text().splitlines()[-1]).startswith(line)
    assert processes_of(run_dir.path) == []


def test_words_folder_setup_and_environment_reach_the_node_as_they_are(run_dir: RunDir, tmp_path: Path) -> None:
    words = ["$(touch owned)", "-oProxyCommand=x", "a 'b' \"c\"", "\x1b]0;title\x07", f"{run_dir.path}/checkpoints"]
    folder = tmp_path / "a $folder"
    folder.mkdir()
    planned = node(
        sys.executable,
        "-c",
        PRINTS,
        *words,
        env={"NCCL_DEBUG": "$(id)"},
        workdir=str(folder),
        setup="export A=1",
    )
    assert ended(launch(planned, run_dir)) == 0
    assert run_dir.node_log(0).read_text() == f"{words} $(id) {folder}\n"
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("level", [StopLevel.NOW, StopLevel.KILL])
def test_a_node_that_is_stopped_or_killed_is_gone(run_dir: RunDir, level: StopLevel) -> None:
    process = launch(node(sys.executable, "-c", WAITS), run_dir)
    while process.identity is None:
        assert select.select([process], [], [], LIMIT_S)[0]
        assert process.poll() is None
    if level == StopLevel.KILL:
        process.kill()
    else:
        process.stop(level)
    assert ended(process) < 0
    assert processes_of(run_dir.path) == []


def test_a_node_outlives_its_connection_and_another_supervisor_adopts_it(run_dir: RunDir) -> None:
    first = launch(node(sys.executable, "-c", WAITS), run_dir)
    while first.identity is None:
        assert select.select([first], [], [], LIMIT_S)[0]
        first.poll()
    second = SshLauncher().adopt(node(sys.executable, "-c", WAITS), run_dir, None, leased=True)
    assert second is not None
    while second.identity is None:
        assert select.select([second], [], [], LIMIT_S)[0]
        assert second.poll() is None
    assert second.identity == first.identity
    second.kill()
    assert ended(second) == ended(first) < 0
    assert processes_of(run_dir.path) == []


def test_a_request_for_stacks_reaches_the_host(run_dir: RunDir) -> None:
    process = launch(node(sys.executable, "-c", WAITS), run_dir)
    while process.identity is None:
        assert select.select([process], [], [], LIMIT_S)[0]
        assert process.poll() is None
    SshLauncher().request_stacks([process], "7")
    until(lambda: read_stack_request(run_dir) == "7")
    process.kill()
    assert ended(process) < 0


def test_the_environment_that_travels_is_a_list() -> None:
    environ = {
        "NCCL_DEBUG": "INFO",
        "GLOO_X": "1",
        "OMP_NUM_THREADS": "2",
        "HF_HOME": "/h",
        "CUDA_LAUNCH_BLOCKING": "1",
        "GPUTRAIN_RUN_ID": "r",
    }
    staying = {"CUDA_VISIBLE_DEVICES": "0", "GPUTRAIN_HOME": "/h", "GPUTRAIN_RUN": "/r", "PATH": "/bin", "LANG": "C"}
    assert forwarded_environment(environ | staying) == environ


@pytest.mark.parametrize("script", [HERE, "exit 255", "exit 1"], ids=["answers", "no host", "no python"])
def test_the_first_hosts_free_port_gets_into_every_command_also_if_that_host_does_not_answer(
    tmp_path: Path, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    ssh_is(script, tmp_path, monkeypatch)
    url = "tcp://far:29600"
    nodes = [node("python", "--distributed-init-method", url), node("python", "--distributed-init-method", url)]
    before = Plan(world_size=2, init_method=url, backend="gloo", launcher="ssh", nodes=nodes, finds_port=True)
    placed = SshLauncher().place(before, run_dir)
    assert FIRST_PORT <= (rendezvous_port(placed) or 0) <= LAST_PORT
    assert [each.argv[-1] for each in placed.nodes] == [placed.init_method] * 2
    assert msgspec.json.decode(run_dir.plan.read_bytes(), type=Plan) == placed
    fixed = msgspec.structs.replace(before, finds_port=False)
    assert SshLauncher().place(fixed, run_dir) is fixed
    idle = Ssh().take_idle(["far"])
    for channel in idle:
        channel.close()
    assert len(idle) == (script == HERE), "the launch takes this connection"
