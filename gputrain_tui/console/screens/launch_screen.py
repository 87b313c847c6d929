"""Launch screen: choose, edit, save and launch a recipe, with its plan and preflight."""

from __future__ import annotations

import asyncio
from itertools import chain, count
from pathlib import Path

import msgspec
from textual import on, work
from textual.widget import Widget
from textual.widgets import Input, Static

from gputrain_tui import paths
from gputrain_tui.console.screens.recipe_page import NEW_LABEL, RecipePage
from gputrain_tui.console.screens.start_and_stop import launch
from gputrain_tui.console.widgets.canvas import Copyable
from gputrain_tui.console.widgets.form import Form
from gputrain_tui.plan.planner import Plan, shell_commands
from gputrain_tui.preflight import errors, summary
from gputrain_tui.recipe.files import complete_path, recipe_files
from gputrain_tui.recipe.form_fields import NODE_KEY, Field
from gputrain_tui.recipe.new_recipe import file_name, from_text
from gputrain_tui.recipe.toml_writer import dump_toml
from gputrain_tui.recipe.values import value_text
from trainer.contract.errors import RequestError
from trainer.contract.home_folder import expand_home
from trainer.contract.record import write_atomically

MOST_NAMES = 12


def free_path(path: Path) -> Path:
    """Return a path, with ``-2``, ``-3`` and so on at the end of its stem if it exists."""
    others = (path.with_stem(f"{path.stem}-{number}") for number in count(2))
    return next(free for free in chain([path], others) if not free.exists())


