"""Detects hosts whose GPUs run below their clock for heat or power, also where all do and no rank is a straggler."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from gputrain_tui.diagnosis import thresholds as limit
from gputrain_tui.diagnosis.advice import ADVICE, THROTTLE_NAMES
from gputrain_tui.diagnosis.symptom import Symptom
from gputrain_tui.state import RunState
from trainer.contract.record import GpuSample, NodeSample

SLOWDOWNS = frozenset(("thermal_software", "thermal_hardware", "hardware_slowdown", "power_brake"))
"""Throttle reasons of a GPU or machine that is not well; ``power_cap`` is that of most busy GPUs."""


class GpuThrottling:
    """Detects throttled GPUs, host by host, once per sample."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[NodeSample]] = {}
        self._found: dict[int, Symptom | None] = {}

    def symptoms(self, state: RunState) -> list[Symptom]:
        """Return the hosts with throttled GPUs of ranks."""
        for node, sample in state.nodes.items():
            kept = self._samples.setdefault(node, deque(maxlen=limit.GPU_CLOCK_SAMPLES))
            if sample.gpus and not (kept and kept[-1] is sample):
                kept.append(sample)
                self._found[node] = _symptom(kept, alone=len(state.nodes) == 1, step=state.step)
        return [symptom for symptom in self._found.values() if symptom is not None]


def throttled_by(gpu: GpuSample) -> str:
    """Return the reason for which a GPU's clock is far below its maximum, in words; empty if it is not."""
    if not gpu.sm_clock_mhz or not gpu.max_sm_clock_mhz:
        return ""
    share, reasons = gpu.sm_clock_mhz / gpu.max_sm_clock_mhz, gpu.throttle_reasons
    if share < limit.SLOWDOWN_CLOCK_SHARE and (slowdowns := [each for each in reasons if each in SLOWDOWNS]):
        if any(each.startswith("thermal") for each in slowdowns):
            return "heat"
        return " and ".join(THROTTLE_NAMES[each] for each in slowdowns)
    return THROTTLE_NAMES["power_cap"] if share < limit.POWER_CAP_CLOCK_SHARE and "power_cap" in reasons else ""


def _symptom(samples: Sequence[NodeSample], *, alone: bool, step: int) -> Symptom | None:
    """Return the symptom of a host; None while there are too few samples, or where no GPU is throttled."""
    newest = samples[-1]
    ranks = {gpu.uuid: gpu.rank for gpu in newest.gpus if gpu.rank is not None}
    counts = dict.fromkeys(ranks, 0)
    last: dict[str, GpuSample] = {}
    for gpu in (gpu for sample in samples for gpu in sample.gpus):
        if gpu.uuid in counts and throttled_by(gpu):
            counts[gpu.uuid] += 1
            last[gpu.uuid] = gpu
    shares = {uuid: count / limit.GPU_CLOCK_SAMPLES for uuid, count in counts.items() if count}
    held = [uuid for uuid, share in shares.items() if share >= limit.GPU_THROTTLED_SHARE]
    if not shares or len(samples) < limit.GPU_CLOCK_SAMPLES:
        return None
    slowest = last[min(held or shares, key=lambda uuid: last[uuid].sm_clock_mhz or 0)]
    why = throttled_by(slowest)
    count = len(held)
    who = f"GPU {slowest.index} on {newest.host} (rank {slowest.rank}) is" if count < 2 else ""
    who = who or f"{count} GPUs on {newest.host} are"
    at = f" at {slowest.temperature_celsius:.0f} °C" if slowest.temperature_celsius is not None else ""
    readings = ("sm_clock_mhz", "max_sm_clock_mhz", "temperature_celsius", "power_watts")
    return Symptom(
        kind="gpu_throttled",
        rank=None if alone else min(ranks.values()),
        host=newest.host,
        ranks=sorted(ranks[uuid] for uuid in held),
        value=max(shares.values()),
        threshold=limit.GPU_THROTTLED_SHARE,
        cause="gpu_thermal" if why == "heat" else "gpu_clock",
        step=step,
        message=f"{who} throttled by {why}: {slowest.sm_clock_mhz:,} of {slowest.max_sm_clock_mhz:,} MHz{at}"
        + (" on the slowest" if count > 1 else ""),
        evidence={name: float(value) for name in readings if (value := getattr(slowest, name)) is not None},
        advice=ADVICE["gpu_thermal" if why == "heat" else "gpu_clock"],
    )
