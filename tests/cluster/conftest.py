from __future__ import annotations

import shutil
import subprocess
import tempfile
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
def environ(server: SshServer) -> Iterator[dict[str, str]]:
    """Environment with the server's ssh configuration and a separate folder for connection sockets."""
    folder = Path(tempfile.mkdtemp(prefix="gt-", dir="/tmp"))  # short: a socket's path has 108 bytes
    yield {"GPUTRAIN_SSH": server.command, "XDG_RUNTIME_DIR": str(folder)}
    for line in (server.folder / "ssh_config").read_text().splitlines():
        if line.startswith("Host ") and "*" not in line:
            connections = Ssh({"GPUTRAIN_SSH": server.command, "XDG_RUNTIME_DIR": str(folder)})
            command = connections.command_line(line.split()[1])
            subprocess.run(
                [*command[: command.index("-T")], "-O", "exit", *command[command.index("--") :]], check=False
            )
    shutil.rmtree(folder)


@pytest.fixture
def ssh(environ: dict[str, str]) -> Iterator[Ssh]:
    connections = Ssh(environ)
    yield connections
    connections.close()


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a libnvidia-ml.so.1 that reports a driver with two GPUs."""
    return fake_driver(tmp_path_factory.mktemp("nvml"))
