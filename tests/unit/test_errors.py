from __future__ import annotations

from trainer.contract.errors import MAX_QUOTE_CHARS, quoted, shorten_words


def test_a_short_value_is_quoted_whole_and_a_long_one_by_its_ends() -> None:
    assert quoted("adam") == "'adam'"
    shortened = quoted("a" * 500 + "z" * 500)
    assert len(shortened) == MAX_QUOTE_CHARS
    assert shortened.startswith("'aaaa")
    assert shortened.endswith("zzzz'")


def test_a_message_keeps_paths_and_loses_the_middle_of_endless_words() -> None:
    path = "/data/" + "x" * 250
    assert shorten_words(f"{path} is missing") == f"{path} is missing"
    shortened = shorten_words(f"train.{'k' * 3000} is not known; did you mean 'lr'?")
    assert len(shortened) < 130
    assert shortened.endswith("k is not known; did you mean 'lr'?")
