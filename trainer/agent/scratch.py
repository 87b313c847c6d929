"""Temporary files of a run, kept in its run directory and deleted at its end."""

from __future__ import annotations

import contextlib
import getpass
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.agent.forkserver import environment
from trainer.contract.record import RunDir

LONGEST_SOCKET_FOLDER = 71
"""Maximum bytes of a folder's path: sockets in its subfolders have 36 more, and the kernel's limit is 108.

The supervisor limits the folder above that of the node to 60, so its folders are never too long.
"""


@contextlib.contextmanager
def scratch_folder(run_dir: RunDir | None, node: int) -> Iterator[None]:
    """Set TMPDIR of this process and its children to a folder of the run directory, and delete that afterwards.

    Killed ranks cannot delete their own temporary files. Without a run directory nothing is changed.
    """
    if run_dir is None:
        yield
        return
    # Nodes may share the run directory and do not end at the same time.
    folder = run_dir.tmp / str(node)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    system = tempfile.gettempdir()
    # The compile cache stays outside, since it speeds up the next run.
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or str(Path(system) / f"torchinductor_{_user()}")
    short = len(os.fsencode(folder)) <= LONGEST_SOCKET_FOLDER
    sockets = str(folder) if short else tempfile.mkdtemp(prefix="gputrain-")
    # multiprocessing, here and in ranks, puts its sockets there, and makes no folder that a kill would leave behind.
    settings: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    with environment({"TMPDIR": str(folder), "TORCHINDUCTOR_CACHE_DIR": cache}):
        settings["tempdir"] = sockets
        try:
            yield
        finally:
            del settings["tempdir"]
            for path in {str(folder), sockets}:
                shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):
                run_dir.tmp.rmdir()


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # A container's user may have no entry in the password file.
        return str(os.getuid())
