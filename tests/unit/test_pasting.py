"""What is pasted presses no key, wherever the terminal cuts it."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from textual import events

from gputrain_tui.console.textual_internals import BEGIN, END, PasteParser

TRAPS = [
    "L",
    "\x1bL",
    "\x1b\x1b",
    "\x1b[31mL\x1b[0m d",
    "\x1bqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqq",
    "\x1b[999;999;999;999;999;999;999;999;9L",
    "\x1b[200~S",
    "\x1b[<0;3;4M",
    "日本\x1b",
    "",
]


def parse_portions(text: str, cuts: list[int]) -> list[str]:
    """Return what a parser makes of a text that comes in portions: pasted texts in brackets, and keys."""
    parser = PasteParser()
    edges = [0, *sorted(cuts), len(text)]
    found = []
    for begin, end in pairwise(edges):
        if begin < end:
            found += list(parser.feed(text[begin:end]))
    return [f"[{m.text}]" if isinstance(m, events.Paste) else getattr(m, "key", str(m)) for m in found]


@pytest.mark.parametrize("trap", TRAPS)
def test_a_paste_is_one_text_without_escapes_and_keys_around_it_stay_keys(trap: str) -> None:
    whole = f"a{BEGIN}{trap}{END}b{BEGIN}next{END}"
    source = random.Random(3)
    portions = [[], list(range(1, len(whole))), *([n] for n in range(1, len(whole)))]
    portions += [[source.randrange(1, len(whole)) for _ in range(4)] for _ in range(20)]
    for cuts in portions:
        before, pasted, after, following = parse_portions(whole, cuts)
        assert (before, after, following) == ("a", "b", "[next]"), cuts
        assert "\x1b" not in pasted
        assert pasted.startswith("[")


def test_keys_that_begin_with_an_escape_are_still_parsed() -> None:
    assert parse_portions("\x1b[A\x1b[3~q\x1bOP", []) == ["up", "delete", "q", "f1"]
