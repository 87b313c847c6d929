"""Copies the code and Python environment of this machine to hosts that do not share its file system.

rsync copies the working folder, without data and files that git ignores, and the folders from which the interpreter
imports. Nothing is deleted on a host. If Python, C library or architecture of a host differ, pip installs the packages
there instead, in the versions of this machine.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import secrets
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec.json import Decoder

from gputrain_tui.hosts.host_channel import HostError
from gputrain_tui.hosts.ssh import Ssh
from gputrain_tui.recipe.model import Recipe
from gputrain_tui.tables import size
from trainer.contract.errors import RequestError

MAX_PARALLEL_HOSTS = 16
"""Hosts that are copied to at a time; they share the network link of this machine."""
PROBE_TIMEOUT_S = 30.0
"""Time limit of a host's answer before anything is copied."""
INSTALL_TIMEOUT_S = 3600.0
"""Time limit of an installation: torch over a slow network."""
SYSTEM = Path("/usr")
"""Folder of the operating system's packages, which are not copied."""
DATA = ("data",)
"""Folders of the working folder that are not copied, besides the data that the recipe's task reads."""
CACHES = ("__pycache__", ".git", ".venv")
"""Names of folders that are not copied."""


class PushError(RequestError):
    """Error of a push to a host."""


@dataclass(frozen=True, kw_only=True)
class Destination:
    """Host, and its folder for the code."""

    host: str
    workdir: str
    """Folder on the host; ``~`` is its home folder."""
    own_python: bool = False
    """Whether the recipe names an interpreter for the host; its environment is not pushed then."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One folder to be copied to one host."""

    source: Path
    target: str
    files: tuple[str, ...] | None = None
    """Paths relative to the folder; None for all files except ``__pycache__``."""


@dataclass(frozen=True, kw_only=True)
class HostPush:
    """Planned transfers and installation of one host."""

    host: str
    transfers: tuple[Transfer, ...] = ()
    packages: tuple[str, ...] = ()
    """``NAME==VERSION`` to install on the host; empty if the environment is copied or shared."""
    imports: tuple[str, ...] = ()
    """Copied folders of code that the environment installed on the host imports from."""
    lines: tuple[str, ...] = ()


