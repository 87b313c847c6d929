"""The process of one rank: rendezvous, training, report of the outcome, teardown."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from trainer import distributed
from trainer.agent import end_signal
from trainer.agent.assignment import RankAssignment
from trainer.agent.deferred_compiler import defer_compiler
from trainer.agent.line_printer import LinePrinter
from trainer.agent.rank_failure import failure_of, text_of
from trainer.checkpoint import CheckpointError, good_ones
from trainer.contract import record
from trainer.contract.checkpoint_trailer import owner_of
from trainer.contract.errors import (
    ExitCode,
    MachineNotReadyError,
    NotKeptError,
    RequestError,
    TrainingError,
    printable,
    printable_lines,
)
from trainer.contract.fairseq_flags import remove_fairseq_flags
from trainer.contract.option_rules import less_memory, uses_compiler, with_keys
from trainer.contract.options import Training, TrainingSpec
from trainer.contract.outcome import NO_UPDATE_LEFT, exit_code_of, is_lost_peer, lost_peer_text
from trainer.contract.record import EventWriter, Failure, RankStateName, RunDir, recorded_checkpoints
from trainer.contract.record.regular_file import read_whole
from trainer.contract.schema import check, describe, read_flags, unknown_option
from trainer.distributed import flight_recorder
from trainer.engine import reports
from trainer.engine.accelerator import prepare_environment, set_numerics
from trainer.engine.checkpoint_evaluation import evaluate_checkpoint
from trainer.engine.compared_options import task_request, training_request
from trainer.engine.end_conditions import TrainingOutcome
from trainer.engine.loop import Loop
from trainer.engine.non_finite import NonFiniteError
from trainer.engine.out_of_memory import OutOfMemoryError, is_out_of_memory
from trainer.engine.resuming import typed_settings
from trainer.engine.starting_point import StartingPoint, open_start
from trainer.engine.task_state import TASK_STATE
from trainer.engine.worker_context import WorkerContext
from trainer.environments import slurm_step
from trainer.host.cores import usable_cores
from trainer.host.memory import keep_freed_memory, return_freed_memory
from trainer.host.processes import RUN
from trainer.tasks.registry import load_task
from trainer.tasks.task import Task


def run_rank(assignment: RankAssignment) -> int:
    """Train as this rank; return the exit code with which the process is to end, by ``os._exit``.

    The outcome is sent to the parent before the teardown, because torch's gloo may hang or abort while a
    successful process exits (pytorch issue 190489).
    """
    run_dir = RunDir(assignment.run_dir) if assignment.run_dir is not None else None
    writer = EventWriter(run_dir.rank_events(assignment.rank) if run_dir else None, rank=assignment.rank)
    rank = _Rank(assignment, run_dir, writer)
    end_signal.write_before_end(writer.write_now)
    end_signal.write_before_end(rank.finish_checkpoints)
    return rank.run()


class _Rank:
    def __init__(self, assignment: RankAssignment, run_dir: RunDir | None, writer: EventWriter) -> None:
        self.assignment = assignment
        self.run_dir = run_dir
        self.writer = writer
        self._in_recipe_terms: Callable[[str], str] = with_keys if os.environ.get(RUN) else str
        self._state: RankStateName = "spawned"
        self.step: Callable[[], int | None] = lambda: None
        self._wait_for_checkpoints: Callable[[float], None] = lambda _timeout_s: None
        self._printer = LinePrinter(assignment.terminal)
        self._print_line = self._printer.print_line

    def run(self) -> int:
        try:
            return self._run()
        finally:
            self._printer.close()

    def _run(self) -> int:
        try:
            outcome = self._train()
        # Any error is recorded and ends the run, also a task's ``sys.exit``, which has not trained.
        except (Exception, SystemExit) as error:  # noqa: BLE001
            failure = self._failure(error)
            self._end_failed(failure)
            distributed.shutdown(abort=True)  # without waiting for peers, which may be gone
            return exit_code_of(failure)
        if not outcome.stopped:
            self.set_state("finished")
        self.writer.flush()
        if outcome.stopped:
            self.assignment.stopped(  # the step is None in an evaluation
                self.step(), outcome.saved, not_kept=outcome.not_kept, not_recorded=self.writer.write_error
            )
        else:
            self.assignment.finished(not_recorded=self.writer.write_error)
        self.writer.close()
        distributed.shutdown()
        return ExitCode.STOPPED if outcome.stopped else ExitCode.FINISHED

    def set_state(self, state: RankStateName, *, message: str | None = None) -> None:
        if state == self._state:
            return
        self._state = state
        assignment = self.assignment
        self.writer.write(
            record.RankState(
                time=time.time(),
                rank=assignment.rank,
                state=state,
                local_rank=assignment.local_rank,
                node=assignment.node,
                host=assignment.host,
                device=assignment.device,
                pid=os.getpid(),
                threads=torch.get_num_threads(),
                message=message,
            )
        )

    def _train(self) -> TrainingOutcome:
        assignment = self.assignment
        self.set_state("joining")
        spec = assignment.spec
        assert spec is not None
        if not uses_compiler(spec.training):
            defer_compiler()
        options = spec.training
        if options.strategy == "fsdp":
            return_freed_memory()
        else:
            keep_freed_memory()
        torch.set_num_threads(options.threads or usable_cores(assignment.local_world_size))
        prepare_environment(options)  # before anything touches CUDA
        device = distributed.bind_device(assignment.device_id)
        tf32 = set_numerics(options, device)
        if options.deterministic:
            torch.use_deterministic_algorithms(True)
        if self.run_dir is not None:
            flight_recorder.prepare(self.run_dir.rank_collectives(assignment.rank), assignment.rank)
        distributed.join_group(
            init_method=assignment.init_method,
            world_size=assignment.world_size,
            rank=assignment.rank,
            backend=assignment.backend,
            device=device,
            timeout_s=assignment.distributed.distributed_timeout,
            join_timeout_s=assignment.distributed.join_timeout,
            share_devices=assignment.distributed.share_devices,
            identity=assignment.run_id,
            request=training_request(options),
            on_waiting=self._report_missing if assignment.rank == 0 else None,
            on_lost=self._end_lost_peer,
            on_unheard=self._report_unheard,
            step=lambda: self.step(),
        )
        self.set_state("ready")
        task, request = self._task(spec)
        start = open_start(options)
        ctx = self._context(task, options, device, request, tf32, start)
        start.restore_into(task, name=options.task)
        if options.eval_only:
            assignment.stoppable()
            return evaluate_checkpoint(task, options, ctx, start)
        loop = Loop(task, options, ctx)
        self.step = lambda: loop.updates
        self._wait_for_checkpoints = loop.saving.wait
        self._warm_start(loop, options, start)
        self._resume(loop, options, start)
        del start  # rank 0 holds the whole checkpoint in it
        assignment.stoppable()
        return loop.run()

    def _task(self, spec: TrainingSpec) -> tuple[Task, dict[str, str]]:
        """Build the task; return it, and its values that must be equal on all ranks."""
        name, own, notes = spec.training.task, spec.task_options, list(spec.notes)
        kind = load_task(name)
        if own is None:
            own, notes = _own_options(kind, spec)
        for note in notes if self.assignment.rank == 0 else ():
            self._print_line(note)
        return kind(own), task_request(name, kind, own)

    def _context(
        self,
        task: Task,
        options: Training,
        device: torch.device,
        request: Mapping[str, str],
        tf32: bool | None,
        start: StartingPoint,
    ) -> WorkerContext:
        assignment = self.assignment
        # Absolute, because the record names the files for readers in other folders.
        given = Path(options.save_dir).absolute() if options.save_dir else None
        folder = given or (self.run_dir.checkpoints if self.run_dir else None) if options.save else None
        return WorkerContext(
            rank=assignment.rank,
            world_size=assignment.world_size,
            device=device,
            tf32=tf32,
            writer=self.writer,
            set_state=self.set_state,
            print_line=self._print_line if assignment.rank == 0 else lambda line: None,
            in_recipe_terms=self._in_recipe_terms,
            checkpoints=None if options.eval_only else folder,
            stop_requested=assignment.stop_requested,
            step_took=assignment.step_took,
            stopping=assignment.stopping,
            before_wait=self._report_wait,
            run_id=assignment.run_id,
            resumed_from=start.opened.path if start.opened is not None else None,
            is_restart=slurm_step.is_requeued(os.environ) or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0",
            request=request,
            recipe=_recipe_in(self.run_dir) or typed_settings(options, task.options),
            loss_unit=task.loss_unit,
        )

    def _warm_start(self, loop: Loop, options: Training, start: StartingPoint) -> None:
        """Load the weights of ``--finetune-from``, if given; a run that resumes has its own."""
        file = options.finetune_from
        if not file or options.resume:
            reports.finding(loop.ctx, "warm_start", f"{file} is not read again: this run resumes" if file else "")
            return
        differs = loop.state.difference_from(start)

        # Rank 0 reads and sends: the others need no file, and cannot read a different one.
        def fitting() -> dict[str, Any]:
            weights, misfits = loop.state.fitting_weights(file, partial=options.finetune_partial)
            return {"model": weights, "misfits": misfits}

        weights, misfits = map(loop.strategy.spread(fitting).__getitem__, ("model", "misfits"))
        loop.state.begin_with(weights)
        took = f"the model starts from {len(weights)} weights of {file}"
        reports.finding(loop.ctx, "warm_start", f"{took}; not loaded: {misfits}" if misfits else took)
        reports.finding(loop.ctx, TASK_STATE, differs, severity="warning")

    def _resume(self, loop: Loop, options: Training, start: StartingPoint) -> None:
        """Restore the checkpoint of ``--resume``, if given.

        A finished training is refused, because no run may end with exit code 0 without having trained. One that was
        stopped between its last update and its last validation is not finished: the validation is made, and the test if
        there is one, and a finding reports that no update is left.

        Raises:
            RequestError: there is no checkpoint, or it does not fit, or its training is finished.
        """
        if not options.resume:
            return
        # Rank 0 has read it and sends it.
        source, passed_over = distributed.from_master(lambda: _require_fitting(loop, start))
        state = loop.strategy.spread(lambda: start.checkpoint().state)
        # A run that continues from its own checkpoint has made the resets of its options already.
        own_checkpoint = distributed.from_master(lambda: self._is_own(source))
        loop.state.load_state_dict(state, source=source, own_checkpoint=own_checkpoint)
        reports.finding(loop.ctx, "checkpoint_passed_over", "; ".join(passed_over), severity="warning")
        if not (reason := loop.end_reason()):
            return
        distributed.from_master(lambda: self._require_work(loop, source, reason))
        missing = "running its last validation now" if loop.validation_missing else "it is finished"
        reports.finding(loop.ctx, NO_UPDATE_LEFT, f"no steps are left, {reason}: {missing}")

    def _require_work(self, loop: Loop, name: str, reason: str) -> None:
        """Raise if a checkpoint's training is finished, unless this run trained it."""
        # A run that is restarted after its last checkpoint has trained; another one would end without having trained.
        if not self._is_own(name) and not loop.validation_missing:
            raise RequestError(f"{name} is at step {loop.updates}, and nothing is left to train: {reason}")

    def _is_own(self, name: str) -> bool:
        source = Path(name)
        if owner := owner_of(source):
            return owner == self.assignment.run_id
        return self.run_dir is not None and (
            source.resolve().is_relative_to(self.run_dir.path.resolve())
            or source.absolute() in recorded_checkpoints(self.run_dir)
        )

    def _report_wait(self) -> None:
        if self.assignment.world_size == 1:
            return
        now, rank, step = time.time(), self.assignment.rank, (self.step() or 0) + 1
        self.writer.write(record.Doing(time=now, rank=rank, step=step, part="group", parts_done=0, waited_ms=0.0))

    def _report_missing(self, joined: list[int], missing: list[int], waited_ms: float) -> None:
        self.writer.write(record.Joining(time=time.time(), joined=joined, missing=missing, waited_ms=waited_ms))
        self._print_line(
            f"waiting for ranks {', '.join(map(str, missing))}: "
            f"{len(joined)} of {len(joined) + len(missing)} have joined"
        )

    def _report_unheard(self, ranks: list[int]) -> None:
        self.writer.write(record.Unheard(time=time.time(), rank=self.assignment.rank, ranks=ranks))

    def _end_lost_peer(self, why: str) -> None:
        """Record the loss of a peer and end the process, whose training thread may be blocked in NCCL."""
        last = flight_recorder.dump()
        failure = Failure(
            time=time.time(),
            kind="lost_peer",
            message=f"{why}; {last}" if last else why,
            rank=self.assignment.rank,
            host=self.assignment.host,
            step=self.step(),
            in_step=self._step_in_progress(),
        )
        self._end_failed(failure)
        os._exit(ExitCode.FAILED)

    def _end_failed(self, failure: Failure) -> None:
        self.set_state("failed", message=failure.message)
        self.writer.write(failure)
        self.writer.flush()
        self.assignment.failed(failure, not_recorded=self.writer.write_error)
        self.finish_checkpoints()
        self.writer.close()

    def finish_checkpoints(self) -> None:
        """Give checkpoints that are being written a second to be complete: a restart continues from them."""
        self._wait_for_checkpoints(1.0)
        self.writer.write_now()

    def _step_in_progress(self) -> int | None:
        """Return the step that this rank is making; None while it starts, validates or saves."""
        done = self.step()
        return done + 1 if self._state == "training" and done is not None else None

    def _failure(self, error: Exception | SystemExit) -> Failure:
        kind = _kind(error)
        explained = kind not in ("exception", "lost_peer", "out_of_memory")
        told = self._in_recipe_terms(text_of(error)) if explained else text_of(error)
        first_line = next((line for line in told.splitlines() if line.strip()), "")
        step = error.step if isinstance(error, NonFiniteError | OutOfMemoryError) else None
        failure = failure_of(
            error,
            kind=kind,
            # The message about a request is kept whole: it may quote a name with a line break.
            message=printable(told) if isinstance(error, RequestError) else first_line if explained else "",
            rank=self.assignment.rank,
            host=self.assignment.host,
            step=self.step() if step is None else step,
            in_step=self._step_in_progress() if step is None else step,
            defect=not explained,
        )
        if kind == "out_of_memory" and self.assignment.spec is not None:
            advice = less_memory(self.assignment.spec.training, self.assignment.world_size)
            failure.message += self._in_recipe_terms(advice)
        # Without a run directory the node agent prints the message, once for all ranks; a rank adds only a traceback.
        if not explained or self.run_dir is not None:
            text = failure.traceback or f"{type(error).__name__}: {told}"
            print(printable_lines(text), file=sys.stderr)
        last = flight_recorder.dump()
        if kind != "lost_peer":
            distributed.report_failure(failure.message)
            return failure
        failure.message = distributed.describe_lost_peers() or lost_peer_text(failure.message)
        if last:
            failure.message += f"; {last}"
        return failure


