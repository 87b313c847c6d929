"""Form of a recipe: a line per field with its message, under headings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from gputrain_tui.console.widgets.canvas import Canvas, Listing
from gputrain_tui.console.widgets.drawing import EMPTY, Row, centred_text, crop, fit_row, pad, title_row, wrap_text
from gputrain_tui.recipe.form_fields import ENV, Field, FieldMessage
from gputrain_tui.recipe.values import value_text
from gputrain_tui.tables import printable

MARKS = {"error": ("!", "error"), "warning": ("!", "warning")}
"""Mark and role of a message's status; a field with a note has the mark of a change, if any."""

EMPTY_FORM = (
    "Choose a recipe on the left, or press",
    "",
    "n  for a new one: a script, a task, a torchrun command",
    "d  to run the demo",
)

NAME_CELLS = (18, 26)
"""Least and greatest width of the column of names."""


@dataclass(frozen=True)
class FieldHeading:
    """Heading over the fields of one group."""

    text: str


def form_lines(fields: Sequence[Field], search: str = "") -> list[FieldHeading | Field]:
    """Return the lines of a form: fields with all the words in key or help, each group under its heading."""
    words = search.lower().split()
    lines: list[FieldHeading | Field] = []
    group = None
    for field in fields:
        if not all(word in f"{field.key} {field.option.help}".lower() for word in words):
            continue
        if field.group != group:
            group = field.group
            lines.append(FieldHeading(group))
        lines.append(field)
    return lines


def best_match(fields: Sequence[Field], search: str) -> Field | None:
    """Return the best match of a search: by exact name or key, else beginning of the name, else key, else help."""
    search = search.lower().strip()
    words = search.split()

    def distance(field: Field) -> int:
        if search in (field.name, field.key):
            return 0
        if field.name.startswith(search):
            return 1
        return 2 if all(word in field.key for word in words) else 3

    found = [line for line in form_lines(fields, search) if isinstance(line, Field)]
    return min(found, key=distance, default=None)


def remark_role(remark: FieldMessage) -> str:
    """Return the role of a message's text."""
    return "base" if remark.status == "note" else remark.status


def draw_field(field: Field, width: int, remark: FieldMessage | None, *, pointed: bool = False) -> Row:
    """Return the line of one field: name, value, and its message or else its help; ``pointed``: with the cursor."""
    names = min(max(width // 4, NAME_CELLS[0]), NAME_CELLS[1])
    values = min(max(width // 4, 14), 40)
    text = crop(printable(field.text) or EMPTY, values - 2)
    role = "bright" if field.written else "dim"
    mark = ("•", "accent") if field.changed else (" ", "base")
    if remark is not None and remark.status in MARKS:
        role, mark = remark.status, MARKS[remark.status]
    remark_text = crop(printable(remark.text) if remark else field.option.help, width - names - values - 3)
    return fit_row(
        [
            ("▸" if pointed else " ", "accent"),
            mark,
            (" ", "base"),
            (field.name[: names - 1].ljust(names), "bright" if field.written or remark else "dim"),
            (pad(text, values), role),
            (remark_text, remark_role(remark) if remark else "dim"),
        ],
        width,
    )


class Form(Listing):
    """List of the fields of the open recipe."""

    title_text = ""
    remarks: Sequence[Row] = ()
    search = ""
    """Words to search for; only fields that have them are shown."""
    _fields: Sequence[Field] = ()
    _lines: Sequence[FieldHeading | Field] = ()
    _remarks: Mapping[str, FieldMessage] = MappingProxyType({})

    def show(self, fields: Sequence[Field], remarks: Mapping[str, FieldMessage]) -> None:
        """Show fields, and their messages by key; the cursor stays on its field."""
        before = self.field
        self._fields, self._remarks = fields, remarks
        self._lines = form_lines(fields, self.search)
        keys = [line.key if isinstance(line, Field) else "" for line in self._lines]
        if before is not None and before.key in keys:
            self.cursor = keys.index(before.key)
        else:
            self.cursor = min(self.cursor, max(len(self._lines) - 1, 0))
            if self._lines and not self.selectable(self.cursor):
                self.cursor += 1
        self.redraw()

    def find(self, search: str) -> None:
        """Show only the fields with some words, and put the cursor on the best match."""
        self.search = search
        self.show(self._fields, self._remarks)
        match = best_match(self._fields, search) if search else None
        if match is not None:
            self.go_to(match.key)

    def go_to(self, key: str) -> None:
        """Put the cursor on a field."""
        for index, line in enumerate(self._lines):
            if isinstance(line, Field) and line.key == key:
                self.go(index)
                return

    @property
    def field(self) -> Field | None:
        """The field under the cursor; None on an empty form."""
        line = self._lines[self.cursor] if self.cursor < len(self._lines) else None
        return line if isinstance(line, Field) else None

    def count(self) -> int:
        """Return the number of lines."""
        return len(self._lines)

    def selectable(self, index: int) -> bool:
        """Return whether a line is a field."""
        return isinstance(self._lines[index], Field)

    def head(self, width: int) -> list[Row]:
        """Return the title line."""
        return [title_row(width, [(printable(self.title_text), "title")], self.remarks)]

    def row(self, index: int, width: int) -> Row:
        """Return the row of a field or a heading."""
        line = self._lines[index]
        if isinstance(line, FieldHeading):
            return fit_row([("   ", "base"), (line.text, "accent")], width)
        pointed = self.has_focus and index == self.cursor  # the background alone is told by colour
        return draw_field(line, width, self._remarks.get(line.key), pointed=pointed)

    def empty(self, width: int, height: int) -> list[Row]:
        """Return the text of a form without fields."""
        if self.search:
            return centred_text(width, height, [f"no field matches {self.search!r}"])
        return centred_text(width, height, EMPTY_FORM)


class FieldDetail(Canvas):
    """Details of the field under the cursor: key, allowed values, default, message, help."""

    field: Field | None = None
    remark: FieldMessage | None = None

    def show(self, field: Field | None, remark: FieldMessage | None) -> None:
        """Show a field with its message."""
        self.field, self.remark = field, remark
        self.redraw()

    def draw(self, width: int, height: int) -> list[Row]:
        """Return the details, as many lines as fit."""
        field = self.field
        if field is None:
            return [title_row(width, [])]
        default = value_text(field.option.default) or "none"
        rows = [
            title_row(
                width,
                [(field.key, "title"), (f"  {allowed(field)}", "bright")],
                [[("default ", "dim"), (printable(default)[:30], "bright")]],
            ),
        ]
        if self.remark is not None:
            rows += [[(line, remark_role(self.remark))] for line in wrap_text(printable(self.remark.text), width)]
        rows += [[(line, "dim")] for line in wrap_text(field.option.help, width)]
        return [fit_row(row, width) for row in rows[:height]]


def allowed(field: Field) -> str:
    """Return the allowed values of a field, as text."""
    if field.option is ENV:
        return "NAME=VALUE NAME=VALUE"
    if field.name == "gpus":
        return 'a count, a list of ids, "all" or "free"'
    if field.key == "train.task":
        return ", ".join(field.values) + ", or module:Class"
    return field.option.allowed
