"""Where the table of faults makes its runs: one machine and hosts over ssh in one lab, nodes of Slurm in another."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from host_recipe import ENDLESS, ENVIRON, events, recipe, script_recipe
from network_namespaces import NamespaceHost, wait_until
from slurm_lab import Slurm, slurm
from ssh_lab import PYTHONPATH, SshLab, ssh_lab

NAMES = ("h1", "h2", "h3")
SCRIPT = Path(__file__).with_name("fault_script.py")
SAVE_EVERY = 100
"""Steps between two checkpoints."""


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    os.kill(pid, number)


@dataclass
class Place:
    """Where runs are made: its hosts, how a command is typed there, and the nodes of a recipe."""

    name: str
    hosts: Sequence[NamespaceHost]
    typed_on: NamespaceHost
    folder: Path
    environ: dict[str, str]
    home: Path
    """``GPUTRAIN_HOME`` of the host where commands are typed, as it is seen from here."""
    node_hosts: Sequence[str | None]
    ranks: Sequence[int]
    slurm: Slurm | None = None
    daemons: frozenset[int] = frozenset()
    script: Path | None = None
    """To be run in place of the task, with the folder as its argument."""

    def write(
        self,
        table: Sequence[str] = (),
        slurm_table: Sequence[str] = (),
        *,
        task: Mapping[str, Any] | None = None,
        **train: Any,
    ) -> None:
        lines = [*table, f'env = {{ PYTHONPATH = "{PYTHONPATH}" }}']
        train = ENDLESS | {"save_every_updates": SAVE_EVERY, "distributed_timeout": 600} | train
        if self.script is None:
            text = recipe(self.node_hosts, self.ranks, task=task, **train)
            text = text.replace("[train]", "\n".join(["[cluster]", *lines, "[train]"]))
        else:
            words = f"[train]\nscript = {json.dumps(str(self.script))}\nargs = [{json.dumps(str(self.folder))}]"
            text = script_recipe(self.node_hosts, self.ranks, words, *lines)
        if self.slurm is not None:
            text += "\n".join(["[slurm]", *slurm_table]) + "\n"
        (self.folder / "recipe.toml").write_text(text)

    def start(self, *words: str) -> subprocess.Popen[str]:
        return self.typed_on.start(
            sys.executable, "-m", "gputrain_tui", *words, cwd=self.folder, env=self.environ,
            stdout=(self.folder / "output").open("w"), stderr=subprocess.STDOUT,
        )  # fmt: skip

    def processes(self, *, without: str = "") -> dict[int, str]:
        """What runs on the hosts, one perhaps left out, besides their daemons."""
        hosts = [host for host in self.hosts if host.name != without]
        found = {pid: words for host in hosts for pid, words in host.processes().items()}
        return {
            pid: words
            for pid, words in found.items()
            if pid not in self.daemons and not words.startswith(("sshd", "slurmstepd"))
        }


@dataclass
class Trial:
    """One run with a fault."""

    place: Place
    command: subprocess.Popen[str]
    record: Path
    struck: float = 0.0
    """Moment of the fault, Unix seconds."""

    def host(self, node: int) -> NamespaceHost:
        names = {host.name: host for host in self.place.hosts}
        if self.place.slurm is not None:
            return self.place.slurm.nodes[node]
        return names.get(self.place.node_hosts[node] or "", self.place.typed_on)

    def pid_of(self, rank: int) -> int:
        """The newest process of a rank."""
        spawned = [
            event
            for path in (self.record / "events").glob("node-*.ndjson")
            for event in events(self.record, path.stem)
            if event.get("state") == "spawned" and event["rank"] == rank
        ]
        return int(max(spawned, key=lambda event: float(event["time"]))["pid"])

    def agent(self, node: int) -> int:
        """The process of a node's agent: the parent of its ranks' parent, or their parent."""
        pid = self.pid_of(node)
        while "trainer" not in _words(parent := _parent(pid)) or "forkserver" in _words(parent):
            pid = parent
        return parent

    def status(self) -> dict[str, Any]:
        return dict(json.loads((self.record / "status.json").read_text()))


def start_run(place: Place, *tables: Sequence[str], task: Mapping[str, Any] | None = None, **train: Any) -> Trial:
    """Start a run of a recipe by ``Place.write``, and return it once it has a run directory."""
    known = set(place.home.glob("runs/[!.]*"))
    place.write(*tables, task=task, **train)
    command = place.start("run", "recipe.toml")
    try:
        record = wait_until(lambda: next(iter(set(place.home.glob("runs/[!.]*")) - known), None), "a run directory")
    except AssertionError:
        command.kill()
        raise
    return Trial(place, command, record)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _words(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ")


@contextmanager
def ssh_places() -> Iterator[tuple[SshLab, list[Place]]]:
    folder = Path(tempfile.mkdtemp(prefix="gt-", dir="/tmp"))
    with ssh_lab(folder, dict.fromkeys(["h0", *NAMES, "h4"], "eth0")) as lab:
        home = lab.disk_of(lab.hosts[0]) / "home"
        common: dict[str, Any] = {
            "hosts": lab.hosts, "typed_on": lab.hosts[0], "folder": folder, "environ": lab.environ, "home": home,
        }  # fmt: skip
        yield (
            lab,
            [
                Place("machine", node_hosts=[None], ranks=[3], **common),
                Place("ssh", node_hosts=NAMES, ranks=[1, 1, 1], **common),
                Place("ssh, script", node_hosts=NAMES, ranks=[1, 1, 1], script=SCRIPT, **common),
            ],
        )
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def slurm_place(name: str = "Slurm", proctrack: str = "linuxproc") -> Iterator[Place]:
    """Nodes of Slurm; with cgroups, which all clusters of the machine share, their names are of this process."""
    folder = Path(tempfile.mkdtemp(prefix="gt-", dir="/tmp"))
    home = folder / "home"
    environ = dict(ENVIRON) | {"GPUTRAIN_HOME": str(home)}
    prefix = f"p{os.getpid()}" if proctrack == "cgroup" else ""
    interfaces = dict.fromkeys([f"{prefix}n{number}" for number in (1, 2, 3)], "eth0")
    with slurm(folder, interfaces, environ=environ, proctrack=proctrack) as cluster:
        hosts = [cluster.login, *cluster.nodes]
        daemons = frozenset(pid for host in hosts for pid in host.processes())
        yield Place(
            name, hosts, cluster.login, folder, dict(cluster.environ), home, [None] * 3, [1, 1, 1], cluster, daemons
        )
    shutil.rmtree(folder, ignore_errors=True)
