"""Runs one rank: joins the rendezvous, trains, reports how it ended, leaves in order."""

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
from trainer.agent.exception_failure import failure_of
from trainer.agent.narration import Narration
from trainer.checkpoint import CheckpointError, good_ones, open_checkpoint
from trainer.contract import record
from trainer.contract.errors import ExitCode, NotKeptError, RequestError, TrainingError, printable, printable_lines
from trainer.contract.options import Training
from trainer.contract.outcome import NO_UPDATE_LEFT, is_lost_peer
from trainer.contract.record import EventWriter, Failure, RankStateName, RunDir, recorded_checkpoints
from trainer.contract.record.regular_file import read_whole
from trainer.contract.schema import check, describe, read_flags
from trainer.contract.seed_flags import settle
from trainer.distributed import flight_recorder
from trainer.engine import reports
from trainer.engine.accelerator import prepare_environment, set_numerics
from trainer.engine.checkpoint_evaluation import evaluate_checkpoint
from trainer.engine.loop import Loop
from trainer.engine.non_finite import NonFiniteError
from trainer.engine.out_of_memory import OutOfMemoryError, is_out_of_memory
from trainer.engine.request import task_request, training_request
from trainer.engine.stopping import TrainingOutcome
from trainer.engine.worker_context import WorkerContext
from trainer.host.allocator import keep_freed_memory
from trainer.host.cores import usable_cores
from trainer.tasks.registry import load_task
from trainer.tasks.task import Task


def run_rank(assignment: RankAssignment) -> int:
    """Train as this rank; return the exit code with which the process is to end, by ``os._exit``.

    What the parent needs to know is sent before the teardown, because torch's gloo may hang or abort while a
    successful process exits (pytorch issue 190489).
    """
    run_dir = RunDir(assignment.run_dir) if assignment.run_dir is not None else None
    writer = EventWriter(run_dir.rank_events(assignment.rank) if run_dir else None, rank=assignment.rank)
    end_signal.write_before_end(writer.write_now)
    return _Rank(assignment, run_dir, writer).run()


