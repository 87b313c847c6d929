"""Notes of a user on a run: a note of one line, and tags; ``notes.json`` in its directory."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from gputrain_tui.history.run_folders import Run
from trainer.contract.errors import RecordError, RequestError, quoted
from trainer.contract.record import RunDir
from trainer.contract.record.regular_file import read_json
from trainer.contract.record.run_dir import write_atomically

MAX_NOTE_CHARS = 1000
"""A note is a line of a list, not a report."""
MAX_TAGS = 20
"""Tags of one run; more would fill the columns of every list."""
_TAG = re.compile(r"[\w.+/-]{1,40}")
"""Without spaces and signs of the filter, so that ``tags:baseline`` finds it."""


class Notes(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Contents of ``notes.json``."""

    note: str = ""
    """One line; empty without one."""
    tags: tuple[str, ...] = ()
    """Sorted, each once."""


_decoder = msgspec.json.Decoder(Notes)


def read_notes(run: RunDir) -> Notes:
    """Return a run's note and tags; none where there is no file.

    Raises:
        RecordError: the file is damaged or cannot be read.
    """
    if not run.notes.exists():
        return Notes()
    try:
        notes = read_json(run.notes, _decoder)
    except RecordError as error:
        raise RecordError(f"{error}; delete the file to start a new note") from None
    return Notes(note=_one_line(notes.note)[:MAX_NOTE_CHARS], tags=tuple(filter(_TAG.fullmatch, notes.tags[:MAX_TAGS])))


def write_notes(run: Run, notes: Notes) -> None:
    """Replace a run's note and tags.

    Raises:
        RequestError: they cannot be written.
    """
    try:
        write_atomically(run.dir.notes, msgspec.json.encode(notes) + b"\n")
    except OSError as error:
        raise RequestError(f"the note of {run.id} cannot be written: {error.strerror}") from None


def checked_note(text: str) -> str:
    """Return a note as one line.

    Raises:
        RequestError: it is too long.
    """
    note = _one_line(text)
    if len(note) > MAX_NOTE_CHARS:
        raise RequestError(f"the note has {len(note):,} characters; at most {MAX_NOTE_CHARS:,} are allowed")
    return note


def checked_tags(tags: Iterable[str]) -> tuple[str, ...]:
    """Return tags sorted, each once.

    Raises:
        RequestError: one is no tag, or they are too many.
    """
    chosen = sorted(set(tags))
    for tag in chosen:
        if not _TAG.fullmatch(tag):
            raise RequestError(f"{quoted(tag)} is not a tag: 1 to 40 letters, digits or . + / - _, without spaces")
    if len(chosen) > MAX_TAGS:
        raise RequestError(f"{len(chosen)} tags; a run has at most {MAX_TAGS}")
    return tuple(chosen)


def _one_line(text: str) -> str:
    return " ".join(text.split())
