from __future__ import annotations

from math import isnan

import pytest
from row_texts import row_text

from gputrain_tui.console.screens.compare_screen import Differences
from gputrain_tui.console.widgets.overlay_chart import OverlayLine, draw_overlay, legend
from gputrain_tui.history.comparison import CurveHistory, CurvePoints, DifferingValues, differences, resampled
from gputrain_tui.recipe.build import build
from gputrain_tui.recipe.model import Recipe
from trainer.contract.record import Metrics, RunEnded, RunStarted, Step, TrainingPlan, Validation

BASE = 'name = "one"\n[train]\ntask = "lm"\nlr = 0.1\n[task]\ndata = "stdlib"\n'


def recipe(text: str = BASE, *settings: str) -> Recipe:
    return build(text, name="recipe.toml", overrides=settings)


def test_equal_recipes_have_no_difference() -> None:
    assert differences([recipe(), recipe(BASE + "# a comment\n"), recipe(BASE, "train.seed=1")]) == []


def test_differences_come_in_the_order_of_a_recipe_with_defaults_filled_in() -> None:
    found = differences(
        [recipe(), recipe(BASE, "train.lr=0.5", "train.seed=7", "task.dim=64", "name=two", "cluster.max_restarts=2")]
    )
    assert found == [
        DifferingValues(key="name", values=("one", "two")),
        DifferingValues(key="cluster.max_restarts", values=("0", "2")),
        DifferingValues(key="task.dim", values=("128", "64")),
        DifferingValues(key="train.lr", values=("0.1", "0.5")),
        DifferingValues(key="train.seed", values=("1", "7")),
    ]


def test_nodes_are_compared_one_by_one() -> None:
    one = recipe(BASE, "cluster.nodes=[{cpu_ranks = 2}]")
    two = recipe(BASE, 'cluster.nodes=[{cpu_ranks = 2}, {host = "n1", gpus = [0, 1]}]')
    assert differences([one, two]) == [
        DifferingValues(key="cluster.nodes[1].host", values=("", "n1")),
        DifferingValues(key="cluster.nodes[1].gpus", values=("", "0, 1")),
    ]


def test_a_task_differs_with_its_own_options() -> None:
    found = differences([recipe(), recipe('name = "one"\n[train]\ntask = "mnist"\nlr = 0.1\n[task]\ndata = "d"\n')])
    keys = {difference.key: difference.values for difference in found}
    assert keys["train.task"] == ("lm", "mnist")
    assert keys["task.data"] == ("stdlib", "d")
    assert keys["task.dim"][1] == ""


def history(steps: int, seconds: float) -> CurveHistory:
    found = CurveHistory(2)
    found.apply(RunStarted(time=100.0, run="r", recipe="r", world_size=2, run_dir="d"))
    for step in range(1, steps + 1):
        for rank in range(2):
            time = 100 + step * seconds
            found.apply(Step(time=time, rank=rank, step=step, epoch=1, steps=1, samples=1, loss=float(step)))
    return found


def test_a_curve_runs_over_steps_or_over_seconds_since_the_start() -> None:
    found = history(100, 0.5)
    assert (found.last_step, found.last_second, found.loss) == (100, 50.0, 100.0)
    assert found.seconds_at(10) == 5.0
    assert found.seconds_at(10.5) == 5.25
    steps, seconds = found.points(10, over_time=False), found.points(10, over_time=True)
    assert (steps.at[0], steps.at[-1]) == pytest.approx((5.5, 95.5))
    assert [at * 0.5 for at in steps.at] == pytest.approx(seconds.at)
    assert steps.values == seconds.values


def test_an_own_metric_is_drawn_at_its_steps_as_the_mean_of_its_ranks() -> None:
    found = history(100, 0.5)
    for step in (10, 100):
        for rank in (0, 1):
            found.apply(Metrics(time=100 + step / 2, rank=rank, step=step, values={"accuracy": step / 100 + rank}))
    over_steps = found.points(100, over_time=False, own_metric="accuracy")
    assert over_steps.at[9] == 10
    assert over_steps.values[9] == pytest.approx(0.6)
    assert over_steps.values[-1] == pytest.approx(1.5)
    assert isnan(over_steps.values[0])
    assert found.points(100, over_time=True, own_metric="accuracy").at[-1] == pytest.approx(50, abs=1)
    assert found.points(100, over_time=False, own_metric="of another run") == CurvePoints(at=(), values=())


def test_throughput_is_of_all_ranks_also_where_steps_become_slower_and_ranks_read_unlike_batches() -> None:
    found = CurveHistory(2)
    time = 100.0
    for step in range(1, 101):
        seconds = 0.1 if step <= 50 else 0.2
        time += seconds
        for rank, samples in ((0, 8), (1, 24)):
            found.apply(
                Step(
                    time=time, rank=rank, step=step, epoch=1, steps=1, samples=samples, loss=1.0,
                    step_ms=1e3 * seconds, sync_exposed_ms=250.0 * seconds,
                    forward_ms=750.0 * seconds, other_ms=0.0,
                )
            )  # fmt: skip
    rates = found.points(10, over_time=False, measure="samples_per_s").values
    assert rates == pytest.approx([320.0] * 5 + [160.0] * 5)
    assert found.rates.samples_per_s == pytest.approx(3200 / 15)
    assert found.sync_share == pytest.approx(0.25)
    waited = found.points(10, over_time=False, measure="sync_exposed_ms").values
    assert [*waited[:4], *waited[5:]] == pytest.approx([25.0] * 4 + [50.0] * 5)


