"""Measurement of an unchanged training script.

The parts of a step are observed in torch's functions: the forward pass of DistributedDataParallel,
``torch.autograd.backward``, the optimizers' step, the DataLoader's iterator. They are wrapped once the script itself
has imported torch: it may set environment variables before that, and a script without torch does not import it.
Nothing is stored in models, optimizers and loaders.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from trainer.agent import script
from trainer.agent.assignment import RankAssignment
from trainer.agent.own_package import own_package
from trainer.contract.record import RunDir

if TYPE_CHECKING:
    from trainer.telemetry.instrument.recording import Recording

EXIT_S = 1.0
"""Maximum time that ``os._exit`` waits for the last steps to be written."""

_recording: Recording | None = None
"""Recording of this process; None before the script has imported torch."""


def run_script(assignment: RankAssignment) -> int:
    """Run the script of a rank, measured, and return the exit code for ``os._exit``."""
    assert assignment.run_dir is not None
    install(RunDir(assignment.run_dir).rank_events(assignment.rank), assignment.rank)
    return script.run_script(assignment, at_end=finish, hidden=str(Path(__file__).parents[1]))


def install(path: Path, rank: int) -> None:
    """Start to measure as soon as torch has been imported."""

    def begin() -> None:
        global _recording
        try:
            with own_package():
                from trainer.telemetry.collectives import interception
                from trainer.telemetry.instrument import patches

            recording = _recording = patches.patch(path, rank)
            functional = interception.FUNCTIONAL_MODULE
            after_import(functional, lambda: interception.wrap_functional(recording.collectives))
            after_import("torch._inductor.compile_fx", _recording.await_compiler)
            for module, patch in patches.patch_later(_recording).items():
                after_import(module, patch)
        except Exception as error:  # noqa: BLE001 - a script must train with an unknown version of torch too
            print(f"gputrain: not measured: {type(error).__name__}: {error}", file=sys.stderr)

    after_import("torch", begin)
    _finish_before_exit()


def finish(failed: bool = False) -> str:
    """Write the last steps and stop measuring; return why the end of the record is not on disk, empty if it is."""
    return "" if _recording is None else _recording.close(failed=failed)


def hand_over() -> int:
    """Stop measuring because ``trainer.watch`` takes over; return the number of steps measured."""
    if _recording is None:
        return 0
    _recording.close(handed_over=True)
    return _recording.steps


def _finish_before_exit() -> None:
    """Patch ``os._exit`` to call ``finish`` first, in this process only: scripts use it to leave a hanging group."""
    leave, pid = os._exit, os.getpid()

    @functools.wraps(leave)
    def _exit(status: int) -> None:
        if os.getpid() == pid and _recording is not None:
            # In a thread: a signal handler may have interrupted code that holds the record's lock.
            with contextlib.suppress(RuntimeError):
                thread = threading.Thread(target=finish, args=(status != 0,), daemon=True)
                thread.start()
                thread.join(EXIT_S)
        leave(status)

    os._exit = _exit  # type: ignore[assignment]


def after_import(name: str, call: Callable[[], None]) -> None:
    """Call a function as soon as the module's code has run; at once where it has been imported already."""
    if name in sys.modules:
        call()
    else:
        sys.meta_path.insert(0, _Finder(name, call))


class _Finder(MetaPathFinder):
    """Finder of one module by the other finders, which removes itself at the first successful import."""

    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self._name = name
        self._call = call

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self._imported)
                return spec
        return None

    def _imported(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._call()


class _Loader(Loader):
    """Loader that delegates to another one, sets that as the module's loader, and calls back after the import."""

    def __init__(self, loader: Any, imported: Callable[[], None]) -> None:
        self._loader = loader
        self._imported = imported

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._imported()
