"""A recipe as a form, and under it what it would start: chosen, edited, saved and launched without leaving."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.events import Resize
from textual.message import Message
from textual.widgets import Input

from gputrain_tui import paths
from gputrain_tui.addresses import local_facts
from gputrain_tui.commands.plan import shell
from gputrain_tui.console.actions import bindings
from gputrain_tui.console.examine import Examined, examined
from gputrain_tui.console.screens.page import Page
from gputrain_tui.console.widgets.form import Detail, Form
from gputrain_tui.console.widgets.plan_view import PlanView
from gputrain_tui.console.widgets.recipe_list import RecipeList
from gputrain_tui.draft import Draft, Field, field_of, shown, without_place
from gputrain_tui.plan import is_local
from gputrain_tui.recipe import dump_toml
from gputrain_tui.recipe_files import recipe_files
from gputrain_tui.start import Prepared
from trainer.errors import RequestError
from trainer.record import write_atomically

SETTLE_S = 0.15
"""How long nothing must change before the plan is computed again."""


class LaunchScreen(Page):
    """Choose, change, launch."""

    PLACE = "launch"
    CSS_PATH = "launch.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("launch")]

    class Looked(Message):
        """The recipe was looked at."""

        def __init__(self, draft: Draft, found: Examined) -> None:
            super().__init__()
            self.draft = draft
            self.found = found

    class Ready(Message):
        """The recipe can be launched, or cannot."""

        def __init__(self, prepared: Prepared | None, problem: str) -> None:
            super().__init__()
            self.prepared = prepared
            self.problem = problem

    def __init__(self, *, settle_s: float = SETTLE_S, examine: Callable[..., Examined] = examined) -> None:
        """Make the screen.

        Args:
            settle_s: how long nothing must change before the plan is computed again.
            examine: looks at a recipe and this machine.
        """
        super().__init__()
        self._settle_s = settle_s
        self._examine = examine
        self._drafts: dict[Path, Draft] = {}
        """By file: changes stay while another recipe is looked at."""
        self._path: Path | None = None
        self._found: Examined | None = None
        self._fields: list[Field] = []
        self._asking: Field | str | None = None
        """What the input is for: a field, ``find`` or ``save``."""
        self._waiting: object = None
        self._launching = False
        """Whether a launch is on its way: a second press of the key starts no second run."""

    # What there is

    def body(self) -> ComposeResult:
        """Yield recipes, form, what a field means, the input, and the plan."""
        with Horizontal(id="desk"):
            yield RecipeList(id="recipes")
            with Vertical(id="sheet"):
                yield Form(id="form")
                with Vertical(id="under"):
                    yield Detail(id="detail")
                    yield Input(id="editor", compact=True)
                yield PlanView(id="plan")

    @property
    def form(self) -> Form:
        """The fields."""
        return self.query_one(Form)

    @property
    def draft(self) -> Draft | None:
        """The recipe in the form."""
        return self._drafts.get(self._path) if self._path is not None else None

    def on_mount(self) -> None:
        """Begin with the list."""
        self.query_one("#recipes").focus()

    def on_screen_resume(self) -> None:
        """Look for recipes, and take what lies on the desk."""
        self._launch_is_near()
        files = recipe_files(self.desk.folder, paths.config_folder())
        listing = self.query_one(RecipeList)
        listing.show(files)
        wanted, self.desk.source = self.desk.source, None
        if wanted is not None:
            self.open_recipe(Path(wanted))
        elif self._path is None and files:
            self.open_recipe(files[0].path, focus=False)
        else:
            self._examine_soon()  # the machine may have changed meanwhile
        gpus, self.desk.gpus = self.desk.gpus, ()
        if gpus:
            self._take_gpus(gpus)

    def _take_gpus(self, gpus: tuple[int, ...]) -> None:
        draft = self.draft
        if draft is None:
            self.console.say("choose a recipe first; the GPUs go into its first node")
            self.desk.gpus = gpus
            return
        hosts = [node.get("host") for node in draft.nodes()]
        facts = local_facts(hosts)
        here = next((index for index, host in enumerate(hosts) if is_local(host, facts)), None)
        if here is None:
            self.console.say(f"no node of {draft.name} is this machine, whose GPUs were chosen", alarm=True)
            return
        draft.take_gpus(here, gpus)
        self._changed()
        self.form.focus()
        self.form.go_to(f"cluster.nodes[{here}].gpus")

    def open_recipe(self, path: Path, *, focus: bool = True) -> None:
        """Show a recipe in the form."""
        if path not in self._drafts:
            try:
                self._drafts[path] = Draft(path.read_text(encoding="utf-8-sig"), name=self._called(path))
            except (OSError, UnicodeDecodeError) as error:
                self.console.say(f"{path} cannot be read: {error}", alarm=True)
                return
            except RequestError as error:
                self.console.say(str(error), alarm=True)
                return
        self._path = path
        self._found = None
        self._leave_editor()
        form = self.form
        form.wanted = ""
        form.cursor = 0
        self.query_one(RecipeList).point_at(path)
        self._changed()
        form.go(0)
        if focus:
            form.focus()
        if self.desk.gpus:
            gpus, self.desk.gpus = self.desk.gpus, ()
            self._take_gpus(gpus)

    def _called(self, path: Path) -> str:
        """Return a file as messages name it: relative where it is below the folder."""
        try:
            return str(path.relative_to(self.desk.folder))
        except ValueError:
            return str(path)

    def on_resize(self, event: Resize) -> None:
        """Give the plan its share."""
        self.set_class(self.size.width < 100, "-narrow")
        self.query_one(PlanView).styles.height = max(self.size.height // 3 - 1, 6)

    def _launch_is_near(self) -> None:
        """Have torch loaded by the time that the run is to start."""
        if self.console.warm is not None:
            self.console.warm.open()

    # What changes

    def _changed(self) -> None:
        """Show the draft as it is now, and have it looked at."""
        self._launch_is_near()
        self._show_fields()
        self._examine_soon()

    def _show_fields(self) -> None:
        draft, found = self.draft, self._found
        if draft is None or self._path is None:
            return
        self._fields = draft.fields()
        problems = {}
        for field in self._fields:
            if field.changed and (problem := draft.problem(field, field.text)):
                problems[field.key] = problem
        current = found is not None and list(found.settings) == draft.settings
        if current and found is not None and found.problem:
            concerned = field_of(self._fields, found.key)
            if concerned is not None:
                problems[concerned.key] = without_place(found.problem)
        form = self.form
        form.title_text = draft.name
        changes = len(draft.changes)
        form.remarks = [[(f"{changes} change{'s' * (changes != 1)} not saved", "accent")]] if changes else []
        if form.wanted:
            form.remarks.insert(0, [(f"/{form.wanted}", "accent")])
        form.show(self._fields, problems)
        self._problems = problems
        self._show_detail()
        listing = self.query_one(RecipeList)
        listing.opened = self._path
        listing.edited = [path for path, other in self._drafts.items() if other.changes]
        listing.redraw()

    def _show_detail(self, typed: str | None = None) -> None:
        field = self.form.field
        problem = "" if field is None else self._problems.get(field.key, "")
        if typed is not None and isinstance(self._asking, Field) and self.draft is not None:
            field = self._asking
            problem = self.draft.problem(field, typed) if typed else ""
        self.query_one(Detail).show(field, problem)

    def _examine_soon(self) -> None:
        self.query_one(PlanView).wait()
        self._waiting = marker = object()

        def settled() -> None:
            if self._waiting is marker:
                self._examine_now()

        if self._settle_s:
            self.set_timer(self._settle_s, settled)
        else:
            settled()

    def _examine_now(self) -> None:
        draft = self.draft
        if draft is not None:
            self._look(draft, draft.text, draft.name, draft.settings, draft.task)

    @work(thread=True, exclusive=True, group="plan")
    def _look(self, draft: Draft, text: str, name: str, settings: list[str], task: str) -> None:
        found = self._examine(text, name=name, settings=settings, task=task)
        self.post_message(self.Looked(draft, found))

    @on(Looked)
    def _show_found(self, event: Looked) -> None:
        draft, found = event.draft, event.found
        if draft is not self.draft or list(found.settings) != draft.settings:
            return  # of a recipe that is no longer shown, or was changed since
        self._found = found
        if found.schema is not None:
            draft.learn(found.task, found.schema)
        self.desk.recipe = found.recipe
        self._show_fields()
        self.query_one(PlanView).show(found.plan, found.problem.removeprefix("--set "))

    # The cursor

    @on(Form.Moved, "#form")
    def _pointed(self, event: Form.Moved) -> None:
        self._show_detail()

    @on(RecipeList.Chosen, "#recipes")
    def _recipe_chosen(self, event: RecipeList.Chosen) -> None:
        file = self.query_one(RecipeList).file
        if file is not None:
            self.open_recipe(file.path)

    @on(RecipeList.Moved, "#recipes")
    def _recipe_pointed(self, event: RecipeList.Moved) -> None:
        file = self.query_one(RecipeList).file
        if file is not None and file.path != self._path and self.query_one(RecipeList).has_focus:
            self.open_recipe(file.path, focus=False)

    @on(Form.Chosen, "#form")
    def _field_chosen(self, event: Form.Chosen) -> None:
        self.action_edit()

    # Editing

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

    def _ask(self, what: Field | str, text: str, hint: str) -> None:
        self._asking = what
        editor = self.query_one("#editor", Input)
        self.add_class("-editing")
        editor.value = text
        editor.placeholder = hint
        editor.focus()
        if isinstance(what, Field):
            self._show_detail(text)

    def _leave_editor(self) -> None:
        if self._asking is not None:
            self._asking = None
            self.remove_class("-editing")
            self.form.focus()

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
            self._save(Path(event.value).expanduser())
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
        """Take back a change, or what the recipe says."""
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
            self.console.say("the cursor is on no node")
        elif draft.remove_node(int(field.group.removeprefix("Node "))):
            self._changed()
        else:
            self.console.say("a run needs one node")

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

    # Saving, copying, launching

    def action_save(self) -> None:
        """Save the recipe where it came from."""
        if self._path is None or self.draft is None:
            return
        if self._path.is_relative_to(paths.runs_folder()):
            self.action_save_as()  # a run keeps the recipe with which it ran
        elif not self.draft.changes:
            self.console.say(f"{self.draft.name} has no changes")
        else:
            self._save(self._path)

    def action_save_as(self) -> None:
        """Ask for a name to save the recipe under."""
        if self._path is None or self.draft is None:
            return
        folder = self.desk.folder if self._path.is_relative_to(paths.runs_folder()) else self._path.parent
        self._ask("save", self._called(folder / f"{self._path.stem}-2.toml"), "file to save the recipe in")

    def _save(self, path: Path) -> None:
        draft, found, before = self.draft, self._found, self._path
        if draft is None or before is None:
            return
        if found is None or found.recipe is None or list(found.settings) != draft.settings:
            problem = found.problem if found is not None and found.problem else "it is being looked at"
            self.console.say(f"not saved: {problem}", alarm=bool(found and found.problem))
            return
        path = path if path.is_absolute() else self.desk.folder / path
        if path != before and path.exists():
            self.console.say(f"not saved: {self._called(path)} is there already", alarm=True)
            return
        text = dump_toml(found.recipe)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text.encode())
        except OSError as error:
            self.console.say(f"not saved: {path}: {error.strerror}", alarm=True)
            return
        if path != before:
            del self._drafts[before]
            self._drafts[path] = draft
            self._path = path
        draft.saved(text, name=self._called(path))
        self.query_one(RecipeList).show(recipe_files(self.desk.folder, paths.config_folder()))
        self.query_one(RecipeList).point_at(path)
        self.console.say(f"saved {draft.name}")
        self._changed()

    def action_copy_commands(self) -> None:
        """Copy the commands with the terminal's own clipboard (OSC 52)."""
        plan = self.query_one(PlanView).plan
        if plan is None:
            self.console.say("there is no plan to copy yet")
            return
        self.app.copy_to_clipboard(shell(plan) + "\n")
        self.console.say(
            f"copied the command{'s' * (len(plan.nodes) != 1)} of {len(plan.nodes)} node{'s' * (len(plan.nodes) != 1)}"
        )

    def action_write_commands(self) -> None:
        """Write the commands into a file."""
        plan, draft = self.query_one(PlanView).plan, self.draft
        if plan is None or draft is None or self._path is None:
            self.console.say("there is no plan to write yet")
            return
        path = self.desk.folder / f"{self._path.stem}-commands.txt"
        try:
            write_atomically(path, (shell(plan) + "\n").encode())
        except OSError as error:
            self.console.say(f"{path}: {error.strerror}", alarm=True)
            return
        self.console.say(f"wrote {self._called(path)}")

    def action_launch(self) -> None:
        """Start what the plan shows, detached, and go to the run."""
        draft = self.draft
        if draft is None:
            self.console.say("choose a recipe first")
            return
        if self._launching:
            return
        self._launching = True
        self._prepare(draft.text, draft.name, draft.settings, draft.task)

    @work(thread=True, exclusive=True, group="launch")
    def _prepare(self, text: str, name: str, settings: list[str], task: str) -> None:
        """Look at the recipe and the machine once more: what was free a minute ago may be taken."""
        found = self._examine(text, name=name, settings=settings, task=task)
        self.post_message(self.Ready(found.prepared, found.problem))

    @on(Ready)
    async def _launch(self, event: Ready) -> None:
        self._launching = False
        if event.prepared is None:
            self.console.say(event.problem, alarm=True)
        else:
            await self.console.launch(event.prepared)


def allowed_hint(field: Field) -> str:
    """Return what stands in the empty input: the default."""
    default = shown(field.option.default)
    return f"empty: the default, {default}" if default else "empty: left out"
