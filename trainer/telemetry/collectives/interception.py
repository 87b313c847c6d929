"""Wrappers around the calls through which a script's collectives go.

Functions of ``torch.distributed`` end in methods of ``ProcessGroup`` and wait by ``Work.wait`` or by a work's future:
these classes are torch's own, written in C++, and their methods are replaced in the class. So calls are seen whatever
name they were imported by, and whoever calls them; what C++ calls, as DDP its buckets, does not pass here. The
functions themselves stay what they are, since torch.compile rewrites calls of them. Functional collectives go straight
to C++, so their Python functions are wrapped, and torch.compile is shown the originals.

torch 2.14 has hooks of its own (``ProcessGroup.register_pre_hook``): they also see what C++ calls, so that DDP's
buckets would count twice, and not the waits.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.compiler import is_compiling

from trainer.telemetry.collectives.collective_meter import CollectiveMeter, guarded_call
from trainer.telemetry.torch_compile import leave_uncompiled

Function = Callable[..., Any]

METHODS: dict[str, tuple[str, int]] = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "reduce": ("reduce", 0),
    "reduce_scatter": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1),
    "allgather": ("all_gather", 0),
    "_allgather_base": ("all_gather", 0),
    "all_gather_single": ("all_gather", 0),
    "allgather_coalesced": ("all_gather", 0),
    "allgather_into_tensor_coalesced": ("all_gather", 0),
    "all_gather_single_coalesced": ("all_gather", 0),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
    "broadcast": ("broadcast", 0),
    "gather": ("gather", 1),
    "gather_single": ("gather", 1),
    "gather_into_tensor": ("gather", 1),
    "scatter": ("scatter", 1),
    "send": ("send", 0),
    "recv": ("recv", 0),
    "recv_anysource": ("recv", 0),
    "barrier": ("barrier", -1),
    "monitored_barrier": ("barrier", -1),
}
"""Method of ``ProcessGroup`` → operation, and index of the argument whose bytes count; -1: none."""
OBJECTS = (
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
)
"""Functions of ``torch.distributed`` that make several calls: sizes first, then pickled objects."""
FUNCTIONAL = {
    "broadcast": "broadcast",
    "all_reduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_gather_tensor": "all_gather",
    "all_gather_tensor_autograd": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_single_autograd": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_autograd": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_single_autograd": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "all_to_all_single_autograd": "all_to_all",
    "permute_tensor": "all_to_all",
}
"""Functional collective → operation."""
FUNCTIONAL_MODULE = "torch.distributed._functional_collectives"


@guarded_call
def wrap_calls(meter: CollectiveMeter) -> None:
    """Wrap the methods of process groups and of their works, and the functions for objects.

    Where another version of torch has other functions, collectives are not measured.
    """
    c10d: Any = importlib.import_module("torch._C._distributed_c10d")
    for name, (operation, index) in METHODS.items():
        _replace(c10d.ProcessGroup, name, functools.partial(_call, meter, operation, index))
    _replace(c10d.ProcessGroup, "_end_coalescing", functools.partial(_end_coalescing, meter))
    _replace(c10d.Work, "wait", functools.partial(_wait, meter))
    _replace(c10d.Work, "get_future", functools.partial(_future, meter))
    futures: Any = torch._C
    _replace(futures.Future, "then", functools.partial(_future, meter))
    _replace(futures.Future, "wait", functools.partial(_wait, meter))
    futures._collect_all = _collect_all(meter, futures._collect_all)
    _replace(torch.cuda.Event, "record", functools.partial(_record_event, meter))
    _replace(torch.cuda.Event, "wait", functools.partial(_wait_event, meter))
    functions: Any = importlib.import_module("torch.distributed.distributed_c10d")
    package: Any = dist
    for name in OBJECTS:
        original = getattr(functions, name, None)
        if original is None or not _is_of_torch(original):
            continue
        wrapper = _objects(meter, name, original)
        for module in (functions, package):
            if getattr(module, name, None) is original:
                setattr(module, name, wrapper)
    original = getattr(package, "_broadcast_coalesced", None)
    if original is not None:
        package._broadcast_coalesced = _broadcast_coalesced(meter, original)


@guarded_call
def wrap_functional(meter: CollectiveMeter) -> None:
    """Wrap the functional collectives, once their module is there."""
    module: Any = sys.modules[FUNCTIONAL_MODULE]
    for name, operation in FUNCTIONAL.items():
        original = module.__dict__.get(name)
        if original is not None and _is_of_torch(original):
            setattr(module, name, _functional(meter, operation, original, module))
    if _is_of_torch(module.wait_tensor):
        module.wait_tensor = _wait_tensor(meter, module.wait_tensor, module)


def _is_of_torch(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).partition(".")[0] == "torch"


def _replace(owner: Any, name: str, wrap: Callable[[str, Function], Function]) -> None:
    if name not in owner.__dict__:
        return  # another version of torch
    original = getattr(owner, name)
    wrapper = wrap(name, original)
    wrapper.__name__, wrapper.__qualname__ = name, f"{owner.__name__}.{name}"
    wrapper.__doc__ = getattr(original, "__doc__", None)
    # By this name pybind11 recognises that a method of C++ is called from its own override.
    wrapper.__code__ = wrapper.__code__.replace(co_name=name)
    leave_uncompiled(wrapper, callees=False)
    setattr(owner, name, wrapper)


# ------------------------------------------------------------------------------------------------------- the wrappers


def _call(meter: CollectiveMeter, operation: str, index: int, name: str, original: Any) -> Function:
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        begun = None
        if meter.on:
            begun = meter.begin(self, operation, args[index] if 0 <= index < len(args) else ())
        if begun is None:
            return original(self, *args, **kwargs)
        try:
            work = original(self, *args, **kwargs)
        except BaseException:
            meter.launched(begun, None)
            raise
        meter.launched(begun, work)
        return work

    return wrapper


def _end_coalescing(meter: CollectiveMeter, name: str, original: Any) -> Function:
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        work = original(self, *args, **kwargs)
        if meter.on:
            meter.coalesced(self, work)
        return work

    return wrapper


def _wait(meter: CollectiveMeter, name: str, original: Any) -> Function:
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        begun = meter.begin_wait(self) if meter.on else None
        if begun is None:
            return original(self, *args, **kwargs)
        try:
            return original(self, *args, **kwargs)
        finally:
            meter.end_wait(begun)

    return wrapper


def _future(meter: CollectiveMeter, name: str, original: Any) -> Function:
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        future = original(self, *args, **kwargs)
        if meter.on:
            meter.stands_for((self,), future)
        return future

    return wrapper


def _collect_all(meter: CollectiveMeter, original: Function) -> Function:
    """Wrap what makes one future of several, for ``torch.futures.collect_all`` and ``wait_all``."""

    def wrapper(futures: Any) -> Any:
        future = original(futures)
        if meter.on:
            meter.stands_for(futures, future)
        return future

    leave_uncompiled(wrapper, callees=False)
    return wrapper


def _record_event(meter: CollectiveMeter, name: str, original: Any) -> Function:
    def wrapper(self: Any, stream: Any = None) -> Any:
        if meter.on:
            meter.recorded(self, stream)
        return original(self, stream)

    return wrapper


def _wait_event(meter: CollectiveMeter, name: str, original: Any) -> Function:
    def wrapper(self: Any, stream: Any = None) -> Any:
        begun = meter.begin_event_wait(self, stream) if meter.on else None
        if begun is None:
            return original(self, stream)
        try:
            return original(self, stream)
        finally:
            meter.end_wait(begun)

    return wrapper


def _objects(meter: CollectiveMeter, name: str, original: Function) -> Function:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        call = None
        if meter.on:
            call = meter.open(lambda: _group_argument(args, kwargs), name)
        if call is None:
            return original(*args, **kwargs)
        try:
            return original(*args, **kwargs)
        finally:
            meter.shut(call)

    functools.update_wrapper(wrapper, original)
    return wrapper


def _group_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the process group among the arguments of a call; the default one without."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, dist.ProcessGroup):
            return value
    return dist.group.WORLD


def _broadcast_coalesced(meter: CollectiveMeter, original: Function) -> Function:
    """Wrap the broadcast of a model's buffers, and of its parameters before training."""

    def wrapper(group: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        begun = meter.begin(group, "broadcast", tensors) if meter.on else None
        if begun is None:
            return original(group, tensors, *args, **kwargs)
        try:
            return original(group, tensors, *args, **kwargs)
        finally:
            meter.launched(begun, None)

    functools.update_wrapper(wrapper, original)
    leave_uncompiled(wrapper, callees=False)
    return wrapper


def _functional(meter: CollectiveMeter, operation: str, original: Function, module: Any) -> Function:
    gathers = operation == "all_gather"
    position = list(inspect.signature(original).parameters).index("group")

    def resolve(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the process group, given in one of several forms; None where telling it costs a warning."""
        group = kwargs["group"] if "group" in kwargs else args[position - 1]
        if isinstance(group, dist.ProcessGroup):
            return group
        if isinstance(group, list):
            return None
        return module.c10d._resolve_process_group(module._resolve_group_name(group))

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or not meter.on or _is_traced(module):
            return original(self, *args, **kwargs)
        call = meter.open(lambda: resolve(args, kwargs), operation, self)
        if call is None:
            return original(self, *args, **kwargs)
        result: Any = ()
        try:
            result = original(self, *args, **kwargs)
        finally:
            meter.shut(call, result, gathers=gathers)
        return result

    return _shown_as(original, wrapper)


def _wait_tensor(meter: CollectiveMeter, original: Function, module: Any) -> Function:
    def wrapper(tensor: Any) -> Any:
        if is_compiling() or not meter.on or _is_traced(module):
            return original(tensor)
        begun = meter.begin_tensor_wait(tensor)
        if begun is None:
            return original(tensor)
        try:
            return original(tensor)
        finally:
            meter.end_wait(begun)

    return _shown_as(original, wrapper)


def _shown_as(original: Function, wrapper: Function) -> Function:
    """Let torch.compile trace the original in place of its wrapper."""
    functools.update_wrapper(wrapper, original)
    wrapper._torchdynamo_inline = original  # type: ignore[attr-defined]
    leave_uncompiled(wrapper, callees=False)
    return wrapper


def _is_traced(module: Any) -> bool:
    traced: Callable[[], bool] | None = getattr(module, "_are_we_tracing", None)
    return traced is not None and traced()
