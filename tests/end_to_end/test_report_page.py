"""The page of a run in a real Chromium, opened from disk without a network."""

from __future__ import annotations

import csv
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from statistics import mean

import browser
import pytest
import synthetic
from synthetic import BEGIN, write
from waiting import LIMIT_S, until

from gputrain_tui import cli
from gputrain_tui.history.run_folders import Run
from trainer.contract.record import Checksum, Finding, ShareChange

pytestmark = pytest.mark.skipif(browser.MISSING, reason="chromium and chromedriver are not installed")
STEPS = 500
READ = """
const plot = document.querySelector(`[data-chart="${arguments[0]}"] .plot`);
plot.focus();
plot.dispatchEvent(new KeyboardEvent("keydown", {key: arguments[1]}));
return document.querySelector(`[data-chart="${arguments[0]}"] output`).textContent;
"""
CHOOSE = "const s = document.querySelector('select'); s.value = arguments[0]; s.dispatchEvent(new Event('change'));"


@pytest.fixture(scope="module")
def window() -> Iterator[browser.Browser]:
    with browser.browser() as opened:
        yield opened


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path))
    return synthetic.run(tmp_path / "runs", nodes=2, steps=STEPS, status="finished", straggler=3)


def page(run: Run, folder: Path) -> str:
    path = folder / "page.html"
    assert cli.main(["report", run.id, "--html", "-o", str(path), "--force"]) == 0
    return path.as_uri()


