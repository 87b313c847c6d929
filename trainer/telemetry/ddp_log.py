"""Times of a step's gradient synchronisation from DistributedDataParallel's own logger.

It has only the last of several synchronisations in one step, and costs some 20 µs a step on CPU ranks. The interface is
private: where a part of it is missing, the values are absent. On CUDA reading it would synchronise with the device, so
it is not used there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parallel import DistributedDataParallel


class SyncTimes(NamedTuple):
    """Gradient synchronisation of one step on this rank."""

    sync_ms: float
    """First bucket launched to all reduced."""
    exposed_ms: float
    """Last bucket ready to all reduced."""
    bucket_bytes: tuple[int, ...] | None
    stable: bool
    """Whether the warm-up is over, and the buckets are those of the step before."""
    bucket_ms: Sequence[float] | None = None
    """Only on detailed steps."""
    unsent_bytes: int = 0


class DdpLog:
    """Reader of DDP's logger, called after each step's last backward."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.fault: str | None = None
        """Why nothing can be read; None without a fault."""
        self._iteration = 0
        self._layout: object = None
        self._data: Any = getattr(model, "_get_ddp_logging_data", None)
        self._refresh: Any = getattr(getattr(model, "logger", None), "set_runtime_stats_and_log", None)
        set_rate = getattr(model, "_set_ddp_runtime_logging_sample_rate", None)
        if self._data is None or self._refresh is None or set_rate is None:
            self.fault = "this version of torch has no DDP runtime logger: synchronisation times are not measured"
        else:
            set_rate(1)

    def read(self) -> SyncTimes | None:
        """Return the times of the synchronisation since the last call; None without one.

        DDP computes them at the start of the next forward; refreshed here, they belong to the step just done.
        """
        if self.fault is not None:
            return None
        self._refresh()
        data = self._data()
        times = sync_times(data, after=self._iteration, layout=self._layout)
        if times is not None:
            self._iteration = data["iteration"]
            self._layout = data.get("rebuilt_bucket_sizes")
        return times


def sync_times(data: Mapping[str, Any], *, after: int, layout: object) -> SyncTimes | None:
    """Return the times in DDP's logging data; None unless its iteration is later than ``after``.

    ``layout`` is the ``rebuilt_bucket_sizes`` of the synchronisation before. Time stamps are nanoseconds; one that an
    iteration did not set keeps its old value, so their order is checked.
    """
    try:
        iteration = data["iteration"]
        compute_start, compute_end = data["backward_compute_time_start"], data["backward_compute_time_end"]
        comm_start, comm_end = data["backward_comm_time_start"], data["backward_comm_time_end"]
    except KeyError:
        return None
    if (
        iteration <= after
        or not compute_start <= comm_start <= comm_end
        or not compute_start <= compute_end <= comm_end
    ):
        return None
    rebuilt = data.get("rebuilt_bucket_sizes")
    sizes = rebuilt or data.get("bucket_sizes")
    return SyncTimes(
        sync_ms=(comm_end - comm_start) / 1e6,
        exposed_ms=(comm_end - compute_end) / 1e6,
        bucket_bytes=tuple(int(size) for size in str(sizes).split(",")) if sizes else None,
        stable=iteration > 2 and rebuilt == layout,
    )


def total(times: Sequence[SyncTimes | None]) -> SyncTimes | None:
    """Return the sum of the synchronisations of several models; None without one."""
    known = [each for each in times if each is not None]
    if not known:
        return None
    sizes = [each.bucket_bytes for each in known]
    return SyncTimes(
        sync_ms=sum(each.sync_ms for each in known),
        exposed_ms=sum(each.exposed_ms for each in known),
        bucket_bytes=None if None in sizes else tuple(size for each in sizes for size in each or ()),
        stable=all(each.stable for each in known),
    )


def ddp_of(model: nn.Module) -> DistributedDataParallel | None:
    """Return the DDP wrapper of a model, also inside a compiled one; None without one."""
    while not isinstance(model, DistributedDataParallel):
        inner = getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return None
        model = inner
    return model
