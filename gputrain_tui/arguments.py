"""Parses flags with argparse; every error is a ``RequestError``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from gputrain_tui.shell_words import shell_joined
from trainer.contract.errors import RequestError, nearest, quoted


class FlagParser(argparse.ArgumentParser):
    """Parser of the flags and positional words after a command's name."""

    def __init__(self, *, command: str = "", description: str = "") -> None:
        """Make a parser without flags; ``command``: its name, empty for ``gputrain`` alone, without ``--help``."""
        self._program = f"gputrain {command}".rstrip()
        self._where = f"{command}: " if command else ""
        super().__init__(prog=self._program, description=description, allow_abbrev=False, add_help=bool(command))

    @property
    def actions(self) -> Sequence[argparse.Action]:
        return self._actions

    def error(self, message: str) -> NoReturn:
        raise RequestError(f"{self._where}{message}; see `{self._program} --help`")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse what is no choice, as argparse does, and name the nearest one."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += nearest(str(value), map(str, action.choices or ()))
            raise

    def print_help(self, file: Any = None) -> None:
        """Print the help with ``print``, so that a closed pipe raises as elsewhere; argparse ignores it."""
        print(self.format_help(), end="", file=file)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, but refuse ``--flag=--``, of which argparse makes an empty list."""
        for word in args:
            flag, _, value = word.partition("=")
            if flag.startswith("-") and value == "--":
                self.error(f"{flag} needs a value, but has '--'")
        return super().parse_known_args(args, namespace)

    def parse_argv(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse all words.

        Raises:
            RequestError: a flag that the command does not have, a missing or a surplus word.
        """
        args, surplus = self.parse_known_args(list(argv))
        if surplus:
            word = surplus[0]
            if not word.startswith("-"):
                self.error(f"{quoted(word)} is one word too many")
            flag = word.partition("=")[0]
            known = [text for action in self.actions for text in action.option_strings]
            guess = nearest(flag, known) or f"; see `{self._program} --help`"
            begin = argv.index(args.argv[0]) if self._where == "init: " and args.argv else len(argv)
            if word in argv[begin:] and not nearest(flag, known):
                command = shell_joined([*self._program.split(), *argv[:begin], "--", *argv[begin:]])
                guess = f"; a command with options of its own stands behind --: `{command}`"
            if self._where == "run: ":
                guess += (
                    "; a script's own options are train.args, and `gputrain init -- COMMAND` translates a launcher's"
                )
            raise RequestError(f"{self._where}{flag} is not a known option{guess}")
        assert isinstance(args, argparse.Namespace)
        return args
