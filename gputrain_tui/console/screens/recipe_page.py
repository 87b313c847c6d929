"""Base of the launch screen: list of recipes, form of the open one, and its validation in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from textual import on, work
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.events import Resize
from textual.widgets import Input

from gputrain_tui import paths
from gputrain_tui.console.host_choice import nodes_on_gpus
from gputrain_tui.console.screens.page import Page
from gputrain_tui.console.validate_recipe import HOSTS_MAX_AGE_S, ValidatedRecipe, remarks_by_field, validate_recipe
from gputrain_tui.console.widgets.form import FieldDetail, Form, RecipeList
from gputrain_tui.console.widgets.line_input import PromptLine
from gputrain_tui.console.widgets.plan_view import PlanView
from gputrain_tui.console.widgets.preflight_summary import PreflightSummary
from gputrain_tui.hosts.host_names import THIS_MACHINE, address_of, is_local
from gputrain_tui.hosts.local_facts import local_facts
from gputrain_tui.preflight import errors
from gputrain_tui.recipe.draft import Draft
from gputrain_tui.recipe.files import recipe_files
from gputrain_tui.recipe.form_fields import Field, FieldMessage, find_field, strip_location
from trainer.contract.errors import RequestError
from trainer.host.addresses import is_loopback

DEBOUNCE_S = 0.15
"""Seconds without a change before the recipe is validated again."""

TALL_LINES = 32
"""Fewest lines of a screen with a blank line before the preflight."""

NEW_LABEL = "new recipe for"
"""Label of the input line of a new recipe."""
UNTRIED_FIELDS = ("task", "host")
"""Fields not validated while being typed: a task is imported in a process, a host is contacted by ssh."""


def set_aside_text(draft: Draft) -> str:
    """Return the line for the keys that another choice of the task has set aside."""
    names = ", ".join(key.partition(".")[2] for key in draft.set_aside)
    return f"set aside, as they were set for another task or script: {names} (undo brings them back)"


class RecipePage(Page):
    """Screen of a recipe with its plan and preflight; a subclass edits the recipe."""

    def __init__(
        self, *, debounce_s: float = DEBOUNCE_S, validate: Callable[..., ValidatedRecipe] = validate_recipe
    ) -> None:
        """Make the screen; ``debounce_s``: seconds without a change before the recipe is validated again."""
        super().__init__()
        self._debounce_s = debounce_s
        self._validate = validate
        self._path: Path | None = None
        self._found: ValidatedRecipe | None = None
        self._found_for: tuple[str, list[str]] | None = None
        """Text and settings of the draft to which ``_found`` belongs."""
        self._fields: list[Field] = []
        self._remarks: dict[str, FieldMessage] = {}
        """Messages beside the fields, by key."""
        self._prompt_for: Field | str | None = None
        """Purpose of the open input line: a field, ``find``, ``save`` or ``new``; None: it is closed."""
        self._before_find = ("", "")
        """Search text of the form, and key of the field under the cursor, before the search line was opened."""

    # Widgets and the open recipe

    def body(self) -> ComposeResult:
        """Yield the list of recipes, the form, help of a field, the input line, the plan and the preflight."""
        with Horizontal(id="workspace"):
            yield RecipeList(id="recipes")
            with Vertical(id="sheet"):
                yield Form(id="form")
                with Vertical(id="under"):
                    yield FieldDetail(id="detail")
                    yield PromptLine()
                yield PlanView(id="plan")
                yield PreflightSummary(id="readiness")

    @property
    def form(self) -> Form:
        """The form."""
        return self.query_one(Form)

    @property
    def _drafts(self) -> dict[Path, Draft]:
        """Drafts by file; changes are kept while another recipe is open."""
        return self.session.drafts

    @property
    def draft(self) -> Draft | None:
        """Draft of the recipe in the form."""
        return self._drafts.get(self._path) if self._path is not None else None

    def on_mount(self) -> None:
        """Focus the list of recipes."""
        self.query_one("#recipes").focus()

    def on_screen_resume(self) -> None:
        """List the recipes; open the file and enter the GPUs that another screen put into the launch session."""
        files = recipe_files(self.session.folder, paths.config_folder())
        listing = self.query_one(RecipeList)
        listing.show(files)
        source, self.session.source = self.session.source, None
        if source is not None:
            self.open_recipe(Path(source))
        elif self._path is None and files:
            self.open_recipe(files[0].path, focus=False)
        else:
            self._validate_soon()  # the machine may have changed meanwhile
        gpus, self.session.gpus = self.session.gpus, {}
        if gpus:
            self._take_gpus(gpus)
        wants_new, self.session.wants_new = self.session.wants_new, False
        if wants_new:
            self.action_new_recipe()

    def action_new_recipe(self) -> None:
        """Open the input line on what a new recipe is for."""
        self._open_prompt("new", NEW_LABEL, "", "train.py, a task, or: torchrun … train.py")

    def _take_gpus(self, gpus: Mapping[str, tuple[int, ...]]) -> None:
        draft = self.draft
        if draft is None:
            self.console.report("choose a recipe first; the GPUs go into its nodes")
            self.session.gpus = gpus
            return
        hosts = [node.get("host") for node in draft.nodes()]
        facts = local_facts([*hosts, *gpus])
        index = 0
        if list(gpus) == [THIS_MACHINE]:
            local_index = next((index for index, host in enumerate(hosts) if is_local(host, facts)), None)
            if local_index is None:
                self.console.report(f"no node of {draft.name} is this machine, which has the chosen GPUs", alarm=True)
                return
            draft.set_gpus(local_index, gpus[THIS_MACHINE])
            index = local_index
        else:
            named = next(
                (host for host in hosts if host and is_local(host, facts) and not is_loopback(address_of(host))), None
            )
            draft.set_nodes(nodes_on_gpus(gpus, draft.nodes(), address=named or next(iter(facts.addresses), None)))
        self._changed()
        self.form.focus()
        self.form.go_to(f"cluster.nodes[{index}].gpus")

    def open_recipe(self, path: Path, *, focus: bool = True) -> None:
        """Show a recipe in the form."""
        if path not in self._drafts:
            try:
                self._drafts[path] = Draft(path.read_text(encoding="utf-8-sig"), name=self._display_name(path))
            except (OSError, UnicodeDecodeError) as error:
                self.console.report(f"{path} cannot be read: {error}", alarm=True)
                return
            except RequestError as error:
                self.console.report(str(error), alarm=True)
                return
        self._path = path
        self._found = None
        self._leave_editor()
        form = self.form
        form.search = ""
        form.cursor = 0
        self.query_one(RecipeList).go_to(path)
        self._changed()
        form.go(0)
        if focus:
            form.focus()
        if self.session.gpus:
            gpus, self.session.gpus = self.session.gpus, {}
            self._take_gpus(gpus)

    def _display_name(self, path: Path) -> str:
        """Return a path as text, relative to the working folder if it lies below."""
        try:
            return str(path.relative_to(self.session.folder))
        except ValueError:
            return str(path)

    def on_resize(self, event: Resize) -> None:
        """Divide the lines again at the new size."""
        self.set_class(self.size.width < 100, "-narrow")
        self.set_class(self.size.height >= TALL_LINES, "-tall")
        self.call_after_refresh(self._share_lines)

    def _share_lines(self) -> None:
        """Set the heights: the preflight gets the lines it needs, first from the plan, then from the form."""
        summary, plan = self.query_one(PreflightSummary), self.query_one(PlanView)
        room = self.query_one("#sheet").size.height - self.query_one("#under").size.height
        room -= self.size.height >= TALL_LINES
        plan_lines = max(self.size.height // 3 - 2, 6)
        least_form_lines = 6  # fewest lines of the form, however many the preflight needs
        least_plan_lines = 4  # fewest lines of the plan then: title, column names, first node, number of hidden lines
        lines = min(summary.lines(summary.size.width), max(room - least_form_lines - least_plan_lines, 1))
        summary.styles.height = lines
        plan.styles.height = min(plan_lines, max(room - least_form_lines - lines, least_plan_lines))

    # Changes

    def _changed(self) -> None:
        """Show the draft and validate it."""
        self._show_fields()
        self._validate_soon()

    def _show_fields(self) -> None:
        draft, found = self.draft, self._found
        if draft is None or self._path is None:
            return
        self._fields = draft.fields()
        self._remarks = {} if found is None else self._validation_messages(draft, found)
        for field in self._fields:
            if field.changed and (problem := draft.problem(field, field.text)):
                self._remarks[field.key] = FieldMessage(problem)
        form = self.form
        form.title_text = draft.name
        changes = len(draft.changes)
        if draft.set_aside:
            self._remarks.setdefault("train.task", FieldMessage(set_aside_text(draft), "note"))
        remarks = [f"/{form.search}"] if form.search else []
        if changes:
            remarks.append(f"{changes} change{'s' * (changes != 1)} not saved")
        form.rights = [[(remark, "accent")] for remark in remarks]
        form.show(self._fields, self._remarks)
        self._show_detail()
        listing = self.query_one(RecipeList)
        listing.opened = self._path
        listing.edited = [path for path, other in self._drafts.items() if other.changes]
        listing.redraw()

    def _validation_messages(self, draft: Draft, found: ValidatedRecipe) -> dict[str, FieldMessage]:
        """Return the messages of a validation by key, without those of fields changed since."""
        remarks = remarks_by_field(self._fields, found.results)
        concerned = find_field(self._fields, found.key)
        if found.problem and concerned is not None:
            remarks[concerned.key] = FieldMessage(strip_location(found.problem))
        changed = {setting.partition("=")[0] for setting in set(found.settings) ^ set(draft.settings)}
        return {key: remark for key, remark in remarks.items() if not any(key.startswith(name) for name in changed)}

    def _show_detail(self, typed: str | None = None) -> None:
        field, draft = self.form.field, self.draft
        remark = None if field is None else self._remarks.get(field.key)
        if typed is not None and isinstance(self._prompt_for, Field) and draft is not None:
            field = self._prompt_for
            remark = FieldMessage(problem) if typed and (problem := draft.problem(field, typed)) else None
            if typed and remark is None and field.name not in UNTRIED_FIELDS:
                self._try_typed_soon(field, typed)
        self.query_one(FieldDetail).show(field, remark)

    def _try_typed_soon(self, field: Field, typed: str) -> None:
        """Validate the recipe with the typed text, unless it names hosts: they would be contacted at every key."""
        draft = self.draft
        if draft is not None and not any(node.get("host") for node in draft.nodes()):
            self._try_typed(draft, field, typed)

    def _validate_soon(self) -> None:
        if self.draft is None:
            return
        self.query_one(PlanView).wait()
        self.query_one(PreflightSummary).wait()
        self._validate_draft()

    async def _validated_draft(self, draft: Draft, *, hosts_max_age_s: float = HOSTS_MAX_AGE_S) -> ValidatedRecipe:
        """Validate a draft; facts of other hosts may be ``hosts_max_age_s`` old."""
        while True:
            text, settings = draft.text, draft.settings
            found = await self._validated(draft, settings, hosts_max_age_s=hosts_max_age_s)
            if found.task_options is not None:
                draft.add_task(found.task, found.task_options)  # keys that this task lacks are set aside from now on
            if (draft.text, draft.settings) == (text, settings):
                return found

    async def _validated(
        self, draft: Draft, settings: list[str], *, hosts_max_age_s: float = HOSTS_MAX_AGE_S
    ) -> ValidatedRecipe:
        """Validate a draft with ``settings`` in a thread."""
        return await asyncio.to_thread(
            self._validate,
            draft.text,
            name=draft.name,
            settings=settings,
            task=draft.task,
            hosts_max_age_s=hosts_max_age_s,
        )

    @work(exclusive=True, group="draft")
    async def _validate_draft(self) -> None:
        """Validate the draft after ``debounce_s`` without a change, and show the result."""
        await asyncio.sleep(self._debounce_s)
        draft = self.draft
        if draft is None:
            return
        found = await self._validated_draft(draft)
        if draft is not self.draft:
            return  # another recipe is open
        self._found, self._found_for = found, (draft.text, draft.settings)
        self.session.recipe = found.recipe
        self._show_fields()
        self.query_one(PlanView).show(found.plan, "" if found.plan else found.problem.removeprefix("--set "))
        self.query_one(PreflightSummary).show(found.results, found.problem.removeprefix("--set "))
        self._share_lines()

    @work(exclusive=True, group="typed")
    async def _try_typed(self, draft: Draft, field: Field, typed: str) -> None:
        """Validate the recipe with the typed text, and show the result if the text is still the same."""
        await asyncio.sleep(self._debounce_s)
        found = await self._validated(draft, draft.settings_with(field.key, typed))
        if self._prompt_for is field and self.query_one("#editor", Input).value == typed:
            remark = remarks_by_field([field], found.results).get(field.key)
            if found.problem and find_field([field], found.key) is not None:
                remark = FieldMessage(strip_location(found.problem))
            self.query_one(FieldDetail).show(field, remark)

    # Cursor

    @on(Form.Moved, "#form")
    def _pointed(self, event: Form.Moved) -> None:
        self._show_detail()

    @on(RecipeList.Chosen, "#recipes")
    def _recipe_chosen(self, event: RecipeList.Chosen) -> None:
        file = self.query_one(RecipeList).current
        if file is not None:
            self.open_recipe(file.path)

    @on(RecipeList.Moved, "#recipes")
    def _recipe_pointed(self, event: RecipeList.Moved) -> None:
        file = self.query_one(RecipeList).current
        if file is not None and file.path != self._path and self.query_one(RecipeList).has_focus:
            self.open_recipe(file.path, focus=False)

    def _go_to_problem(self, found: ValidatedRecipe) -> None:
        """Put the cursor on the field of the validation's problem, or else of its first error."""
        keys = [found.key, *(result.key for result in errors(found.results))]
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
        """Close the line; ``focus``: give the focus to the form."""
        if self._prompt_for is not None:
            self._prompt_for = None
            self.remove_class("-editing")
            self.query_one(PromptLine).close()
            if focus:
                self.set_focus(self.form)
