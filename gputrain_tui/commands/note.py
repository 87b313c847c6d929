"""``gputrain note``: writes a note and tags to a run, or prints them."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

import msgspec

from gputrain_tui.history.notes import checked_note, checked_tags, read_notes, write_notes
from gputrain_tui.history.run_folders import ARCHIVES, find
from gputrain_tui.tables import printable
from trainer.contract.errors import ExitCode, RequestError


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="run id, a unique prefix of one, or `last`")
    parser.add_argument("text", metavar="TEXT", nargs="?", help='the note, in one line; "" deletes it')
    parser.add_argument("--tag", action="append", default=[], metavar="TAG", help="add a tag; may be repeated")
    parser.add_argument("--untag", action="append", default=[], metavar="TAG", help="remove a tag; may be repeated")


def run(args: Namespace) -> int:
    """Change the note and tags by the flags, and print them."""
    chosen = find(args.run)
    before = read_notes(chosen.dir)
    note = before.note if args.text is None else checked_note(args.text)
    tags = checked_tags([tag for tag in [*before.tags, *args.tag] if tag not in args.untag])
    after = msgspec.structs.replace(before, note=note, tags=tags)
    if after != before:
        if args.run.endswith(ARCHIVES):
            advice = "add notes to the run before exporting it"
            raise RequestError(f"{args.run} is an archive, which is read-only: {advice}")
        write_notes(chosen, after)
    print(printable(" ".join([chosen.id, *(f"[{tag}]" for tag in after.tags), after.note]).strip()))
    return ExitCode.FINISHED
