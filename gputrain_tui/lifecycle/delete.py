"""Deletes the directory of a run that has no process left."""

from __future__ import annotations

import secrets
import shlex
import shutil
import subprocess
from contextlib import suppress
from pathlib import PurePosixPath

from gputrain_tui.history.runs import Run, open_run
from gputrain_tui.history.status_file import ENDED
from gputrain_tui.hosts.ssh import Ssh
from gputrain_tui.lifecycle.leftovers import processes_of, supervisors_of
from gputrain_tui.lifecycle.remote_nodes import remote_nodes
from trainer.contract.errors import RequestError

REMOTE_TIMEOUT_S = 15.0
"""For a small folder on all hosts together, over connections of their own; a host that does not answer keeps it."""


def delete_refused(run: Run) -> None:
    """Delete everything of a run that was refused before it trained, on the hosts as well."""
    found = {(remote.host, remote.run_dir) for remote in remote_nodes(run.dir)}
    # A host that answers anything else than its folder of this run is not asked to delete it.
    found = {(host, path) for host, path in found if PurePosixPath(path).parts[-2:] == ("runs", run.id)}
    processes = []
    with suppress(RequestError, OSError):
        ssh = Ssh()
        for host, path in sorted(found):
            words = ssh.command_line(host, "rm", "-rf", "--", shlex.quote(path), own=True)
            nowhere = subprocess.DEVNULL
            processes.append(subprocess.Popen(words, stdin=nowhere, stdout=nowhere, stderr=nowhere))
    try:
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(REMOTE_TIMEOUT_S)
    finally:  # also at Ctrl-C
        for process in processes:
            process.kill()
            process.wait()
    shutil.rmtree(run.dir.path, ignore_errors=True)


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
