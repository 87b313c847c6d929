"""Finds the checkpoints of a run, in its run directory or in ``train.save_dir``."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from gputrain_tui.history.recorded_recipe import recorded_table
from gputrain_tui.history.run_folders import Run, find, newest_runs, open_run, parent_of
from gputrain_tui.history.status_file import read_status
from gputrain_tui.lifecycle.remote_nodes import path_with_host, remote_node
from trainer.contract.checkpoint_trailer import owner_of
from trainer.contract.errors import RequestError, nearest, quoted
from trainer.contract.record import RunDir, checkpoint_to_resume, recorded_checkpoints
from trainer.contract.record.checkpoints import BEST, is_dcp_folder, run_folders


def resumable_checkpoint(run_dir: RunDir) -> Path | None:
    """Return the path to resume a run from: a folder, for its newest good checkpoint, or a file; None without one.

    If rank 0 ran on a host with a run directory of its own, it is a path of that host, taken from the recorded
    checkpoints: their files cannot be read from here.
    """
    remote = remote_node(run_dir, 0)
    if remote is None:
        return checkpoint_to_resume(run_dir, run_ids(run_dir))
    recorded = recorded_checkpoints(run_dir)[-1:]
    folder = RunDir(remote.run_dir).checkpoints
    return next((folder if path.parent == folder else path for path in recorded), None)


def run_ids(run_dir: RunDir) -> frozenset[str]:
    """Return the ids that a run's checkpoints may name: its directory's name, and the one before that was renamed."""
    status = read_status(run_dir)
    return frozenset({run_dir.path.name, *([status.run] if status is not None else [])})


def run_named_by(run_dir: RunDir, path: Path) -> str:
    """Return the run's id as its checkpoint, or the newest in its folder, names it: ``train.checkpoint_run``."""
    named = owner_of(path)
    ids = run_ids(run_dir)
    if not named:
        own = next((folder.own[0] for folder in run_folders(run_dir, ids) if folder.path == path), path)
        named = owner_of(own)
    return named if named in ids else run_dir.path.name


@dataclass(frozen=True, kw_only=True)
class ChosenCheckpoint:
    """Checkpoint to be evaluated or exported."""

    path: Path
    """A file, or a folder for its newest good checkpoint; absolute."""
    run: Run | None
    run_id: str = ""
    """The run's id as the checkpoint names it, if a run was named; empty for a named file."""
    description: str
    """Such as ``the best checkpoint of RUN``."""
    of_torch: bool = False
    """Whether it is a folder of ``torch.distributed.checkpoint``."""


def choose_checkpoint(named: str, which: str | None, *, here: bool = False) -> ChosenCheckpoint:
    """Return a checkpoint of a run, or the one in a file.

    Args:
        named: a run (an id, a prefix of one, or ``last``, the last one that trained), or a checkpoint's file.
        which: of a run: ``best``, ``newest``, or the name of a file; None for the best, or the newest without a best.
        here: whether it is read on this machine, and not by the hosts of the run.

    Raises:
        RequestError: there is no such run, file or checkpoint.
    """
    path = Path(named)
    if path.suffix == ".pt" or len(path.parts) > 1 or path.is_file() or is_dcp_folder(path):
        if which is not None:
            raise RequestError(
                f"--checkpoint {which} selects a checkpoint of a run, but {named} is a file: "
                "name a run, or omit --checkpoint"
            )
        return _named_file(path)
    run = find_training(named)
    if runs_script(run.dir):
        record = shlex.join(["gputrain", "export", run.id, "--to", "csv"])
        raise RequestError(
            f"{run.id} ran a script, whose model and checkpoints are its own: only a task can be evaluated, predict "
            f"and export its weights; {record} writes the script's steps"
        )
    if which not in (None, "best", "newest"):
        return _file_of(run, str(which))
    newest = resumable_checkpoint(run.dir)
    if newest is None:
        raise RequestError(describe_missing_checkpoint(run))
    newest = newest.absolute()
    if here and remote_node(run.dir, 0) is not None and not (last := recorded_checkpoints(run.dir)[-1]).exists():
        where = path_with_host(run.dir, 0, str(last))
        raise RequestError(f"the checkpoints of {run.id} are on its first host: copy {where} here, and name that file")
    run_id = run_named_by(run.dir, newest)
    folder = next(
        (each for each in run_folders(run.dir, run_ids(run.dir)) if newest in (each.path, each.to_resume)), None
    )
    best = folder.best if folder is not None else None
    if which != "newest" and best is not None:
        return ChosenCheckpoint(
            path=best.absolute(), run=run, run_id=run_id, description=f"the best checkpoint of {run.id}"
        )
    if which == "best":
        raise RequestError(f"{run.id} has no best checkpoint: take the newest with --checkpoint newest")
    description = f"the newest checkpoint of {run.id}" + (", which has no best one" if which is None else "")
    return ChosenCheckpoint(path=newest, run=run, run_id=run_id, description=description)