class HostPlatform(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of a host to ``probe``."""

    libc: str
    """Name and version of its C library."""
    machine: str
    base: str
    """Version of the interpreter at the path of this machine's; empty if there is none."""
    rsync: bool
    workdir: str
    shared: tuple[str, ...]


PLATFORM, PREPARED = msgspec.json.Decoder(HostPlatform), msgspec.json.Decoder(None)
"""Made before any thread."""
T = TypeVar("T")


def destinations(recipe: Recipe, is_here: Callable[[str | None], bool]) -> list[Destination]:
    """Return the hosts of a recipe that are not this machine; a spare has the folders of all nodes."""
    by_host = {}
    for index in range(len(recipe.cluster.nodes)):
        node = recipe.cluster.of_node(index)
        if node.host is not None and not is_here(node.host):
            workdir = node.workdir or str(Path.cwd())
            own = node.python not in (None, sys.executable)
            by_host[node.host] = Destination(host=node.host, workdir=workdir, own_python=own)
    as_nodes = list(by_host.values())
    spares = [replace(node, host=host) for host in recipe.cluster.spare if not is_here(host) for node in as_nodes]
    return as_nodes + list(dict.fromkeys(spares))


def data_of(recipe: Recipe) -> set[Path]:
    """Return the existing files and folders that the task options of a recipe name: data, which is not copied."""
    named = [Path.cwd() / value for value in recipe.task_options.values() if isinstance(value, str) and value]
    return {path.resolve() for path in named if path.exists()}


def plan_push(ssh: Ssh, to: Sequence[Destination], data: set[Path]) -> list[HostPush]:
    """Probe every host, and return the plan for each; nothing is copied yet. Raise PushError for the first failure."""
    code = Path.cwd()
    imports = import_folders(code)
    base = Path(sys.base_prefix) / "bin" / f"python{sysconfig.get_python_version()}"
    with _tokens([code, *imports]) as tokens:

        def probe(destination: Destination) -> HostPlatform:
            request = {"base": str(base), "workdir": destination.workdir, "tokens": list(tokens.values())}
            return _call(ssh, destination.host, "probe", PLATFORM, PROBE_TIMEOUT_S, **request)

        answers = _in_parallel(probe, to)
    sent_code = tuple(code_files(code, data))
    pushes = []
    for destination, answer in zip(to, answers, strict=True):
        shared = {folder for folder, token in tokens.items() if token in answer.shared}
        missing = [path for path in imports if path not in shared]
        pushes.append(_plan_host(destination, answer, code, sent_code, missing, shared))
    return pushes


def _plan_host(
    destination: Destination,
    answer: HostPlatform,
    code: Path,
    files: tuple[str, ...],
    imports: Sequence[Path],
    shared: set[Path],
) -> HostPush:
    """Return the plan for one host; ``imports`` are the folders of imports that it does not share."""
    transfers, lines = [], []
    if code in shared and answer.workdir == str(code):
        lines.append(f"code: {code} is shared with this machine; nothing to copy")
    else:
        transfers.append(Transfer(source=code, target=answer.workdir, files=files))
        number = f"{len(files)} files" if files else "no file"
        lines.append(f"code: {number} of {code} to {answer.workdir}; data and files that git ignores are not copied")
    # An environment that contains its interpreter, as of conda and pyenv, needs no equal one on the host.
    same = sys.prefix == sys.base_prefix or answer.base == platform.python_version()
    same = same and answer.machine == platform.machine()
    same = same and answer.libc == " ".join(platform.libc_ver())
    packages: tuple[str, ...] = ()
    if destination.own_python:
        lines.append("environment: the recipe sets python for this host; nothing to copy")
    elif Path(sys.prefix).is_relative_to(SYSTEM):
        lines.append(
            f"environment: {sys.prefix} belongs to the system and is not copied; "
            "use a virtual environment, or set the host's python in the recipe"
        )
    elif not imports:
        lines.append(f"environment: {sys.prefix} is shared with this machine; nothing to copy")
    else:
        wanted = [(folder, files_of(folder)) for folder in imports]
        transfers += [
            Transfer(source=folder, target=str(folder), files=files)
            for folder, files in wanted
            if same or files is not None
        ]
        if same:
            lines.append(f"environment: {', '.join(map(str, imports))} by rsync to the same path")
        else:
            packages = tuple(package_versions())
            why = f"Python {answer.base or 'at another path'}, {answer.libc}, {answer.machine}"
            lines.append(
                f"environment: the host has {why}; a new one in {sys.prefix}, with {len(packages)} packages by pip"
            )
    if transfers and not answer.rsync:
        raise PushError(f"{destination.host}: there is no rsync; install it there")
    own_folders = tuple(str(item.target) for item in transfers if item.source != code and item.files is not None)
    return HostPush(
        host=destination.host, transfers=tuple(transfers), packages=packages, imports=own_folders, lines=tuple(lines)
    )


def push(ssh: Ssh, pushes: Sequence[HostPush]) -> list[str]:
    """Carry out the plans of all hosts in parallel; return a line for each. A PushError is of one host, not of all."""

    def push_host(item: HostPush) -> str:
        request = {
            "folders": [transfer.target for transfer in item.transfers],
            "python": sys.executable,
            "prefix": sys.prefix,
            "packages": list(item.packages),
            "imports": list(item.imports),
        }
        _call(ssh, item.host, "prepare", PREPARED, INSTALL_TIMEOUT_S, **request)
        sent = sum(_rsync(ssh, item.host, transfer) for transfer in item.transfers)
        return f"{item.host}: {size(sent)} sent" if item.transfers else f"{item.host}: nothing to copy"

    return _in_parallel(push_host, pushes)


def _rsync(ssh: Ssh, host: str, transfer: Transfer) -> int:
    # rsync runs `SHELL HOST COMMAND`. The shell words contain the host already, so `env` stands in the place of HOST.
    shell = " ".join(f'"{word}"' if " " in word else word for word in ssh.command_line(host))
    argv = ["rsync", "-a", "-s", "--stats", "-e", shell]
    if transfer.files is None:
        argv += ["--exclude=__pycache__"]
    else:
        argv += ["--files-from=-", "--from0"]
    # A name that begins with # would be a comment.
    listed = b"" if transfer.files is None else b"\0".join(os.fsencode(f"./{name}") for name in transfer.files)
    try:
        done = subprocess.run(
            [*argv, f"{transfer.source}/", f"env:{transfer.target}/"], input=listed, capture_output=True
        )
    except OSError as error:
        raise PushError(f"rsync cannot be run here: {error.strerror}") from None
    if done.returncode:
        lines = [text for text in done.stderr.decode("utf-8", "replace").splitlines() if text.strip()]
        # rsync may lose the host's message: 11 is an error of its files.
        code = f"exit code {done.returncode}{', as of a full disk there' if done.returncode == 11 else ''}"
        raise PushError(f"{host}: rsync of {transfer.source}: {lines[0] if lines else code}")
    sent = next((text for text in done.stdout.decode().splitlines() if text.startswith("Total bytes sent:")), "0")
    return int("".join(filter(str.isdigit, sent)) or 0)


def code_files(folder: Path, data: set[Path]) -> Iterator[str]:
    """Yield the files of a folder without data and caches, relative to it; in a git repository the unignored ones."""
    for name in sorted(set(_listed(folder))):
        parts = Path(name).parts
        path = folder / name
        if parts[0] in DATA or set(CACHES) & set(parts) or not (path.is_file() or path.is_symlink()):
            continue
        if not any(path.resolve().is_relative_to(kept) for kept in data):
            yield name


def _listed(folder: Path) -> Iterator[str]:
    """Yield all files of a folder; in a git repository the unignored ones, those of repositories within it too."""
    command = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, env=os.environ | {"LC_ALL": "C"})
        code, why = listed.returncode, listed.stderr.decode("utf-8", "replace").strip().partition("\n")[0]
    except OSError as error:
        git = any((each / ".git").exists() for each in (folder, *folder.parents))
        code, why = 1, str(error.strerror) if git else "not a git repository"
    if code and "not a git repository" not in why:
        raise PushError(f"git cannot list the files of {folder} that are not ignored: {why}")
    if code:
        for parent, folders, files in os.walk(folder):
            links = [name for name in folders if Path(parent, name).is_symlink()]
            yield from (str(Path(parent, name).relative_to(folder)) for name in files + links)
        return
    for name in map(os.fsdecode, filter(None, listed.stdout.split(b"\0"))):
        inner = folder / name
        if (inner / ".git").exists() and not inner.is_symlink():  # git lists only the folder of another repository
            yield from (str(Path(name, file)) for file in _listed(inner))
        else:
            yield name


