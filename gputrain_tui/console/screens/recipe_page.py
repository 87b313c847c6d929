"""Base of the launch screen: list of recipes, form of the open one, and its validation in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from textual import on, work
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.events import Resize
from textual.widgets import Input

from gputrain_tui import paths
from gputrain_tui.console.host_choice import nodes_on_gpus
from gputrain_tui.console.screens.console_screen import Page
from gputrain_tui.console.validate_recipe import HOSTS_MAX_AGE_S, ValidatedRecipe, validate_recipe
from gputrain_tui.console.widgets.form import FieldDetail, Form, RecipeList
from gputrain_tui.console.widgets.line_input import PromptLine
from gputrain_tui.console.widgets.plan_view import PlanView
from gputrain_tui.console.widgets.preflight_summary import PreflightSummary
from gputrain_tui.hosts.host_names import THIS_MACHINE, address_of, is_local
from gputrain_tui.hosts.local_facts import local_facts
from gputrain_tui.preflight import errors
from gputrain_tui.recipe.draft import Draft
from gputrain_tui.recipe.files import recipe_files
from gputrain_tui.recipe.form_fields import Field, FieldMessage, find_field
from trainer.contract.errors import RequestError
from trainer.host.addresses import is_loopback

TALL_LINES = 32
"""Fewest lines of a screen with a blank line before the preflight."""

NEW_LABEL = "new recipe for"


class Sheet(Vertical):
    """Form, plan and preflight, whose lines are shared anew when the size changes, also by a notice above the page."""

    def __init__(self, share_lines: Callable[[], None]) -> None:
        super().__init__(id="sheet")
        self._share_lines = share_lines

    def on_resize(self, event: Resize) -> None:
        self.call_after_refresh(self._share_lines)


class RecipePage(Page):
    """Screen of a recipe with its plan and preflight; a subclass edits the recipe."""

    AUTO_FOCUS = "#recipes"

    def __init__(self, *, debounce_s: float = 0.15, validate: Callable[..., ValidatedRecipe] = validate_recipe) -> None:
        """Make the screen; ``debounce_s``: seconds without a change before the recipe is validated again."""
        super().__init__()
        self._debounce_s = debounce_s
        self._validate = validate
        self.recipes = RecipeList(id="recipes")
        self.form = Form(id="form")
        self.plan_view = PlanView(id="plan")
        self.preflight = PreflightSummary(id="readiness")
        self._path: Path | None = None
        self._validation: ValidatedRecipe | None = None
        self._validation_of: tuple[str, list[str]] | None = None
        """Text and settings of the draft to which ``_validation`` belongs."""
        self._fields: list[Field] = []
        self._messages: dict[str, FieldMessage] = {}
        self._prompt_for: Field | str | None = None
        """Purpose of the open input line: a field, ``find``, ``save`` or ``new``; None: it is closed."""
        self._before_find = ("", "")
        """Search text of the form, and key of the field under the cursor, before the search line was opened."""

    def body(self) -> ComposeResult:
        with Horizontal(id="workspace"):
            yield self.recipes
            with Sheet(self._share_lines):
                yield self.form
                with Vertical(id="under"):
                    yield FieldDetail(id="detail")
                    yield PromptLine()
                yield self.plan_view
                yield self.preflight

    @property
    def editor(self) -> Input:
        return self.query_one("#editor", Input)

    @property
    def _drafts(self) -> dict[Path, Draft]:
        """Drafts by file; changes are kept while another recipe is open."""
        return self.session.drafts

    @property
    def draft(self) -> Draft | None:
        return self._drafts.get(self._path) if self._path is not None else None

    def on_screen_resume(self) -> None:
        """List the recipes; open the file and enter the GPUs that another screen put into the launch session."""
        files = recipe_files(self.session.folder, paths.config_folder())
        self.recipes.show(files)
        source, self.session.source = self.session.source, None
        if source is not None:
            self.open_recipe(Path(source))
        elif self._path is None and files:
            self.open_recipe(files[0].path, focus=False)
        else:
            self._validate_soon()  # the machine may have changed meanwhile
        self._take_gpus()
        if self.session.wants_new:
            self.session.wants_new = False
            self.action_new_recipe()

    def action_new_recipe(self) -> None:
        self._open_prompt("new", NEW_LABEL, "", "train.py, a task, or: torchrun … train.py")

    def _take_gpus(self) -> None:
        """Enter the GPUs that were chosen on the cluster screen."""
        gpus, draft = self.session.gpus, self.draft
        if not gpus:
            return
        if draft is None:
            self.console.report("choose a recipe first; the GPUs go into its nodes")
            return
        self.session.gpus = {}
        hosts = [node.get("host") for node in draft.nodes()]
        facts = local_facts([*hosts, *gpus])
        index = 0
        if list(gpus) == [THIS_MACHINE]:
            local_indices = [index for index, host in enumerate(hosts) if is_local(host, facts)]
            if not local_indices:
                self.console.report(f"no node of {draft.name} is this machine, which has the chosen GPUs", alarm=True)
                return
            index = local_indices[0]
            draft.set_gpus(index, gpus[THIS_MACHINE])
        else:
            local = (host for host in hosts if host and is_local(host, facts))
            named = next((host for host in local if not is_loopback(address_of(host))), None)
            draft.set_nodes(nodes_on_gpus(gpus, draft.nodes(), address=named or facts.address or None))
        self._changed()
        self.form.focus()
        self.form.go_to(f"cluster.nodes[{index}].gpus")

    def open_recipe(self, path: Path, *, focus: bool = True) -> None:
        if path not in self._drafts:
            try:
                self._drafts[path] = Draft(path.read_text(encoding="utf-8-sig"), name=self._display_name(path))
            except (OSError, UnicodeDecodeError, RequestError) as error:
                text = str(error) if isinstance(error, RequestError) else f"{path} cannot be read: {error}"
                self.console.report(text, alarm=True)
                return
        if path != self._path:  # plan and preflight are those of the recipe before
            self.plan_view.show(None, "")
            self.preflight.show((), "")
        self._path = path
        self._validation = None
        self._leave_editor()
        self.form.search = ""
        self.form.cursor = 0
        self.recipes.go_to(path)
        self._changed()
        self.form.go(0)
        if focus:
            self.form.focus()
        self._take_gpus()

    def _display_name(self, path: Path) -> str:
        """Return a path as text, relative to the working folder if it lies below."""
        try:
            return str(path.relative_to(self.session.folder))
        except ValueError:
            return str(path)

    def on_resize(self, event: Resize) -> None:
        self.set_class(self.size.width < 100, "-narrow")
        self.set_class(self.size.height >= TALL_LINES, "-tall")

    def _share_lines(self) -> None:
        """Set the heights: the preflight gets the lines it needs, first from the plan, then from the form."""
        height = self.query_one("#sheet").size.height - self.query_one("#under").size.height
        height -= self.size.height >= TALL_LINES
        plan_lines = max(self.size.height // 3 - 2, 6)
        least_form_lines = 6  # fewest lines of the form, however many the preflight needs
        least_plan_lines = 4  # fewest lines of the plan then: title, column names, first node, number of hidden lines
        needed = self.preflight.lines(self.preflight.size.width)
        lines = min(needed, max(height - least_form_lines - least_plan_lines, 1))
        self.preflight.styles.height = lines
        self.plan_view.styles.height = min(plan_lines, max(height - least_form_lines - lines, least_plan_lines))

    # Changes

    def _changed(self) -> None:
        self._show_fields()
        self._validate_soon()

    def _show_fields(self) -> None:
        draft, result = self.draft, self._validation
        if draft is None or self._path is None:
            return
        self._fields = draft.fields()
        self._messages = {}
        if result is not None:  # without messages of fields that were changed since
            changed = tuple(setting.partition("=")[0] for setting in set(result.settings) ^ set(draft.settings))
            messages = result.messages(self._fields)
            self._messages = {key: message for key, message in messages.items() if not key.startswith(changed)}
        for field in self._fields:
            if field.changed and (problem := draft.problem(field, field.text)):
                self._messages[field.key] = FieldMessage(problem)
        changes = len(draft.changes)
        notes = [f"/{self.form.search}"] if self.form.search else []
        if changes:
            notes.append(f"{changes} change{'s' * (changes != 1)} not saved")
        self.form.title_text = draft.name
        self.form.rights = [[(note, "accent")] for note in notes]
        self.form.show(self._fields, self._messages)
        self._show_detail()
        self.recipes.opened = self._path
        self.recipes.edited = [path for path, other in self._drafts.items() if other.changes]
        self.recipes.redraw()

    def _show_detail(self, typed: str | None = None) -> None:
        field, draft = self.form.field, self.draft
        message = None if field is None else self._messages.get(field.key)
        if typed is not None and isinstance(self._prompt_for, Field) and draft is not None:
            field = self._prompt_for
            message = FieldMessage(problem) if typed and (problem := draft.problem(field, typed)) else None
        self.query_one(FieldDetail).show(field, message)

    def _validate_soon(self) -> None:
        if self.draft is None:
            return
        self.plan_view.wait()
        self.preflight.wait()
        self._validate_draft()

    async def _validated_draft(self, draft: Draft, *, hosts_max_age_s: float = HOSTS_MAX_AGE_S) -> ValidatedRecipe:
        """Validate a draft; facts of other hosts may be ``hosts_max_age_s`` old."""
        while True:
            text, settings = draft.text, draft.settings
            result = await asyncio.to_thread(
                self._validate, draft.text, name=draft.name, settings=settings, task=draft.task,
                hosts_max_age_s=hosts_max_age_s,
            )  # fmt: skip
            if result.task_options is not None:
                draft.add_task(result.task, result.task_options)
            if (draft.text, draft.settings) == (text, settings):
                return result

    @work(exclusive=True, group="draft")
    async def _validate_draft(self) -> None:
        """Validate the draft after ``debounce_s`` without a change, and show the result."""
        await asyncio.sleep(self._debounce_s)
        draft = self.draft
        if draft is None:
            return
        self._show_validation(draft, await self._validated_draft(draft))

    def _show_validation(self, draft: Draft, result: ValidatedRecipe) -> None:
        if draft is not self.draft:
            return  # another recipe is open
        self._validation, self._validation_of = result, (draft.text, draft.settings)
        self.session.recipe = result.recipe
        self._show_fields()
        self.plan_view.show(result.plan, "" if result.plan else result.problem.removeprefix("--set "))
        self.preflight.show(result.results, result.problem.removeprefix("--set "))
        self._share_lines()

    # Cursor

    @on(Form.Moved, "#form")
    def _pointed(self, event: Form.Moved) -> None:
        self._show_detail()

    @on(RecipeList.Chosen, "#recipes")
    def _recipe_chosen(self, event: RecipeList.Chosen) -> None:
        if (file := self.recipes.current) is not None:
            self.open_recipe(file.path)

    @on(RecipeList.Moved, "#recipes")
    def _recipe_pointed(self, event: RecipeList.Moved) -> None:
        file = self.recipes.current
        if file is not None and file.path != self._path and self.recipes.has_focus:
            self.open_recipe(file.path, focus=False)

    def _go_to_problem(self, result: ValidatedRecipe) -> None:
        """Put the cursor on the field of the validation's problem, or else of its first error."""
        keys = [result.key, *(check.key for check in errors(result.results))]
        field = next(filter(None, (find_field(self._fields, key) for key in keys if key)), None)
        if field is not None:
            self.form.find("")
            self._show_fields()
            self.form.focus()
            self.form.go_to(field.key)

    # Input line

    def _open_prompt(self, purpose: Field | str, label: str, text: str, hint: str) -> None:
        self._prompt_for = purpose
        self.add_class("-editing")
        self.query_one(PromptLine).open(label, text, hint)
        if isinstance(purpose, Field):
            self._show_detail(text)

    def _leave_editor(self, *, focus: bool = True) -> None:
        if self._prompt_for is not None:
            self._prompt_for = None
            self.remove_class("-editing")
            self.query_one(PromptLine).close()
            if focus:
                self.set_focus(self.form)
