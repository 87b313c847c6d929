"""Calls after an import and after the start of a process group, by which a process that a script starts becomes a rank.

Standard library only: ``started_site/sitecustomize.py`` runs this file by its path in every such process, since the
script may have a ``trainer`` of its own. It loads nothing that a new interpreter has not loaded already.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # the modules take milliseconds to load
    from collections.abc import Callable, Sequence
    from typing import Any

STARTED = "GPUTRAIN_STARTED"
"""Environment variable of a measured script, by which the processes that it starts may become ranks."""
SITE_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "started_site")  # noqa: PTH100, PTH118, PTH120
"""Folder that is first in the script's ``PYTHONPATH``."""


def follow(
    address: str, own_package: Any, *, starts_ranks: bool, is_visible: bool, own_group: Callable[[int, int], bool]
) -> None:
    """Make the processes that this one starts ask to be ranks when they join a process group.

    Args:
        address: file of the node agent's socket.
        own_package: the module ``trainer.agent.own_package``.
        starts_ranks: whether the recipe says that the script starts its ranks.
        is_visible: whether the script sees the two variables. If not, a process with variables that the script has
            copied lacks them.
        own_group: called in each process that has joined, with its rank and world size; returns whether it is this one.
    """
    _own.append(own_package)
    described = [address, str(os.getpid()), str(int(starts_ranks)), *own_package.own_path()]
    put = os.environ.__setitem__ if is_visible else os.putenv
    put(STARTED, "\n".join([sys.prefix, str(sys.hexversion), *described]))
    users = os.environ.get("PYTHONPATH", "")
    put("PYTHONPATH", SITE_FOLDER + (users and os.pathsep + users))

    def joined(rank: int, world_size: int) -> None:
        if not own_group(rank, world_size):  # a process that was forked from this one
            _join(rank, world_size, described)

    after_join(joined)


def prepare() -> None:
    """Make this process, which does not know these packages, ask to be a rank when it joins a process group."""
    prefix, version, *described = os.environ.get(STARTED, "\n").split("\n")
    if prefix == sys.prefix and version == str(sys.hexversion):  # another interpreter may not have these packages
        after_join(lambda rank, world_size: _join(rank, world_size, described))


_own: list[Any] = []
"""The module ``trainer.agent.own_package``, once it is loaded."""


def _join(rank: int, world_size: int, described: Sequence[str]) -> None:
    """Ask the node agent whether this process is a rank, and measure it then."""
    address, plan_pid, starts_ranks, *path = described
    try:
        if not _own:
            _own.append(load_own_package(path))
        with _own[0].own_package():
            from trainer.telemetry.instrument import started_rank

            started_rank.join(address, int(plan_pid), rank, world_size, at_once=world_size > 1 or starts_ranks == "1")
    except Exception as error:  # noqa: BLE001 - whatever is wrong with these packages, the script goes on
        print(f"gputrain: not measured: {type(error).__name__}: {error}", file=sys.stderr)


def load_own_package(path: Sequence[str]) -> Any:
    """Import the module that separates these packages from the script's modules, beside a ``trainer`` of the script."""
    script_path, theirs = list(sys.path), _pop_trainer()
    sys.path[:] = path
    try:
        from trainer.agent import own_package
    finally:
        sys.path[:] = script_path
        ours = _pop_trainer()
        sys.modules.update(theirs)
    own_package.enter(path, ours)
    return own_package


def _pop_trainer() -> dict[str, Any]:
    names = [name for name in sys.modules if name.partition(".")[0] == "trainer"]
    return {name: sys.modules.pop(name) for name in names}


DISTRIBUTED = "torch.distributed.distributed_c10d"


def after_import(name: str, call: Callable[[], None]) -> None:
    """Call a function as soon as the module's code has run; at once where it has been imported already."""
    if name in sys.modules:
        call()
    else:
        sys.meta_path.insert(0, _Finder(name, call))


def after_join(call: Callable[[int, int], None]) -> None:
    """Call a function with rank and world size when this process, or one forked from it, has made its process group.

    The call comes within ``init_process_group``, before the script's own code runs again.
    """

    def wrap() -> None:
        module: Any = sys.modules[DISTRIBUTED]
        original = getattr(module, "_update_default_pg", None)
        if original is None:
            print(
                f"gputrain: {DISTRIBUTED} is not torch's as known: no process is a rank by its group", file=sys.stderr
            )
            return

        def _update_default_pg(group: Any) -> None:
            original(group)
            if hasattr(group, "rank") and hasattr(group, "size"):  # neither is destroyed nor of other processes
                call(group.rank(), group.size())

        module._update_default_pg = _update_default_pg

    after_import(DISTRIBUTED, wrap)


class _Finder:
    """Finder of one module by the other finders, which removes itself at the first successful import."""

    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self._name = name
        self._call = call

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self._name:
            return None
        # Those before this one have found none; one of the same module may stand there, in a forked process.
        finders: list[Any] = sys.meta_path
        for finder in finders[finders.index(self) + 1 :]:
            if not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    loader: Any = _Loader(spec.loader, self._imported)
                    spec.loader = loader
                return spec
        return None

    def _imported(self) -> None:
        if self in sys.meta_path:
            finders: list[Any] = sys.meta_path
            finders.remove(self)
            self._call()


class _Loader:
    """Loader that delegates to another one, sets that as the module's loader, and calls back after the import."""

    def __init__(self, loader: Any, imported: Callable[[], None]) -> None:
        self._loader = loader
        self._imported = imported

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._imported()
