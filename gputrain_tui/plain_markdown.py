"""Lays out the Markdown of the help as plain text: wrapped paragraphs, aligned tables, indented code."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby

from gputrain_tui.tables import width as cells

LINK = re.compile(r"!?\[([^]]+)\]\(([^)]+)\)")
BOLD = re.compile(r"\*\*([^*]+)\*\*")
ITEM = re.compile(r"([-*]|\d+\.) ")
UNDERLINES = {"#": "=", "##": "-", "###": ""}
FENCE = "```"
FENCE_LINE = re.compile(rf"^{FENCE}.*\n?", re.MULTILINE)


def render(markdown: str, width: int) -> str:
    """Return Markdown as plain text of ``width`` columns; code is not wrapped."""
    parts = []
    for kind, lines in _blocks(markdown):
        if kind == "code":
            parts.append("\n".join(f"    {line}".rstrip() for line in lines))
        elif kind == "table":
            parts.append(table_text(lines, width))
        elif kind == "heading":
            marks, _, title = lines[0].partition(" ")
            text = _inline(title)
            parts.append(f"{text}\n{UNDERLINES[marks] * cells(text)}".rstrip())
        elif kind == "list":
            parts.append("\n".join(_item(lines, width)))
        else:
            parts.append(_wrap(_inline(" ".join(lines)), width))
    return "\n\n".join(parts) + "\n"


def tables_as_code(markdown: str, width: int) -> str:
    """Return Markdown for Textual, with its tables as blocks of code and no line of code wider than ``width``.

    Textual makes a widget of each cell of a table, which takes seconds for those of recipe keys, and cuts long code.
    """
    parts = []
    for kind, lines in _blocks(markdown):
        if kind == "table":
            parts.append(f"{FENCE}text\n{table_text(lines, width)}\n{FENCE}")
        elif kind == "code":
            parts.append("\n".join([f"{FENCE}text", *(part for line in lines for part in _code(line, width)), FENCE]))
        else:
            parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def table_text(lines: Sequence[str], width: int) -> str:
    """Return the lines of a Markdown table as aligned columns, of which the last one is wrapped."""
    head, _, *rows = [[_inline(cell) for cell in _cells(line)] for line in lines]
    shown = [head, *rows] if any(head) else rows
    # Widest first column beside which the text of a row stands; below a wider cell it gets lines of its own.
    max_first_cells = 30
    wide = [
        max((cells(row[at]) for row in shown if at or cells(row[0]) <= max_first_cells), default=0)
        for at in range(len(head))
    ]
    text: list[str] = []
    min_last_cells = 24  # least width of the last column, which is wrapped
    for row in shown:
        lead = "  ".join(cell + " " * (size - cells(cell)) for cell, size in zip(row[:-1], wide, strict=False))
        indent = sum(size + 2 for size in wide[:-1])
        first, *rest = textwrap.wrap(row[-1], max(width - indent, min_last_cells), break_on_hyphens=False) or [""]
        if cells(lead) + 2 > indent:
            text += [lead.rstrip(), " " * indent + first]
        else:
            text.append(f"{lead}  {first}".rstrip())
        text += [" " * indent + line for line in rest]
    return "\n".join(text)


def _blocks(markdown: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the blocks of a text with their kinds: heading, code (without fences), table, list, text."""
    for number, part in enumerate(FENCE_LINE.split(markdown)):
        if number % 2:
            yield "code", part.splitlines()
            continue
        for full, group in groupby(part.splitlines(), lambda line: bool(line.strip())):
            if full:
                block = list(group)
                kind = "list" if ITEM.match(block[0]) else {"#": "heading", "|": "table"}.get(block[0][0], "text")
                yield kind, block


def _cells(line: str) -> list[str]:
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


def _item(lines: Sequence[str], width: int) -> Iterator[str]:
    """Yield the wrapped items of a list."""
    items: list[str] = []
    for line in lines:
        if ITEM.match(line):
            items.append(line)
        else:
            items[-1] += f" {line.strip()}"
    for item in items:
        indent = len(item) - len(item.split(" ", 1)[1])
        yield _wrap(_inline(item), width, " " * indent)


def _code(line: str, width: int) -> list[str]:
    """Return a line of code in parts of at most ``width`` columns; a comment continues below its beginning."""
    indent = " " * (line.find("# ") + 2 if 0 < line.find("# ") < width // 2 else 4)
    wrapped = textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False, drop_whitespace=False)
    return [part.rstrip() for part in wrapped] if cells(line) > width else [line]


def _wrap(text: str, width: int, indent: str = "") -> str:
    return textwrap.fill(text, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


def _inline(text: str) -> str:
    """Return a text without emphasis, and with the address of a link behind its words."""
    text = LINK.sub(lambda link: f"{link[1]} ({link[2]})" if link[2].startswith("http") else link[1], text)
    return BOLD.sub(r"\1", text)
