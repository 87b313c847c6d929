from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.agent.node_sampler import Gpus, NodeSampler, rank_sample
from trainer.contract.record import EventWriter, NodeSample, RunDir, decode_events
from trainer.host.cores import CoreTimes, read_core_times, usable_cores
from trainer.host.memory import read_container_memory, read_memory, read_memory_group
from trainer.host.nvml import Nvml
from trainer.host.processes import ProcessUsage, read_usage

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
STAT = "77 (python) R 1 77 77 0 -1 4194304 100 0 0 0 250 50 0 0 20 0 9 0 100 0 0"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cpu  100 10 40 800 50 5 5 20 30 0\ncpu0 1 2 3", CoreTimes(total=1030, busy=180, stolen=20)),
        ("cpu  1 0 0 0 0 0 0 0", CoreTimes(total=1, busy=1, stolen=0)),
        ("cpu  1 0 0 0", None),
        ("", None),
    ],
    ids=["guest time is in user time", "no guest columns", "too old", "not there"],
)
def test_cores_are_read_from_proc_stat(tmp_path: Path, text: str, expected: CoreTimes | None) -> None:
    (tmp_path / "stat").write_text(text)
    assert read_core_times(tmp_path) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("MemTotal:       1000 kB\nMemFree: 10 kB\nMemAvailable:    400 kB\n", (600 * 1024, 1000 * 1024)),
        ("MemTotal:       1000 kB\n", (None, 1000 * 1024)),
        ("", (None, None)),
    ],
)
def test_used_memory_leaves_out_reclaimable_memory(
    tmp_path: Path, text: str, expected: tuple[int | None, int | None]
) -> None:
    (tmp_path / "meminfo").write_text(text)
    memory = read_memory(tmp_path)
    assert (memory.used_bytes, memory.total_bytes) == expected


@pytest.mark.parametrize(
    ("stat", "statm", "schedstat", "expected"),
    [
        (STAT, "900 25 3", "123 456 7", ProcessUsage(ticks=300, rss_bytes=25 * PAGE_BYTES, wait_ns=456)),
        (
            STAT.replace("python", "a) R (b c"),
            "900 25 3",
            "",
            ProcessUsage(ticks=300, rss_bytes=25 * PAGE_BYTES, wait_ns=None),
        ),
        ("77 (x) Z", "", "", ProcessUsage(ticks=None, rss_bytes=None, wait_ns=None)),
    ],
    ids=["whole", "a name with parentheses, no schedstat", "a torn line"],
)
def test_a_process_is_read_from_its_files(
    tmp_path: Path, stat: str, statm: str, schedstat: str, expected: ProcessUsage
) -> None:
    (tmp_path / "77").mkdir()
    for name, text in (("stat", stat), ("statm", statm), ("schedstat", schedstat)):
        (tmp_path / "77" / name).write_text(text)
    assert read_usage(77, proc=tmp_path) == expected


def test_shares_are_of_the_time_between_two_readings() -> None:
    before = ProcessUsage(ticks=100, rss_bytes=1, wait_ns=0)
    after = ProcessUsage(ticks=400, rss_bytes=2, wait_ns=500_000_000)
    sample = rank_sample(3, before, after, seconds=2.0)
    assert (sample.rank, sample.cpu_percent, sample.wait_percent, sample.rss_bytes) == (3, 150.0, 25.0, 2)


@pytest.mark.parametrize("seconds", [0.0, -5.0])
def test_a_clock_that_was_set_back_leaves_shares_absent(seconds: float) -> None:
    process = ProcessUsage(ticks=100, rss_bytes=1, wait_ns=0)
    sample = rank_sample(0, process, process, seconds=seconds)
    assert (sample.cpu_percent, sample.wait_percent, sample.rss_bytes) == (None, None, 1)


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


