"""What the screens of the console hand to each other: the recipe at hand and what the next launch shall use."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gputrain_tui.recipe import Recipe


@dataclass
class Desk:
    """One per console."""

    folder: Path = field(default_factory=Path.cwd)
    """Where recipes are looked for."""
    source: str | None = None
    """The recipe file that the launch screen is to open next."""
    resume: str | None = None
    """The run whose training the next launch continues."""
    recipe: Recipe | None = None
    """The recipe as it stands in the form; None while there is none that is right."""
    gpus: tuple[int, ...] = ()
    """GPUs of this machine that were chosen for the next launch and are not in the form yet."""