class _Rank:
    """What one rank's process does, in order."""

    def __init__(self, assignment: RankAssignment, run_dir: RunDir | None, writer: EventWriter) -> None:
        self.assignment = assignment
        self.run_dir = run_dir
        self.writer = writer
        self._state: RankStateName = "spawned"
        self.step: Callable[[], int | None] = lambda: None
        self._narration = Narration(assignment.terminal)

    def run(self) -> int:
        """Train, tell how it ended, tear down; return the exit code."""
        try:
            return self._run()
        finally:
            self._narration.close()

    def _run(self) -> int:
        try:
            outcome = self._train()
        except Exception as error:  # noqa: BLE001  (whatever it is, the record says it and the run ends)
            failure = self._failure(error)
            self._end_failed(failure)
            distributed.shutdown(abort=True)  # peers may be gone: nothing is waited for
            return ExitCode.BAD_REQUEST if failure.kind == "request" else ExitCode.FAILED
        if outcome.stopped:
            self.writer.flush()
            self.assignment.stopped(  # an evaluation is at no step
                self.step(), outcome.saved, not_kept=outcome.not_kept, not_recorded=self.writer.write_error
            )
            self.writer.close()
            distributed.shutdown()
            return ExitCode.STOPPED
        self.set_state("finished")
        self.writer.flush()
        self.assignment.finished(not_recorded=self.writer.write_error)
        self.writer.close()
        distributed.shutdown()
        return ExitCode.FINISHED

    def set_state(self, state: RankStateName, *, message: str | None = None) -> None:
        """Record that this rank entered a state."""
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
                message=message,
            )
        )

    def _train(self) -> TrainingOutcome:
        assignment = self.assignment
        self.set_state("joining")
        keep_freed_memory()
        options, words = _training_options(assignment.words)
        torch.set_num_threads(options.threads or usable_cores(assignment.local_world_size))
        prepare_environment(options)  # before anything touches CUDA
        device = distributed.bind_device(assignment.device_id)
        tf32 = set_numerics(options, device)
        if options.deterministic:
            torch.use_deterministic_algorithms(True)
        if self.run_dir is not None:
            flight_recorder.prepare(self.run_dir.rank_collectives(assignment.rank), assignment.rank)
        distributed.distributed_init(
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
            on_waiting=self._waiting if assignment.rank == 0 else None,
            on_lost=self._lost,
        )
        self.set_state("ready")
        task, request = self._task(options, words)
        ctx = self._context(options, device, request, tf32)
        if options.eval_only:
            assignment.stoppable()
            return evaluate_checkpoint(task, options, ctx)
        loop = Loop(task, options, ctx)
        self.step = lambda: loop.updates
        self._warm_start(loop, options)
        self._resume(loop, options)
        assignment.stoppable()
        return loop.run()

    def _task(self, options: Training, words: list[str]) -> tuple[Task, dict[str, str]]:
        """Build the task from the flags that are left; return it and what must be equal of it on all ranks."""
        kind = load_task(options.task)
        schema = describe(kind.Options)
        values, rest = read_flags(words, schema)
        rest, notes = settle(rest)
        for note in notes if self.assignment.rank == 0 else ():
            self._say(note)
        if rest:
            raise RequestError(f"{rest[0]} is no option of the trainer or of task {options.task}")
        flags = {option.name: option.flag for option in schema}
        own = check(kind.Options, values, where=lambda name: flags.get(name, name))
        return kind(own), task_request(options.task, kind, own)

    def _context(
        self, options: Training, device: torch.device, request: Mapping[str, str], tf32: bool | None
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
            say=self._say if assignment.rank == 0 else _discard_line,
            checkpoints=None if options.eval_only else folder,
            stop_requested=assignment.stop_requested,
            step_took=assignment.step_took,
            stopping=assignment.stopping,
            waits=self._waits,
            run_id=assignment.run_id,
            request=request,
            recipe=_recipe_in(self.run_dir),
        )

    def _warm_start(self, loop: Loop, options: Training) -> None:
        """Begin with the weights of another training, if any are named; a run that resumes has its own.

        Raises:
            RequestError: the file cannot be read, or does not fit the model.
        """
        file = options.finetune_from
        if not file or options.resume:
            reports.remark(loop.ctx, "warm_start", f"{file} is not read again: this run resumes" if file else "")
            return
        # Rank 0 sends what it has read: nobody else needs the file, or could have another one.
        weights, other = distributed.from_master(
            lambda: loop.state.fitting_weights(file, partial=options.finetune_partial)
        )
        loop.state.begin_with(weights)
        took = f"the model begins with {len(weights)} weights of {file}"
        reports.remark(loop.ctx, "warm_start", f"{took}, not with what does not fit: {other}" if other else took)

    def _resume(self, loop: Loop, options: Training) -> None:
        """Continue from a checkpoint, if there is something to continue.

        Nothing ends with exit code 0 without having trained. A training whose updates are all made, but that was
        stopped before its last validation, is not finished, though: that validation, and the test where one is asked
        for, are what it lacks. They are made and the output says that no update is.

        Raises:
            RequestError: no checkpoint, one of something else, or of a training that is finished.
        """
        if not options.resume:
            return
        path = Path(options.resume)
        # Rank 0 sends what it has read: nobody else needs the file, or could choose another one.
        source, state, passed_over = distributed.from_master(lambda: _choose(loop, path))
        # A run that goes on after its own last checkpoint has begun afresh already.
        loop.state.load_state_dict(state, source=source, again=distributed.from_master(lambda: self._is_own(source)))
        reports.remark(loop.ctx, "checkpoint_passed_over", "; ".join(passed_over), severity="warning")
        if not (reason := loop.at_its_end()):
            return
        distributed.from_master(lambda: self._require_work(loop, source, reason))
        missing = "its last validation is made now" if loop.validation_missing else "it is finished"
        reports.remark(loop.ctx, NO_UPDATE_LEFT, f"no update is left to make, {reason}: {missing}")

    def _require_work(self, loop: Loop, name: str, reason: str) -> None:
        """Refuse a training that is finished, unless it is this run's own.

        Raises:
            RequestError: nothing is left to train.
        """
        # A run that is started again after its last checkpoint has trained; another one would end without having.
        if not self._is_own(name) and not loop.validation_missing:
            raise RequestError(f"{name} is at update {loop.updates}, and nothing is left to train: {reason}")

    def _is_own(self, name: str) -> bool:
        """Return whether a checkpoint was written by this very run."""
        source = Path(name)
        return self.run_dir is not None and (
            source.resolve().is_relative_to(self.run_dir.path.resolve())
            or source.absolute() in recorded_checkpoints(self.run_dir)
        )

    def _say(self, line: str) -> None:
        self._narration.say(line)

    def _waits(self) -> None:
        if self.assignment.world_size == 1:
            return
        self.writer.write(
            record.Doing(
                time=time.time(),
                rank=self.assignment.rank,
                step=(self.step() or 0) + 1,
                part="group",
                parts_done=0,
                waited_ms=0.0,
            )
        )

    def _waiting(self, joined: list[int], missing: list[int], waited_ms: float) -> None:
        self.writer.write(record.Joining(time=time.time(), joined=joined, missing=missing, waited_ms=waited_ms))
        self._say(
            f"waiting for ranks {', '.join(map(str, missing))}: {len(joined)} of {len(joined) + len(missing)} are here"
        )

    def _lost(self, why: str) -> None:
        """Report that another machine is gone and end the process, whose training thread may wait in NCCL."""
        last = flight_recorder.dump()
        failure = Failure(
            time=time.time(),
            kind="lost_peer",
            message=f"{why}; {last}" if last else why,
            rank=self.assignment.rank,
            host=self.assignment.host,
            step=self.step(),
        )
        self._end_failed(failure)
        os._exit(ExitCode.FAILED)

    def _end_failed(self, failure: Failure) -> None:
        self.set_state("failed", message=failure.message)
        self.writer.write(failure)
        self.writer.flush()
        self.assignment.failed(failure, not_recorded=self.writer.write_error)
        self.writer.close()

    def _failure(self, error: Exception) -> Failure:
        kind = _kind(error)
        told = kind not in ("exception", "lost_peer", "out_of_memory")
        first_line = next((line for line in str(error).splitlines() if line.strip()), "")
        failure = failure_of(
            error,
            kind=kind,
            # A line break in what was asked for is part of a name that the message quotes, not its end.
            message=printable(str(error)) if kind == "request" else first_line if told else "",
            rank=self.assignment.rank,
            host=self.assignment.host,
            step=self.step(),
            defect=not told,
        )
        # On a terminal the node agent says it, once for all ranks; only a traceback is worth more than that.
        if not told or self.run_dir is not None:
            said = failure.traceback or f"{type(error).__name__}: {error}"
            print(printable_lines(said), file=sys.stderr)
        last = flight_recorder.dump()
        if kind != "lost_peer":
            distributed.report_failure(failure.message)
            return failure
        if lost := distributed.describe_lost_peers():
            failure.message = f"{lost} ({failure.message})"
        if last:
            failure.message += f"; {last}"
        return failure