class LaunchScreen(RecipePage):
    """The launch screen."""

    PLACE = "launch"
    CSS_PATH = "launch.tcss"

    _launching = False
    """Whether a launch is under way: a second press of the key starts no second run."""

    # Editing

    @on(Form.Chosen, "#form")
    def _field_chosen(self, event: Form.Chosen) -> None:
        self.action_edit()

    def action_edit(self) -> None:
        field = self.form.field
        if field is None or self.draft is None:
            return
        if field.option.kind == "bool":
            self.action_cycle(1)
            return
        default = value_text(field.option.default)
        hint = f"empty: the default, {default}" if default else "empty: left out"
        self._open_prompt(field, field.key, field.text if field.written else "", hint)

    @on(Input.Changed, "#editor")
    def _typed(self, event: Input.Changed) -> None:
        if self._prompt_for == "find":
            self.form.find(event.value)
            self._show_detail()
        elif isinstance(self._prompt_for, Field):
            self._show_detail(event.value)

    @on(Input.Submitted, "#editor")
    def _submitted(self, event: Input.Submitted) -> None:
        self._commit()

    def _commit(self) -> bool:
        """Apply the typed text and close the line; return False, with the line open, if the text is invalid."""
        purpose, draft, typed = self._prompt_for, self.draft, self.editor.value
        if isinstance(purpose, Field):
            if typed and draft is not None and draft.problem(purpose, typed):
                self.app.bell()
                return False  # the problem stands above the input
            self._set(purpose.key, typed)
            self._leave_editor()
            self._changed()
        elif purpose == "new":
            if typed.strip():
                self._write_new(typed)
                return False  # the line closes when the text has been read
            self._leave_editor()
        elif purpose == "save":
            self._leave_editor()
            if typed.strip():
                self.save_under(expand_home(typed))
        elif purpose == "find":
            self._leave_editor()
            self._show_fields()
        return True

    def _set(self, key: str, text: str) -> None:
        """Set a field, and name the keys that another task or script does not keep."""
        removed = self.draft.set(key, text) if self.draft is not None else []
        if removed:
            names = ", ".join(name.partition(".")[2] for name in removed)
            self.console.report(f"removed, as they were set for another task or script: {names} (u undoes)")

    @work(exclusive=True, group="new")
    async def _write_new(self, typed: str) -> None:
        """Write a new recipe and open it; the line stays open if the text names nothing to train.

        In a thread: an accelerate command is read by accelerate itself, which takes seconds to import.
        """
        label, editor = self.query_one("#label", Static), self.editor
        label.update("reading …")
        problem = ""
        try:
            new = await asyncio.to_thread(from_text, typed)
        except RequestError as error:
            problem = str(error)
        if self._prompt_for != "new":
            return  # the line was closed meanwhile
        label.update(NEW_LABEL)
        if editor.value != typed:
            self.console.report("not written: the line was changed while it was read; Enter reads it again")
            return
        if problem:
            self.console.report(problem, alarm=True)
            return
        path = free_path(self.session.folder / file_name(new.name))
        try:
            path.write_text(new.text(file=path.name), encoding="utf-8")
        except OSError as error:
            self.console.report(f"not written: {path}: {error.strerror}", alarm=True)
            return
        self.recipes.show(recipe_files(self.session.folder, paths.config_folder()))
        self.open_recipe(path)
        self.console.report("\n".join([f"wrote {self._display_name(path)}", *new.notes]))

    def action_commit(self, step: int) -> None:
        """Complete a path; with nothing to complete, apply the typed text and go to the next field."""
        field = self._prompt_for if isinstance(self._prompt_for, Field) else None
        if (self._prompt_for == "save" or (field is not None and field.is_path)) and self._complete_path():
            return
        if self._commit() and field is not None:
            self.form.action_move(step)

    def _complete_path(self) -> bool:
        """Complete a path as far as it is unambiguous; return False if that adds nothing."""
        editor = self.editor
        path, names = complete_path(editor.value, self.session.folder) if editor.value else ("", [])
        if path == editor.value and (len(names) < 2 or path.rpartition("/")[2] in ("", *names)):
            return False
        editor.value = path
        editor.cursor_position = len(path)
        if len(names) > 1:
            self.console.report("  ".join(names[:MOST_NAMES]) + (" …" if len(names) > MOST_NAMES else ""))
        return True

    def watch_focused(self, focused: Widget | None) -> None:
        """Apply the typed text and close the line when a click moves the focus: letters typed there are commands."""
        purpose, editor = self._prompt_for, self.editor
        if purpose is None or focused is None or focused is editor:
            return  # focused is None: the terminal has lost the focus
        if isinstance(purpose, Field) and self.draft is not None:
            problem = self.draft.problem(purpose, editor.value) if editor.value else ""
            if problem:
                self.console.report(f"{purpose.key} stays as it was: {problem}", alarm=True)
            else:
                self._set(purpose.key, editor.value)
        self._leave_editor(focus=False)
        self._changed()

    def action_cycle(self, step: int) -> None:
        field = self.form.field
        if field is not None and field.values and self.form.has_focus:
            index = field.values.index(field.text) if field.text in field.values else -1
            self._set(field.key, field.values[(index + step) % len(field.values)])
            self._changed()

    def action_reset(self) -> None:
        field, draft = self.form.field, self.draft
        if field is not None and draft is not None and self.form.has_focus:
            draft.reset(field.key)
            self._changed()

    def action_undo(self) -> None:
        if self.draft is not None and (key := self.draft.undo()) is not None:
            self._changed()
            self.form.go_to(key)
        else:
            self.console.report("there is nothing to undo")

    def action_find(self) -> None:
        if self.draft is not None:
            self._before_find = self.form.search, self.form.field.key if self.form.field is not None else ""
            self._open_prompt("find", "find", self.form.search, "a field's name, or words in its help; Esc restores")

    def action_add_node(self) -> None:
        if self.draft is not None:
            index = self.draft.add_node()
            self._changed()
            self.form.focus()
            self.form.go_to(f"cluster.nodes[{index}].host")

    def action_remove_node(self) -> None:
        field, draft = self.form.field, self.draft
        if field is None or draft is None or not field.group.startswith("Node "):
            self.console.report("there is no node under the cursor")
        elif draft.remove_node(int(field.group.removeprefix("Node "))):
            self._changed()
        else:
            self.console.report("a run needs at least one node")

    async def action_back(self) -> None:
        """Close the input line; else end the search; else focus the list of recipes."""
        if self._prompt_for is not None:
            searching = self._prompt_for == "find"
            self._leave_editor()
            if searching:
                search, key = self._before_find
                self.form.find(search)
                self.form.go_to(key)
            self._show_fields()
        elif self.form.search:
            self.form.find("")
            self._show_fields()
        else:
            self.recipes.focus()

    # Save, copy, launch

    def action_save(self) -> None:
        if self._path is None or self.draft is None:
            return
        if self._path.is_relative_to(paths.runs_folder()):
            self.action_save_as()  # a run keeps the recipe with which it ran
        elif not self.draft.changes:
            self.console.report(f"{self.draft.name} has no changes")
        else:
            self.save_under(self._path)

    def action_save_as(self) -> None:
        if self._path is None or self.draft is None:
            return
        folder = self.session.folder if self._path.is_relative_to(paths.runs_folder()) else self._path.parent
        name = self._display_name(folder / f"{self._path.stem}-2.toml")
        self._open_prompt("save", "save as", name, "file to save the recipe in")

    def save_under(self, path: Path) -> None:
        draft, result, before = self.draft, self._validation, self._path
        if draft is None or before is None:
            return
        if result is None or result.recipe is None or self._validation_of != (draft.text, draft.settings):
            problem = result.problem if result is not None and result.problem else "the recipe is still being checked"
            self.console.report(f"not saved: {problem}", alarm=bool(result and result.problem))
            if result is not None:
                self._go_to_problem(result)
            return
        path = self.session.folder / path
        if path.is_dir():
            self.console.report(f"not saved: {self._display_name(path)} is a folder", alarm=True)
            return
        path = path if path.suffix == ".toml" else path.with_name(f"{path.name}.toml")  # others are not listed
        if path != before and path.exists():
            self.console.report(f"not saved: {self._display_name(path)} already exists", alarm=True)
            return
        text = dump_toml(result.recipe)
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
        self.recipes.show(recipe_files(self.session.folder, paths.config_folder()))
        self.recipes.go_to(path)
        self.console.report(f"saved {draft.name}")
        self._changed()

    def action_copy_commands(self) -> None:
        plan = self.plan_view.plan
        if plan is None:
            self.console.report("there is no plan to copy yet")
            return
        several = "s" * (len(plan.nodes) != 1)
        self.console.copy(self._commands(plan), f"the command{several} of {len(plan.nodes)} node{several}")

    def copyable(self) -> Copyable | None:
        """Return the command of the node under the cursor; if it is on none, the commands of all nodes."""
        plan, field = self.plan_view.plan, self.form.field
        if plan is None:
            return None
        node = NODE_KEY.fullmatch(field.key) if field is not None and self.form.has_focus else None
        index = int(node[1]) if node is not None else -1
        if not 0 <= index < len(plan.nodes):
            return Copyable(self._commands(plan), "the command of every node")
        only = msgspec.structs.replace(plan, nodes=[plan.nodes[index]])
        return Copyable(self._commands(only), f"the command of node {index}")

    def _commands(self, plan: Plan) -> str:
        return shell_commands(plan, folder=str(self.session.folder.absolute())) + "\n"

    @work(group="launch")
    async def action_launch(self) -> None:
        """Validate again, since a port or GPU may be taken meanwhile; launch, detached, and show the run."""
        draft = self.draft
        if draft is None:
            self.console.report("choose a recipe first")
            return
        if self._launching or (self._prompt_for is not None and not self._commit()):
            return  # an open input line is applied first; an invalid value stops the launch
        self._launching = True
        result = await self._validated_draft(draft, hosts_max_age_s=0.0)
        self._launching = False
        if result.prepared is not None:
            await launch(self.console, result.prepared)
        else:
            self._show_validation(draft, result)  # the preflight has the reasons, whole
            why = summary(result.results) if errors(result.results) else "the recipe has an error"
            self.console.report(f"not launched: {why}", alarm=True)
            self._go_to_problem(result)
