"""The topics of the help, their tables that are made from the code, and their layout as plain text."""

from __future__ import annotations

import pytest
from documents import ROOT
from help_tables import section, sections

from gputrain_tui.console.screens.help_screen import TOPICS
from gputrain_tui.diagnosis import KINDS
from gputrain_tui.help_topics import FOLDER, ORDER, read_topic, section_heading
from gputrain_tui.plain_markdown import render, tables_as_code
from gputrain_tui.recipe.model import CLUSTER_KEYS, NodeOptions, SlurmOptions, train_options
from gputrain_tui.tables import width
from trainer.contract.errors import RequestError

TABLES = list(sections())
KEYS = [
    *(f"cluster.{name}" for name in CLUSTER_KEYS),
    *(f"cluster.nodes[0].{name}" for name in NodeOptions.__struct_fields__),
    *(f"slurm.{name}" for name in SlurmOptions.__struct_fields__),
    *(f"train.{option.name}" for option in train_options()),
    "report.wandb", "task.data", "name",
]  # fmt: skip


@pytest.mark.parametrize(("topic", "heading", "content"), TABLES, ids=[heading for _, heading, _ in TABLES])
def test_a_table_is_the_one_that_the_code_gives(topic: str, heading: str, content: str) -> None:
    assert section(topic, heading) == content, "write it anew: .venv/bin/python tests/support/help_tables.py"


def test_every_file_is_a_topic_and_ships_with_the_package() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {f"{name}.md" for name in ORDER}
    assert FOLDER.is_relative_to(ROOT / "gputrain_tui")


@pytest.mark.parametrize("name", ORDER)
def test_a_topic_begins_with_its_title_and_fits_a_terminal(name: str) -> None:
    topic = read_topic(name)
    assert topic.markdown.startswith(f"# {topic.title}\n")
    text = render(topic.markdown, 80)
    assert [line for line in text.splitlines() if width(line) > 80 and not line.startswith("    ")] == []
    assert "```" not in text


def test_an_unknown_topic_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(RequestError, match=r"^'recipes' is not a topic of the help; did you mean 'recipe'"):
        read_topic("recipes")


@pytest.mark.parametrize("key", KEYS)
def test_the_help_of_a_key_leads_to_a_heading_of_its_topic(key: str) -> None:
    name, heading = section_heading(key)
    markdown = read_topic(name).markdown
    assert not heading or f"\n## {heading}\n" in markdown
    if key.rpartition(".")[0] in ("slurm", "train") and name in ("slurm", "recipe"):
        assert f"| `{key.rpartition('.')[2]}` |" in markdown


def test_every_screen_has_a_topic() -> None:
    assert set(TOPICS.values()) <= set(ORDER)


def test_every_finding_is_explained() -> None:
    text = read_topic("findings").markdown
    kinds = (*KINDS, "desync", "host_silent")
    assert [kind for kind in kinds if f"`{kind}`" not in text and f"**{kind}**" not in text] == []


@pytest.mark.parametrize(
    ("markdown", "text"),
    [
        ("# Title\n\none **two**\nthree [four](five.md)\n", "Title\n=====\n\none two three four\n"),
        ("- one\n  two three four five\n- six\n", "- one two three four\n  five\n- six\n"),
        ("a **b** 'c/**/*.d'\n", "a b 'c/**/*.d'\n"),
        ("```sh\nls -l\n```\n", "    ls -l\n"),
        ("| a | b |\n|---|---|\n| x | one two three four five six |\n", "a  b\nx  one two three four five\n   six\n"),
        ("| a | b |\n|---|---|\n| x\\|y | z |\n", "a    b\nx|y  z\n"),
        (f"| a | b |\n|---|---|\n| {'x' * 40} | z |\n", f"a  b\n{'x' * 40}\n   z\n"),
    ],
)
def test_markdown_becomes_plain_text(markdown: str, text: str) -> None:
    assert render(markdown, 24) == text


def test_textual_gets_tables_as_code() -> None:
    markdown = "# T\n\ntext\n\n| a | b |\n|---|---|\n| x | y |\n"
    assert tables_as_code(markdown, 40) == "# T\n\ntext\n\n```text\na  b\nx  y\n```\n"