@pytest.mark.parametrize("steps", [2, 3, 7, 100, 5000])
@pytest.mark.parametrize("over_time", [False, True])
def test_a_curve_reaches_the_last_step(steps: int, over_time: bool) -> None:
    found = history(steps, 0.5)
    points = found.points(140, over_time=over_time)
    assert list(points.at) == sorted(points.at)
    line = resampled(points, 140, found.last_second if over_time else float(found.last_step))
    assert line[-1] == pytest.approx(steps, rel=0.01)


def test_a_run_that_ended_within_one_event_is_drawn_from_its_first_step_to_its_last() -> None:
    found = CurveHistory(2)
    for rank, losses in ((0, [5.0, 4.0, 3.0]), (1, [5.0, 4.0])):
        found.apply(Step(time=101.0, rank=rank, step=len(losses), epoch=1, steps=len(losses), samples=3, loss=4.0,
                         losses=losses, step_ms=100.0, step_ms_each=[100.0] * len(losses)))  # fmt: skip
    found.apply(RunEnded(time=102.0, status="failed", exit_code=1))
    assert (found.first_step, found.last_step, found.loss) == (1, 3, 4.0)
    assert found.seconds_at(2) == pytest.approx(0.2)


def test_the_figures_of_a_run_are_its_newest_loss_and_validation_and_its_best_one() -> None:
    found = history(1, 1.0)
    assert (found.validations.newest(), found.validations.best) == (None, None)
    plan = {"world_size": 2, "updates_per_epoch": 2, "samples_per_epoch": 2}
    found.apply(TrainingPlan(time=1.0, best_metric="accuracy", best_is_highest=True, **plan))
    for split, loss in (("valid", 3.0), ("valid", 2.0), ("test", 1.0), ("valid", 2.5)):
        metrics = {"accuracy": 1 / loss}
        found.apply(Validation(time=1.0, step=1, epoch=1, split=split, loss=loss, metrics=metrics))  # type: ignore[arg-type]
    newest, best = found.validations.newest(), found.validations.best
    assert newest is not None
    assert newest.loss == 2.5
    assert best is not None
    assert (best.metric, best.value) == ("accuracy", 0.5)
    for rank in (0, 1):
        found.apply(Step(time=2.0, rank=rank, step=2, epoch=1, steps=1, samples=1, step_ms=1.0, non_finite=["loss"]))
    line = OverlayLine(name="one", values=[], loss=found.loss, valid=newest.loss, best=best)
    assert row_text(legend([line], 120)[0]).split()[3:] == [
        "loss", "nan", "valid", "2.5000", "best", "accuracy", "0.5000", "samples/s", "–", "sync", "–",
    ]  # fmt: skip


def test_a_shorter_run_ends_before_the_end_of_a_common_axis() -> None:
    line = resampled(CurvePoints(at=[0.0, 5.0], values=[1.0, 2.0]), 20, 10.0)
    assert line[0] == 1.0
    assert line[10] == 2.0
    assert line[5] == 1.5
    assert all(map(isnan, line[11:]))


def test_an_axis_may_begin_where_resumed_runs_went_on() -> None:
    line = resampled(CurvePoints(at=[80.0, 90.0], values=[1.0, 2.0]), 20, 100.0, first=80.0)
    assert (line[0], line[10]) == (1.0, 2.0)
    rows = draw_overlay([OverlayLine(name="on", values=line, loss=2.0)], 60, 8, first=80, last=100)
    labels = row_text(rows[-1]).split()
    assert labels[0] == "80"
    assert labels[-1] == "100"


def test_gaps_stay_out_and_no_step_is_an_empty_curve() -> None:
    assert all(map(isnan, resampled(CurvePoints(at=[], values=[]), 4, 10.0)))
    assert all(map(isnan, resampled(CurvePoints(at=[1.0], values=[1.0]), 4, 0.0)))
    assert CurveHistory(2).points(10, over_time=True) == CurvePoints(at=(), values=())


def lines_of(*values: list[float]) -> list[OverlayLine]:
    return [OverlayLine(name=f"run-{index}", values=line, loss=line[-1]) for index, line in enumerate(values)]


@pytest.mark.parametrize(("width", "height"), [(80, 12), (40, 6), (20, 3), (9, 2), (200, 40)])
def test_the_chart_has_the_requested_size(width: int, height: int) -> None:
    rows = draw_overlay(lines_of([3.0, 2.0, 1.0] * 20, [2.0, 1.0, 0.5] * 20), width, height, last=100)
    assert len(rows) == height
    assert all(len(row_text(row)) == width for row in rows[1:])


def test_each_run_has_its_own_colour_and_its_line_in_the_legend() -> None:
    lines = lines_of([3.0] * 40, [1.0] * 40)
    roles = {role for row in draw_overlay(lines, 60, 10, last=100) for _, role in row}
    assert {"curve-0", "curve-1"} <= roles
    assert [row_text(row)[:20].split() for row in legend(lines, 60)] == [
        ["1", "━━", "run-0"],
        ["2", "━━", "run-1"],
    ]


def test_the_axis_is_labelled_in_steps_or_in_time() -> None:
    lines = lines_of([1.0, 2.0] * 30)
    assert row_text(draw_overlay(lines, 60, 8, last=100)[-1]).endswith("step 100")
    assert row_text(draw_overlay(lines, 60, 8, last=100, over_time=True)[-1]).endswith("1:40")
    assert any("no step yet" in row_text(row) for row in draw_overlay([], 60, 9, last=100))


def test_a_long_key_of_a_recipe_keeps_its_end() -> None:
    table = Differences(2)
    table.differences = [DifferingValues(key="cluster.nodes[0].cpu_ranks", values=("2", "–"))]
    assert "…odes[0].cpu_ranks 2 " in row_text(table.row(table.differences[0], 58))