def _require_fitting(loop: Loop, start: StartingPoint) -> tuple[str, list[str]]:
    """Return the file of the opened checkpoint, and the reasons for passing over newer ones.

    If it could not be opened or does not fit, the message offers one beside it that does.
    """
    try:
        opened = start.checkpoint()
        loop.state.require_fit(opened.state, source=start.source)
    except RequestError as error:
        raise RequestError(f"{error}{_offer(loop, Path(start.source), loop.options.checkpoint_run)}") from None
    return start.source, opened.passed_over


def _offer(loop: Loop, source: Path, run: str) -> str:
    """Return a hint at the newest checkpoint of the run that fits, beside one that does not; empty without one."""
    if source.is_dir():
        return ""
    for path, state in good_ones(source.parent, run=run or owner_of(source), on_skipped=lambda _: None):
        if source.exists() and path.samefile(source):
            continue
        try:
            loop.state.require_fit(state, source=str(path))
        except RequestError:
            continue
        return f"; {path} fits: --resume {path} continues from step {state['updates']}"
    return ""


def _own_options(kind: type[Task], spec: TrainingSpec) -> tuple[Any, list[str]]:
    """Read the flags of a user's own task; return its options, and lines about flags without an effect."""
    schema = describe(kind.Options)
    values, rest = read_flags(spec.task_flags, schema)
    rest, notes = remove_fairseq_flags(rest)
    flags = {option.name: option.flag for option in schema}
    if rest:
        known = [*flags.values(), *(option.flag for option in describe(Training))]
        raise unknown_option(rest[0], spec.training.task, known)
    return check(kind.Options, values, where=lambda name: flags.get(name, name)), notes


def _kind(error: Exception | SystemExit) -> str:
    kinds: dict[type[Exception], str] = {
        MachineNotReadyError: "refused",
        RequestError: "request",
        CheckpointError: "request",
        NotKeptError: "checkpoint_lost",
        OutOfMemoryError: "out_of_memory",
        NonFiniteError: "non_finite",
        distributed.JoinTimeoutError: "join_timeout",
    }
    for kind, name in kinds.items():
        if isinstance(error, kind):
            return name
    if is_out_of_memory(error):
        return "out_of_memory"
    if is_lost_peer(text_of(error)):
        return "lost_peer"
    return "training" if isinstance(error, TrainingError) else "exception"


def _recipe_in(run_dir: RunDir | None) -> str:
    if run_dir is None:
        return ""
    try:
        return read_whole(run_dir.recipe).decode("utf-8", "replace")
    except OSError:
        return ""
