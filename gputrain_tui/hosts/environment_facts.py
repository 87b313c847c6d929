"""Reads what ranks of an interpreter would import and read: versions, code and data, without importing torch.

It runs in the interpreter of each host, in the folder and the environment of the ranks, as ``python -c``: it needs
Python 3.10 and the standard library. Frozen dataclasses, which msgspec reads as well.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import json
import os
import re
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MAX_DATA_FILES = 20_000
"""Of one folder; more take longer to list than a start may take, on a network file system."""


@dataclass(frozen=True, kw_only=True)
class Torch:
    """The torch that the ranks of this machine import."""

    version: str = ""
    """Empty when torch is not installed."""
    cuda: str | None = None
    """CUDA version for which it was built; None for a build without."""
    hip: str | None = None
    """Likewise the ROCm version."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What the ranks of a node import and read."""

    python: str = ""
    """Version of the interpreter."""
    executable: str = ""
    torch: Torch = Torch()
    nccl: str | None = None
    """Version of the package that brings NCCL; None where torch brings its own, or is built without."""
    gputrain: str | None = None
    """Version of the installed package; None where it is imported from a folder."""
    code: str = ""
    """Digest of the package ``trainer``; empty where it cannot be imported."""
    missing: str = ""
    """A package that ``trainer`` imports and this interpreter cannot; empty where there is none."""
    open_files: int | None = None
    """That one process may have open, behind the line of setup; None without a limit."""
    own_code: str = ""
    """Digest of the file of the user's task or script; empty for a built-in task, and where it is missing."""
    own_file: str = ""
    """Where that file is, or was looked for."""
    data: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Files and bytes of what each option of the task names, by option; one that is not there is left out."""
    data_problem: str = ""
    """Why the data of a built-in task cannot be read."""


def read_environment(task: str, script: str, options: Mapping[str, Any]) -> Environment:
    """Read the environment of this interpreter.

    Args:
        task: name of the user's own task or of a built-in one; empty for a script.
        script: path of the script; empty for a task.
        options: of the task.
    """
    own = _own_file(task, script)
    trainer = _folder_of("trainer")
    torch = torch_here()
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Environment(
        python=sys.version.split()[0],
        executable=sys.executable,
        torch=torch,
        nccl=_version(f"nvidia-nccl-cu{torch.cuda.partition('.')[0]}") if torch.cuda else None,
        gputrain=_version("gputrain"),
        code=digest(*sorted(trainer.rglob("*.py"))) if trainer is not None else "",
        missing=_missing_package(),
        open_files=None if open_files == resource.RLIM_INFINITY else open_files,
        own_code=digest(own) if own is not None and own.is_file() else "",
        own_file="" if own is None else str(own),
        data={name: size for name, value in options.items() if (size := _size(value)) is not None},
        data_problem=_data_problem(task, options) if trainer is not None else "",
    )


def torch_here() -> Torch:
    """Read of the torch of this interpreter what it was built for, without importing it."""
    folder = _folder_of("torch")
    if folder is None:
        return Torch()
    try:
        text = folder.joinpath("version.py").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = dict(re.findall(r"(?m)^(\w+)(?:\s*:[^=]+)?\s*=\s*'([^']*)'", text))
    return Torch(version=found.get("__version__", "?"), cuda=found.get("cuda"), hip=found.get("hip"))


def digest(*files: Path) -> str:
    """Return a digest of the names and contents of files."""
    import hashlib  # the start of a run does without

    found = hashlib.blake2b(digest_size=6)
    for file in files:
        found.update(file.name.encode())
        found.update(file.read_bytes())
    return found.hexdigest()


def _folder_of(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def _version(package: str) -> str | None:
    """Return the version of an installed package; None where it is not installed."""
    name = re.sub(r"[-_.]+", "_", package).lower()
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")  # noqa: PTH208 - a string of this path may be empty
        except NotADirectoryError:
            return _version_by_importlib(package)  # an archive
        except OSError:
            continue
        for each in names:
            stem, _, kind = each.lower().rpartition(".")
            if kind not in ("dist-info", "egg-info") or re.sub(r"[-_.]+", "_", stem.partition("-")[0]) != name:
                continue
            try:
                text = Path(folder, each, "METADATA").read_text(encoding="utf-8", errors="replace")
            except OSError:
                return _version_by_importlib(package)  # of another layout
            found = re.search(r"(?m)^Version: *(\S+)", text.partition("\n\n")[0])
            return found[1] if found else _version_by_importlib(package)
    return None


def _version_by_importlib(package: str) -> str | None:
    import importlib.metadata  # its imports take longer than all the other facts

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _missing_package() -> str:
    folder = _folder_of("msgspec")
    # Importing it takes tens of ms. It is compiled: one that was built for another Python is not found.
    if folder is None or importlib.machinery.PathFinder.find_spec("_core", [str(folder)]) is None:
        return "msgspec"
    return "" if _folder_of("psutil") is not None else "psutil"


def _own_file(task: str, script: str) -> Path | None:
    """Return the file of a user's own task or script, which is not imported; None for a built-in task."""
    module, colon, _ = task.rpartition(":")
    if script or module.endswith(".py"):
        return Path(os.path.expanduser(script or module))  # noqa: PTH111 - Path.expanduser() fails on an unknown user
    if not colon:
        return None
    first, *rest = module.split(".")
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(first)  # of a package inside it would be imported
        if spec is not None and not rest and spec.origin is not None:
            return Path(spec.origin)
        for folder in (spec and spec.submodule_search_locations) or ():
            for path in (Path(folder, *rest).with_suffix(".py"), Path(folder, *rest, "__init__.py")):
                if path.is_file():
                    return path
    return Path(first, *rest).with_suffix(".py")


def _size(value: Any) -> tuple[int, int] | None:
    """Return the number of files that an option names and their bytes together; None where it names none."""
    if not isinstance(value, str) or not value:
        return None
    path = Path(os.path.expanduser(value))  # noqa: PTH111
    try:
        if path.is_file():
            return 1, path.stat().st_size
        if not path.is_dir():
            return None
        sizes: list[int] = []
        for folder, folders, names in os.walk(path):
            folders[:] = [name for name in folders if not name.startswith(".")]
            sizes += [Path(folder, name).stat().st_size for name in names if not name.startswith(".")]
            if len(sizes) > MAX_DATA_FILES:
                return None
    except (OSError, ValueError):
        return None
    return len(sizes), sum(sizes)


def _data_problem(task: str, options: Mapping[str, Any]) -> str:
    """Return why a built-in task cannot read its data; empty for another task, and where nothing is wrong."""
    if not task or ":" in task:
        return ""
    try:
        import msgspec

        from trainer.contract.builtin_tasks import check_data, options_schema
        from trainer.contract.errors import RequestError
    except ImportError:  # a package is missing, which is told as such
        return ""
    schema: Any = options_schema(task)
    try:
        check_data(msgspec.convert(dict(options), schema))
    except RequestError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename} cannot be read: {error.strerror}"
    return ""


def main(words: Sequence[str]) -> None:
    """Print the environment as one line of JSON, after a word that frames it; the second word is the request."""
    request = json.loads(words[1])
    sys.stdout.write(f"{words[0]}{json.dumps(asdict(read_environment(**request)))}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
