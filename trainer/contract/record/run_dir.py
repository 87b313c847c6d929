"""The layout of a run directory, and how its small files are replaced."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


class RunDir:
    """Names every file of a run directory; creating one is the caller's business."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.recipe = self.path / "recipe.toml"
        self.plan = self.path / "plan.json"
        self.status = self.path / "status.json"
        self.events = self.path / "events"
        self.run_events = self.events / "run.ndjson"
        self.digest = self.path / "digest"
        """The events in short, from which a long run is shown at once; an aid that may be missing."""
        self.logs = self.path / "logs"
        self.checkpoints = self.path / "checkpoints"
        self.nodes = self.path / "nodes"
        """What each node agent reports when it ends, ``<node>.json``."""
        self.attempt = self.path / "attempt.json"
        """The processes of the nodes, by which another supervisor recognises them."""
        self.lock = self.path / "supervisor.lock"
        """Locked by the one supervisor."""
        self.tmp = self.path / "tmp"
        """The ranks' temporary folder, deleted when the run ends."""

    def rank_events(self, rank: int) -> Path:
        """Events of one rank."""
        return self.events / f"{rank}.ndjson"

    def node_events(self, node: int) -> Path:
        """Events of a node agent: machine samples and how its ranks ended."""
        return self.events / f"node-{node}.ndjson"

    def rank_log(self, rank: int) -> Path:
        """What one rank printed, both streams."""
        return self.logs / f"{rank}.log"

    def node_log(self, node: int) -> Path:
        """What a node agent printed."""
        return self.logs / f"node-{node}.log"

    def node_result(self, node: int) -> Path:
        """How a node ended; written atomically before its parent process leaves."""
        return self.nodes / f"{node}.json"


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a small file so that a reader sees the old or the new content, never a part.

    Raises:
        OSError: it could not be written; nothing is left of the new content, and the old one is as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
