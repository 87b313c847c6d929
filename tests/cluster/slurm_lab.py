"""A Slurm cluster of its own: munged, slurmctld and one slurmd per host of a network of namespaces.

Its configuration, keys, sockets and logs lie in one folder; nothing in /etc is read or changed.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import stat
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from network_namespaces import LIMIT_S, NamespaceHost, network, require_namespaces, wait_until

DAEMONS = {
    name: shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    for name in ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo")
}
CGROUPS = Path("/sys/fs/cgroup")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL")


def require_slurm() -> None:
    """Skip where there is no Slurm to start."""
    missing = sorted(name for name, path in DAEMONS.items() if path is None)
    if missing:
        pytest.skip(f"needs {', '.join(missing)} (Debian: slurmctld slurmd slurm-client munge)")
    require_namespaces()


@dataclass
class Slurm:
    login: NamespaceHost
    """Where commands are typed; slurmctld runs there too."""
    nodes: list[NamespaceHost]
    folder: Path
    environ: Mapping[str, str]
    """What makes Slurm's commands find this cluster."""
    daemons: list[subprocess.Popen[str]] = field(default_factory=list)

    def start_node(self, node: NamespaceHost) -> None:
        """Start the daemon of a node."""
        conf = self.environ["SLURM_CONF"]
        _daemon(self, node, DAEMONS["slurmd"], "-D", "-N", node.name, "-f", conf)

    def kill_node(self, node: NamespaceHost) -> None:
        """Kill what Slurm itself runs on a node, and leave what it has started there."""
        slurmd = [process.pid for process in self.daemons if process.pid in node.processes()]
        steps = [pid for pid, words in node.processes().items() if words.startswith("slurmstepd:")]
        assert slurmd, "its daemon runs"
        assert steps, "a step runs there"
        for pid in slurmd + steps:
            os.kill(pid, signal.SIGKILL)
        self.daemons = [process for process in self.daemons if process.pid not in slurmd or process.wait() is None]

    def wait_idle(self) -> None:
        """Wait until Slurm can use all nodes."""
        wait_until(lambda: _idle(self) == len(self.nodes), "all nodes are idle", self.daemons)

    def run(self, *words: str | Path, check: bool = True, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Type a command on the login host."""
        return self.login.run(*words, check=check, cwd=cwd or self.folder, env=self.environ)

    def start(self, *words: str | Path, cwd: Path) -> subprocess.Popen[str]:
        """Type a command on the login host and leave it running; its output goes to the file ``output``."""
        with (cwd / "output").open("w") as output:
            return self.login.start(*words, cwd=cwd, env=self.environ, stdout=output, stderr=subprocess.STDOUT)

    def submit(self, script: Path, *words: str) -> int:
        """Submit a batch script from its folder; return the job's number."""
        answer = self.run("sbatch", "--parsable", *words, script.name, cwd=script.parent)
        return int(answer.stdout.strip())

    def job(self, number: int) -> dict[str, str]:
        """Return Slurm's fields of a job."""
        text = self.run("scontrol", "--oneliner", "show", "job", str(number)).stdout
        return dict(word.partition("=")[::2] for word in text.split() if "=" in word)

    def wait(self, number: int) -> dict[str, str]:
        """Wait until a job has ended and its nodes are free; return Slurm's fields of it."""

        def ended() -> dict[str, str] | None:
            found = self.job(number)
            return found if found["JobState"] in ENDED else None

        found: dict[str, str] = wait_until(ended, f"job {number} ends")
        wait_until(lambda: not self.processes(), "no process of a job is left")
        return found

    def processes(self) -> dict[int, str]:
        """What runs on the nodes besides slurmd."""
        ours = {process.pid for process in self.daemons}
        return {pid: words for node in self.nodes for pid, words in node.processes().items() if pid not in ours}


@contextmanager
def slurm(
    folder: Path,
    interfaces: Mapping[str, str],
    *,
    environ: Mapping[str, str] = os.environ,
    cpus: int = 8,
    proctrack: str = "linuxproc",
    memory: str = "",
    gpus: int = 0,
) -> Iterator[Slurm]:
    """Start a cluster with a node per interface, and end it with all that runs on it.

    Args:
        folder: for everything of it; its path must be short enough for a socket.
        interfaces: network interface by name of the node.
        environ: of the commands, and so of the jobs.
        cpus: cores that each node claims to have.
        proctrack: how Slurm finds a job's processes: ``cgroup`` as most clusters do, which signals a step's tasks only.
        memory: how a job is held to its requested memory: ``cgroup``, by the kernel, or ``polled``, by a check
            every second; empty for not at all.
        gpus: of the type h100 on each node, made of device files.
    """
    with ExitStack() as stack:
        # Names as administrators configure them: a node's own leads to the address that the others know.
        hosts = stack.enter_context(
            network(folder, {"login": "eth0"} | dict(interfaces), own_name="", subnet="10.78.0")
        )
        login, *nodes = hosts
        for name in ("run", "log", "spool", "state"):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        conf = folder / "slurm.conf"
        conf.write_text(_configuration(folder, login, nodes, cpus, proctrack, memory, gpus))
        for number in range(gpus):
            os.mknod(folder / f"gpu{number}", 0o600 | stat.S_IFCHR, os.makedev(1, 3))  # as /dev/null
        if gpus:
            (folder / "gres.conf").write_text(f"Name=gpu Type=h100 File={folder}/gpu[0-{gpus - 1}]\n")
        (folder / "plugstack.conf").write_text("")
        constrained = "yes" if memory == "cgroup" else "no"
        (folder / "cgroup.conf").write_text(
            f"CgroupPlugin=cgroup/v1\nConstrainCores=no\nConstrainRAMSpace={constrained}\n"
        )
        cluster = Slurm(login, nodes, folder, dict(environ) | {"SLURM_CONF": str(conf)})
        stack.callback(_remove_cgroups, nodes if "cgroup" in (proctrack, memory) else [])
        stack.callback(lambda: _end(cluster.daemons))
        socket = folder / "run" / "munge"
        words = [DAEMONS["munged"], "--foreground", "--force", "-S", socket, "--key-file", key]
        words += ["--pid-file", folder / "run" / "munged.pid", "--seed-file", folder / "run" / "munged.seed"]
        words += ["--log-file", folder / "log" / "munged"]
        _daemon(cluster, login, *words)
        wait_until(socket.exists, "munged listens", cluster.daemons)
        _daemon(cluster, login, DAEMONS["slurmctld"], "-D", "-c", "-f", conf)
        for node in nodes:
            (folder / "spool" / node.name).mkdir()
            cluster.start_node(node)
        cluster.wait_idle()
        yield cluster


def _configuration(
    folder: Path,
    login: NamespaceHost,
    nodes: Sequence[NamespaceHost],
    cpus: int,
    proctrack: str,
    memory: str,
    gpus: int,
) -> str:
    settings = {
        "ClusterName": "lab",
        "SlurmctldHost": f"{login.name}({login.address})",
        "AuthType": "auth/munge",
        "CredType": "cred/munge",
        "AuthInfo": f"socket={folder}/run/munge",
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "SlurmctldPidFile": f"{folder}/run/slurmctld.pid",
        "SlurmdPidFile": f"{folder}/run/slurmd.%n.pid",
        "SlurmctldLogFile": f"{folder}/log/slurmctld",
        "SlurmdLogFile": f"{folder}/log/slurmd.%n",
        "StateSaveLocation": f"{folder}/state",
        "SlurmdSpoolDir": f"{folder}/spool/%n",
        # No accounting, and no cgroups unless requested: the machine that runs the tests may have neither.
        "ProctrackType": f"proctrack/{proctrack}",
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "AccountingStorageType": "accounting_storage/none",
        "JobCompType": "jobcomp/none",
        "SwitchType": "switch/none",
        "MpiDefault": "none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_CPU",
        "SchedulerParameters": "sched_min_interval=0,batch_sched_delay=0,bf_interval=1",
        "SlurmdParameters": "config_overrides",  # cores that are not there
        "ReturnToService": "2",
        "KillWait": "30",
        "TCPTimeout": "5",
        "MessageTimeout": "20",
        "PropagateResourceLimits": "NONE",
        "SlurmdTimeout": "10",
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",  # of a cluster that has partitions which differ; the modes of these are their own
        "PlugStackConfig": f"{folder}/plugstack.conf",
    }
    if memory:
        settings["SelectTypeParameters"] = "CR_CPU_Memory"
    if memory == "cgroup":
        settings["TaskPlugin"] = "task/cgroup"
    if memory == "polled":
        settings |= {
            "JobAcctGatherType": "jobacct_gather/linux",
            "JobAcctGatherFrequency": "task=1",
            "JobAcctGatherParams": "OverMemoryKill",
        }
    if gpus:
        settings["GresTypes"] = "gpu"
    resources = f"CPUs={cpus} RealMemory=1000" + (f" Gres=gpu:h100:{gpus}" if gpus else "")
    lines = [f"{name}={value}" for name, value in settings.items()]
    lines += [f"NodeName={node.name} NodeHostname={node.name} NodeAddr={node.address} {resources}" for node in nodes]
    names = ",".join(node.name for node in nodes)
    lines.append(f"PartitionName=main Nodes={names} Default=YES State=UP PreemptMode=OFF")
    for mode in ("cancel", "requeue"):
        lines.append(f"PartitionName={mode} Nodes={names} State=UP PriorityTier=1 PreemptMode={mode.upper()}")
    lines.append(f"PartitionName=urgent Nodes={names} State=UP PriorityTier=10 PreemptMode=OFF")
    return "\n".join(lines) + "\n"


def _daemon(cluster: Slurm, host: NamespaceHost, *words: str | Path | None) -> None:
    log = (cluster.folder / "log" / "output").open("a")
    with log:
        process = host.start(*(str(word) for word in words), env=cluster.environ, stdout=log, stderr=subprocess.STDOUT)
    cluster.daemons.append(process)


def _idle(cluster: Slurm) -> int:
    answer = cluster.run("sinfo", "--noheader", "--partition=main", "--Node", "--format=%t", check=False)
    return answer.stdout.split().count("idle")


def _remove_cgroups(nodes: Sequence[NamespaceHost]) -> None:
    """Remove the empty groups that Slurm leaves of each node."""
    for node in nodes:
        for top in CGROUPS.glob(f"*/slurm_{node.name}"):
            for folder, _, _ in os.walk(top, topdown=False):
                Path(folder).rmdir()


def _end(daemons: Sequence[subprocess.Popen[str]]) -> None:
    for process in reversed(daemons):
        process.send_signal(signal.SIGTERM)
    for process in daemons:
        try:
            process.wait(LIMIT_S / 10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
