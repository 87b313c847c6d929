"""What users read: the README and the topics of the help, with their blocks of code."""

from __future__ import annotations

import re
from pathlib import Path

from gputrain_tui.help_topics import ORDER, read_topic

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = {"README": README, **{name: read_topic(name).markdown for name in ORDER}}
"""Text of each document, by ``README`` or the name of the topic."""


def blocks(document: str, language: str) -> list[str]:
    """Return the blocks of a language in a document; ``sh slurm`` is a language of its own."""
    return re.findall(rf"^```{language}\n(.*?)^```$", DOCUMENTS[document], flags=re.DOTALL | re.MULTILINE)
