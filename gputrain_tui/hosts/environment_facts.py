"""Reads the environment of the ranks: versions of packages, digests of code, sizes of data. It never imports torch.

The interpreter of each node runs this file as ``python -c``, in the folder and the environment of the ranks: it needs
Python 3.10 and the standard library only, hence frozen dataclasses, which msgspec decodes as well.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import itertools
import json
import os
import re
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Torch:
    """The torch that the ranks of this machine import."""

    version: str = ""
    """Empty when torch is not installed."""
    cuda: str | None = None
    """CUDA version of the build; None for a build without CUDA."""
    hip: str | None = None
    """ROCm version of the build; None for a build without ROCm."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Interpreter, packages, code and data of the ranks of a node."""

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
    """Package that ``trainer`` needs and this interpreter cannot import; empty if there is none."""
    open_files: int | None = None
    """Soft limit of open files per process, after the line of setup; None without a limit."""
    own_code: str = ""
    """Digest of the file of the user's task or script; empty for a built-in task, and where it is missing."""
    own_file: str = ""
    """Path of that file, also if it is missing; empty for a built-in task."""
    beside: Mapping[str, str] = field(default_factory=dict)
    """Digests of what ``files_beside`` returns for that file."""
    hiding: Sequence[str] = ()
    """Files beside the script that ``hiding_files`` returns."""
    data: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Number of files and their bytes for each option of the task that names an existing file or folder."""
    data_problem: str = ""
    """Reason why the data of a built-in task cannot be read; empty for another task or readable data."""
    start_problem: str = ""
    """Reason why the run cannot start from the checkpoint or the weights of the recipe; empty where it names none."""
    shares_problem: str = ""
    """Reason why the recorded shares of another run cannot be repeated; empty where none are."""


def read_environment(
    task: str,
    script: str,
    options: Mapping[str, Any],
    start: Mapping[str, str] | None = None,
    shares: Mapping[str, Any] | None = None,
    *,
    is_module: bool = False,
) -> Environment:
    """Read the environment of this interpreter for a task, the user's own or a built-in one, or for a script.

    ``start`` and ``shares`` are the arguments of ``start_problem`` and ``recorded_shares``, where rank 0 reads them.
    """
    own = own_file(task, script, is_module=is_module)
    trainer = _folder_of("trainer")
    torch = installed_torch()
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
        beside={} if own is None else files_beside(own),
        hiding=hiding_files(script, is_module=is_module) if script else (),
        data={name: size for name, value in options.items() if (size := _files_and_bytes(value)) is not None},
        data_problem=_data_problem(task, options) if trainer is not None else "",
        start_problem=_start_problem(start) if trainer is not None and start else "",
        shares_problem=_shares_problem(shares) if trainer is not None and shares else "",
    )


def installed_torch() -> Torch:
    """Return version and build of this interpreter's torch, from its ``version.py``, without importing it."""
    folder = _folder_of("torch")
    if folder is None:
        return Torch()
    try:
        text = folder.joinpath("version.py").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    assignments = dict(re.findall(r"(?m)^(\w+)(?:\s*:[^=]+)?\s*=\s*'([^']*)'", text))
    return Torch(version=assignments.get("__version__", "?"), cuda=assignments.get("cuda"), hip=assignments.get("hip"))


def hiding_files(script: str, *, is_module: bool) -> list[str]:
    """Return what lies beside a script and is imported in place of torch or of a module of Python's own.

    Modules that are built into the interpreter are found before any file.
    """
    folder = Path() if is_module else Path(os.path.expanduser(script)).parent  # noqa: PTH111
    files = []
    with contextlib.suppress(OSError):
        for path in sorted(folder.iterdir()):
            is_package = path.joinpath("__init__.py").is_file()
            if path.suffix != ".py" and not is_package:
                continue
            if path.stem == "torch":
                hides = not path.joinpath("version.py").is_file()  # else it is a torch
            else:
                hides = path.stem in sys.stdlib_module_names and not (
                    importlib.machinery.BuiltinImporter.find_spec(path.stem)
                    or importlib.machinery.FrozenImporter.find_spec(path.stem)
                )
            if hides:
                files.append(str(path))
    return files


def own_file(task: str, script: str, *, is_module: bool) -> Path | None:
    """Return the file of the user's own task, script or module, which may be missing; None for a built-in task."""
    return _own_file(f"{script}:", "") if is_module else _own_file(task, script)


def files_beside(own: Path) -> dict[str, str]:
    """Return the digest of each Python file of the own file's folder and its packages, by its path in that folder."""
    most = 500  # of a folder that holds more than one project
    found = {}
    with contextlib.suppress(OSError):
        for path in itertools.islice(_python_files(own.parent), most):
            name = str(path.relative_to(own.parent))
            if name.isprintable():  # as JSON and tables need it
                found[name] = digest(path)
    return found


