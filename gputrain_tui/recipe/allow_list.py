"""The values that exports and comments show: an allow-list, as nothing tells a secret from another text.

Shown are numbers, words of our own options, paths below the project, and the variables of launchers and libraries in
which no secret stands. Any other value of the recipe and the plan is hidden, and where it occurs in the record or in a
log, it is hidden there as well.
"""

from __future__ import annotations

import datetime
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from gputrain_tui.recipe.model import ClusterOptions, NodeOptions, ReportOptions, SlurmOptions
from trainer.contract.builtin_tasks import BUILT_IN, options_schema
from trainer.contract.options import Distributed, Script, Training
from trainer.contract.schema import Option, describe

HIDDEN = "•••"
MIN_HIDDEN_CHARS = 8
"""Minimum length of a value that is hidden in the record and in logs: ``false`` of a variable is in every log."""

VARIABLES = frozenset(
    (
        "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG",
        "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK",
        "ROLE_RANK", "ROLE_WORLD_SIZE", "WORLD_SIZE",
        "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES",
        "OPENBLAS_NUM_THREADS", "PYTHONHASHSEED", "PYTHONUNBUFFERED", "TOKENIZERS_PARALLELISM",
        "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCHDYNAMO_DISABLE", "TORCH_CPP_LOG_LEVEL",
        "TORCH_DISTRIBUTED_DEBUG", "TORCH_SHOW_CPP_STACKTRACES",
        "SLURM_CPUS_PER_TASK", "SLURM_GPUS_ON_NODE", "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES",
        "SLURM_JOB_PARTITION", "SLURM_LOCALID", "SLURM_NNODES", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_PROCID",
    )
)  # fmt: skip
"""Variables whose values are shown, besides those with one of ``PREFIXES``."""
PREFIXES = ("GLOO_", "NCCL_", "TORCH_NCCL_", "UCX_")
"""Beginnings of names of communication libraries, none of which has a secret among its variables."""
EVERYWHERE = frozenset(
    (
        "COLORTERM", "DISPLAY", "HOME", "HOSTNAME", "LANG", "LOGNAME", "OLDPWD", "PATH", "PWD", "SHELL", "TERM",
        "TMPDIR", "TZ", "USER", "VIRTUAL_ENV",
    )
)  # fmt: skip
"""Variables of any login: their values are no secrets, and stand in tracebacks and in names of hosts."""
_NUMBER = re.compile(r"[+-]?(\d+([.:]\d+)*|\.\d+)(e[+-]?\d+)?[KMGTkmgt%]?", re.ASCII)
"""A number, a size such as ``64G`` or a time such as ``1:00:00``."""
_LONG_FLAG = re.compile(r"--[A-Za-z][\w-]{0,40}", re.ASCII)
_SHORT_FLAG = re.compile(r"-[A-Za-z]", re.ASCII)
_HOST_NAME = re.compile(r"([\w.-]+@)?[\w.:\[\]-]+", re.ASCII)
_RENDEZVOUS = re.compile(r"env://|tcp://[\w.\[\]:-]+", re.ASCII)
_CODE = re.compile(rb'File "([^"<\n][^"\n]*)", line \d+|^(/[^\s":]+\.py):\d+: ', re.MULTILINE)
"""A file of code in a traceback or a warning."""
_LIBRARY = re.compile(rb"/(?:lib\d*/python\d|(?:site|dist)-packages/)")
_HOME = re.compile(rb"/(?:home|Users)/[^/]+(?=/)|/root(?=/)")
_CLASS_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", re.ASCII)


def is_shown_variable(name: str) -> bool:
    """Whether the value of an environment variable is shown."""
    return name in VARIABLES or name.startswith(PREFIXES)


@cache
def own_options() -> Mapping[str, Option]:
    """Return all options of recipes and of built-in tasks by their flags, aliases included."""
    schemas: list[type[Any]] = [Distributed, Training, Script, ClusterOptions, NodeOptions, SlurmOptions, ReportOptions]
    schemas += [schema for name in BUILT_IN if (schema := options_schema(name)) is not None]
    return {flag: option for kind in schemas for option in describe(kind) for flag in (option.flag, *option.aliases)}


