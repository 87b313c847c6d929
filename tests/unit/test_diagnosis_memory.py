"""Memory that goes on growing, and when it is used up."""

from __future__ import annotations

import pytest
from test_diagnosis import SimulatedRun

from trainer.contract.record import Finding, GpuSample, NodeSample, RankSample

GIB = 2**30


def grow(
    run: SimulatedRun,
    sizes: list[float],
    *,
    rank: int = 1,
    total: float | None = None,
    host: list[float] | None = None,
    gpu: bool = False,
) -> list[Finding]:
    """Follow a rank's memory, GiB a second.

    Args:
        run: its run.
        sizes: of its process or GPU.
        rank: which.
        total: what its host or GPU has.
        host: what is used of the host; None: 20 GiB more than the process.
        gpu: whether it is a GPU's.
    """
    run.steps(30)
    found = []
    total_bytes = None if total is None else int(total * GIB)
    for second, size in enumerate(sizes):
        run.now += 1.0
        used = int(size * GIB)
        process = RankSample(rank=rank, rss_bytes=4 * GIB if gpu else used)
        sample = NodeSample(time=run.now, node=0, host="node0", ranks=[process])
        if gpu:
            sample.gpus = [
                GpuSample(index=0, uuid="a", rank=rank, memory_used_bytes=used, memory_total_bytes=total_bytes)
            ]
        else:
            sample.memory_used_bytes = int((host[second] if host else size + 20.0) * GIB)
            sample.memory_total_bytes = total_bytes
        run.state.apply(sample)
        found += run.diagnose()
    return [finding for finding in found if finding.kind == "memory_creep"]


SIZES = [
    pytest.param([4.0 + 0.01 * second for second in range(200)], ["raised"], id="growing"),
    pytest.param([4.0] * 200, [], id="flat"),
    pytest.param([4.0 + 2.0 * (1 - 0.97**second) for second in range(400)], [], id="filling up"),
    pytest.param([4.0 if second < 100 else 6.0 for second in range(300)], [], id="one step up"),
    pytest.param([4.0 + 0.5 * (second % 20) / 20 for second in range(300)], [], id="a saw"),
    pytest.param([4.0 + 0.001 * second for second in range(300)], [], id="slower than counts"),
]


@pytest.mark.parametrize(("sizes", "kinds"), SIZES)
def test_memory_that_goes_on_growing_is_a_finding(sizes: list[float], kinds: list[str]) -> None:
    found = grow(SimulatedRun(2), sizes)
    assert [finding.state for finding in found] == kinds
    assert all(finding.rank == 1 and finding.evidence["growth_bytes_per_hour"] > 0 for finding in found)


@pytest.mark.parametrize("gpu", [False, True], ids=["host", "GPU"])
def test_memory_that_will_soon_run_out_is_raised_in_time(gpu: bool) -> None:
    """16 GiB are free and 3 GiB go in a minute."""
    run = SimulatedRun(2)
    total = 20.0 if gpu else 40.0
    found = grow(run, [4.0 + 0.05 * second for second in range(36)], total=total, gpu=gpu)
    assert [(finding.state, finding.rank, finding.severity) for finding in found] == [("raised", 1, "critical")]
    assert "of rank 1 grows by 3 GiB a minute: at this rate the" in found[0].message
    whose = "the GPU memory of rank 1" if gpu else "the memory of node0"
    assert found[0].message.endswith(f"{whose} is used up in about 5 min")
    assert found[0].evidence["out_of_memory_s"] == pytest.approx(14.35 * 20, rel=0.03)


@pytest.mark.parametrize(
    ("sizes", "total", "host"),
    [
        ([4.0 + 0.05 * second for second in range(60)], 120.0, None),
        ([4.0 + 6.0 * (1 - 0.97**second) for second in range(120)], 31.0, None),
        ([4.0 + 0.5 * (second // 10) for second in range(60)], 30.0, None),
        ([4.0 + 0.05 * (second % 30) for second in range(200)], 30.0, None),
        ([4.0 + 0.05 * min(second, 12) for second in range(120)], 25.0, None),
        ([4.0 + 0.05 * second for second in range(60)], 30.0, [24.0] * 60),
        ([4.0 + 0.001 * second for second in range(60)], 30.0, [24.0 + 0.05 * second for second in range(60)]),
    ],
    ids=[
        "enough is free",
        "a cache that fills up, slower and slower",
        "an allocator that takes blocks",
        "given back now and then",
        "the first steps",
        "pages of files that the host can give back",
        "another process grows",
    ],
)
def test_growth_that_does_not_use_up_the_memory_is_not_forecast(
    sizes: list[float], total: float, host: list[float] | None
) -> None:
    found = grow(SimulatedRun(2), sizes, total=total, host=host)
    assert [finding for finding in found if "at this rate" in finding.message] == []


def test_a_forecast_is_cleared_when_the_growth_is_over() -> None:
    sizes = [4.0 + 0.05 * min(second, 40) for second in range(100)]
    assert [finding.state for finding in grow(SimulatedRun(2), sizes, total=30.0)] == ["raised", "cleared"]
