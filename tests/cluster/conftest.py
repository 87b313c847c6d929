from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_driver import fake_driver
from ssh_server import SSHD, SshServer, ssh_server

from gputrain_tui.hosts.ssh import Ssh


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    if SSHD is None or shutil.which("ssh-keygen") is None:
        pytest.skip("needs sshd and ssh-keygen")
    with ssh_server(tmp_path_factory.mktemp("sshd")) as running:
        yield running


@pytest.fixture(scope="module")
def environ(server: SshServer) -> dict[str, str]:
    """Environment with the server's ssh configuration."""
    return {"GPUTRAIN_SSH": server.command}


@pytest.fixture
def ssh(environ: dict[str, str]) -> Iterator[Ssh]:
    connections = Ssh(environ)
    yield connections
    connections.close()


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a libnvidia-ml.so.1 that reports a driver with two GPUs."""
    return fake_driver(tmp_path_factory.mktemp("nvml"))