def test_the_threads_of_a_rank_that_waits_for_a_core_are_counted(tmp_path: Path) -> None:
    """A rank with two busy threads and one that sleeps, whose main thread has had no core half of the time."""
    proc = tmp_path / "proc"
    folder = proc / "77"

    def write(second: int, *, main_wait_s: float, state: str = "R") -> None:
        per_second = {"77": (0.5, main_wait_s), "78": (0.25, 0.75), "79": (0.0, 0.0)}
        for thread, (ran, waited) in per_second.items():
            (folder / "task" / thread).mkdir(parents=True, exist_ok=True)
            line = f"{int(ran * 1e9 * second)} {int(waited * 1e9 * second)} 5"
            (folder / "task" / thread / "schedstat").write_text(line)
        (folder / "schedstat").write_text(f"1 {int(main_wait_s * 1e9 * second)} 5")
        (folder / "statm").write_text("900 25 3")
        (folder / "stat").write_text(STAT.replace(" R ", f" {state} "))

    sampler = NodeSampler(0, "here", {0: 77}, writer=EventWriter(tmp_path / "events"), proc=proc)
    counted = []
    for second, main_wait_s in ((1, 0.5), (2, 0.5), (3, 0.5), (4, 0.3)):
        write(second, main_wait_s=main_wait_s, state="T" if second == 4 else "R")
        sample = sampler.poll(1000.0 + second)
        assert sample is not None
        counted.append((sample.ranks[0].busy_threads, sample.ranks[0].held))
    assert counted == [(None, None), (None, None), (2.0, None), (None, "T")]
    assert sample.cores == usable_cores()


def test_the_children_of_an_idle_rank_are_sampled_and_those_of_a_busy_one_are_not(tmp_path: Path) -> None:
    """A rank that waits for its child, which computes in a child of its own; one tick is a hundredth of a second."""
    proc = tmp_path / "proc"

    def write(pid: int, parent: int, ticks: int) -> None:
        (proc / str(pid)).mkdir(parents=True, exist_ok=True)
        fields = ["S", str(parent), *["0"] * 9, str(ticks), "0", *["0"] * 40]
        (proc / str(pid) / "stat").write_text(f"{pid} (py) {' '.join(fields)}")
        (proc / str(pid) / "statm").write_text("900 25 3")

    run_dir = RunDir(tmp_path)
    writer = EventWriter(run_dir.node_events(0))
    sampler = NodeSampler(0, "here", {0: 77, 1: 90}, writer=writer, proc=proc, run_dir=run_dir)
    counted = []
    for second in range(4):
        write(77, 1, 0)
        write(78, 77, 0)
        write(79, 78, 100 * second)
        write(90, 1, 100 * second)
        write(91, 90, 100 * second)
        sample = sampler.poll(1000.0 + second)
        assert sample is not None
        counted.append([rank.children_percent for rank in sample.ranks])
    assert counted == [[None, None], [None, None], [100.0, None], [100.0, None]]
    assert sample.record_free_bytes is not None
    assert sample.record_free_bytes > 0


