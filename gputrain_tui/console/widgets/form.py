"""List of recipes, and form of one: a line per field with its message, under headings."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from types import MappingProxyType

from gputrain_tui.console.widgets.canvas import Canvas, Heading, Listing
from gputrain_tui.console.widgets.drawing import (
    EMPTY,
    Row,
    centred_text,
    crop,
    crop_start,
    fit_row,
    pad,
    title_row,
    wrap_text,
)
from gputrain_tui.recipe.files import RecipeFile
from gputrain_tui.recipe.form_fields import ENV, Field, FieldMessage
from gputrain_tui.recipe.values import value_text
from gputrain_tui.tables import printable


class RecipeList(Listing[RecipeFile]):
    """List of the recipes of the working folder and of the user's configuration folder."""

    opened: Path | None = None
    edited: Collection[Path] = ()

    def show(self, files: Sequence[RecipeFile]) -> None:
        """List recipe files, which come in order of their groups."""
        lines: list[RecipeFile | Heading] = []
        for group, members in groupby(files, key=lambda file: file.group):
            lines += [Heading(group), *members]
        self.show_lines(lines)

    def key(self, line: RecipeFile) -> Path:
        return line.path

    def head(self, width: int) -> list[Row]:
        return [title_row(width, [("recipes", "title")])]

    def row(self, line: RecipeFile, width: int) -> Row:
        is_open = line.path == self.opened
        sign = "•" if line.path in self.edited else "▸" if is_open else " "
        return [(f"{sign} ", "accent"), (printable(line.name), "bright" if is_open else "dim")]

    def empty(self, width: int, height: int) -> list[Row]:
        searched = ("No recipe here.", "", "Looked in", "./*.toml and", "./recipes/*.toml")
        return [[(text, "dim")] for text in (*searched, "", "n  a new one", "d  run the demo")][:height]


EMPTY_FORM = (
    "Choose a recipe on the left, or press",
    "",
    "n  for a new one: a script, a task, a torchrun command",
    "d  to run the demo",
)


def form_lines(fields: Sequence[Field], search: str = "") -> list[Field | Heading]:
    """Return the lines of a form: fields with all the words in key or help, each group under its heading."""
    words = search.lower().split()
    shown = [field for field in fields if all(word in f"{field.key} {field.option.help}".lower() for word in words)]
    lines: list[Field | Heading] = []
    for group, members in groupby(shown, key=lambda field: field.group):
        lines += [Heading(group, "   "), *members]
    return lines


def best_match(fields: Sequence[Field], search: str) -> Field | None:
    """Return the best match of a search: by exact name or key, else beginning of the name, else key, else help."""
    search = search.lower().strip()
    words = search.split()

    def distance(field: Field) -> tuple[bool, bool, bool]:
        is_exact, begins = search in (field.name, field.key), field.name.startswith(search)
        return not is_exact, not begins, not all(word in field.key for word in words)

    matches = [line for line in form_lines(fields, search) if isinstance(line, Field)]
    return min(matches, key=distance, default=None)


def _role_of(message: FieldMessage) -> str:
    return "base" if message.status == "note" else message.status


def draw_field(field: Field, width: int, message: FieldMessage | None, *, pointed: bool = False) -> Row:
    """Return the line of one field: name, value, and its message or else its help; ``pointed``: with the cursor."""
    names = min(max(width // 4, 18), 26)
    values = min(max(width // 4, 14), 40)
    text = crop(printable(field.text) or EMPTY, values - 2)
    role = "bright" if field.written else "dim"
    sign = ("•", "accent") if field.changed else (" ", "base")
    if message is not None and message.status != "note":
        role, sign = message.status, ("!", message.status)
    message_text = crop(printable(message.text) if message else field.option.help, width - names - values - 3)
    return fit_row(
        [
            ("▸" if pointed else " ", "accent"),
            sign,
            (" ", "base"),
            (field.name[: names - 1].ljust(names), "bright" if field.written or message else "dim"),
            (pad(text, values), role),
            (message_text, _role_of(message) if message else "dim"),
        ],
        width,
    )


class Form(Listing[Field]):
    """List of the fields of the open recipe."""

    title_text = ""
    rights: Sequence[Row] = ()
    search = ""
    _fields: Sequence[Field] = ()
    _messages: Mapping[str, FieldMessage] = MappingProxyType({})

    def show(self, fields: Sequence[Field], messages: Mapping[str, FieldMessage]) -> None:
        """Show fields, and their messages by key; the cursor stays on its field."""
        self._fields, self._messages = fields, messages
        self.show_lines(form_lines(fields, self.search))

    def find(self, search: str) -> None:
        """Show only the fields with some words, and put the cursor on the best match."""
        self.search = search
        self.show(self._fields, self._messages)
        match = best_match(self._fields, search) if search else None
        if match is not None:
            self.go_to(match.key)

    @property
    def field(self) -> Field | None:
        return self.current

    def key(self, line: Field) -> str:
        return line.key

    def head(self, width: int) -> list[Row]:
        title = crop_start(printable(self.title_text), max(width - 20, 12))  # leaves cells for what was changed
        return [title_row(width, [(title, "title")], self.rights)]

    def row(self, line: Field, width: int) -> Row:
        pointed = self.has_focus and line is self.current  # the background alone is told by colour
        return draw_field(line, width, self._messages.get(line.key), pointed=pointed)

    def empty(self, width: int, height: int) -> list[Row]:
        return centred_text(width, height, [f"no field matches {self.search!r}"] if self.search else EMPTY_FORM)


class FieldDetail(Canvas):
    """Details of the field under the cursor: key, allowed values, default, message, help."""

    field: Field | None = None
    message: FieldMessage | None = None

    def show(self, field: Field | None, message: FieldMessage | None) -> None:
        self.field, self.message = field, message
        self.redraw()

    def draw(self, width: int, height: int) -> list[Row]:
        field = self.field
        if field is None:
            return [title_row(width, [])]
        default = printable(value_text(field.option.default) or "none")[:30]
        left: Row = [(field.key, "title"), (f"  {_allowed(field)}", "bright")]
        rows = [title_row(width, left, [[("default ", "dim"), (default, "bright")]])]
        if self.message is not None:
            rows += [[(line, _role_of(self.message))] for line in wrap_text(printable(self.message.text), width)]
        rows += [[(line, "dim")] for line in wrap_text(field.option.help, width)]
        return rows[:height]


def _allowed(field: Field) -> str:
    """Return the allowed values of a field, as text."""
    if field.option is ENV:
        return "NAME=VALUE NAME=VALUE"
    if field.name == "gpus":
        return 'a count, a list of ids, "all" or "free"'
    if field.key == "train.task":
        return ", ".join(field.values) + ", or module:Class"
    return field.option.allowed
