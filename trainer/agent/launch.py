"""Execution of a dispatch decision: exchange counts, prepare the init method, run this node's ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from trainer.agent import forkserver, worker_entry
from trainer.agent.assignment import RankAssignment
from trainer.agent.count_exchange import exchange_counts
from trainer.agent.in_process import run_in_process
from trainer.agent.init_method import usable_init_method
from trainer.agent.node_agent import run_node
from trainer.agent.script_environment import launcher_environment, master_address
from trainer.contract.errors import ExitCode, MachineNotReadyError, RequestError, TrainingError, print_message
from trainer.contract.home_folder import expand_home
from trainer.contract.option_rules import uses_compiler
from trainer.contract.options import Distributed, Script, TrainingSpec
from trainer.contract.outcome import NodeOutcome, describe_stop
from trainer.contract.record import RunDir, checkpoint_to_resume
from trainer.environments import slurm_step
from trainer.environments.decision import Decision, apply_counts
from trainer.host.gpu_claims import GpuClaimError, GpuTakenError, claim_gpus
from trainer.host.processes import RUN
from trainer.host.visible_devices import Device, label

RUN_ID = "GPUTRAIN_RUN_ID"
"""Environment variable with the run's id, if the run directory has another name."""

RANK_TARGET = "trainer.engine.worker:run_rank"
SCRIPT_TARGET = "trainer.agent.script:run_script"
MEASURED_SCRIPT_TARGET = "trainer.telemetry.instrument:run_script"
SCRIPT_PRELOADED = ("trainer.agent.preload_first", "trainer.agent.script", "trainer.telemetry.instrument")
"""Modules that the fork server imports for scripts: no torch, since a script may set variables before it imports it."""


def launch(
    decision: Decision,
    options: Distributed,
    ranks_run: TrainingSpec | Script,
    *,
    devices: Sequence[Device],
    environ: Mapping[str, str],
) -> int:
    """Run the ranks of a decision and return the exit code; if this process is the rank, end the process instead.

    Raises:
        RequestError: the rendezvous, a GPU or the run directory cannot be used.
    """
    if decision.exchange is not None:
        counts = exchange_counts(decision.exchange, len(decision.ranks), timeout_s=options.join_timeout)
        decision = apply_counts(decision, counts)
    # By default CUDA numbers the fastest GPU as 0; NVML and nvidia-smi have PCI order.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    claimed = [devices[index].uuid for index in decision.device_ids if index is not None]
    run_dir = None if options.run_dir is None else expand_home(options.run_dir).absolute()
    run_id = environ.get(RUN_ID) or ("" if run_dir is None else run_dir.name)
    with (
        _claim(claimed, run_id, options, environ),
        usable_init_method(decision) as init_method,
        _disk_errors_as_training_errors(options),
    ):
        if run_dir is not None:
            _make_run_dir(run_dir)
        # In the rank's own process orphans that it adopts could not be told from children that the task waits for.
        agent_of_its_own = bool(environ.get(RUN)) and decision.mode in ("single_process", "explicit")
        assignments = _assign(decision, options, init_method, run_dir, run_id, devices, environ)
        if isinstance(ranks_run, Script):
            if ranks_run.starts_ranks and len(assignments) < assignments[0].local_world_size:
                raise RequestError("--starts-ranks: another launcher has started the ranks already; remove one of both")
            if run_dir is not None and assignments[0].rank == 0 and not environ.get(RUN):
                print_message(
                    f"what the script prints: {RunDir(run_dir).logs}, a file for each rank", program="trainer"
                )
            # In a process of its own even for one rank: a script may end its process in any way, which the node agent
            # must report.
            address = master_address(init_method, environ)
            outcome = run_node(
                [_for_script(assignment, ranks_run, address, environ) for assignment in assignments],
                start_method=options.start_method,
                environ=environ,
                target=MEASURED_SCRIPT_TARGET if ranks_run.instrument and run_dir is not None else SCRIPT_TARGET,
                preloaded=SCRIPT_PRELOADED,
                follows_started=ranks_run.instrument and run_dir is not None,
            )
        else:
            spec = _with_resume(ranks_run, run_dir, run_id, environ)
            assignments = [dataclasses.replace(assignment, spec=spec) for assignment in assignments]
            if decision.spawn or agent_of_its_own:
                outcome = run_node(
                    assignments,
                    start_method=options.start_method,
                    environ=environ,
                    target=RANK_TARGET,
                    preloaded=forkserver.COMPILER_PRELOADED if uses_compiler(spec.training) else forkserver.PRELOADED,
                )
            else:
                outcome = None
                code = run_in_process(assignments[0], environ=environ, target=RANK_TARGET)
    if outcome is None:
        worker_entry.leave(code)
    print_outcome(outcome)
    return outcome.exit_code


