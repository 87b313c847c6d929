from __future__ import annotations

from pathlib import Path

import pytest

from gputrain_tui import paths
from gputrain_tui.tables import TableColumn, cut_apart, duration, number, size, table


def test_cells_are_aligned_by_their_width_on_the_screen() -> None:
    rows = [["訓練", "1"], ["e\u0301", "1000"]]
    assert table((TableColumn("name"), TableColumn("n", right=True)), rows).splitlines() == [
        "name     n",
        "訓練     1",
        "e\u0301     1000",
    ]
    assert table((TableColumn("name"), TableColumn("n")), []) == "name  n"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, ""),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (80 << 30, "80 GiB"),
        (123_456_789_012, "115 GiB"),
        (5 << 60, "5242880 TiB"),
    ],
)
def test_sizes_are_formatted_in_binary_units(count: int | None, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, ""),
        (-1.0, "0 s"),
        (59.9, "59 s"),
        (60, "1:00"),
        (3_599, "59:59"),
        (3_600, "1:00:00"),
        (93_784, "1 d 02:03"),
    ],
)
def test_durations_are_formatted_as_a_clock(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_a_number_that_was_not_measured_is_empty_and_not_zero() -> None:
    assert [number(None), number(0.0), number(1.23456, 2)] == ["", "0", "1.23"]
    assert [number(1234), number(12345.678, 4), number(1e20)] == ["1,234", "12,346", "1.00e+20"]


@pytest.mark.parametrize(
    ("texts", "shown"),
    [
        (["/data/a.py", "/data/b.py"], ["…/a.py", "…/b.py"]),
        (["/data/a.py", "/tmp/a.py"], ["/data…", "/tmp/…"]),
        (["", "/data/a.py", "7"], ["", "/data…", "7"]),
        (["/data/a.py", "/data/a.py"], ["/data…", "/data…"]),
    ],
)
def test_paths_that_differ_do_so_after_they_are_cut(texts: list[str], shown: list[str]) -> None:
    assert cut_apart(texts, 6) == shown


def test_everything_lives_under_the_home_that_is_set(tmp_path: Path) -> None:
    environ = {"GPUTRAIN_HOME": str(tmp_path)}
    assert paths.runs_folder(environ) == tmp_path / "runs"
    assert paths.config_folder(environ) == tmp_path / "config"
    assert paths.cache_folder(environ) == tmp_path / "cache"


def test_without_a_home_the_platform_s_folders_are_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert paths.runs_folder({}) == tmp_path / "state" / "gputrain" / "runs"
    assert paths.cache_folder({}) == tmp_path / "cache" / "gputrain"
    assert paths.config_folder({}) == tmp_path / "config" / "gputrain"
    assert paths.runs_folder({"GPUTRAIN_HOME": "~/g"}) == Path.home() / "g" / "runs"
