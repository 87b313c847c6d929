"""Part of a machine's sample in the record: a GPU."""

from __future__ import annotations

import msgspec

from trainer.contract.record.numbers import Count, FiniteFloat, Rank


class GpuSample(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Sample of a GPU."""

    index: Count
    uuid: str
    rank: Rank | None = None
    utilization_percent: FiniteFloat | None = None
    memory_used_bytes: Count | None = None
    memory_total_bytes: Count | None = None
    power_watts: FiniteFloat | None = None
    temperature_celsius: FiniteFloat | None = None
    sm_clock_mhz: Count | None = None
    max_sm_clock_mhz: Count | None = None
    throttle_reasons: list[str] = []
