"""Tables of the help and the recipe's schema, made from the code: ``python tests/support/help_tables.py`` writes them.

A table stands in ``gputrain_tui/help`` between its heading and the next heading of the second level.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any, get_args

import msgspec

from gputrain_tui.console.actions import ACTIONS, EVERYWHERE, of_place
from gputrain_tui.diagnosis.advice import ADVICE
from gputrain_tui.help_topics import FOLDER
from gputrain_tui.recipe.json_schema import recipe_schema
from gputrain_tui.recipe.model import ClusterOptions, NodeOptions, ReportOptions, SlurmOptions, train_options
from gputrain_tui.report.field_docs import field_docs, prose
from trainer.contract.builtin_tasks import BUILT_IN, options_schema
from trainer.contract.errors import ExitCode
from trainer.contract.record import AnyEvent, collective_groups, machine_samples
from trainer.contract.schema import Option, describe

SCHEMA = FOLDER.parent / "recipe" / "recipe.schema.json"
"""The file that the recipes of the repository name for editors."""


def schema_text() -> str:
    """Return the schema of a recipe as text."""
    return json.dumps(recipe_schema(), ensure_ascii=False, indent=1) + "\n"


def table(head: tuple[str, str], rows: Iterable[tuple[str, str]]) -> str:
    """Return a Markdown table of two columns."""
    lines = [f"| {head[0]} | {head[1]} |", "|---|---|"]
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join(lines)


def literal(value: object) -> str:
    """Return a default as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\n", "\\n") + '"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(literal, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def options(found: Iterable[Option]) -> str:
    """Return a table of options: help, allowed values and default."""
    rows = []
    for option in found:
        default = ""
        if option.required:
            default = "; required"
        elif option.default is not None and "default:" not in option.help:
            default = f"; default: `{literal(option.default)}`"
        allowed = "" if option.name in ("gpus", "nodes") else f"{option.allowed}"
        rows.append((f"`{option.name}`", f"{option.help} ({allowed}{default})" if allowed or default else option.help))
    return table(("key", "does"), rows)


def grouped(found: Iterable[Option]) -> str:
    """Return tables of options by their groups."""
    groups: dict[str, list[Option]] = {}
    for option in found:
        option = msgspec.structs.replace(option, required=False)  # `script` is one only without a task
        groups.setdefault(option.group or "Task, script and launch", []).append(option)
    return "\n\n".join(f"### {group}\n\n{options(members)}" for group, members in groups.items())


def nodes() -> str:
    """Return the table of a node's keys; ``gpus`` has more than one type."""
    return options(describe(NodeOptions)) + "\n\n`env` is a table of environment variables of the node's ranks."


def tasks() -> str:
    """Return the tables of the options of the built-in tasks."""
    return "\n\n".join(f"### {name}\n\n{options(describe(schema(name)))}" for name in BUILT_IN)


def schema(name: str) -> type[Any]:
    """Return the schema of a built-in task."""
    found = options_schema(name)
    assert found is not None
    return found


def keys() -> str:
    """Return the tables of keys, one for each screen or panel."""
    tables = []
    for place in dict.fromkeys(place for action in ACTIONS for place in action.places):
        rows = [(f"`{action.key_texts}` {action.label}", action.description) for action in of_place(place)]
        tables.append(f"### {'everywhere' if place == EVERYWHERE else place}\n\n{table(('key', 'does'), rows)}")
    return "\n\n".join(tables)


def event_tables() -> str:
    """Return the events, each with its fields."""
    titles: dict[type[Any], str] = {
        machine_samples.RankSample: "`ranks` of `node_sample`",
        machine_samples.GpuSample: "`gpus` of it",
        collective_groups.GroupSync: "`groups` of `step`",
        collective_groups.CollectiveCall: "`calls` of `step`, each an array",
    }
    parts = []
    for event in (*get_args(AnyEvent), *titles):
        fields = field_docs(event)
        plain = ", ".join(f"`{name}`" for name, text in fields.items() if not text)
        rows = [(f"`{name}`", text) for name, text in fields.items() if text]
        assert event.__doc__ is not None
        text = prose(event.__doc__) + (f" It has {plain}." if plain else "")
        title = titles.get(event) or f"`{event.__struct_config__.tag}`"
        parts += [f"### {title}", textwrap.fill(text, 120, break_on_hyphens=False)]
        parts += [table(("field", "holds"), rows)] if rows else []
    return "\n\n".join(parts)


def exit_codes() -> str:
    """Return the table of exit codes."""
    docs = field_docs(ExitCode)
    return table(("code", "means"), ((f"{code.value}", docs[code.name]) for code in ExitCode))


def advice() -> str:
    """Return the table of advice by cause or finding."""
    return table(
        ("cause or finding", "advice"),
        ((f"`{name}`", text.replace("{step}", "N")) for name, text in ADVICE.items()),
    )


def sections() -> Iterator[tuple[str, str, str]]:
    """Yield topic, heading and content of every table that is made from the code."""
    yield "recipe", "Keys of [cluster]", options(describe(ClusterOptions))
    yield "recipe", "Keys of [[cluster.nodes]]", nodes()
    yield (
        "recipe",
        "Keys of [train]",
        grouped(train_options()),
    )
    yield "recipe", "Keys of [report]", options(describe(ReportOptions))
    yield "slurm", "Keys of [slurm]", options(describe(SlurmOptions))
    yield "tasks", "Options of the built-in tasks", tasks()
    yield "findings", "Advice by cause or finding", advice()
    yield "record", "Events", event_tables()
    yield "keys", "Keys by screen", keys()
    yield "exit-codes", "Codes", exit_codes()


def write() -> None:
    """Write every table into its topic, and the schema."""
    SCHEMA.write_text(schema_text(), encoding="utf-8")
    for topic, heading, content in sections():
        path = FOLDER / f"{topic}.md"
        text = path.read_text(encoding="utf-8")
        before, found, after = text.partition(f"## {heading}\n")
        rest = after.partition("\n## ")
        text = f"{(before if found else text).rstrip()}\n\n## {heading}\n\n{content}\n"
        text += f"\n## {rest[2]}" if rest[1] else ""
        path.write_text(text, encoding="utf-8")


def section(topic: str, heading: str) -> str:
    """Return what stands below a heading of a topic."""
    text = (FOLDER / f"{topic}.md").read_text(encoding="utf-8")
    return text.partition(f"## {heading}\n")[2].partition("\n## ")[0].strip()


if __name__ == "__main__":
    write()
