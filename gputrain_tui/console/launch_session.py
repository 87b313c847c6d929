"""State that the console's screens share for the next launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gputrain_tui.hosts.hostfile import HostEntry
    from gputrain_tui.recipe.draft import Draft
    from gputrain_tui.recipe.model import Recipe


@dataclass
class LaunchSession:
    """State of the next launch; one per console."""

    folder: Path = field(default_factory=Path.cwd)
    """Working folder, whose recipes are listed."""
    drafts: dict[Path, Draft] = field(default_factory=dict)
    """Drafts of the recipes opened so far, by file."""
    source: str | None = None
    """Recipe file that the launch screen opens when it is shown next."""
    wants_new: bool = False
    """Whether the launch screen asks for a new recipe when it is shown next."""
    recipe: Recipe | None = None
    """Recipe in the form; None if it is invalid or none is open."""
    gpus: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """GPUs chosen for the next launch that are not in the form yet, by host; ``localhost`` is this machine."""
    hosts: tuple[HostEntry, ...] = ()
    """Hosts of the hostfile, shown even without a recipe."""
    hostfile: str = ""
    """Path of the hostfile; empty: none."""

    @property
    def unsaved(self) -> list[str]:
        """Names of the recipes with unsaved changes."""
        return [draft.name for draft in self.drafts.values() if draft.changes]
