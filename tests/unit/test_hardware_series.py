from __future__ import annotations

import math

import pytest
from row_texts import row_text

from gputrain_tui.console.widgets.hardware_lines import draw_hardware
from gputrain_tui.history import hardware_series
from gputrain_tui.history.hardware_series import HardwareSeries, SeriesKey, TimeSeries
from trainer.contract.record import GpuSample, NodeSample

GIB = 1 << 30


def sample(time: float, *, node: int = 0, cpu: float | None = 50.0, gpus: int = 0) -> NodeSample:
    return NodeSample(
        time=time,
        node=node,
        host=f"node{node}",
        cpu_percent=cpu,
        memory_used_bytes=4 * GIB,
        memory_total_bytes=16 * GIB,
        gpus=[
            GpuSample(
                index=index, uuid=f"GPU-{index}", rank=index, utilization_percent=97.0, memory_used_bytes=70 * GIB,
                memory_total_bytes=80 * GIB, power_watts=650.0, temperature_celsius=61.0,
            )
            for index in range(gpus)
        ],
    )  # fmt: skip


def test_a_figure_that_a_machine_lacks_has_no_line() -> None:
    found = HardwareSeries()
    for second in range(10):
        found.apply(sample(float(second)))
    lines = [row_text(row) for row in draw_hardware(found, 100, 20)]
    assert [("use %" in line, "memory GiB" in line) for line in lines[1:]] == [(True, False), (False, True)]
    assert lines[1].split()[-1] == "▄" * 47


def test_each_gpu_has_use_memory_temperature_and_power() -> None:
    found = HardwareSeries()
    for second in range(60):
        found.apply(sample(float(second), gpus=2))
    lines = [row_text(row) for row in draw_hardware(found, 120, 20)]
    assert len(lines) == 1 + 2 + 2 * 4
    assert "GPU 1" in lines[7]
    assert any("temperature °C" in line and "61" in line for line in lines)
    assert any("power W" in line and "650" in line for line in lines)


def test_the_selected_ranks_host_stands_first_and_hosts_that_do_not_fit_are_counted() -> None:
    found = HardwareSeries()
    for node in range(8):
        found.apply(sample(1.0, node=node))
        found.apply(sample(2.0, node=node))
    lines = [row_text(row) for row in draw_hardware(found, 100, 5, first=6)]
    assert "node6" in lines[1]
    assert "12 more lines" in lines[0]


def test_a_series_keeps_its_means_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware_series, "MAX_POINTS", 64)
    series = TimeSeries()
    for second in range(10_000):
        series.append(float(second), 10.0 if second < 5_000 else 30.0)
    columns = series.columns(0.0, 9_999.0, 10)
    assert columns[:4] == pytest.approx([10.0] * 4)
    assert columns[6:] == pytest.approx([30.0] * 4)
    assert (series.newest, series.greatest) == (30.0, 30.0)


def test_no_sample_is_an_empty_panel_and_a_column_without_one_has_the_value_before() -> None:
    assert "no sample yet" in "".join(row_text(row) for row in draw_hardware(HardwareSeries(), 80, 6))
    series = TimeSeries()
    series.append(0.0, 1.0)
    series.append(9.0, 3.0)
    columns = series.columns(0.0, 9.0, 3)
    assert columns == [1.0, 1.0, 3.0]
    assert all(map(math.isnan, TimeSeries().columns(0.0, 9.0, 3)))


def test_a_host_keeps_its_lines_when_the_nodes_are_numbered_anew() -> None:
    found = HardwareSeries()
    with_spare = ("twin", "twin", "spare")
    for second, hosts in enumerate([("a", "twin", "twin", "d"), ("twin", "twin", "d"), with_spare, with_spare]):
        for node, host in enumerate(hosts):
            found.apply(NodeSample(time=float(second), node=node, host=host, cpu_percent=10.0 * second + node))
    assert found.hosts == ["a", "twin", "twin", "d", "spare"]
    assert [(key.machine, each.newest, each.greatest) for key, each in found.series(first=2)] == [
        (4, 32.0, 32.0), (1, 30.0, 30.0), (2, 31.0, 31.0), (0, 0.0, 0.0), (3, 12.0, 12.0),
    ]  # fmt: skip
    lines = [row_text(row).split() for row in draw_hardware(found, 120, 10)]
    assert lines[1][:5] == ["twin", "use", "%", "30.00", "peak"]
    assert lines[4][:6] == ["a", "use", "%", "–", "peak", "0.000"], "a host that the run has lost has no newest value"
    lost, left = (dict(found.series())[SeriesKey(machine, -1, "use %")] for machine in (3, 4))
    assert [math.isnan(value) for value in lost.columns(0.0, 3.0, 3)] == [False, False, True]
    assert [math.isnan(value) for value in left.columns(0.0, 3.0, 3)] == [True, True, False]