def _choose(loop: Loop, path: Path) -> tuple[str, dict[str, Any], list[str]]:
    """Return the checkpoint that a path names and that fits: its file, its state, and what was passed over.

    Raises:
        RequestError: there is none; a good one beside it is offered.
    """
    source = path
    try:
        source, state, passed_over = open_checkpoint(path, asked="--resume")
        loop.state.require_fit(state, source=str(source))
    except RequestError as error:
        raise RequestError(f"{error}{_offer(loop, source)}") from None
    return str(source), state, passed_over


def _offer(loop: Loop, source: Path) -> str:
    """Offer the newest checkpoint beside the one that was refused from which this training can go on."""
    if source.is_dir():
        return ""
    for path, state in good_ones(source.parent, on_skipped=lambda _: None):
        if source.exists() and path.samefile(source):
            continue
        try:
            loop.state.require_fit(state, source=str(path))
        except RequestError:
            continue
        return f"; {path} is good: --resume {path} (in a recipe train.resume) goes on from update {state['updates']}"
    return ""


def _training_options(words: tuple[str, ...]) -> tuple[Training, list[str]]:
    """Read the trainer's flags; the task's own are left over."""
    schema = describe(Training)
    values, rest = read_flags(words, schema)
    flags = {option.name: option.flag for option in schema}
    return check(Training, values, where=lambda name: flags.get(name, name)), rest


def _kind(error: Exception) -> str:
    """Sort an error into the record's kinds of failure."""
    if isinstance(error, RequestError | CheckpointError):
        return "request"
    if isinstance(error, NotKeptError):
        return "checkpoint_lost"
    if isinstance(error, OutOfMemoryError) or is_out_of_memory(error):
        return "out_of_memory"
    if isinstance(error, NonFiniteError):
        return "non_finite"
    if isinstance(error, distributed.JoinTimeoutError):
        return "join_timeout"
    if is_lost_peer(str(error)):
        return "lost_peer"
    return "training" if isinstance(error, TrainingError) else "exception"


def _recipe_in(run_dir: RunDir | None) -> str:
    """Return the recipe that a run keeps; empty where there is none."""
    if run_dir is None:
        return ""
    try:
        return read_whole(run_dir.recipe).decode("utf-8", "replace")
    except OSError:
        return ""


def _discard_line(line: str) -> None:
    """Only rank 0 speaks."""