def test_charts_are_drawn_and_read_the_values_of_the_export(window: browser.Browser, run: Run, tmp_path: Path) -> None:
    write(
        run.dir.rank_events(0),
        ShareChange(time=BEGIN, step=STEPS, previous=[4] * 4, shares=[2, 4, 4, 6], cause="measured"),
        *(Checksum(time=BEGIN, rank=rank, step=9, parameters=str(rank), buffers="b") for rank in range(4)),
    )
    window.messages()
    window.open(page(run, tmp_path))
    drawn = window.run("return [...document.querySelectorAll('[data-chart]')].map((each) => each.dataset.chart)")
    assert drawn[:6] == [
        "loss", "wait for the gradient synchronisation", "step time", "phases of a step", "throughput", "lateness",
    ]  # fmt: skip
    assert window.run("return document.querySelectorAll('path.curve').length") > 10
    assert cli.main(["export", run.id, "--to", "csv", "-o", str(tmp_path / "steps.csv")]) == 0
    with (tmp_path / "steps.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if int(row["step"]) == STEPS]
    losses = [float(row["loss"]) for row in rows]
    text = window.run(READ, "loss", "End")
    step, shown, low, high = re.match(r"step ([\d,]+): mean (\S+), (\S+) to (\S+) over", text).groups()  # type: ignore[union-attr]
    assert int(step) == STEPS
    assert float(shown) == pytest.approx(mean(losses), rel=1e-4)  # all ranks have equally many samples
    assert (float(low), float(high)) == pytest.approx((min(losses), max(losses)), rel=1e-4)

    # A rank's own line and row, and again those of all.
    window.run(CHOOSE, "3")
    text = window.run(READ, "loss", "End")
    assert float(re.search(r"rank 3 (\S+),", text).group(1)) == pytest.approx(  # type: ignore[union-attr]
        next(float(row["loss"]) for row in rows if row["rank"] == "3"), rel=1e-4
    )
    assert window.run("return document.querySelectorAll('section:last-of-type tbody tr').length") >= 1
    window.run(CHOOSE, "")

    # What a balanced run has reached stands below its ranks, as in the closing table.
    shown = window.run("return [...document.querySelectorAll('section')].map((each) => each.innerText)")
    (ranks,) = [text for text in shown if text.startswith("Ranks and results")]
    assert "samples/s" in ranks
    assert re.search(r"\bshare\b", ranks)
    assert f"shares 2, 4, 4, 6 from step {STEPS} on" in ranks
    assert "parameters DIFFER between ranks" in ranks

    # Zoom by dragging, and Escape for the whole run.
    drag = """
    const plot = document.querySelector('[data-chart="loss"] .plot'), area = plot.getBoundingClientRect();
    const at = (share) => ({clientX: area.left + share * area.width, clientY: area.top + 20, bubbles: true});
    plot.dispatchEvent(new PointerEvent("pointerdown", at(0.5)));
    plot.dispatchEvent(new PointerEvent("pointermove", at(0.7)));
    plot.dispatchEvent(new PointerEvent("pointerup", at(0.7)));
    """
    window.run(drag)
    inside = window.run(READ, "loss", "End")
    assert STEPS * 0.5 < int(re.match(r"step (\d+)", inside).group(1)) < STEPS * 0.8  # type: ignore[union-attr]
    window.run(READ, "loss", "Escape")
    assert window.run(READ, "loss", "End").startswith(f"step {STEPS}:")

    # The table of values has what the readout says.
    table = """
    const details = document.querySelector('[data-chart="loss"] details');
    details.open = true;
    details.dispatchEvent(new Event("toggle"));
    return [...details.querySelectorAll("tbody tr")].map((row) => [...row.children].map((cell) => cell.textContent));
    """
    rows_shown = window.run(table)
    assert 100 < len(rows_shown) <= 300
    means = [mean(map(float, row[1:5])) for row in rows_shown[:3]]
    assert means[0] > means[-1] > 4
    assert window.messages() == []


def test_a_comparison_has_curves_over_steps_samples_or_time_and_the_exit_code_of_its_limits(
    window: browser.Browser, run: Run, tmp_path: Path
) -> None:
    bad = "</script><b>late"
    late = synthetic.run(tmp_path / "runs", name=bad, nodes=2, steps=STEPS // 2, status="finished", seed=5)
    path = tmp_path / "compare.html"
    limit = ("--fail-on", "loss_by_samples>+0.5", "--fail-on", "finding:straggler")
    assert cli.main(["compare", late.id, run.id, *limit, "--html", "-o", str(path)]) == 1
    assert cli.main(["compare", late.id, run.id, "--html", "-o", str(path)]) == 2, "the file exists"
    window.messages()
    window.open(path.as_uri())
    assert window.run("return document.querySelector('h1').textContent") == f"{run.id} against {late.id}"
    assert window.run("return [...document.querySelectorAll('.verdict strong')].map((e) => e.textContent)") == [
        "kept  loss_by_samples>+0.5",
        "exceeded  finding:straggler",
    ]
    for axis, name, last in (("steps", "step", STEPS), ("samples", "sample", STEPS * 64)):
        window.run(CHOOSE, axis)
        text = window.run(READ, "loss", "End")
        at, theirs, own = re.match(rf"{name} ([\d,]+): (\S+ \S+), (\S+ \S+)$", text).groups()  # type: ignore[union-attr]
        assert int(at.replace(",", "")) == pytest.approx(last, rel=0.02)
        assert theirs == f"{late.id} –", "it is not drawn on beyond its last step"
        assert float(own.removeprefix(run.id)) == pytest.approx(1.6, abs=0.2)
    assert window.run("return document.querySelectorAll('.change rect').length") >= 4
    assert window.run("return document.querySelector('b') === null")
    assert window.messages() == []


@pytest.mark.parametrize(("dark", "width"), [(False, 1280), (True, 400)], ids=["light and wide", "dark and narrow"])
def test_text_keeps_its_contrast_and_nothing_is_wider_than_the_window(
    run: Run, tmp_path: Path, width: int, dark: bool
) -> None:
    with browser.browser(dark=dark, width=width) as window:
        window.open(page(run, tmp_path))
        assert window.run("return document.documentElement.scrollWidth") <= width
        ground = window.run("return getComputedStyle(document.body).backgroundColor")
        for place in ("body", ".faint", ".chart output", "th", ".alarm"):
            ink = window.run("return getComputedStyle(document.querySelector(arguments[0])).color", place)
            assert contrast(ink, ground) >= 4.5, place


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours by WCAG 2.2: 1 to 21."""

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, light = sorted(map(luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


def test_text_of_a_run_is_never_markup(
    window: browser.Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path))
    bad = "</script><script>window.hit = 1</script><img src=x onerror='window.hit = 1'>\u2028"
    run = synthetic.run(tmp_path / "runs", steps=20, status="finished")
    finding = Finding(
        time=BEGIN + 9, kind="straggler", severity="critical", rank=1, host=bad, step=9, message=bad, advice=bad
    )
    write(run.dir.run_events, finding)
    window.messages()
    window.open(page(run, tmp_path))
    assert window.run("return window.hit === undefined && document.images.length === 0")
    assert window.run("return document.querySelector('.verdict strong').textContent") == bad
    assert window.messages() == []


def test_a_served_page_shows_a_step_within_two_seconds_and_keeps_the_choice_of_its_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path))
    run = synthetic.run(tmp_path / "runs", steps=20)
    argv = [sys.executable, "-m", "gputrain_tui", "serve", run.id, "--port", "0"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        with browser.browser(network=True) as window:
            window.messages()
            window.open(address)
            assert window.run("return document.querySelectorAll('path.curve').length") > 4
            window.run(
                "const s = document.querySelector('select'); s.value = '1'; s.dispatchEvent(new Event('change'))"
            )
            took_s = []
            for step in (21, 22, 23):  # each just after a reading, so that it waits for the whole of the next
                for rank in (0, 1):
                    write(run.dir.rank_events(rank), synthetic.step_of(rank, step, Random(3)))
                began = time.monotonic()
                until(lambda: f"{step} steps" in window.run("return document.querySelector('main').textContent"))  # noqa: B023
                took_s.append(time.monotonic() - began)
            assert min(took_s[1:]) < 2.0, f"{took_s} s; a busy machine delays one, not each"
            assert window.run("return document.querySelector('select').value") == "1"
            assert "token" not in window.run("return location.href")
            assert window.messages() == []
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 130
        process.stdout.close()
