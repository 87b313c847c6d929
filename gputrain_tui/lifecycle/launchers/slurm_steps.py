"""Starts the commands of nodes as steps of a Slurm job: one ``srun`` per node, as GPUs and commands may differ."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress

import msgspec

from gputrain_tui.hosts import slurm_commands
from gputrain_tui.hosts.host_names import DEFAULT_PORT, address_of, is_pending
from gputrain_tui.lifecycle.launchers.local_launcher import AdoptedProcess, LocalProcess, node_environment
from gputrain_tui.plan.planner import Plan, PlannedNode
from trainer.contract.errors import ExitCode, RequestError
from trainer.contract.record import RunDir
from trainer.contract.record.regular_file import open_to_append
from trainer.contract.rendezvous_url import parse_rendezvous_url, tcp_url
from trainer.contract.stop_level import StopLevel
from trainer.host.stop_request import LEASE_RETURNED

SLURM_VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
"""Variables that Slurm sets in a step."""
FIRST_PORT, PORTS = 12_000, 18_000
"""Ports 12000 to 29999, below Linux's ephemeral ports, one of which a job gets by its number: jobs may share a host."""
UNSEEN = "does not see the run directory"
SHARED = f"""[ -e "$0/plan.json" ] && exec "$@"
echo "$(hostname) {UNSEEN} $0: GPUTRAIN_HOME must be on a disk that all nodes share"
exit {ExitCode.REFUSED}
"""
"""Shell script that executes a node's command if its host sees the run directory."""


def place_on_allocation(plan: Plan, environ: Mapping[str, str] = os.environ) -> Plan:
    """Return a plan on the hosts of this process's allocation, with a port derived from the job's number.

    Raises:
        RequestError: the allocation has too few hosts.
    """
    named = {node.host for node in plan.nodes}
    given = [host for host, _ in slurm_commands.allocation(environ)]
    free = [host for host in given if host not in named]
    moved = slurm_commands.is_requeued(environ)  # a requeued job may get other hosts
    pending = [node.host for node in plan.nodes if is_pending(node.host) or (moved and node.host not in given)]
    if len(pending) > len(free):
        raise RequestError(f"the plan needs {len(pending)} hosts, but Slurm has allocated {len(free)}")
    hosts = dict(zip(pending, free, strict=False))
    before = after = plan.init_method
    url = parse_rendezvous_url(before) if before is not None else None
    if url is not None and url.scheme == "tcp" and environ.get("SLURM_JOB_ID", "").isdecimal():
        port = FIRST_PORT + int(environ["SLURM_JOB_ID"]) % PORTS if url.port == DEFAULT_PORT else url.port
        after = tcp_url(hosts.get(url.host, url.host), port)
    nodes = []
    for node in plan.nodes:
        arguments = [str(after) if word == before else word for word in node.argv]
        env = {key: hosts.get(value, value) for key, value in node.env.items() if key not in SLURM_VARIABLES}
        nodes.append(msgspec.structs.replace(node, host=hosts.get(node.host, node.host), argv=arguments, env=env))
    return msgspec.structs.replace(plan, init_method=after, nodes=nodes)


class StepProcess(LocalProcess):
    """``srun`` of one node's step, which forwards signals to the step."""

    def __init__(self, node: int, host: str, process: subprocess.Popen[bytes], step_name: str) -> None:
        super().__init__(node, host, process)
        self._step_name = step_name

    def poll(self) -> int | None:
        code = super().poll()
        if code is not None and code > 128 and code != ExitCode.STOPPED:
            return 128 - code  # 128 + signal number, as in a shell
        return code

    def stop(self, level: StopLevel) -> None:
        """Send the node agent a stop request: srun forwards SIGUSR1, and its standard input, the lease, to the step."""
        if level <= StopLevel.SAVE:
            self._process.send_signal(signal.SIGUSR1)
        elif self._process.stdin is not None:
            self._end_lease()
        else:
            self._process.send_signal(signal.SIGTERM)  # at which srun ends the step

    def kill(self) -> None:
        with suppress(RequestError, ValueError):
            slurm_commands.kill_step(int(os.environ.get("SLURM_JOB_ID", "")), self._step_name, address_of(self.host))
        super().kill()

    def _end_lease(self) -> None:
        stdin = self._process.stdin
        if stdin is not None and not stdin.closed:
            with suppress(OSError):  # srun has ended
                stdin.write(LEASE_RETURNED)
                stdin.flush()
        with suppress(OSError):
            super()._end_lease()


class AdoptedStep(AdoptedProcess):
    """``srun`` of a step that a killed supervisor started."""

    def stop(self, level: StopLevel) -> None:
        self._signal(signal.SIGUSR1 if level <= StopLevel.SAVE else signal.SIGTERM)


def launch_step(node: PlannedNode, run_dir: RunDir, *, env: Mapping[str, str], leased: bool) -> StepProcess:
    """Start a node's command as a step on its host.

    Raises:
        OSError: there is no srun.
    """
    # A job ends with its script: if that is this process, no other supervisor can adopt the step.
    leased = leased or os.environ.get("SLURM_TASK_PID") == str(os.getpid())
    host = address_of(node.host)
    groups = dict(slurm_commands.allocation())
    arguments = ["srun", "--nodes=1", "--ntasks=1", f"--nodelist={host}", "--cpu-bind=none"]
    arguments += [f"--job-name={run_dir.path.name}"]
    if groups.get(host) is not None:
        arguments.append(f"--het-group={groups[host]}")
    if gpus := len({device for device in node.devices if device != "cpu"}):
        arguments.append(f"--gpus={gpus}")
    argv = [sys.executable, *node.argv[1:]] if node.argv[0] == "python" else node.argv
    environment = node_environment(node, env, leased=leased)
    environment.pop("TMPDIR", None)  # may exist on this machine only
    with os.fdopen(open_to_append(run_dir.node_log(node.node)), "ab") as log:
        process = subprocess.Popen(
            [*arguments, "sh", "-c", SHARED, str(run_dir.path), *argv],
            env=environment,
            stdin=subprocess.PIPE if leased else subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return StepProcess(node.node, node.host, process, run_dir.path.name)
