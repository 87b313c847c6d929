"""A user's own metrics: on their way into the record, thinned in it, and read from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gputrain_tui.history.metric_curves import MAX_POINTS, NOISE_SCALE, MetricCurve, MetricCurves
from gputrain_tui.history.run_columns import run_filter, sorted_runs
from gputrain_tui.history.summary import SUMMARY_KEYS
from gputrain_tui.state.newest_metrics import NewestMetrics, newest_values
from trainer.contract.errors import RequestError
from trainer.contract.record import EventWriter, Finding, Metrics, NoiseScale, Step, Validation, decode_events
from trainer.contract.record.downsampled import DownsampledNote, Downsampler
from trainer.contract.record.events import MAX_METRIC_CHARS, MAX_METRICS
from trainer.telemetry.own_metrics import OwnMetrics


class Clock:
    seconds = 1000.0

    def __call__(self) -> float:
        self.seconds += 1.0
        return self.seconds


def recorded(path: Path, *given: dict[Any, Any]) -> list[Any]:
    """Return the events of a rank that has reported metrics, each at a step of its own."""
    writer = EventWriter(path)
    own = OwnMetrics(Clock())
    own.record_to(writer, 3, lambda: 0, lambda value: None)
    for step, metrics in enumerate(given, start=1):
        own.add(metrics, step=step)
    writer.close()
    return list(decode_events(path.read_bytes()))


@pytest.mark.parametrize(
    ("given", "values", "non_finite"),
    [
        ({"a": 1, "b": 2.5, "c": True}, {"a": 1.0, "b": 2.5, "c": 1.0}, []),
        ({"t": torch.tensor(3.0), "row": torch.tensor([4]), "wide": torch.ones(2)}, {"t": 3.0, "row": 4.0}, []),
        ({"train": {"loss": 1.5, "deep": {"er": 2}}, 7: 8}, {"train.loss": 1.5, "train.deep.er": 2.0, "7": 8.0}, []),
        ({"s": "text", "n": None, "l": [1], "c": 1j, "ok": 1}, {"ok": 1.0}, []),
        ({"nan": float("nan"), "inf": torch.tensor(float("inf")), "big": 1e200, "int": 10**400}, {},
         ["big", "inf", "int", "nan"]),
        ({"[bold]x\x1b[2J": 1, "": 2, "ü" * MAX_METRIC_CHARS: 3},
         {"[bold]x\x1b[2J": 1.0, "ü" * MAX_METRIC_CHARS: 3.0}, []),
    ],
)  # fmt: skip
def test_numbers_are_recorded_by_name_and_all_else_is_left_out(
    tmp_path: Path, given: dict[Any, Any], values: dict[str, float], non_finite: list[str]
) -> None:
    event = next(event for event in recorded(tmp_path / "3.ndjson", given) if isinstance(event, Metrics))
    assert (event.rank, event.step, event.values, event.non_finite) == (3, 1, values, non_finite)


def test_too_many_and_too_long_names_are_told_once(tmp_path: Path) -> None:
    many = {f"m{index}": index for index in range(MAX_METRICS + 50)}
    events = recorded(tmp_path / "3.ndjson", many, many, {"x" * (MAX_METRIC_CHARS + 1): 1})
    found = [event for event in events if isinstance(event, Finding)]
    assert [each.kind for each in found] == ["metrics_left_out"] * 2
    assert f"more than {MAX_METRICS} metrics: 'm{MAX_METRICS}'" in found[0].message
    assert [len(event.values) for event in events if isinstance(event, Metrics)][:2] == [MAX_METRICS] * 2


def test_of_one_step_and_of_steps_at_once_the_last_value_counts(tmp_path: Path) -> None:
    writer, own = EventWriter(tmp_path / "0.ndjson"), OwnMetrics(lambda: 1000.0)
    own.record_to(writer, 0, lambda: 9, lambda value: None)
    own.add({"a": 1.0}, step=1)
    own.add({"valid": 5.0}, step=1)
    own.add({"a": 2.0}, step=2)
    own.add({"a": 3.0})
    own.add({"a": float("nan")})
    own.add({"a": 4.0})
    writer.close()
    events = [event for event in decode_events((tmp_path / "0.ndjson").read_bytes()) if isinstance(event, Metrics)]
    # Step 2 is replaced by step 9; step 1 has a name that step 2 lacks.
    assert [(event.step, event.values, event.non_finite) for event in events] == [
        (1, {"a": 1.0, "valid": 5.0}, []),
        (9, {"a": 4.0}, []),
    ]


def test_the_downsampled_record_has_means_of_metrics_in_few_notes(tmp_path: Path) -> None:
    downsampler = Downsampler(tmp_path, "0", 0)
    for step in range(1, 161):
        downsampler.add(Step(time=float(step), rank=0, step=step, epoch=1, steps=1, step_ms=1.0), 10)
        downsampler.add(Metrics(time=float(step), rank=0, step=step, values={"a": float(step)}), 10)
    downsampler.finish()
    lines = downsampler.take()[tmp_path / "0.notes.ndjson"].splitlines()
    import msgspec

    notes = [msgspec.json.decode(line, type=DownsampledNote) for line in lines]
    assert len(notes) == 11
    assert all(isinstance(note.event, Metrics) for note in notes)
    assert notes[1].event.values == {"a": sum(range(16, 32)) / 16}
    assert [note.begin for note in notes] == sorted(note.begin for note in notes)


def test_the_gradient_noise_scale_has_a_curve_beside_the_metrics_once_it_is_known() -> None:
    curves = MetricCurves()
    for step, samples in ((32, None), (64, 800.0), (96, 1000.0)):
        curves.apply(NoiseScale(time=1.0, step=step, batch=64, gradient_sq=1.0, noise_sq=9.0, samples=samples))
    curves.apply(Metrics(time=1.0, rank=1, step=96, values={"accuracy": 0.5}))
    assert curves.names == [NOISE_SCALE, "accuracy"]
    assert curves[NOISE_SCALE].span == (64, 96)
    assert curves[NOISE_SCALE].window(2, (64, 96)).middle == [800.0, 1000.0]


def test_a_curve_has_the_band_over_ranks_and_forgets_steps_that_are_repeated() -> None:
    curve = MetricCurve()
    for step in (10, 20, 30):
        curve.add(0, step, float(step))
        curve.add(1, step, float(step + 2))
    window = curve.window(3, (5, 34))
    assert (window.low, window.middle, window.high) == ([10, 20, 30], [11, 21, 31], [12, 22, 32])
    for rank in (0, 1):  # restarted from step 15
        curve.add(rank, 16, 100.0)
    assert curve.window(3, (5, 34)).middle == [11, 100, pytest.approx(float("nan"), nan_ok=True)]
    curve.add(0, 17, float("nan"))
    assert curve.span == (10, 16)


def test_a_curve_of_many_steps_has_bounded_memory_and_keeps_extremes() -> None:
    curve = MetricCurve()
    for step in range(1, 50_001):
        curve.add(0, step, 1000.0 if step == 777 else 1.0)
    assert len(curve._points) < 2 * MAX_POINTS
    window = curve.window(100, (1, 50_000))
    assert max(window.high) == 1000.0
    assert window.low == [1.0] * 100


def test_the_newest_value_is_the_mean_over_the_ranks_at_the_newest_step() -> None:
    newest = NewestMetrics()
    newest.apply(Metrics(time=1.0, rank=0, step=5, values={"a": 1.0, "b": 7.0}))
    newest.apply(Metrics(time=1.1, rank=1, step=5, values={"a": 3.0}))
    assert newest.values() == {"a": 2.0, "b": 7.0}
    newest.apply(Metrics(time=2.0, rank=1, step=6, values={"a": 9.0}))
    newest.apply(Metrics(time=1.9, rank=0, step=5, values={"a": 100.0}))  # read late
    assert newest.values()["a"] == 9.0
    newest.apply(Metrics(time=3.0, rank=0, step=2, values={"a": 4.0}))  # restarted
    assert newest.values()["a"] == 4.0


def entry(name: str, **metrics: float) -> dict[str, Any]:
    return dict.fromkeys(SUMMARY_KEYS) | {
        "id": name,
        "state": "finished",
        "recipe": "r",
        "metrics": metrics,
        "tags": [],
    }


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ("metric:val/acc>0.9", ["b"]),
        ("metric:val/acc<=0.5", ["a"]),
        ("metric:a=b>0", ["c"]),
        ("metric:val/acc", ["a", "b", "d"]),
        ("!metric:val/acc", ["c"]),
    ],
)
def test_runs_are_filtered_by_their_own_metrics(words: str, kept: list[str]) -> None:
    entries = [
        entry("a", **{"val/acc": 0.5}),
        entry("b", **{"val/acc": 0.95}),
        entry("c", **{"a=b": 1.0}),
        entry("d", **{"val/acc": float("nan")}),
    ]
    wanted = run_filter(words)
    assert [each["id"] for each in entries if wanted.keeps(each)] == kept
    assert [each["id"] for each in sorted_runs(entries, "metric:val/acc")] == ["b", "a", "c", "d"]


def test_a_metric_that_is_a_loss_is_sorted_as_one() -> None:
    entries = [entry("a", val_loss=0.5), entry("b", val_loss=0.2), entry("c")]
    assert [each["id"] for each in sorted_runs(entries, "metric:val_loss")] == ["b", "a", "c"]
    assert [each["id"] for each in sorted_runs(entries, "metric:val_loss", reverse=True)] == ["a", "b", "c"]


def test_a_column_that_is_none_is_refused_with_the_form_of_a_metric() -> None:
    with pytest.raises(RequestError, match="metric:NAME"):
        run_filter("accuracy>0.9")
    with pytest.raises(RequestError, match="expected a number"):
        run_filter("metric:accuracy>high")
    with pytest.raises(RequestError, match="metric:NAME"):
        sorted_runs([], "accuracy")


def test_a_metric_that_is_validated_has_the_value_of_the_newest_validation() -> None:
    metrics = NewestMetrics()
    metrics.apply(Metrics(time=1.0, rank=0, step=20, values={"accuracy": 1.0, "margin": 0.3}))
    kinds = (("valid", 0.7), ("valid", 0.8), ("test", 0.6))
    validations = [
        Validation(time=2.0, step=20, epoch=1, split=split, loss=1.0, metrics={"accuracy": value, "f1": 0.5})
        for split, value in kinds
    ]
    assert newest_values(metrics, validations) == {"accuracy": 0.8, "margin": 0.3, "f1": 0.5}
    assert newest_values(metrics, []) == {"accuracy": 1.0, "margin": 0.3}
