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
    """The next launch, as far as it was chosen; one per console."""

    folder: Path = field(default_factory=Path.cwd)
    """Folder of recipes."""
    drafts: dict[Path, Draft] = field(default_factory=dict)
    """Recipes that were opened, with their changes, by file."""
    source: str | None = None
    """The recipe file that the launch screen is to open next."""
    resume: str | None = None
    """The run whose training the next launch continues."""
    recipe: Recipe | None = None
    """The recipe as it stands in the form; None while there is none that is right."""
    gpus: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """GPUs that were chosen for the next launch and are not in the form yet: by host, ``localhost`` for this one."""
    hosts: tuple[HostEntry, ...] = ()
    """Machines that are shown also without a recipe."""
    hostfile: str = ""
    """The file that names them."""

    @property
    def unsaved(self) -> list[str]:
        """Names of the recipes with changes that are not saved."""
        return [draft.name for draft in self.drafts.values() if draft.changes]
