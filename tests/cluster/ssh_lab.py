"""Hosts on a network of their own that are reached over ssh: an sshd each, with its own host key and start-up file.

Each host has a disk of its own at one path that is the same on all of them, beside the files that all share.
"""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from host_recipe import TESTS
from network_namespaces import NamespaceHost, network, require_namespaces, wait_until
from ssh_server import SSHD


@dataclass(frozen=True)
class SshLab:
    hosts: list[NamespaceHost]
    folder: Path
    """Seen by all hosts; its folder ``disk`` is a disk of its own on each."""

    @property
    def disk(self) -> Path:
        return self.folder / "disk"

    def disk_of(self, host: NamespaceHost) -> Path:
        """Where a host's disk is seen from outside."""
        return self.folder / f"disk.{host.name}"

    @property
    def environ(self) -> dict[str, str]:
        """Of a command that is typed on a host."""
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        return kept | {
            "GPUTRAIN_SSH": shlex.join(["ssh", "-F", str(self.folder / "ssh_config")]),
            "GPUTRAIN_HOME": str(self.disk / "home"),
            "PYTHONPATH": PYTHONPATH,
        }


PYTHONPATH = f"{TESTS / 'support'}:{TESTS / 'cluster'}"


def require_ssh() -> None:
    """Skip where there can be no such hosts."""
    if SSHD is None or shutil.which("ssh-keygen") is None:
        pytest.skip("needs sshd and ssh-keygen (Debian: openssh-server)")
    require_namespaces()


@contextmanager
def ssh_lab(
    folder: Path,
    interfaces: Mapping[str, str],
    *,
    start_up: Mapping[str, str] | None = None,
    round_trip_s: Mapping[str, float] | None = None,
) -> Iterator[SshLab]:
    """Start hosts that reach each other over ssh, and end them with everything that runs there.

    Args:
        folder: for everything of them.
        interfaces: name of the network interface by name of the host.
        start_up: what the shell of a host runs before each command, by name of the host.
        round_trip_s: how long a packet to a host and its answer take on the way, by name of the host.
    """
    assert SSHD is not None
    Path("/run/sshd").mkdir(exist_ok=True)
    with ExitStack() as stack:
        hosts = stack.enter_context(network(folder, interfaces, round_trip_s=round_trip_s))
        _key(folder / "key")
        (folder / "known_hosts").touch()
        config = [f"Host *\n  User root\n  IdentityFile {folder}/key\n  IdentitiesOnly yes\n  IdentityAgent none"]
        config.append(f"  UserKnownHostsFile {folder}/known_hosts\n  GlobalKnownHostsFile /dev/null")
        config.append("  StrictHostKeyChecking yes\n  KexAlgorithms curve25519-sha256")
        (folder / "ssh_config").write_text("\n".join(config) + "\n")
        start_up_file = Path(pwd.getpwuid(os.getuid()).pw_dir) / ".bashrc"  # sshd sets HOME to that folder
        if not start_up_file.exists():
            start_up_file.touch()  # a mount needs a place
            stack.callback(start_up_file.unlink)
        lab = SshLab(hosts, folder)
        lab.disk.mkdir()
        for host in hosts:
            _key(folder / f"host_key.{host.name}")
            public = (folder / f"host_key.{host.name}.pub").read_text().rpartition(" ")[0]
            with (folder / "known_hosts").open("a") as known:
                known.write(f"{host.name},{host.address} {public}\n")
            (folder / f"start_up.{host.name}").write_text((start_up or {}).get(host.name, ""))
            lab.disk_of(host).mkdir()
            host.run("mount", "--bind", lab.disk_of(host), lab.disk)
            host.run("mount", "--bind", folder / f"start_up.{host.name}", start_up_file)
            words = (
                f"ListenAddress {host.address}", f"HostKey {folder}/host_key.{host.name}", "PidFile none",
                f"AuthorizedKeysFile {folder}/key.pub", "StrictModes no", "UsePAM no", "PasswordAuthentication yes",
                "KbdInteractiveAuthentication no", "PermitRootLogin yes", "UseDNS no", "PrintMotd no",
            )  # fmt: skip
            (folder / f"sshd_config.{host.name}").write_text("\n".join(words) + "\n")
            stack.callback(_end, start_sshd(lab, host))
        for host in hosts:
            wait_until(lambda host=host: "listening" in _log(folder, host), f"sshd listens on {host.name}")
        yield lab


def start_sshd(lab: SshLab, host: NamespaceHost) -> subprocess.Popen[str]:
    """Start the sshd of a host; it ends with this process."""
    log, config = lab.folder / f"sshd.{host.name}.log", lab.folder / f"sshd_config.{host.name}"
    return host.start(str(SSHD), "-D", "-E", log, "-f", config)


def _key(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)


def _log(folder: Path, host: NamespaceHost) -> str:
    path = folder / f"sshd.{host.name}.log"
    return path.read_text() if path.exists() else ""


def _end(server: subprocess.Popen[str]) -> None:
    server.kill()
    server.wait()
