"""Help text of ``python -m trainer``, rendered from the option schemas."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import msgspec

from trainer.contract.options import Distributed, Script, Training
from trainer.contract.schema import Option, describe

USAGE = """\
usage: python -m trainer --task TASK [options] [options of the task]
       python -m trainer --script FILE [options of ranks] [-- ARGUMENTS OF THE SCRIPT]

Trains a model with distributed data parallelism, on this machine or as one node of several. A script of your own runs
as under torchrun: one process per rank, with RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

examples:
  python -P -m trainer --task lm --data . --max-updates 100
  python -P -m trainer --task lm --data . --max-updates 100 --cpu --distributed-world-size 2
  python -P -m trainer --task lm --data . --max-updates 100 --cpu --distributed-init-method tcp://10.0.0.1:29500 \\
      --distributed-world-size 4 --distributed-gpus 2 --distributed-rank 0        # and on the other node: 2
  torchrun --nproc-per-node 4 --no-python python -P -m trainer --task lm --data . --max-updates 100
  python -P -m trainer --script train.py --distributed-gpus 4 -- --epochs 3

  --help, -h               this text; with --task TASK also the options of the task
  --describe-task TASK     print the options of a task as JSON; --with-files: and the files that define them
"""


def render(task: str, task_options: Sequence[Option] | None, width: int) -> str:
    """Return the help text for a terminal of ``width`` columns; without ``task_options``, without those of a task."""
    parts = [USAGE]
    script = [msgspec.structs.replace(option, required=False) for option in describe(Script) if option.name != "args"]
    parts.append(_group("Ranks", [*describe(Distributed), *script], width))
    groups: dict[str, list[Option]] = {}
    for option in describe(Training):
        groups.setdefault(option.group or "Task", []).append(option)
    if task_options is not None:
        parts.append(_group(f"Options of task {task}", task_options, width))
    parts += [_group(name, options, width) for name, options in groups.items()]
    return "\n".join(parts)


def _group(title: str, options: Sequence[Option], width: int) -> str:
    lines = [f"{title}:"]
    for option in options:
        lines += _entry(option, width)
    if not options:
        lines.append("  none")
    return "\n".join(lines) + "\n"


def _entry(option: Option, width: int) -> list[str]:
    value = "" if option.kind == "bool" else " " + _placeholder(option)
    names = ", ".join((option.flag, *option.aliases)) + value
    if option.kind == "bool" and option.default:
        names = f"--no-{option.flag[2:]}"
    switches = [f"{flag} is {value}" for flag, value in option.switches.items()]
    help = option.help
    if option.kind == "bool" and option.default:
        help = f"turn off, as it is on by default: {help}"
    text = "; ".join(part for part in (help, *switches, _default(option)) if part)
    column = 34  # column at which descriptions start
    indent = " " * column
    body = textwrap.wrap(text, max(width, column + 30) - column, break_on_hyphens=False) or [""]
    head = f"  {names}"
    lines = [head.ljust(column) + body[0]] if len(head) <= column - 2 else [head, indent + body[0]]
    return lines + [indent + line for line in body[1:]]


def _placeholder(option: Option) -> str:
    if option.choices:
        return "{" + ",".join(str(choice) for choice in option.choices) + "}"
    kind = option.item_kind if option.kind == "list" else option.kind
    word = {"int": "N", "float": "X", "str": "TEXT"}.get(kind or "", "VALUE")
    return "|".join([f"{word}[,{word}...]" if option.kind == "list" else word, *option.words])


def _default(option: Option) -> str:
    value: Any = option.default
    if option.required:
        return "required"
    if option.kind == "bool" or value in (None, "", [], ()) or "default:" in option.help:
        return ""
    if isinstance(value, str) and value != value.strip():
        return f"default: {value!r}"
    return "default: " + (",".join(str(item) for item in value) if isinstance(value, list | tuple) else str(value))
