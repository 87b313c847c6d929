"""Keeps a run's temporary files in its run directory, and deletes them at its end."""

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
"""Bytes that a folder's path may have for sockets in its subfolders, 36 bytes more, to stay under the kernel's 108.

The supervisor's limit, 60 for the folder above that of the node, keeps below it: no folder is needed in that one then.
"""


@contextlib.contextmanager
def scratch_folder(run_dir: RunDir | None, node: int) -> Iterator[None]:
    """Point TMPDIR of this process and its children into the run directory, where there is one.

    Ranks that are killed cannot delete what they have there, so the node agent does.
    """
    if run_dir is None:
        yield
        return
    # Nodes may share the run directory and do not end at the same time.
    folder = run_dir.tmp / str(node)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    system = tempfile.gettempdir()
    # What torch.compile has built is worth keeping from run to run.
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or str(Path(system) / f"torchinductor_{_user()}")
    short = len(os.fsencode(folder)) <= LONGEST_SOCKET_FOLDER
    sockets = str(folder) if short else tempfile.mkdtemp(prefix="gputrain-")
    # Where multiprocessing, here and in ranks, puts its sockets; set, it makes no folder of its own to clear away.
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
        # A container's user without an entry in the password file.
        return str(os.getuid())
