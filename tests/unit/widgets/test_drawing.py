from __future__ import annotations

import pytest
from rich.cells import cell_len
from row_texts import row_text

from gputrain_tui.console.widgets.drawing import (
    Row,
    cell_count,
    centred_text,
    crop,
    crop_start,
    fit_row,
    format_value,
    pad,
    title_row,
)
from gputrain_tui.console.widgets.form import Form
from gputrain_tui.console.widgets.rank_columns import rank_filter
from gputrain_tui.console.widgets.rank_table import GridView, draw_grid
from gputrain_tui.console.widgets.rendezvous_panel import (
    RendezvousProgress,
    draw_rendezvous,
    rendezvous_progress,
)
from gputrain_tui.state import RankView, RunState
from trainer.contract.record import Queued, RunStarted

SCRIPTS = ["node3", "計算機二号", "a計b", "узел", "🎉🎉", "e\u0301e\u0301", "–…▸✗●⣿█", "👩\u200d🚀", ""]


@pytest.mark.parametrize("text", SCRIPTS)
def test_cells_are_counted_as_a_terminal_counts_them(text: str) -> None:
    assert cell_count(text) == cell_len(text)


def test_the_title_of_the_form_has_the_end_of_a_long_path_and_what_was_changed() -> None:
    form = Form()
    form.title_text = "/data/state/gputrain/runs/20261128-222810-a-name/recipe.toml"
    form.rights = [[("2 changes", "accent")]]
    (title,) = form.head(58)
    assert row_text(title).startswith("…ns/20261128-222810-a-name/recipe.toml")
    assert row_text(title).endswith(" 2 changes")


@pytest.mark.parametrize("wide", range(12))
@pytest.mark.parametrize("text", SCRIPTS)
def test_a_text_of_any_script_takes_exactly_the_room_it_is_given(text: str, wide: int) -> None:
    assert cell_len(crop(text, wide)) <= wide
    assert cell_len(crop_start(text, wide)) <= wide
    assert cell_len(pad(text, wide)) == wide
    row: Row = [("ab", "dim"), (text, "bright"), ("c", "dim")]
    assert cell_len(row_text(fit_row(row, wide))) == wide


@pytest.mark.parametrize("width", [20, 40, 78, 118])
@pytest.mark.parametrize("name", ["計算機二号", "n" * 200, "🎉 party", "tab\tand\x1b[31mred\x07"])
def test_names_of_any_script_and_length_keep_every_line_whole(name: str, width: int) -> None:
    views = []
    for rank in range(3):
        view = RankView(rank)
        view.host, view.device, view.state = name, name, "training"
        views.append(view)
    text = " ".join(name.split())
    grid = GridView(rows=views, ranks=3, hosts={name, "b"}, filter_text=rank_filter(text).text, cursor=1)
    frames = [
        draw_grid(grid, width, 8),
        draw_grid(GridView(rows=[], ranks=3, hosts={name}, filter_text=text), width, 8),
        draw_rendezvous(
            RendezvousProgress(hosts=[(name, [(0, "here"), (1, "joining")])], joined=1, missing=[1]), width, 8
        ),
        centred_text(width, 4, [name]),
        [fit_row(title_row(width, [(name, "title")], [[(name, "dim")]]), width)],
    ]
    for frame in frames[:3]:
        assert all(char.isprintable() for row in frame for char in row_text(row))
    assert {cell_len(row_text(row)) for frame in frames for row in frame} == {width}


def test_the_panel_of_a_run_that_waits_in_the_queue_names_its_job_and_no_host() -> None:
    state = RunState(world_size=2)
    state.apply(Queued(time=1.0, job=7, partition="main", reason="Priority"))
    shown = [row_text(row).strip() for row in draw_rendezvous(rendezvous_progress(state, 5.0), 60, 8)]
    assert "queued as job 7 in main: Priority" in shown
    assert any(line.startswith("queued  ranks 0–1") for line in shown)
    assert not any("this machine" in line or "torch" in line for line in shown)
    state.apply(RunStarted(time=6.0, run="r", recipe="r", run_dir="/r", world_size=2))
    shown = [row_text(row).strip() for row in draw_rendezvous(rendezvous_progress(state, 7.0), 60, 8)]
    assert "waiting for ranks 0, 1" in shown


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.3, "0.300"), (0.0123, "0.0123"), (1.0, "1.000"), (24.4, "24.40"), (1234.5, "1,234"), (0, "0.000")],
)
def test_a_newest_value_has_as_many_digits_as_are_worth_reading(value: float | None, text: str) -> None:
    assert format_value(value) == text
