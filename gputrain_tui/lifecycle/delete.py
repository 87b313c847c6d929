"""Deletes the directory of a run that has no process left."""

from __future__ import annotations

import secrets
import shutil

from gputrain_tui.history.runs import ENDED, Run, open_run
from gputrain_tui.lifecycle.leftovers import processes_of, supervisors_of
from trainer.contract.errors import RequestError


def delete_run(run: Run) -> None:
    """Delete everything of a run: record, logs and checkpoints.

    It is renamed first, so that a reader never finds half of a run.

    Raises:
        RequestError: the run goes on, or its directory cannot be deleted.
    """
    path = run.dir.path
    now = open_run(path) or run
    if now.state not in (*ENDED, "lost"):
        raise RequestError(f"{run.id} is {now.state}; stop it with `gputrain stop {run.id}` before deleting it")
    if left := [*supervisors_of(path), *processes_of(path)]:
        raise RequestError(f"{run.id} still has processes ({', '.join(map(str, left))}): `gputrain stop {run.id}`")
    hidden = path.with_name(f".deleted-{secrets.token_hex(8)}")
    try:
        if path.is_symlink():  # to a directory of one's own, which stays
            path.unlink()
            return
        path.rename(hidden)
        shutil.rmtree(hidden)
    except OSError as error:
        raise RequestError(f"{run.id} cannot be deleted: {error.strerror}") from None