def _python_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.suffix == ".py" and path.is_file():
            yield path
        elif path.joinpath("__init__.py").is_file() and not path.is_symlink():
            yield from _python_files(path)


def digest(*files: Path) -> str:
    """Return a digest of the names and contents of files."""
    import hashlib  # slow to import, and the start of a run on one machine needs no digest

    content = hashlib.blake2b(digest_size=6)
    for file in files:
        content.update(file.name.encode())
        content.update(file.read_bytes())
    return content.hexdigest()


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
            return _version_by_importlib(package)  # a zip archive
        except OSError:
            continue
        for each in names:
            stem, _, kind = each.lower().rpartition(".")
            if kind not in ("dist-info", "egg-info") or re.sub(r"[-_.]+", "_", stem.partition("-")[0]) != name:
                continue
            try:
                text = Path(folder, each, "METADATA").read_text(encoding="utf-8", errors="replace")
            except OSError:
                return _version_by_importlib(package)  # an egg-info of another layout
            match = re.search(r"(?m)^Version: *(\S+)", text.partition("\n\n")[0])
            return match[1] if match else _version_by_importlib(package)
    return None


def _version_by_importlib(package: str) -> str | None:
    import importlib.metadata  # its imports take longer than all the other facts

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _missing_package() -> str:
    folder = _folder_of("msgspec")
    # Importing msgspec takes tens of ms. Its ``_core`` is compiled: one built for another Python is not found.
    if folder is None or importlib.machinery.PathFinder.find_spec("_core", [str(folder)]) is None:
        return "msgspec"
    return "" if _folder_of("psutil") is not None else "psutil"


def _own_file(task: str, script: str) -> Path | None:
    """Return the file of a user's own task or script without importing it; None for a built-in task."""
    module, colon, _ = task.rpartition(":")
    if script or module.endswith(".py"):
        return Path(os.path.expanduser(script or module))  # noqa: PTH111 - Path.expanduser() fails on an unknown user
    if not colon:
        return None
    first, *rest = module.split(".")
    with contextlib.suppress(ImportError, ValueError):
        # The working folder is not in ``sys.path``; find_spec of a dotted name would import the parent package.
        spec = importlib.machinery.PathFinder.find_spec(first, [str(Path.cwd())]) or importlib.util.find_spec(first)
        if spec is not None and not rest and spec.origin is not None:
            return Path(spec.origin)
        for folder in (spec and spec.submodule_search_locations) or ():
            within = Path(folder, *rest)
            for path in (within.with_suffix(".py"), within / "__init__.py", within / "__main__.py"):
                if path.is_file():
                    return path
    return Path(first, *rest).with_suffix(".py")


def _files_and_bytes(value: Any) -> tuple[int, int] | None:
    """Return number and total bytes of the files that an option's value names; None if it names none, or too many."""
    if not isinstance(value, str) or not value:
        return None
    path = Path(os.path.expanduser(value))  # noqa: PTH111
    # Most files of a data folder that are counted; listing more on a network file system would delay the start.
    max_data_files = 20_000
    try:
        if path.is_file():
            return 1, path.stat().st_size
        if not path.is_dir():
            return None
        sizes: list[int] = []
        for folder, folders, names in os.walk(path):
            folders[:] = [name for name in folders if not name.startswith(".")]
            sizes += [Path(folder, name).stat().st_size for name in names if not name.startswith(".")]
            if len(sizes) > max_data_files:
                return None
    except (OSError, ValueError):
        return None
    return len(sizes), sum(sizes)


def _data_problem(task: str, options: Mapping[str, Any]) -> str:
    """Return the reason why a built-in task cannot read its data; empty for another task, or if all can be read."""
    if not task or ":" in task:
        return ""
    try:
        import msgspec

        from trainer.contract.builtin_tasks import check_data, options_schema
        from trainer.contract.errors import RequestError
    except ImportError:  # ``missing`` reports it
        return ""
    schema: Any = options_schema(task)
    try:
        check_data(msgspec.convert(dict(options), schema))
    except RequestError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename} cannot be read: {error.strerror}"
    return ""


def _start_problem(start: Mapping[str, str]) -> str:
    try:
        from trainer.contract.start_file import start_problem
    except ImportError:  # ``missing`` or another version of gputrain, which are reported
        return ""
    return start_problem(start["option"], Path(start["path"]))


def _shares_problem(shares: Mapping[str, Any]) -> str:
    try:
        from trainer.contract.errors import RequestError
        from trainer.contract.recorded_shares import recorded_shares
    except ImportError:
        return ""
    try:
        recorded_shares(**shares)
    except RequestError as refused:
        return str(refused)
    return ""


def main(arguments: Sequence[str]) -> None:
    """Print the environment as one line of JSON; the words are the mark before that line, and the request as JSON."""
    request = json.loads(arguments[1])
    sys.stdout.write(f"{arguments[0]}{json.dumps(asdict(read_environment(**request)))}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
