"""Order of imports: Python's own modules and these packages come before the user's folders.

Each process of these packages is started with ``-P``, so that it imports nothing from its working folder. A folder of
``PYTHONPATH`` comes before the standard library all the same, so those with the user's code are set aside. Standard
library only, since this file is sent to hosts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from importlib import import_module
from importlib.machinery import PathFinder

PACKAGES = ("trainer", "gputrain_tui")
NAMESPACES = ("cuda",)
"""Packages without ``__init__.py`` that torch imports late: a file of this name in any later folder would hide them."""
ASIDE = "GPUTRAIN_PYTHONPATH"
"""Environment variable with the user's whole ``PYTHONPATH`` if folders of it were set aside."""


def node_environment(environ: Mapping[str, str], added: Mapping[str, str], workdir: str = "") -> dict[str, str]:
    """Return the environment of a node's command, with variables of the recipe, for its working folder."""
    merged = {**environ, **added}
    if "PYTHONPATH" in added:
        merged.pop(ASIDE, None)
    set_aside(merged, workdir)
    return merged


def set_aside(environ: MutableMapping[str, str], workdir: str = "") -> list[str]:
    """Remove the folders from ``PYTHONPATH`` that have a module named like Python's or these packages'; return them.

    Folders of installed packages stay: they are meant to come first.
    """
    folders = python_path(environ, workdir=workdir)
    aside = [folder for folder in folders if _has_reserved_names(folder)]
    if aside:
        environ[ASIDE] = environ.pop("PYTHONPATH")
        if kept := [folder for folder in folders if folder not in aside]:
            environ["PYTHONPATH"] = os.pathsep.join(kept)
    return aside


def python_path(environ: Mapping[str, str], name: str = "PYTHONPATH", *, workdir: str = "") -> list[str]:
    """Return the absolute folders of a variable like ``PYTHONPATH``, in which an empty entry is the working folder."""
    value = environ.get(name, "")
    folder = os.path.abspath(workdir)  # noqa: PTH100
    return [os.path.join(folder, each) if each else folder for each in value.split(os.pathsep)] if value else []  # noqa: PTH118


def append_user_folders(*folders: str) -> None:
    """Append folders, and those set aside, to ``sys.path``: for a user's own task, behind all other modules."""
    for name in NAMESPACES:
        spec = PathFinder.find_spec(name, sys.path)
        if spec is not None and spec.origin is None:
            import_module(name)  # executes no code
    sys.path += [folder for folder in (*folders, *python_path(os.environ, ASIDE)) if folder not in sys.path]


def origin_in(folders: Sequence[str], name: str) -> str | None:
    """Return the file of a top-level module in folders; None without one."""
    spec = PathFinder.find_spec(name, folders)
    # A folder without __init__.py, which has no origin, comes behind all other modules of its name.
    return None if spec is None else spec.origin


def _has_reserved_names(folder: str) -> bool:
    try:
        entries = os.listdir(folder)  # noqa: PTH208
    except OSError:
        return False
    library = os.path.dirname(os.__file__)  # noqa: PTH120
    if folder.startswith(library) or any(entry.endswith((".dist-info", ".egg-info")) for entry in entries):
        return False
    is_ours = os.path.isfile(os.path.join(folder, "trainer", "host", "import_path.py"))  # noqa: PTH113, PTH118
    reserved = sys.stdlib_module_names if is_ours else sys.stdlib_module_names.union(PACKAGES)
    names = reserved.intersection(entry.partition(".")[0] for entry in entries)
    return any(origin_in([folder], name) is not None for name in names)
