"""Readings of a rank's collectives, taken in the training thread."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor

from trainer.telemetry.clocks import Clock, CudaClock, HostClock, Instant
from trainer.telemetry.collectives.group_names import GroupNames
from trainer.telemetry.collectives.readings import Call, StepCollectives
from trainer.telemetry.collectives.side_streams import SideStreams
from trainer.telemetry.torch_compile import leave_uncompiled

_comm_hooks = 0
"""Comm hooks that are running; their buckets are measured otherwise."""


def uncounted(hook: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a comm hook whose collectives no meter follows."""

    def call(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        global _comm_hooks
        _comm_hooks += 1
        try:
            return hook(state, bucket)
        finally:
            _comm_hooks -= 1

    leave_uncompiled(call, callees=True)
    return call


Method = TypeVar("Method", bound=Callable[..., Any])


def guarded_call(method: Method) -> Method:
    """End the measuring, not the script's training, at the first fault in a call, which gets the meter first."""

    @functools.wraps(method)
    def call(self: CollectiveMeter, *given: Any, **named: Any) -> Any:
        try:
            return method(self, *given, **named)
        except Exception as error:  # noqa: BLE001 - whatever it is, the script's training goes on
            self.fail(error)
            return None

    # torch.compile calls it instead of tracing into it; torch.compiler.disable would import the compiler for that.
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


class CollectiveMeter:
    """Followed collectives of the training thread, step by step.

    A call is followed from ``begin`` over ``launched`` to the end of the wait for its work or its tensors. What one
    function of torch calls for another, such as the two gathers of ``all_gather_object``, is one call.

    Nothing here raises: the first fault ends the measuring.
    """

    def __init__(self) -> None:
        self.on = False
        self.fault: str | None = None
        """Why nothing is measured any more; None without a fault."""
        self.blocked: Call | None = None
        """The collective that the training thread is in, or waits for."""
        self.names = GroupNames()
        self._now: Callable[[], Instant] = lambda: None
        self._delays: HostClock | None = None
        """Where the run delay is counted."""
        self._streams: SideStreams | None = None
        """On a GPU."""
        self._is_capturing: Callable[[], bool] = lambda: False
        self._thread = 0
        self._in_backward: Callable[[], bool] = lambda: False
        self._phases: Sequence[object] = ()
        self._step = StepCollectives(self.names.named, detailed=False)
        self._works: dict[int, tuple[ref[Any], Call]] = {}
        """Calls by the address of their ``Work``, and of the futures made of it."""
        self._tensors: dict[int, Call] = {}
        """Calls by the address of the storage of their results."""
        self._outer: Call | None = None
        """The call of a function that calls collectives itself."""

    def attach(self, clock: Clock, in_backward: Callable[[], bool]) -> None:
        """Begin to follow the calls of this thread, and those of autograd's threads in its backward passes."""
        self._now = clock.instant
        self._delays = clock if isinstance(clock, HostClock) and clock.counts_waits else None
        if isinstance(clock, CudaClock):
            self._streams = SideStreams(clock.stream_handle)
            self._is_capturing = clock.is_capturing
        self._thread = get_ident()
        self._in_backward = in_backward
        self.on = self.fault is None

    def close(self) -> None:
        self.on = False

    # ------------------------------------------------------------------------------------------------------- steps

    def begin_step(self, phases: Sequence[object], *, detailed: bool = False) -> None:
        """Drop what is not taken; ``phases`` are those of the step that begins, and grow with it."""
        self._phases = phases
        self.blocked = self._outer = None  # an exception of a signal handler may have come before these were set back
        self._step = StepCollectives(self.names.named, detailed)
        if self._streams is not None:
            self._streams.begin_step()

    def take(self) -> StepCollectives | None:
        """Return the collectives of the step that ends; None before the first one, and after a fault."""
        return self._step if self.names.named and self.fault is None else None

    @property
    def sends(self) -> bool:
        """Whether the step has sent to a single rank or received from one, as the stages of a pipeline do."""
        return any(call.operation in ("send", "recv") for call in self._step.calls)

    @property
    def calls_of_phase(self) -> list[tuple[str, Sequence[int]]]:
        """Operations that the step has called since its last phase was complete, each with the ranks of its group."""
        complete, groups = len(self._phases), self.names.named
        return [(call.operation, groups[call.group].ranks) for call in self._step.calls if call.interval == complete]

    def exclude(self, phases: int) -> None:
        """Drop the calls after the first ``phases`` phases of the step; the waits there are of the next phase."""
        step = self._step
        step.calls = [call for call in step.calls if call.interval < phases]
        step.waits = [(call, min(interval, phases), *rest) for call, interval, *rest in step.waits]
        step.delays = [(min(interval, phases), delay_s) for interval, delay_s in step.delays]

    def described(self, call: Call) -> str:
        """Return operation and group of a call, for a reader; also on other threads."""
        return f"{call.operation} of {self.names.named[call.group].name}"

    # ------------------------------------------------------------------------------------------------------- calls

    def begin(self, group: Any, operation: str, tensors: Any) -> Call | None:
        """Follow a call that hands its work back; None where it is not measured.

        Args:
            group: Process group.
            operation: Such as ``all_gather``.
            tensors: Tensor or nested lists of them whose bytes count.
        """
        try:
            # Here and below what is short is written out: a step may have hundreds of calls.
            if (get_ident() != self._thread or self._streams is not None or _comm_hooks) and not self._followed():
                return None
            call = self._outer
            if call is None:
                known = self.names.indices.get(id(group))
                index = known[1] if known is not None and known[0]() is group else self.names.index(group)
                if index is None:
                    return None
                nbytes, start = bytes_of(tensors), self._now()
                call = Call(index, operation, nbytes, len(self._phases), start, start)
                self._step.calls.append(call)
                if self._streams is not None:
                    self._streams.issued(call)
            else:
                call.bytes += bytes_of(tensors)
                call.begun = start = self._now()
            if self._delays is not None and start >= self._delays.next_read_s:
                self._delays.read_delay_s(start)
            self.blocked = call
            return call
        except Exception as error:  # noqa: BLE001 - written out, as a step may have hundreds of these calls
            self.fail(error)
            return None

    def launched(self, call: Call, work: Any) -> None:
        """The call has returned its work; without one it is complete, or has raised."""
        try:
            self.blocked = outer = self._outer
            if self._streams is None or not self._streams.is_elsewhere():
                complete, end = work is None and call is not outer, self._now()
                self._step.waits.append((call, len(self._phases), call.begun, end, complete))
                if self._delays is not None and end >= self._delays.next_read_s:
                    self._step.delays.append((len(self._phases), self._delays.read_delay_s(end)))
            if work is not None:
                works = self._works
                works[id(work)] = ref(work), call
                if len(works) > MAX_OPEN:
                    self._forget()
        except Exception as error:  # noqa: BLE001 - written out, as a step may have hundreds of these calls
            self.fail(error)

    @guarded_call
    def stands_for(self, made_of: Sequence[Any], future: Any) -> None:
        """Waiting for a future is waiting for the last of the works or futures that it is made of."""
        if not self._followed():
            return
        known = [self._works.get(id(each)) for each in made_of]
        calls = [found[1] for found, each in zip(known, made_of, strict=True) if found and found[0]() is each]
        if calls:
            self._works[id(future)] = ref(future), calls[-1]

    def begin_wait(self, work: Any) -> Call | None:
        """Follow the wait for a work or a future; None where its call is not followed."""
        try:
            if (get_ident() != self._thread or self._streams is not None or _comm_hooks) and not self._followed():
                return None
            known = self._works.pop(id(work), None)
            if known is None or known[0]() is not work:
                return None
            return self._begin_wait(known[1])
        except Exception as error:  # noqa: BLE001 - written out, as a step may have hundreds of these calls
            self.fail(error)
            return None

    @guarded_call
    def begin_tensor_wait(self, tensor: Any) -> Call | None:
        """Follow the wait for a functional collective's result; None where its call is not followed."""
        if not self._followed():
            return None
        call = self._tensors.pop(_storage(tensor), None) or self._outer
        if call is None:
            return None
        if call is self._outer:
            self._count_call(call)
        return self._begin_wait(call)

    def end_wait(self, call: Call) -> None:
        try:
            self.blocked = outer = self._outer
            if self._streams is None or not self._streams.is_elsewhere():
                # A work and its future may both be waited for. A function that calls collectives itself is complete
                # when it returns.
                complete, end = not call.waited and call is not outer, self._now()
                self._step.waits.append((call, len(self._phases), call.begun, end, complete))
                if self._delays is not None and end >= self._delays.next_read_s:
                    self._step.delays.append((len(self._phases), self._delays.read_delay_s(end)))
            call.waited = True
        except Exception as error:  # noqa: BLE001 - written out, as a step may have hundreds of these calls
            self.fail(error)

    @guarded_call
    def recorded(self, event: Any, stream: Any) -> None:
        """An event was recorded on a stream of the GPU, None for the current one."""
        if self._streams is not None and self._followed():
            self._streams.recorded(event, stream)

    @guarded_call
    def begin_event_wait(self, event: Any, stream: Any) -> Call | None:
        """Follow the wait of a stream for an event; None where no collective is before it."""
        if self._streams is None or not self._followed():
            return None
        call = self._streams.awaited(event, stream)
        return None if call is None else self._begin_wait(call)

    @guarded_call
    def open(self, group: Callable[[], Any], operation: str, tensors: Any = ()) -> Call | None:
        """Follow a function that calls collectives itself, as one call; None within another, or without a group."""
        if self._outer is not None or not self._followed():
            return None
        resolved = group()
        index = None if resolved is None else self.names.index(resolved)
        if index is None:
            return None
        nbytes, start = bytes_of(tensors), self._now()
        call = Call(index, operation, nbytes, len(self._phases), start, start)
        self._step.calls.append(call)
        if self._streams is not None:
            self._streams.issued(call)
        self._outer = call
        return call

    @guarded_call
    def shut(self, call: Call, results: Any = (), *, gathers: bool = False) -> None:
        """That function has returned or raised.

        Args:
            call: As ``open`` returned it.
            results: Tensors that are to be waited for; none if the function has waited itself.
            gathers: Whether all ranks' parts arrive, so that the bytes are those of all.
        """
        self._outer = self.blocked = None
        if gathers:
            call.bytes *= len(self.names.named[call.group].ranks) or 1
        tensors = results if isinstance(results, list | tuple) else (results,)
        if call.waited or not tensors:
            now = self._now()
            self._step.waits.append((call, len(self._phases), now, now, True))
            return
        self._count_call(call)
        for tensor in tensors:
            self._tensors[_storage(tensor)] = call
        if len(self._tensors) > MAX_OPEN:
            self._forget()

    @guarded_call
    def coalesced(self, group: Any, work: Any) -> None:
        """The work of several calls of a group that were put together is that of the last one."""
        if not self._followed():
            return
        index = self.names.index(group)
        newest = next((call for call in reversed(self._step.calls) if call.group == index), None)
        if newest is not None and work is not None:
            self._works[id(work)] = ref(work), newest

    def fail(self, error: Exception) -> None:
        if self.fault is not None:
            return
        self.on = False
        self.blocked = self._outer = None
        self.fault = f"collectives are no longer measured: {type(error).__name__}: {error}"
        print(f"gputrain: {self.fault}", file=sys.stderr)

    # ----------------------------------------------------------------------------------------------------- readings

    def _followed(self) -> bool:
        if not self.on or _comm_hooks:
            return False
        if get_ident() != self._thread and not (
            # On a GPU the hooks of a backward pass run in a thread of autograd.
            torch._C._current_graph_task_id() != -1 and self._in_backward()
        ):
            return False
        return self._streams is None or not self._is_capturing()

    def _begin_wait(self, call: Call) -> Call:
        self.blocked = call
        call.begun = start = self._now()
        if self._delays is not None and start >= self._delays.next_read_s:
            self._delays.read_delay_s(start)
        return call

    def _count_call(self, call: Call) -> None:
        """Count the time since a function was called, unless calls that it made were measured."""
        if call.begun is call.start and (self._streams is None or not self._streams.is_elsewhere()):
            self._step.waits.append((call, len(self._phases), call.start, self._now(), False))

    def _forget(self) -> None:
        """Forget works and results for which nothing has waited."""
        self._works = {key: known for key, known in self._works.items() if known[0]() is not None}
        if len(self._works) > MAX_OPEN:
            self._works.clear()
        self._tensors.clear()


MAX_OPEN = 10_000
"""Calls that are remembered until something waits for them."""


def bytes_of(tensors: Any) -> int:
    """Return the bytes of a tensor, or of all in nested lists."""
    if type(tensors) is list and len(tensors) == 1:
        tensors = tensors[0]
    if type(tensors) is Tensor:
        try:
            return tensors.nbytes
        except RuntimeError:
            pass  # it is sparse
    if isinstance(tensors, list | tuple):
        return sum([bytes_of(each) for each in tensors])
    if isinstance(tensors, Tensor):
        # Without the subclass's own code, which might count its calls.
        with torch._C.DisableTorchFunctionSubclass():
            parts = (tensors._indices(), tensors._values()) if tensors.layout is torch.sparse_coo else (tensors,)
            return sum([int(part.nbytes) for part in parts])
    return 0


def _storage(tensor: Any) -> int:
    """Return the address of a tensor's storage; of an ``AsyncCollectiveTensor`` that of the tensor in it."""
    with torch._C.DisableTorchFunctionSubclass():
        inner = getattr(tensor, "elem", tensor)
        return int(inner.untyped_storage()._cdata)
