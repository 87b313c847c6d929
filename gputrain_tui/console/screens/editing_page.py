"""Editing of the open recipe: fields, nodes, search."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path

from textual import on
from textual.widgets import Input

from gputrain_tui.console.screens.recipe_page import RecipePage
from gputrain_tui.console.widgets.form import Form
from gputrain_tui.console.widgets.recipe_list import RecipeList
from gputrain_tui.recipe.draft import Field, value_text
from trainer.contract.home_folder import expand_home


class EditingPage(RecipePage):
    """Recipe page whose fields can be edited."""

    @abstractmethod
    def save_under(self, path: Path) -> None:
        """Save the recipe in a file."""

    @on(Form.Chosen, "#form")
    def _field_chosen(self, event: Form.Chosen) -> None:
        self.action_edit()

    def action_edit(self) -> None:
        """Change the field with the cursor."""
        field = self.form.field
        if field is None or self.draft is None:
            return
        if field.option.kind == "bool":
            self.action_cycle(1)
            return
        hint = allowed_hint(field)
        self._ask(field, field.text if field.written else "", hint)

    @on(Input.Changed, "#editor")
    def _typed(self, event: Input.Changed) -> None:
        if self._asking == "find":
            self.form.find(event.value)
            self._show_detail()
        elif isinstance(self._asking, Field):
            self._show_detail(event.value)

    @on(Input.Submitted, "#editor")
    def _submitted(self, event: Input.Submitted) -> None:
        asked, draft = self._asking, self.draft
        if draft is None:
            return
        if isinstance(asked, Field):
            if event.value and draft.problem(asked, event.value):
                self.app.bell()
                return  # what is wrong stands above the input
            draft.set(asked.key, event.value)
            self._leave_editor()
            self._changed()
        elif asked == "save":
            self._leave_editor()
            self.save_under(expand_home(event.value))
        else:
            self._leave_editor()
            self._show_fields()

    def action_cycle(self, step: int) -> None:
        """Change a switch or a choice."""
        field, draft = self.form.field, self.draft
        if field is None or draft is None or not self.form.has_focus:
            return
        values = field.values
        if not values:
            return
        at = values.index(field.text) if field.text in values else -1
        draft.set(field.key, values[(at + step) % len(values)])
        self._changed()

    def action_reset(self) -> None:
        """Reset the field to the recipe's value, or to the default."""
        field, draft = self.form.field, self.draft
        if field is not None and draft is not None and self.form.has_focus:
            draft.reset(field.key)
            self._changed()

    def action_find(self) -> None:
        """Ask which fields to show."""
        if self.draft is not None:
            self._ask("find", self.form.wanted, "words in a field's name or help; Enter keeps them, Esc shows all")

    def action_add_node(self) -> None:
        """Add a node."""
        if self.draft is not None:
            index = self.draft.add_node()
            self._changed()
            self.form.focus()
            self.form.go_to(f"cluster.nodes[{index}].host")

    def action_remove_node(self) -> None:
        """Remove the node with the cursor."""
        field, draft = self.form.field, self.draft
        if field is None or draft is None or not field.group.startswith("Node "):
            self.console.report("the cursor is on no node")
        elif draft.remove_node(int(field.group.removeprefix("Node "))):
            self._changed()
        else:
            self.console.report("a run needs one node")

    async def action_back(self) -> None:
        """Leave the editor; then the search; then the form."""
        if self._asking is not None:
            searching = self._asking == "find"
            self._leave_editor()
            if searching:
                self.form.find("")
            self._show_fields()
        elif self.form.wanted:
            self.form.find("")
            self._show_fields()
        else:
            self.query_one(RecipeList).focus()


def allowed_hint(field: Field) -> str:
    """Return the placeholder of the empty input: the default."""
    default = value_text(field.option.default)
    return f"empty: the default, {default}" if default else "empty: left out"