def test_the_memory_of_a_container_is_its_limit_less_unreclaimable_memory(tmp_path: Path) -> None:
    assert read_container_memory(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 400\nactive_file 150\n")
    assert read_container_memory(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    memory = read_container_memory(tmp_path)
    assert memory is not None
    assert (memory.total_bytes, memory.used_bytes) == (1000, 350)


@pytest.mark.parametrize(
    ("line", "folder", "names", "unlimited"),
    [
        ("4:memory:/job_2/step_0", "memory", ("memory.limit_in_bytes", "memory.oom_control"), "9223372036854771712"),
        ("0::/job_2/step_0", "", ("memory.max", "memory.events"), "max"),
    ],
    ids=["version 1", "version 2"],
)
def test_the_memory_group_of_a_process_has_the_least_limit_around_it_and_its_own_kills(
    tmp_path: Path, line: str, folder: str, names: tuple[str, str], unlimited: str
) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(f"7:pids:/other\n{line}\n")
    root = tmp_path / "cgroup"
    assert read_memory_group(tmp_path, root) is None, "it cannot be seen from here"
    step = root / folder / "job_2" / "step_0"
    step.mkdir(parents=True)
    (step.parent / names[0]).write_text("419430400\n")
    (step / names[0]).write_text(f"{unlimited}\n")
    (step / names[1]).write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    group = read_memory_group(tmp_path, root)
    assert group is not None
    (tmp_path / "self").rename(tmp_path / "77")
    assert read_memory_group(tmp_path, root, pid=77) == group
    assert (group.limit(), group.oom_kills()) == ((400 << 20, step.parent), 3)
    (step.parent / names[0]).write_text(f"{unlimited}\n")
    assert group.limit() is None


def test_the_sizes_of_the_logs_of_a_rank_and_its_node_are_sampled(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.rank_log(0).parent.mkdir()
    run_dir.rank_log(0).write_bytes(b"hello\n")
    run_dir.node_log(0).write_bytes(b"trainer:\n")
    writer = EventWriter(run_dir.node_events(0))
    sampler = NodeSampler(0, "here", {0: os.getpid()}, writer=writer, run_dir=run_dir)
    sample = sampler.poll(1.0)
    writer.close()
    assert sample is not None
    assert [rank.log_bytes for rank in sample.ranks] == [6]
    assert sample.log_bytes == 9


def test_without_a_record_nothing_is_read(tmp_path: Path) -> None:
    sampler = NodeSampler(0, "here", {0: os.getpid()}, writer=EventWriter(None), proc=tmp_path / "missing")
    assert sampler.poll(1.0) is None


NOT_SUPPORTED = 3


def _nvml(**answers: Any) -> Nvml:
    """Stand in for the driver's library, which this machine need not have: what each function writes."""

    def function(value: Any) -> Any:
        def call(*arguments: Any) -> int:
            if isinstance(value, int):
                arguments[-1]._obj.value = value
            for name, number in value.items() if isinstance(value, dict) else ():
                setattr(arguments[-1]._obj, name, number)
            return 0

        return call

    functions = {name: value if callable(value) else function(value) for name, value in answers.items()}
    return Nvml(SimpleNamespace(**{"nvmlInitWithFlags": function(None), "nvmlShutdown": function(None), **functions}))


def _refuse(*_: Any) -> int:
    return NOT_SUPPORTED


def test_values_that_a_gpu_does_not_report_are_absent() -> None:
    nvml = _nvml(
        nvmlDeviceGetHandleByUUID=7,
        nvmlDeviceGetIndex=3,
        nvmlDeviceGetUtilizationRates={"gpu": 97},
        nvmlDeviceGetMemoryInfo={"used": 10, "total": 40},
        nvmlDeviceGetPowerUsage=_refuse,
        nvmlDeviceGetClockInfo=1200,
        nvmlDeviceGetCurrentClocksThrottleReasons=0x41,
    )
    gpus = Gpus({4: "GPU-a"}, nvml)
    (sample,) = gpus.sample()
    gpus.close()
    assert (sample.index, sample.uuid, sample.rank, sample.utilization_percent) == (3, "GPU-a", 4, 97)
    assert (sample.power_watts, sample.temperature_celsius, sample.max_sm_clock_mhz) == (None, None, None)
    assert sample.throttle_reasons == ["thermal_hardware"]
    assert gpus.sample() == []


def test_a_gpu_that_ranks_share_belongs_to_none_of_them() -> None:
    nvml = _nvml(nvmlDeviceGetHandleByUUID=7, nvmlDeviceGetIndex=0)
    gpus = Gpus({0: "GPU-a", 1: "GPU-a"}, nvml)
    (sample,) = gpus.sample()
    assert sample.rank is None


def test_samples_stay_readable_after_a_gpu_has_fallen_off_the_bus(tmp_path: Path) -> None:
    present = [True]

    def index(_: Any, number: Any) -> int:
        number._obj.value = 3
        return 0 if present[0] else NOT_SUPPORTED

    writer = EventWriter(tmp_path / "events/node-0.ndjson", shared=True)
    gpus = Gpus({0: "GPU-a"}, _nvml(nvmlDeviceGetHandleByUUID=7, nvmlDeviceGetIndex=index))
    present[0] = False
    NodeSampler(0, "here", {}, writer=writer, gpus=gpus).poll(1.0)
    writer.close()
    (sample,) = decode_events((tmp_path / "events/node-0.ndjson").read_bytes())
    assert isinstance(sample, NodeSample)
    assert [gpu.index for gpu in sample.gpus] == [3]


def test_a_missing_driver_means_no_gpu_samples() -> None:
    assert Gpus({0: "GPU-a"}, _nvml(nvmlInitWithFlags=_refuse)).sample() == []
