"""A real sshd on the loopback with keys of its own, and the configuration with which ssh reaches it."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class SshServer:
    folder: Path
    port: int

    def host(self, name: str, *, key: str = "key", alias: str = "good", port: int = 0) -> str:
        """Give the server one more name; return it.

        Args:
            name: for ssh.
            key: file of the identity that is offered.
            alias: the name under which the host's key is looked up.
            port: its own where it is 0.
        """
        config = self.folder / "ssh_config"
        lines = (f"Port {port or self.port}", f"HostKeyAlias {alias}", f"IdentityFile {self.folder / key}")
        config.write_text(f"Host {name}\n" + "".join(f"  {line}\n" for line in lines) + config.read_text())
        return name

    def shell(self, name: str, script: str) -> str:
        """Give a host a start-up file, which gets the command as ``$SSH_ORIGINAL_COMMAND``; return the host's name."""
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        key = self.folder / f"key_{name}"
        key.unlink(missing_ok=True)  # of a test that runs again
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        with (self.folder / "authorized_keys").open("a") as keys:
            keys.write(f'command="{path}" {key.with_suffix(".pub").read_text()}')
        return self.host(name, key=key.name)

    @property
    def command(self) -> str:
        """The value of ``GPUTRAIN_SSH``."""
        return shlex.join(["ssh", "-F", str(self.folder / "ssh_config"), "-o", "ConnectTimeout=1"])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def ssh_server(folder: Path) -> Iterator[SshServer]:
    """Start sshd, and end it with every connection to it."""
    assert SSHD is not None
    Path("/run/sshd").mkdir(exist_ok=True)  # where privileges are given up, as root
    for name in ("host_key", "key", "stranger"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    (folder / "authorized_keys").write_text((folder / "key.pub").read_text())
    port = free_port()
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host_key\nPidFile none\n"
        f"AuthorizedKeysFile {folder}/authorized_keys\nStrictModes no\nUsePAM no\nPasswordAuthentication no\n"
        "KbdInteractiveAuthentication no\nPermitRootLogin yes\nUseDNS no\nPrintMotd no\nMaxStartups 100:30:200\n"
    )
    public = (folder / "host_key.pub").read_text()
    (folder / "known_hosts").write_text(f"good {public}changed {(folder / 'stranger.pub').read_text()}")
    (folder / "ssh_config").write_text(
        f"Host *\n  HostName 127.0.0.1\n  IdentitiesOnly yes\n  IdentityAgent none\n"
        f"  UserKnownHostsFile {folder}/known_hosts\n  GlobalKnownHostsFile /dev/null\n  StrictHostKeyChecking ask\n"
        "  KexAlgorithms curve25519-sha256\n"
    )
    process = subprocess.Popen([SSHD, "-D", "-E", folder / "log", "-f", folder / "sshd_config"], start_new_session=True)
    try:
        while process.poll() is None:  # until it listens
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
        assert process.poll() is None, (folder / "log").read_text()
        yield SshServer(folder, port)
    finally:
        process.terminate()
        process.wait(10)