def _last_trained() -> Run:
    """Return the newest run that is not an evaluation."""
    runs = (run for run in newest_runs() if isinstance(run, Run))
    return next((run for run in runs if not evaluated_checkpoint(run.dir)), None) or find("last")


def find_or_last_trained(named: str) -> Run:
    """Return a run as ``find`` does, but of ``last`` the last one that trained.

    Raises:
        RequestError: there is no such run.
    """
    return _last_trained() if named == "last" else find(named)


def find_training(named: str) -> Run:
    """Return a run as ``find_or_last_trained`` does.

    Raises:
        RequestError: there is no such run, or it is an evaluation.
    """
    run = find_or_last_trained(named)
    if checkpoint := evaluated_checkpoint(run.dir):
        raise RequestError(f"{run.id} is an evaluation of {checkpoint}: name that file, or the run that trained it")
    return run


def evaluated_checkpoint(run_dir: RunDir) -> str:
    """Return ``train.eval_only`` of a run's recipe, the evaluated checkpoint; empty for a run that trains."""
    return str(recorded_table(run_dir, "train").get("eval_only", ""))


def runs_script(run_dir: RunDir) -> bool:
    """Whether the ranks of a run are a script's: its checkpoints are its own, and in no record."""
    train = recorded_table(run_dir, "train")
    return bool(train.get("script") or train.get("module"))


def _named_file(path: Path) -> ChosenCheckpoint:
    if is_dcp_folder(path):
        return ChosenCheckpoint(path=path.absolute(), run=None, description="the weights", of_torch=True)
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise RequestError(f"{path} {problem}: name a checkpoint, such as FOLDER/{BEST}, or a run")
    path = path.absolute()
    folder = path.parent
    run = open_run(folder.parent) if folder == RunDir(folder.parent).checkpoints else None
    if run is not None and (owner := owner_of(path)) and owner not in run_ids(run.dir):
        run = open_run(run.dir.path.parent / owner)  # another run has saved it in this one's folder
    return ChosenCheckpoint(
        path=path, run=run, description="the checkpoint" if run is None else f"a checkpoint of {run.id}"
    )


def _file_of(run: Run, name: str) -> ChosenCheckpoint:
    """Return a checkpoint of a run by its path, or by its name in a checkpoint folder of the run."""
    ids = run_ids(run.dir)
    folders = dict.fromkeys([run.dir.checkpoints, *(path.parent for path in recorded_checkpoints(run.dir))])
    for path in (Path(name), *(folder / name for folder in folders)):
        if not path.is_file():
            continue
        owner = owner_of(path)
        if owner and owner not in ids:
            raise RequestError(f"--checkpoint {quoted(name)}: {path} is a checkpoint of {owner}, not of {run.id}")
        return ChosenCheckpoint(
            path=path.absolute(), run=run, run_id=owner or run.id, description=f"a checkpoint of {run.id}"
        )
    known = sorted({path.name for folder in run_folders(run.dir, ids) for path in folder.own})
    listed = f"; it has {', '.join(known)}" if known else ""
    raise RequestError(
        f"--checkpoint {quoted(name)} is not a checkpoint of {run.id}; allowed are best, newest or a file"
        f"{nearest(name, ['best', 'newest', *known]) or listed}"
    )


def describe_newest(run_dir: RunDir, step: int | None) -> str:
    """Return which checkpoint an attempt that was ended leaves; ``step``: of the newest one on record."""
    if step is not None:
        return f"the newest checkpoint is that of step {step}"
    return "the checkpoints of a script are its own" if runs_script(run_dir) else "no checkpoint was saved"


def describe_missing_checkpoint(run: Run) -> str:
    """Return one line for a run without a checkpoint: why, if it ran a script, or the last one, if that was deleted."""
    if runs_script(run.dir):
        again = shlex.join(["gputrain", "run", str(run.dir.recipe)])
        return (
            f"{run.id} ran a script, which keeps checkpoints of its own: {again} starts it again, in the same folder; "
            "the script must find its checkpoint by itself, or by its option for it in train.args"
        )
    last = next(iter(recorded_checkpoints(run.dir)[-1:]), None)
    where = ""
    if last is not None:
        owner = owner_of(last)
        now = f"is now a checkpoint of {owner}" if owner else "no longer exists"
        where = f"; the last one it wrote, {last}, {now}"
    elif (parent := parent_of(run)) is not None:
        where = f": it was to continue {parent.id}, so resume that one"
    return f"{run.id} has no checkpoint in {run.dir.checkpoints}{where}"
