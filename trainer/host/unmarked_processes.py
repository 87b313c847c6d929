"""Processes of a run that its environment variable does not mark, such as a daemon that ``env -i`` started.

Their node agent lists them in its temporary folder, by which they are found if it is killed. The folder belongs to this
user and to one run directory: no copied or forged file of a run names a process to be killed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from trainer.contract.errors import RecordError
from trainer.contract.record.regular_file import read_json
from trainer.contract.record.run_dir import write_atomically
from trainer.host.proc_environ import RUN, SUPERVISOR
from trainer.host.process_identity import ProcessIdentity, identify, is_alive
from trainer.host.processes import descendants, environ_value
from trainer.host.temporary_folder import SHORT, system_folder, temporary_folders

FILE = "unmarked.json"

_decode = msgspec.json.Decoder(list[ProcessIdentity])


class UnmarkedProcesses:
    """List of the unmarked descendants of this process, a node agent."""

    def __init__(self, folder: Path) -> None:
        """Start without processes; ``folder`` is the node's temporary folder."""
        self._path = folder / FILE
        self._listed: set[int] = set()

    def update(self) -> None:
        """List the unmarked descendants that live now."""
        found = {
            pid for pid in descendants(os.getpid()) if all(environ_value(pid, n) is None for n in (RUN, SUPERVISOR))
        }
        if found != self._listed:
            try:
                write_atomically(self._path, msgspec.json.encode([identify(pid) for pid in sorted(found)]))
            except OSError:
                return  # a full disk, or a script that has emptied its TMPDIR
            self._listed = found


def unmarked_processes(run_dir: Path) -> Iterator[ProcessIdentity]:
    """Yield the listed processes of a run that still live."""
    max_nodes = 256  # nodes of a run whose lists are looked for on this machine, where few run
    for within in {system_folder(), SHORT}:
        for folder in temporary_folders(run_dir, range(max_nodes), within):
            try:
                listed = read_json(folder / FILE, _decode)
            except RecordError:
                continue
            yield from (process for process in listed if is_alive(process))
