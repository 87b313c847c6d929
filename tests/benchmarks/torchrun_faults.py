"""The faults of the table that a script under torchrun can meet too, on three hosts: what they cost there."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fault_places import SCRIPT, kill
from network_namespaces import NamespaceHost, wait_until
from ssh_lab import SshLab

NAMED = r"\bh3\b|10\.77\.0\.4"
"""The host of each fault, whose address is what gloo names."""


@dataclass
class Job:
    """A script of endless steps by torchrun on three hosts, typed on each."""

    folder: Path
    hosts: list[NamespaceHost]
    commands: list[subprocess.Popen[str]]

    def pid(self, node: int) -> int:
        """Of the rank on a host: the rendezvous decides which rank that is."""
        return int((self.folder / f"pid.{self.hosts[node].name}").read_text())

    def output(self, node: int) -> str:
        return (self.folder / f"output.{node}").read_text()

    def written(self) -> int:
        """How much torchrun and the ranks have printed on all hosts."""
        return sum((self.folder / f"output.{node}").stat().st_size for node in range(len(self.hosts)))

    def processes(self, *, without: str = "") -> list[int]:
        hosts = [host for host in self.hosts if host.name != without]
        return [pid for host in hosts for pid, words in host.processes().items() if SCRIPT.name in words]


@dataclass(frozen=True, kw_only=True)
class TorchrunFault:
    name: str
    make: Callable[[Job], None]
    cause: str
    """Regular expression for the output of the first host: the rank or the host that it is about."""
    silent: str = ""
    """Host whose own processes are counted only."""
    max_restarts: int = 0
    goes_on: bool = False


@dataclass
class TorchrunResult:
    noticed_s: float | None = None
    """Until one of the hosts printed a line."""
    is_right: bool = False
    over_s: float | None = None
    left: int = 0
    left_silent: int = 0
    exit_codes: tuple[int | None, ...] = ()
    """Of torchrun on each host."""
    said: str = ""


def _cut(job: Job) -> None:
    second, last = job.hosts[1:]
    last.run("ip", "route", "add", "blackhole", f"{second.address}/32")


TORCHRUN_FAULTS = (
    TorchrunFault(name="rank killed", make=lambda job: kill(job.pid(2)), cause=NAMED),
    TorchrunFault(
        name="rank killed, max_restarts = 1",
        make=lambda job: kill(job.pid(2)),
        cause="",
        max_restarts=1,
        goes_on=True,
    ),
    TorchrunFault(
        name="rank stopped (hangs), default settings",
        make=lambda job: kill(job.pid(2), signal.SIGSTOP),
        cause=NAMED,
    ),
    TorchrunFault(name="node agent killed", make=lambda job: kill(job.commands[2].pid), cause=NAMED),
    TorchrunFault(name="command killed by -9", make=lambda job: kill(job.commands[0].pid), cause=""),
    TorchrunFault(
        name="host silent (default settings)",
        make=lambda job: job.hosts[2].link("down"),
        cause=NAMED,
        silent="h3",
    ),
    TorchrunFault(
        name="network between two hosts cut",
        make=_cut,
        cause=r"h[23].*h[23]",
    ),
)


def torchrun_trial(lab: SshLab, fault: TorchrunFault, patience_s: float) -> TorchrunResult:
    job = _start(lab, fault)
    result, goes_on = TorchrunResult(), False
    try:
        ranks = [job.folder / f"pid.{host.name}" for host in job.hosts]
        wait_until(lambda: all(path.exists() and path.read_text() for path in ranks), "all ranks train")
        before = {path: path.read_text() for path in ranks}
        written, struck = job.written(), time.time()
        fault.make(job)
        while time.time() - struck < patience_s and result.over_s is None:
            if result.noticed_s is None and job.written() > written:
                result.noticed_s = time.time() - struck
            goes_on = fault.goes_on and all(path.read_text() not in ("", before[path]) for path in ranks)
            ended = [
                command
                for command, host in zip(job.commands, job.hosts, strict=True)
                if host.name == fault.silent or command.poll() is not None
            ]
            is_over = goes_on or (len(ended) == len(job.hosts) and not job.processes(without=fault.silent))
            if is_over:
                result.over_s = time.time() - struck
            time.sleep(0.05)
        result.exit_codes = tuple(command.poll() for command in job.commands)
        everywhere = len(job.processes())
        result.left = 0 if goes_on else len(job.processes(without=fault.silent))
        result.left_silent = everywhere - result.left if fault.silent else 0
        result.said = job.output(0)[-3000:]
        result.is_right = goes_on if fault.goes_on else re.search(fault.cause, result.said) is not None
    finally:
        _end(job, fault)
    return result


def _start(lab: SshLab, fault: TorchrunFault) -> Job:
    folder = Path(tempfile.mkdtemp(prefix="torchrun-", dir=lab.folder))
    job = Job(folder, lab.hosts[1:4], [])
    for number, host in enumerate(job.hosts):
        words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=3", "--nproc-per-node=1"]
        words += ["--rdzv-backend=c10d", f"--rdzv-endpoint={job.hosts[0].address}:29517", "--rdzv-id=faults"]
        # An address of its own is not found by the name of a host that leads to 127.0.1.1, as Debian's does.
        words += [f"--rdzv-conf=is_host={number == 0}", f"--local-addr={host.address}"]
        words += [f"--max-restarts={fault.max_restarts}", str(SCRIPT), str(folder)]
        env = lab.environ | {"GLOO_SOCKET_IFNAME": host.interface, "OMP_NUM_THREADS": "1"}
        with (folder / f"output.{number}").open("w") as output:
            job.commands.append(host.start(*words, env=env, stdout=output, stderr=subprocess.STDOUT))
    return job


def _end(job: Job, fault: TorchrunFault) -> None:
    if fault.silent:
        job.hosts[2].link("up")
    if fault.make is _cut:
        job.hosts[2].run("ip", "route", "delete", "blackhole", f"{job.hosts[1].address}/32")
    for host in job.hosts:
        for pid, words in host.processes().items():
            if not words.startswith("sshd"):
                with suppress(ProcessLookupError):
                    kill(pid)
    for command in job.commands:
        command.wait()