def _assign(
    decision: Decision,
    options: Distributed,
    init_method: str | None,
    run_dir: Path | None,
    run_id: str,
    devices: Sequence[Device],
    environ: Mapping[str, str],
) -> list[RankAssignment]:
    host = socket.gethostname()
    # All nodes of srun or torchrun share one command line, so --node is 0 there.
    node = environ.get({"slurm": "SLURM_NODEID", "environment": "GROUP_RANK"}.get(decision.mode, ""), "")
    return [
        RankAssignment(
            rank=rank,
            local_rank=local_rank,
            world_size=decision.world_size,
            local_world_size=decision.local_world_size,
            node=int(node) if options.node == 0 and node.isdecimal() else options.node,
            host=host,
            device_id=device_id,
            device=label(device_id, devices),
            init_method=init_method,
            backend=decision.backend,
            parent_pid=None,
            distributed=options,
            run_dir=None if run_dir is None else str(run_dir),
            run_id=run_id,
            terminal=1 if rank == 0 and run_dir is not None and not environ.get(RUN) else None,
            report=lambda _: None,  # until ``start_worker`` or ``run_in_process`` sets another sink
        )
        for rank, local_rank, device_id in zip(decision.ranks, decision.local_ranks, decision.device_ids, strict=True)
    ]


def _for_script(
    assignment: RankAssignment, script: Script, address: tuple[str, int], environ: Mapping[str, str]
) -> RankAssignment:
    environment = launcher_environment(assignment, address, environ, starts_ranks=script.starts_ranks)
    argv = [*(["-m"] if script.module else []), script.script]
    if script.local_rank_flag is not None:
        argv.append(f"{script.local_rank_flag}={assignment.local_rank}")
    return dataclasses.replace(
        assignment, environment=environment, script_argv=(*argv, *script.args), must_start_ranks=script.starts_ranks
    )


def _make_run_dir(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise RequestError(f"--run-dir {path} cannot be made: {error.strerror}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise RequestError(f"--run-dir {path} cannot be written")


def _with_resume(spec: TrainingSpec, run_dir: Path | None, run_id: str, environ: Mapping[str, str]) -> TrainingSpec:
    """Return the training, which resumes in a job that Slurm has requeued after it wrote a checkpoint.

    Every node finds the same checkpoint: nodes share the run directory, and the ranks compare their options.
    """
    if run_dir is None or not slurm_step.is_requeued(environ):
        return spec
    checkpoint = checkpoint_to_resume(RunDir(run_dir), {run_id})
    if checkpoint is None:
        return spec
    print_message(f"Slurm has requeued this job; resuming from {checkpoint}", program="trainer")
    resumed = msgspec.structs.replace(spec.training, resume=str(checkpoint), checkpoint_run=run_id)
    return msgspec.structs.replace(spec, training=resumed)


@contextlib.contextmanager
def _disk_errors_as_training_errors(options: Distributed) -> Iterator[None]:
    """Raise a TrainingError for a full or read-only disk at the start of the record.

    Once ranks run, a full disk costs parts of the record and not the training.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS) or options.run_dir is None:
            raise
        raise TrainingError(f"cannot write {error.filename or options.run_dir}: {error.strerror}") from None


@contextlib.contextmanager
def _claim(uuids: Sequence[str], run_id: str, options: Distributed, environ: Mapping[str, str]) -> Iterator[None]:
    """Claim the GPUs of this node's ranks in the body; raise MachineNotReadyError if they cannot be claimed."""
    known = [uuid for uuid in uuids if uuid]
    with contextlib.ExitStack() as claims:
        try:
            claims.enter_context(claim_gpus(known, run_id, shared=options.share_devices, environ=environ))
        except GpuTakenError as error:
            remedy = "choose another GPU, or allow sharing it with --share-devices"
            raise MachineNotReadyError(f"{error}; {remedy}") from None
        except GpuClaimError as error:
            raise MachineNotReadyError(f"{error}; accept that with --share-devices") from None
        yield


def print_outcome(outcome: NodeOutcome) -> None:
    """Print the stop or the failure of the node to standard error; nothing if it finished."""
    failure = outcome.failure
    if outcome.exit_code == ExitCode.STOPPED:
        parts = [describe_stop(outcome.stopped_at, outcome.saved, outcome.not_kept)]
        if killed := [*outcome.unanswered, *outcome.killed]:
            parts.append(f"killed because they did not respond: ranks {', '.join(map(str, killed))}")
        parts.append(f"processes {outcome.left} could not be ended" if outcome.left else "no process is left")
        print_message("; ".join(parts), program="trainer")
    elif failure is not None:
        where = f"rank {failure.rank} on {failure.host}: " if failure.rank is not None else ""
        print_message(where + failure.message, program="trainer")
