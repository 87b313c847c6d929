"""``gputrain help``: shows a topic of the help, or lists the topics."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from argparse import ArgumentParser, Namespace

from gputrain_tui.help_topics import ORDER, Topic, read_topic
from gputrain_tui.output import print_json
from gputrain_tui.plain_markdown import render
from trainer.contract.errors import ExitCode

PAGER = "less"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("topic", nargs="?", metavar="TOPIC", help="topic to show; without it, the list of topics")
    parser.add_argument("--json", action="store_true", help="print the topics, or one with its text, as JSON")


def run(args: Namespace) -> int:
    """Show a topic, or list all."""
    topics = [read_topic(name) for name in ORDER] if args.topic is None else [read_topic(args.topic)]
    width = 100  # columns of the text in a pipe, and at most on a terminal: longer lines are harder to read
    if args.json:
        listed = {"topics": [{"topic": topic.name, "title": topic.title} for topic in topics]}
        one = {"topic": topics[0].name, "title": topics[0].title, "markdown": topics[0].markdown}
        print_json(json.dumps(listed if args.topic is None else one, ensure_ascii=False))
    elif args.topic is None:
        lines = [f"  {topic.name:<11} {_short(topic)}" for topic in topics]
        print("\n".join(["usage: gputrain help TOPIC", "", *lines]))
        print("\n`gputrain --help` lists the commands, `gputrain COMMAND --help` the options of one.")
    else:
        columns = min(shutil.get_terminal_size().columns, width) if sys.stdout.isatty() else width
        _show(render(topics[0].markdown, columns))
    return ExitCode.FINISHED


def _short(topic: Topic) -> str:
    """Return the title without the topic's name."""
    name, _, text = topic.title.partition(": ")
    return text if name.replace(" ", "-").lower() == topic.name and text else topic.title


def _show(text: str) -> None:
    """Print a text; on a terminal through ``$PAGER`` or less, if there is one."""
    pager = os.environ.get("PAGER", PAGER)
    usable = pager and os.environ.get("TERM") != "dumb" and (pager != PAGER or shutil.which(PAGER))
    if not (sys.stdout.isatty() and usable):
        print(text, end="")
        return
    # -F: a text that fits is only printed; -R: colours; -X: it stays on the screen afterwards.
    environ = {"LESS": "FRX", "LESSCHARSET": "utf-8"} | os.environ
    with subprocess.Popen(pager, shell=True, stdin=subprocess.PIPE, env=environ) as process:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is a key of the pager
        try:
            process.communicate(text.encode())
        finally:
            signal.signal(signal.SIGINT, before)
