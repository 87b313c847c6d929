"""Reads a command that was pasted from a shell, a page or a script: its words, split as bash splits them.

Nothing is run. Variables that the same text sets are replaced; of any other expansion only its place is kept, since its
value is not in the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gputrain_tui.shell_words import shell_quoted
from trainer.contract.errors import RequestError, quoted

EXPANSION = "\ue000"
"""Stands in a word for the ``$`` or the first backquote of an expansion whose value is not in the text."""
_EXPANSION = r"\$(?:\w+|\{[^}]*\}|\((?:[^()]|\([^()]*\))*\)|[*@#?$!-])|`[^`]*`"
_TOKEN = re.compile(
    rf"""
      (?P<space>(?:[ \t]|\\\n)+)
    | (?<![^\s;|&()]) (?P<comment>\#[^\n]*)
    | (?P<redirect>(?:(?<![^\s;|&()])\d+)?(?:<<<|<<|<&|<>|>>|>&|>\||<|>)|&>>|&>)
    | (?P<end>\|\||&&|\|&|[;&|\n()])
    | '(?P<single>[^']*)'
    | "(?P<double>(?:\\.|[^"\\])*)"
    | (?P<expansion>{_EXPANSION})
    | \\(?P<escaped>.)
    | (?P<plain>[^\s'"`\\|&;()<>$]+|\$)
    """,
    re.VERBOSE | re.DOTALL,
)
_IN_DOUBLE_QUOTES = re.compile(rf'\\\n|\\(?P<escaped>["\\$`])|(?P<expansion>{_EXPANSION})', re.DOTALL)
_PROMPT = re.compile(
    r"^[ \t]*(?:(?:\([\w.-]+\)[ ]?)?(?:[\w.-]+@[\w.-]+(?::[^\s$#%]*)?[ ]?[$#%]|[$%>❯])[ \t]+|!(?=\w))", re.MULTILINE
)
"""A prompt of a shell or a notebook at the beginning of a line; a bare ``#`` is a comment."""
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
SECRET = re.compile(
    r"SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|WEBHOOK|AUTHORIZATION|(TOKEN|KEYS?)(?![a-z])", re.IGNORECASE
)
"""A word in the name of a variable or an argument whose value a recipe should not keep."""
_SHELL_WORDS = ("for", "while", "until", "if", "case", "select", "function", "{", "[[")
"""Words that begin a compound command of a shell."""


@dataclass(kw_only=True)
class PastedCommand:
    """The one command of a pasted text that trains."""

    argv: list[str]
    """Its words, after the settings of exported variables; an expansion that is left begins with ``EXPANSION``."""
    notes: list[str] = field(default_factory=list)
    """A line for each part of the text that is left out, or that a shell would have changed."""


@dataclass
class _Simple:
    """A simple command, and what ended it."""

    words: list[str] = field(default_factory=list)
    end: str = ""
    globs: list[str] = field(default_factory=list)
    redirected: bool = False


def read_pasted_command(text: str) -> PastedCommand:
    """Return the command of a text that has one.

    Raises:
        RequestError: the text has none or several, or what only a shell can run.
    """
    if re.search(r"^\s*#SBATCH\b", text, re.MULTILINE):
        raise RequestError(
            "this is a batch script for sbatch: give init its line with srun or torchrun, and write its #SBATCH "
            "options into [slurm]; gputrain submits the job itself"
        )
    variables: dict[str, str] = {}
    exported: dict[str, str] = {}
    left: list[_Simple] = []
    is_piped = False
    for simple in _commands(_PROMPT.sub("", text.replace("\r\n", "\n")), variables):
        if simple.words and simple.words[0] in _SHELL_WORDS:
            raise RequestError(_only_a_shell(quoted(simple.words[0])))
        if not is_piped and simple.words and not _sets_variables(simple.words, variables, exported):
            left.append(simple)
        is_piped = simple.end in ("|", "|&")
    if len(left) != 1:
        raise RequestError(_not_one(left))
    command = left[0]
    notes = []
    if command.redirected or command.end in ("|", "|&"):
        notes.append("what takes its output is left out: `gputrain logs RUN` prints what each rank has printed")
    if command.end == "&":
        notes.append("& is left out: `gputrain run --detach` goes on in the background")
    notes += [
        f"{word} stays as it is: a shell would write the names of files in its place, if there are any"
        for word in command.globs
    ]
    return PastedCommand(argv=[*(f"{name}={value}" for name, value in exported.items()), *command.words], notes=notes)


def require_no_expansion(words: list[str]) -> None:
    """Raise for the first expansion in words that are kept."""
    for word in words:
        if (at := word.find(EXPANSION)) >= 0:
            found = re.match(_EXPANSION, shown(word[at:]))
            raise RequestError(
                f"the command has {quoted(found[0] if found else shown(word))}, whose value only your shell knows: "
                "write the value, or give the command on the line: gputrain init -- COMMAND"
            )


def shown(text: str) -> str:
    """Return a text with its expansions as they were written."""
    return re.sub(rf"{EXPANSION}(?=[^`]*`)", "`", text).replace(EXPANSION, "$")


def shown_command(words: Iterable[str]) -> str:
    """Return words on one line, quoted, with expansions as they were written and without secrets."""
    texts = []
    for word in words:
        name, equals, _ = word.partition("=")
        text = f"{name}=•••" if equals and SECRET.search(name) else shown(word)
        if EXPANSION not in word or not text.isprintable():
            texts.append(shell_quoted(text))
        else:  # quoted singly it would be no expansion
            texts.append(f'"{text}"' if re.search(r"\s", text) else text)
    return re.sub(r"(?<=://)[^/@\s]+@", "•••@", " ".join(texts))


def _only_a_shell(word: str) -> str:
    return f"the command has {word}, which only a shell can run: give init the command alone"


def _not_one(commands: list[_Simple]) -> str:
    if not commands:
        return "no command is given; paste one, such as: torchrun --nproc-per-node 4 train.py"
    texts = ", ".join(quoted(shown_command(each.words)) for each in commands[:4])
    return f"{len(commands)} commands are given; paste one, and do the others in the shell first: {texts}"


def _sets_variables(words: list[str], variables: dict[str, str], exported: dict[str, str]) -> bool:
    """Whether a command only sets variables or the shell; keep what it sets."""
    if words[0] in ("set", "shopt", "echo", "wait", "disown"):
        return True
    if words[0] == "unset":
        for name in words[1:]:
            variables.pop(name, None)
            exported.pop(name, None)
        return True
    is_export = words[0] == "export" or words[:2] == ["declare", "-x"]
    settings = [ASSIGNMENT.fullmatch(word) for word in words]
    if not is_export and not all(settings):
        return False
    for word, setting in zip(words, settings, strict=True):
        if setting is not None:
            variables[setting[1]] = setting[2]
        if is_export and (name := setting[1] if setting is not None else word) in variables:
            exported[name] = variables[name]
    return True


def _commands(text: str, variables: dict[str, str]) -> Iterator[_Simple]:
    """Yield the simple commands of a text; ``variables`` may grow between them."""
    command, word, is_target, is_glob = _Simple(), None, False, False
    text = text.rstrip().removesuffix("\\") + "\n"
    position = 0
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None:
            raise RequestError("the command cannot be read: no closing quotation")
        position = token.end()
        kind, value = str(token.lastgroup), token[str(token.lastgroup)]
        if kind == "expansion":
            name = value.strip("${}")
            if name in variables and re.fullmatch(r"\$(\w+|\{\w+\})", value):
                for index, part in enumerate(variables[name].split()):
                    if index:
                        command.words.append(str(word))
                    word = part if index else (word or "") + part
            else:
                word = (word or "") + EXPANSION + value[1:]
        elif kind == "double":
            word = (word or "") + _IN_DOUBLE_QUOTES.sub(lambda match: _unquoted(match, variables), value)
        elif kind in ("single", "escaped"):
            word = (word or "") + value
        elif kind == "plain":
            if word is None and re.match(r"~(/|$)", value):
                value = str(Path(value).expanduser()) + "/" * (len(value) > 2 and value.endswith("/"))
            word = (word or "") + value
            is_glob |= re.search(r"[*?]", value) is not None
        elif kind in ("space", "comment", "redirect", "end"):
            if word is not None:
                if is_target and word.startswith("-"):
                    raise RequestError(f"the command has > before {quoted(word)}: leave out the prompts of its lines")
                if not is_target:
                    command.words.append(word)
                    command.globs += [word] if is_glob else []
                is_target = False
            word, is_glob = None, False
            if kind == "redirect":
                if "<" in value and (placeholder := re.match(r"[\w .-]+>", text[position:])):
                    raise RequestError(f"the command has <{placeholder[0]}: put its value in place of that")
                if value == "<<":
                    raise RequestError("the command has a here-document (<<), which a recipe cannot give to ranks")
                command.redirected |= ">" in value
                is_target = True
            elif kind == "end":
                if value in ("(", ")"):
                    raise RequestError(_only_a_shell(value))
                command.end = value
                yield command
                command, is_target = _Simple(), False


def _unquoted(match: re.Match[str], variables: dict[str, str]) -> str:
    """Return what an escape or an expansion between double quotes stands for."""
    if (expansion := match["expansion"]) is None:
        return match["escaped"] or ""
    if re.fullmatch(r"\$(\w+|\{\w+\})", expansion) and (name := expansion.strip("${}")) in variables:
        return variables[name]
    return EXPANSION + expansion[1:]