@cache
def own_words() -> frozenset[str]:
    """Return the words of our own options, with our name, which is in each run's folder and in many messages."""
    words = {"auto", "all", "free", "none", "true", "false", "cpu", "gputrain", *BUILT_IN}
    for option in own_options().values():
        defaults = option.default if isinstance(option.default, list | tuple) else [option.default]
        words.update(map(str, option.choices), option.spellings, (word for word in defaults if isinstance(word, str)))
    return frozenset(words)


class AllowList:
    """Replaces the values that are not shown, and remembers them."""

    def __init__(self, environment: Mapping[str, str], project: Path) -> None:
        """Begin with the values of an environment that a program may print; paths below ``project`` are shown."""
        self._projects: list[Path] = []
        self.add_project(project)
        self._home = os.fsencode(environment.get("HOME", ""))
        self.hidden = 0
        """Values that were replaced in recipe and plan."""
        self._values: set[bytes] = set()
        self._pattern: re.Pattern[bytes] | None = None
        for name, value in environment.items():
            if not is_shown_variable(name) and name not in EVERYWHERE:
                self._remember(value, words="://" in value)

    def add_project(self, folder: Path) -> None:
        """Add a folder below which paths are shown; the root of all files is none."""
        if folder.is_absolute() and folder != Path("/"):
            self._projects += [each for each in (folder.resolve(), folder) if each not in self._projects]

    def is_shown(self, text: str) -> bool:
        """Whether a text is a number, a word of our own options or a path below the project."""
        return text in own_words() or _NUMBER.fullmatch(text) is not None or self._is_in_project(text)

    def _is_in_project(self, text: str) -> bool:
        try:
            paths = [(project, (project / text).resolve()) for project in self._projects if text]
            return any(path.is_relative_to(project) and path.exists() for project, path in paths)
        except (OSError, ValueError):  # no path at all
            return False

    def _is_task(self, text: str) -> bool:
        """Whether a text is a class in a file of the project."""
        file, _, name = text.rpartition(":")
        return name.isidentifier() and self._is_in_project(file)

    def recipe(self, table: Mapping[str, Any]) -> dict[str, Any]:
        """Return a parsed recipe with only the values that are shown."""
        return {key: self._setting((key,), value) for key, value in table.items()}

    def _setting(self, key: tuple[str, ...], value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: self._setting((*key, name), each) for name, each in value.items()}
        if len(key) > 1 and key[-2] == "env":
            return value if is_shown_variable(key[-1]) else self.hide(value)
        if key == ("train", "args") and isinstance(value, list):
            return self.arguments([str(word) for word in value])
        if isinstance(value, list):
            return [self._setting(key, each) for each in value]
        if isinstance(value, bool | int | float | datetime.date | datetime.time) or self.is_shown(str(value)):
            return value
        return value if self._is_name(key, str(value)) else self.hide(value)

    def _is_name(self, key: tuple[str, ...], value: str) -> bool:
        """Whether a value is the name of a run, a host, a task's class or a rendezvous, which the record has too."""
        if key[0] == "cluster" and key[-1] in ("host", "spare"):
            return _HOST_NAME.fullmatch(value) is not None
        if key == ("cluster", "init_method"):
            return _RENDEZVOUS.fullmatch(value) is not None
        return key == ("name",) or (key == ("train", "task") and _CLASS_NAME.fullmatch(value) is not None)

    def variables(self, values: Mapping[str, str]) -> dict[str, str]:
        """Return environment variables with only the values that are shown."""
        return {name: value if is_shown_variable(name) else self.hide(value) for name, value in values.items()}

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return the command of a node; the words after ``--`` are the script's."""
        cut = argv.index("--") if "--" in argv else len(argv)
        own = [Path(argv[0]).name, *argv[1:cut]] if argv else []
        shown = [word for word in own[:4] if word in (own[0], "-P", "-m", "trainer")]
        return [*shown, *self.arguments(own[len(shown) :]), *argv[cut : cut + 1], *self.arguments(argv[cut + 1 :])]

    def arguments(self, words: Sequence[str]) -> list[str]:
        """Return the arguments of a program: flags by name, and of values only those that are shown."""
        return [self._argument(word) for word in words]

    def _argument(self, word: str) -> str:
        flag, equals, value = word.partition("=")
        if word in own_options() or _LONG_FLAG.fullmatch(word) or _SHORT_FLAG.fullmatch(word):
            return word
        if not (equals and (_LONG_FLAG.fullmatch(flag) or flag in own_options())):
            flag, value = "", word
        if self.is_shown(value) or _RENDEZVOUS.fullmatch(value) or self._is_task(value):
            return word
        return f"{flag}={self.hide(value)}" if flag else self.hide(value)

    def hide(self, value: Any) -> str:
        """Return the sign of a hidden value, which is remembered."""
        if value == "":
            return ""
        self.hidden += 1
        self._remember(str(value), words=True)
        return HIDDEN

    def _remember(self, value: str, *, words: bool) -> None:
        """Remember a value and its words: a line of shell is in no log, but the password in it may be."""
        parts = [part for word in re.split(r"[\s'\"]+", value) for part in _parts(word)] if words else []
        parts += [part[2:] for part in parts if _SHORT_FLAG.match(part)]  # -pVALUE
        for text in (value, *parts):
            if len(text) >= MIN_HIDDEN_CHARS and not self.is_shown(text):
                self._values.add(text.encode("utf-8", "surrogateescape"))
                self._values.add(json.dumps(text, ensure_ascii=False)[1:-1].encode("utf-8", "surrogateescape"))
        self._pattern = None

    def mask(self, data: bytes) -> bytes:
        """Return bytes of the same length in which every hidden value is stars.

        Files of code in tracebacks and warnings stay readable, with blanks at the line's end for what is left out: a
        file below the project is relative to it, libraries are shown from their folder on, and the home folder is ~.
        """
        masked, parts, at = self._mask_values(data), [], 0
        for match in _CODE.finditer(data):
            group = 1 if match[1] else 2
            if match.start() < at:
                continue  # a second one in a line
            shown, end = self._shown_code(match[group]), data.find(b"\n", match.end())
            end = end if end >= 0 else len(data)
            parts += [masked[at : match.start(group)], shown, masked[match.end(group) : end]]
            parts.append(b" " * (len(match[group]) - len(shown)))
            at = end
        return b"".join([*parts, masked[at:]])

    def _shown_code(self, path: bytes) -> bytes:
        for project in sorted(map(os.fsencode, self._projects), key=len, reverse=True):
            if path.startswith(project + b"/"):
                return path[len(project) + 1 :]
        if not path.startswith(b"/"):
            return path
        library = _LIBRARY.search(path)
        folder, rest = (path, b"") if library is None else (path[: library.start()], path[library.start() :])
        if self._home and folder.startswith(self._home + b"/"):
            return self._mask_values(b"~" + folder[len(self._home) :]) + rest
        home = _HOME.match(folder)
        return self._mask_values(folder if home is None else b"~" + folder[home.end() :]) + rest

    def _mask_values(self, data: bytes) -> bytes:
        if not self._values:
            return data
        if self._pattern is None:
            self._pattern = re.compile(b"|".join(map(re.escape, sorted(self._values, key=len, reverse=True))))
        return self._pattern.sub(lambda match: b"*" * len(match[0]), data)

    @property
    def longest_bytes(self) -> int:
        """Length of the longest value that ``mask`` hides."""
        return max(map(len, self._values), default=1)


def _parts(word: str) -> Iterator[str]:
    """Yield what stands between the separators of a word, and shorter ones also joined: a secret may have a slash."""
    pieces = re.split(r"([=;&|@:,/?]+)", word)
    for begin in range(0, len(pieces), 2):
        yield pieces[begin]
        for end in range(begin, len(pieces), 2):
            if len(pieces[end]) >= MIN_HIDDEN_CHARS:  # hidden by itself
                break
            yield "".join(pieces[begin : end + 1])
