from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.agent.node_sampler import (
    Cores,
    Gpus,
    NodeSampler,
    Process,
    parse_cores,
    parse_memory,
    parse_process,
    rank_sample,
)
from trainer.contract.record import EventWriter, NodeSample, decode_events

STAT = "77 (python) R 1 77 77 0 -1 4194304 100 0 0 0 250 50 0 0 20 0 9 0 100 0 0"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cpu  100 10 40 800 50 5 5 20 30 0\ncpu0 1 2 3", Cores(total=1030, busy=180, stolen=20)),
        ("cpu  1 0 0 0 0 0 0 0", Cores(total=1, busy=1, stolen=0)),
        ("cpu  1 0 0 0", None),
        ("", None),
    ],
    ids=["guest time is in user time", "no guest columns", "too old", "not there"],
)
def test_cores_are_read_from_proc_stat(text: str, expected: Cores | None) -> None:
    assert parse_cores(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("MemTotal:       1000 kB\nMemFree: 10 kB\nMemAvailable:    400 kB\n", (600 * 1024, 1000 * 1024)),
        ("MemTotal:       1000 kB\n", (None, 1000 * 1024)),
        ("", (None, None)),
    ],
)
def test_memory_is_what_cannot_be_given_back(text: str, expected: tuple[int | None, int | None]) -> None:
    assert parse_memory(text) == expected


@pytest.mark.parametrize(
    ("stat", "statm", "schedstat", "expected"),
    [
        (STAT, "900 25 3", "123 456 7", Process(ticks=300, rss_bytes=25 * 4096, wait_ns=456)),
        (STAT.replace("python", "a) R (b c"), "900 25 3", "", Process(ticks=300, rss_bytes=25 * 4096, wait_ns=None)),
        ("77 (x) Z", "", "", Process(ticks=None, rss_bytes=None, wait_ns=None)),
    ],
    ids=["whole", "a name with parentheses, no schedstat", "a torn line"],
)
def test_a_process_is_read_from_its_files(stat: str, statm: str, schedstat: str, expected: Process) -> None:
    assert parse_process(stat, statm, schedstat, page_bytes=4096) == expected


def test_shares_are_of_the_time_between_two_readings() -> None:
    before = Process(ticks=100, rss_bytes=1, wait_ns=0)
    after = Process(ticks=400, rss_bytes=2, wait_ns=500_000_000)
    sample = rank_sample(3, before, after, seconds=2.0, tick_hz=100)
    assert (sample.rank, sample.cpu_percent, sample.wait_percent, sample.rss_bytes) == (3, 150.0, 25.0, 2)


@pytest.mark.parametrize("seconds", [0.0, -5.0])
def test_a_clock_that_was_set_back_leaves_shares_absent(seconds: float) -> None:
    process = Process(ticks=100, rss_bytes=1, wait_ns=0)
    sample = rank_sample(0, process, process, seconds=seconds, tick_hz=100)
    assert (sample.cpu_percent, sample.wait_percent, sample.rss_bytes) == (None, None, 1)


@pytest.mark.timing
def test_a_busy_process_is_sampled_once_a_second_and_a_dead_one_is_left_out(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "node-2.ndjson")
    dead = int(Path("/proc/sys/kernel/pid_max").read_text())  # the first number that no process has
    sampler = NodeSampler(2, "here", {5: os.getpid(), 6: dead}, writer=writer)
    assert sampler.poll(1000.0) is not None
    spent = os.times()
    while os.times().user + os.times().system < spent.user + spent.system + 0.05:
        pass
    assert sampler.poll(1000.9) is None
    second = sampler.poll(1001.0)
    sampler.close()
    writer.close()
    assert second is not None
    (rank,) = second.ranks
    assert rank.rank == 5
    assert rank.cpu_percent is not None
    assert rank.cpu_percent >= 4.0
    events = list(decode_events((tmp_path / "node-2.ndjson").read_bytes()))
    assert [event.time for event in events] == [1000.0, 1001.0]
    assert isinstance(events[0], NodeSample)
    assert events[0].cpu_percent is None, "the first reading has nothing to compare with"
    assert (events[1].node, events[1].host) == (2, "here")


def test_without_a_record_nothing_is_read(tmp_path: Path) -> None:
    sampler = NodeSampler(0, "here", {0: os.getpid()}, writer=EventWriter(None), proc=tmp_path / "missing")
    assert sampler.poll(1.0) is None


class NotSupportedError(Exception):
    pass


def _nvml(**answers: Any) -> Any:
    """Stand in for the driver's library, which this machine need not have."""

    def answer(value: Any) -> Any:
        def call(*_: Any) -> Any:
            if isinstance(value, Exception):
                raise value
            return value

        return call

    functions = {name: answer(value) for name, value in answers.items()}
    return SimpleNamespace(NVMLError=NotSupportedError, NVML_TEMPERATURE_GPU=0, NVML_CLOCK_SM=1, **functions)


def test_a_gpu_tells_what_it_can_and_the_rest_is_absent() -> None:
    nvml = _nvml(
        nvmlInit=None,
        nvmlDeviceGetHandleByUUID="handle",
        nvmlDeviceGetIndex=3,
        nvmlDeviceGetUtilizationRates=SimpleNamespace(gpu=97),
        nvmlDeviceGetMemoryInfo=SimpleNamespace(used=10, total=40),
        nvmlDeviceGetPowerUsage=NotSupportedError(),
        nvmlDeviceGetClockInfo=1200,
        nvmlDeviceGetCurrentClocksThrottleReasons=0x41,
        nvmlShutdown=None,
    )
    gpus = Gpus({4: "GPU-a"}, nvml)
    (sample,) = gpus.sample()
    gpus.close()
    assert (sample.index, sample.uuid, sample.rank, sample.utilization_percent) == (3, "GPU-a", 4, 97)
    assert (sample.power_watts, sample.temperature_celsius, sample.max_sm_clock_mhz) == (None, None, None)
    assert sample.throttle_reasons == ["thermal_hardware"]
    assert gpus.sample() == []


def test_a_gpu_that_ranks_share_belongs_to_none_of_them() -> None:
    nvml = _nvml(nvmlInit=None, nvmlDeviceGetHandleByUUID="handle", nvmlShutdown=None)
    gpus = Gpus({0: "GPU-a", 1: "GPU-a"}, nvml)
    (sample,) = gpus.sample()
    assert sample.rank is None


def test_a_missing_driver_means_no_gpu_samples() -> None:
    assert Gpus({0: "GPU-a"}, _nvml(nvmlInit=NotSupportedError())).sample() == []
