"""Launch screen: choose, edit, save and launch a recipe, with its plan and preflight."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from textual import work
from textual.binding import BindingType

from gputrain_tui import paths
from gputrain_tui.console.actions import bindings
from gputrain_tui.console.screens.editing_page import EditingPage
from gputrain_tui.console.screens.recipe_page import DEBOUNCE_S
from gputrain_tui.console.validate_recipe import ValidatedRecipe, validate_recipe
from gputrain_tui.console.widgets.plan_view import PlanView
from gputrain_tui.console.widgets.recipe_list import RecipeList
from gputrain_tui.plan.shell import shell_commands
from gputrain_tui.preflight import errors
from gputrain_tui.recipe.files import recipe_files
from gputrain_tui.recipe.toml_writer import dump_toml
from trainer.contract.record import write_atomically


class LaunchScreen(EditingPage):
    """The launch screen."""

    PLACE = "launch"
    CSS_PATH = "launch.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("launch")]

    def __init__(
        self, *, debounce_s: float = DEBOUNCE_S, validate: Callable[..., ValidatedRecipe] = validate_recipe
    ) -> None:
        """Make the screen; arguments as of ``RecipePage``."""
        super().__init__(debounce_s=debounce_s, validate=validate)
        self._launching = False
        """Whether a launch is on its way: a second press of the key starts no second run."""

    # Saving, copying, launching

    def action_save(self) -> None:
        """Save the recipe where it came from."""
        if self._path is None or self.draft is None:
            return
        if self._path.is_relative_to(paths.runs_folder()):
            self.action_save_as()  # a run keeps the recipe with which it ran
        elif not self.draft.changes:
            self.console.report(f"{self.draft.name} has no changes")
        else:
            self.save_under(self._path)

    def action_save_as(self) -> None:
        """Ask for a name to save the recipe under."""
        if self._path is None or self.draft is None:
            return
        folder = self.session.folder if self._path.is_relative_to(paths.runs_folder()) else self._path.parent
        self._ask("save", self._display_name(folder / f"{self._path.stem}-2.toml"), "file to save the recipe in")

    def save_under(self, path: Path) -> None:
        """Save the recipe in a file, which becomes the open one."""
        draft, found, before = self.draft, self._found, self._path
        if draft is None or before is None:
            return
        if found is None or found.recipe is None or list(found.settings) != draft.settings:
            problem = found.problem if found is not None and found.problem else "it is being looked at"
            self.console.report(f"not saved: {problem}", alarm=bool(found and found.problem))
            return
        path = path if path.is_absolute() else self.session.folder / path
        if path != before and path.exists():
            self.console.report(f"not saved: {self._display_name(path)} is there already", alarm=True)
            return
        text = dump_toml(found.recipe)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text.encode())
        except OSError as error:
            self.console.report(f"not saved: {path}: {error.strerror}", alarm=True)
            return
        if path != before:
            del self._drafts[before]
            self._drafts[path] = draft
            self._path = path
        draft.mark_saved(text, name=self._display_name(path))
        self.query_one(RecipeList).show(recipe_files(self.session.folder, paths.config_folder()))
        self.query_one(RecipeList).point_at(path)
        self.console.report(f"saved {draft.name}")
        self._changed()

    def action_copy_commands(self) -> None:
        """Copy the commands with the terminal's own clipboard (OSC 52)."""
        plan = self.query_one(PlanView).plan
        if plan is None:
            self.console.report("there is no plan to copy yet")
            return
        self.app.copy_to_clipboard(shell_commands(plan) + "\n")
        self.console.report(
            f"copied the command{'s' * (len(plan.nodes) != 1)} of {len(plan.nodes)} node{'s' * (len(plan.nodes) != 1)}"
        )

    def action_write_commands(self) -> None:
        """Write the commands into a file."""
        plan, draft = self.query_one(PlanView).plan, self.draft
        if plan is None or draft is None or self._path is None:
            self.console.report("there is no plan to write yet")
            return
        path = self.session.folder / f"{self._path.stem}-commands.txt"
        try:
            write_atomically(path, (shell_commands(plan) + "\n").encode())
        except OSError as error:
            self.console.report(f"{path}: {error.strerror}", alarm=True)
            return
        self.console.report(f"wrote {self._display_name(path)}")

    @work(group="launch")
    async def action_launch(self) -> None:
        """Validate again, since a port or GPU that was free may be taken; launch, detached, and show the run."""
        draft = self.draft
        if draft is None:
            self.console.report("choose a recipe first")
            return
        if self._launching:
            return
        self._launching = True
        found = await self._validated(draft, draft.settings)
        self._launching = False
        if found.prepared is not None:
            await self.console.launch(found.prepared)
        else:
            refused = errors(found.results)
            self.console.report(refused[0].line if refused else found.problem, alarm=True)
