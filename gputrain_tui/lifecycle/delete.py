"""Deletes run directories: of ended runs, and of runs that were refused before they trained."""

from __future__ import annotations

import secrets
import shlex
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import PurePosixPath

from gputrain_tui.history.run_folders import Run, open_run
from gputrain_tui.history.status_file import ENDED
from gputrain_tui.hosts.host_channel import ANSWER_S
from gputrain_tui.hosts.ssh import Ssh
from gputrain_tui.lifecycle.leftovers import processes_of, supervisors_of
from gputrain_tui.lifecycle.remote_nodes import remote_nodes
from trainer.contract.errors import RequestError


def delete_refused(run: Run) -> None:
    """Delete a run that was refused before it trained: its directory here and those on its hosts."""
    folders = {(remote.host, remote.run_dir) for remote in remote_nodes(run.dir)}
    # A host chooses the recorded path: only one that ends in this run's folder is deleted.
    folders = {(host, path) for host, path in folders if PurePosixPath(path).parts[-2:] == ("runs", run.id)}
    processes = []
    with suppress(RequestError, OSError):
        ssh = Ssh()
        for host, path in sorted(folders):
            argv = ssh.command_line(host, "rm", "-rf", "--", shlex.quote(path))
            null = subprocess.DEVNULL
            processes.append(subprocess.Popen(argv, stdin=null, stdout=null, stderr=null))
    deadline = time.monotonic() + ANSWER_S  # a host that does not answer in time keeps its small folder
    try:
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.0))
    finally:  # also at Ctrl-C
        for process in processes:
            process.kill()
            process.wait()
    shutil.rmtree(run.dir.path, ignore_errors=True)


def delete_run(run: Run) -> None:
    """Delete the directory of a run: record, logs and checkpoints.

    It is renamed first, so that no reader finds a run with files missing.

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
        if path.is_symlink():  # the directory that the user linked stays
            path.unlink()
            return
        path.rename(hidden)
        shutil.rmtree(hidden)
    except OSError as error:
        raise RequestError(f"{run.id} cannot be deleted: {error.strerror}") from None
