"""The topics of the help: Markdown files in ``help``, for ``gputrain help``, the console and the repository's page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainer.contract.errors import RequestError, nearest, quoted

FOLDER = Path(__file__).with_name("help")
ORDER = (
    "scripts", "recipe", "tasks", "ssh", "slurm", "by-hand", "shares", "findings", "numbers", "report", "compare",
    "serve", "automation", "record", "exports", "gpus", "keys", "exit-codes", "developers", "changelog",
)  # fmt: skip
"""Names of the topics in the order of a list; each is ``help/NAME.md``."""


@dataclass(frozen=True)
class Topic:
    """One topic of the help."""

    name: str
    """Name of its file without ``.md``."""
    title: str
    """Its first heading."""
    markdown: str


def read_topic(name: str) -> Topic:
    """Return a topic.

    Raises:
        RequestError: there is no topic of this name.
    """
    if name not in ORDER:
        raise RequestError(
            f"{quoted(name)} is not a topic of the help{nearest(name, ORDER)}; `gputrain help` lists the topics"
        )
    markdown = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    return Topic(name, markdown.partition("\n")[0].removeprefix("# "), markdown)


def section_heading(key: str) -> tuple[str, str]:
    """Return the topic and the heading about a recipe key, such as ``train.lr``; the heading is empty for the whole."""
    table, _, name = key.partition(".")
    if name in ("script", "module", "local_rank_flag", "args", "starts_ranks", "instrument"):
        return "scripts", ""
    if table == "slurm":
        return "slurm", ""
    if name.endswith(("host", "workdir", "python", "setup")):
        return "ssh", ""
    if table == "task":
        return "tasks", "Options of the built-in tasks"
    if "nodes" in name:
        return "recipe", "Keys of [[cluster.nodes]]"
    return "recipe", f"Keys of [{table}]" if name else ""