def files_of(folder: Path) -> tuple[str, ...] | None:
    """Return the files of a folder of code; None for a folder of installed packages, which is copied whole."""
    if folder == Path(sys.prefix) or folder.name in ("site-packages", "dist-packages"):
        return None
    return tuple(code_files(folder, set()))


def import_folders(code: Path) -> list[Path]:
    """Return the folders of ``sys.path`` and the environment, without standard library, ``/usr`` and ``code``."""
    library = {Path(sysconfig.get_paths()[name]) for name in ("stdlib", "platstdlib")}
    folders = [] if Path(sys.prefix).is_relative_to(SYSTEM) else [Path(sys.prefix)]
    for name in sys.path:
        path = Path(name)
        if not name or not path.is_dir() or any(path.is_relative_to(folder) for folder in (code, SYSTEM)):
            continue
        standard = path in library or path.name == "lib-dynload"
        if not standard and not any(path.is_relative_to(folder) for folder in folders):
            folders.append(path)
    return folders


def package_versions() -> Iterator[str]:
    """Yield ``name==version`` of the installed packages, without editable and local installs (PEP 610)."""
    packages = {package.metadata["Name"]: package for package in importlib.metadata.distributions()}
    for name in sorted(packages, key=str.lower):
        if packages[name].read_text("direct_url.json") is None:
            yield f"{name}=={packages[name].version}"


@contextmanager
def _tokens(folders: Sequence[Path]) -> Iterator[dict[Path, str]]:
    """Create a randomly named file in each folder; a host that finds it there shares the folder."""
    name = f".gputrain-{secrets.token_hex(8)}"
    tokens: dict[Path, str] = {}
    try:
        for folder in folders:
            with suppress(OSError):  # a folder without write permission counts as not shared
                (folder / name).touch()
                tokens[folder] = str(folder / name)
        yield tokens
    finally:
        for token in tokens.values():
            with suppress(OSError):
                Path(token).unlink()


def _call(ssh: Ssh, host: str, function: str, decoder: Decoder[T], timeout_s: float, **arguments: Any) -> T:
    """Call a function of ``push_target`` on a host; return its answer."""
    try:
        with ssh.shared_channel(host) as channel:
            answer = channel.call(function, decoder, timeout_s, **arguments)
            noise = channel.noise_bytes
    except HostError as error:
        raise PushError(f"{host}: {error}") from None
    if noise:
        raise PushError(
            f"{host}: its shell start-up files print, which breaks rsync; make them print in interactive shells only"
        )
    return answer


def _in_parallel(call: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    with ThreadPoolExecutor(min(MAX_PARALLEL_HOSTS, max(len(items), 1)), thread_name_prefix="push") as pool:
        return list(pool.map(call, items))
