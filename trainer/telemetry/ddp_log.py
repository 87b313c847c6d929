"""Reads from DistributedDataParallel's own logger how long the step's gradient synchronisation took.

Of several synchronisations in one step it knows the last. Costs some 20 µs a step on CPU ranks. It is a private
interface: each piece is asked for, and without it the values are absent. On CUDA reading it at every step would make
the host wait for the device, so it is not used there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True, kw_only=True)
class SyncTimes:
    """One gradient synchronisation as this rank saw it."""

    sync_ms: float
    """First bucket launched to all reduced."""
    exposed_ms: float
    """Last bucket ready to all reduced."""
    bucket_bytes: tuple[int, ...] | None
    """Size of each bucket, where they are known."""
    settled: bool
    """False in the warm-up: the first two iterations and the one in which DDP arranged its buckets anew."""


class DdpLog:
    """Reads the logger after each step's last backward."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.fault: str | None = None
        """Why nothing can be read, for people; None while it can."""
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
        """Return the times of the synchronisation since the last call, or None where there was none.

        DDP computes these at the start of the next forward; asked for here, they belong to the step just done.
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
    """Turn DDP's logging data into times, or None when they are not of a synchronisation later than ``after``.

    ``layout`` is what ``rebuilt_bucket_sizes`` was at the synchronisation before. The stamps are nanoseconds; a
    stamp that an iteration did not set keeps its old value, so the order of the stamps is checked.
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
        settled=iteration > 2 and rebuilt == layout,
    )
