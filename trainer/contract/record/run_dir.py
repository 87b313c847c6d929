"""Layout of a run directory, and atomic replacement of its small files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from trainer.contract.record.regular_file import read_part


class _Entry:
    """File or folder of a run directory; its path is made when it is asked for, as a list reads many directories."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDir, owner: type[RunDir]) -> Path:
        return run.path / self._name


class RunDir:
    """Paths of all files of a run directory; creates none of them."""

    recipe = _Entry("recipe.toml")
    plan = _Entry("plan.json")
    status = _Entry("status.json")
    events = _Entry("events")
    run_events = _Entry("events/run.ndjson")
    digest = _Entry("digest")
    """The downsampled record, from which a long run is shown at once; it may be missing."""
    logs = _Entry("logs")
    checkpoints = _Entry("checkpoints")
    nodes = _Entry("nodes")
    """Outcomes of the nodes, ``<node>.json``."""
    gaps = _Entry("gaps")
    """Counts of the steps that a rank has made and its event file lacks, ``<rank>.json``."""
    attempt = _Entry("attempt.json")
    """Identities of the node agents' processes, with which another supervisor can adopt the run."""
    agents = _Entry("agents")
    """Folders through which supervisors talk to the node agents of other hosts, one for each start of a node."""
    notes = _Entry("notes.json")
    """A person's note and tags."""
    slurm = _Entry("slurm.json")
    submission = _Entry("submission.json")
    """What ``sbatch`` was given, from which a job of ``slurm.requeue`` submits the one after it."""
    lock = _Entry("supervisor.lock")
    """Lock file of the supervisor, which touches it once a second."""
    stop = _Entry("stop")
    """Stop level for the supervisor, written by a host that sees the run directory but not the process."""
    stack_request = _Entry("stack_request")
    """The newest request for the stacks of all ranks, a text that is new for each; the node agents answer it."""
    on_end_log = _Entry("logs/on_end.log")
    """Output of the command after the end of the run; the process that creates this file runs the command."""
    on_finding_log = _Entry("logs/on_finding.log")
    """Output of the commands for findings."""
    told_findings = _Entry("told_findings.json")
    """Findings of which the command for findings was last told that they stand."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def report_lock(self, sink: str) -> Path:
        """Return the lock of a live sink; it contains the sink's target."""
        return self.path / f"report-{sink}.lock"

    def rank_events(self, rank: int) -> Path:
        return self.events / f"{rank}.ndjson"

    def node_events(self, node: int) -> Path:
        """Return the event file of a node agent: node samples, and the states and failures of its ranks."""
        return self.events / f"node-{node}.ndjson"

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"{rank}.log"

    def rank_collectives(self, rank: int) -> Path:
        """Return the file in which NCCL dumps a rank's last collectives; NCCL appends the rank to the name."""
        return self.logs / f"collectives_{rank}"

    def node_log(self, node: int) -> Path:
        return self.logs / f"node-{node}.log"

    def node_result(self, node: int) -> Path:
        """Return the outcome of a node; written before its agent exits."""
        return self.nodes / f"{node}.json"


NATIVE = " native"
"""End of a request for stacks that asks for the native frames as well."""


def read_stack_request(run_dir: RunDir) -> str:
    """Return the newest request for the stacks of all ranks; empty if there is none."""
    max_bytes = 64
    try:
        return read_part(run_dir.stack_request, 0, max_bytes).decode("ascii", "replace")
    except OSError:
        return ""


@contextmanager
def replacing(path: Path, temporary: Path | None = None) -> Iterator[BinaryIO]:
    """Yield a file that replaces ``path`` once it is on disk; on any failure it is deleted and ``path`` unchanged.

    A reader sees the old or the new content, never a part, even after a power failure.
    """
    # Two containers that share a folder may have equal pids; what is at that name already is not ours.
    temporary = temporary or path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a small file; a reader sees the old or the new content.

    Raises:
        OSError: it could not be written; the old content is unchanged.
    """
    with replacing(path) as file:
        file.write(data)


def create_atomically(path: Path, data: bytes) -> None:
    """Create a small file; a reader sees none or the whole content.

    Raises:
        FileExistsError: there is one, which is unchanged.
        OSError: it could not be written.
    """
    draft = path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")
    write_atomically(draft, data)
    try:
        os.link(draft, path)
    finally:
        draft.unlink()
