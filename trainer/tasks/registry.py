"""Import of tasks by name: built in, ``package.module:Class``, or ``path/to/file.py:Class``.

Torch-free until a task is loaded.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from trainer.contract.builtin_tasks import BUILT_IN, unknown_task
from trainer.contract.errors import RequestError, nearest, quoted
from trainer.contract.home_folder import expand_home
from trainer.contract.task_files import nearest_file
from trainer.host.import_path import NAMESPACES, append_user_folders, origin_in

if TYPE_CHECKING:
    from trainer.tasks.task import Task


def is_same_task(one: str, other: str) -> bool:
    """Return whether two names are of a class of one name in modules or files of one name, whatever their folders."""
    first, second = (BUILT_IN.get(name, name).rpartition(":") for name in (one, other))
    modules = {re.split(r"[./\\]", module.removesuffix(".py"))[-1] for module, _, _ in (first, second)}
    return first[2] == second[2] and len(modules) == 1


def load_task(name: str) -> type[Task]:
    """Import a task's class.

    Raises:
        RequestError: the name, file, module or class does not exist, or the class is not a ``Task``.
    """
    module_name, colon, attribute = BUILT_IN.get(name, name).rpartition(":")
    if not colon or not attribute or not (module_name.endswith(".py") or re.fullmatch(r"\w+(\.\w+)*", module_name)):
        raise unknown_task(name)
    if name not in BUILT_IN and not module_name.endswith(".py"):
        _add_working_folder(module_name)
    module = _from_file(expand_home(module_name)) if module_name.endswith(".py") else _from_module(module_name)

    from trainer.tasks.task import Task

    kind = getattr(module, attribute, None)
    if kind is None:
        tasks = [key for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, Task)]
        own = [key for key in tasks if key != "Task"]
        listed = f"; its tasks are {', '.join(own)}" if own else ""
        raise RequestError(f"{module_name} has no {attribute!r}{listed}{nearest(attribute, own)}")
    if not (isinstance(kind, type) and issubclass(kind, Task)):
        raise RequestError(f"{name} is not a task: it must be a subclass of trainer.tasks.task.Task")
    return kind


def _from_module(module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise RequestError(
                f"task module {module_name!r} is not found in {Path.cwd()} or among the installed packages"
            ) from error
        raise RequestError(f"task module {module_name!r} cannot be imported: {error}") from error
    except SyntaxError as error:
        raise _syntax_error(error) from error


def _add_working_folder(module_name: str) -> None:
    """Make the modules of the working folder importable, behind all others."""
    folder, name = str(Path.cwd()), module_name.partition(".")[0]
    append_user_folders(folder)
    own, first = origin_in([folder], name), origin_in(sys.path, name)
    if name in NAMESPACES and name in sys.modules:
        first = ", ".join(sys.modules[name].__path__)
    if own is not None and own != first:
        raise RequestError(
            f"task module {quoted(module_name)} is in {folder}, but {first} has the same name and comes first: "
            "rename yours, or name the task by its file, path.py:Class"
        )


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise RequestError(f"task file {path} does not exist{nearest_file(path)}")
    path = path.resolve()
    # The path is part of the name, so that two files called task.py are two modules.
    name = "task_file" + "".join(char if char.isalnum() else "_" for char in str(path.with_suffix("")))
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    append_user_folders(str(path.parent))  # the file may import its neighbours
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, ModuleNotFoundError):
            raise RequestError(f"task file {path} cannot be imported: {error}") from error
        if isinstance(error, SyntaxError):
            raise _syntax_error(error) from error
        if isinstance(error, ImportError) and "no known parent package" in str(error):
            package = path.parent.name
            raise RequestError(
                f"task file {path} imports relatively, as a module of a package: name it as one, such as "
                f"{package}.{path.stem}:Class, in the folder that holds {package}"
            ) from error
        raise
    return module


def _syntax_error(error: SyntaxError) -> RequestError:
    return RequestError(f"{error.filename}, line {error.lineno}: {error.msg}")
