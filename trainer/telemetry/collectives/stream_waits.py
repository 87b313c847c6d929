"""Waits of a GPU's computing stream for collectives on other streams, which FSDP has.

FSDP launches all-gathers and reduce-scatters on streams of their own, which wait for them at once without delaying
anything. The computing stream waits for events of these streams (FSDP2: ``FSDPParamGroup.wait_for_unshard``,
``post_backward`` and ``finalize_backward``), through ``torch.cuda.Stream.wait_event``, which ``wait_stream`` calls too.
Marks around that are reached where the stream begins and ends to wait. Nothing waits on the host.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from trainer.telemetry.collectives.collective_meter import CollectiveMeter
from trainer.telemetry.torch_compile import leave_uncompiled


def wrap_streams(meter: CollectiveMeter) -> None:
    """Wrap the methods of torch's streams."""
    stream: Any = torch.cuda.Stream
    record, wait = stream.record_event, stream.wait_event

    def record_event(self: Any, *args: Any, **kwargs: Any) -> Any:
        event = record(self, *args, **kwargs)
        if meter.on:
            meter.recorded(self, event)
        return event

    def wait_event(self: Any, event: Any) -> Any:
        begun = meter.begin_event_wait(self, event) if meter.on else None
        result = wait(self, event)
        if begun is not None:
            meter.end_event_wait(begun)
        return result

    for name, original, wrapper in (("record_event", record, record_event), ("wait_event", wait, wait_event)):
        functools.update_wrapper(wrapper, original)
        leave_uncompiled(wrapper, callees=False)
        setattr(stream, name, wrapper)
