"""TMPDIR of a node's processes: a folder of the run, deleted at its end."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trainer.agent.forkserver import environment, sockets_in
from trainer.contract.errors import MachineNotReadyError
from trainer.contract.record import RunDir
from trainer.host.temporary_folder import SHORT, delete_temporary_folders, make_temporary_folder, system_folder


@contextlib.contextmanager
def scratch_folder(run_dir: RunDir | None, node: int) -> Iterator[Path | None]:
    """Set TMPDIR of this process and its children to a folder of the run, and delete that afterwards.

    Killed ranks cannot delete their own temporary files. Without a run directory nothing is changed.

    Raises:
        MachineNotReadyError: there is no folder for temporary files.
    """
    if run_dir is None:
        yield None
        return
    folder, sockets = _make_folders(run_dir, node)
    # The compile cache stays where it is without a run, since it speeds up the next one.
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or str(system_folder() / f"torchinductor_{_user()}")
    # multiprocessing, here and in ranks, puts its sockets there, and makes no folder that a kill would leave behind.
    with environment({"TMPDIR": str(folder), "TORCHINDUCTOR_CACHE_DIR": cache}), sockets_in(str(sockets)):
        tempfile.tempdir = None  # tempfile has cached the system's folder
        try:
            yield folder
        finally:
            tempfile.tempdir = None
            delete_temporary_folders(run_dir.path, [node])


def _make_folders(run_dir: RunDir, node: int) -> tuple[Path, Path]:
    """Make the temporary folder of a node, and one with a short path for its sockets, which may be the same."""
    # Maximum bytes of the path of a folder for sockets of ``multiprocessing``: they have 36 more, of at most 107.
    longest_socket_folder = 71
    try:
        folder = make_temporary_folder(run_dir.path, node, system_folder())
        if len(os.fsencode(folder)) <= longest_socket_folder:
            return folder, folder
        return folder, make_temporary_folder(run_dir.path, node, SHORT)
    except OSError as error:
        raise MachineNotReadyError(
            f"temporary files cannot be written ({error.filename or error}: {error.strerror}); "
            "set TMPDIR to a folder of this machine that can be written"
        ) from None


def _user() -> str:
    """Return the user's name as torch has it in the name of its cache."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        # A container's user may have no entry in the password file.
        name = f"uid_{os.getuid()}"
    return re.sub(r'[\\/:*?"<>|]', "_", name)
