"""One recorded run in every view: a figure has one value under its name."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import redirect_stdout
from io import StringIO
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Literal

import msgspec
import pytest
from msgspec import structs
from screen_frames import console, press, rows, settle

from gputrain_tui import cli
from gputrain_tui.console.screens.compare_screen import CompareScreen
from gputrain_tui.console.widgets.overlay_chart import CurveReader
from gputrain_tui.console.widgets.run_list import cell_text
from gputrain_tui.console.widgets.step_bars import phases_of
from gputrain_tui.headless.closing_report import closing_lines, status_line
from gputrain_tui.headless.progress import paint, plain_line, progress_line
from gputrain_tui.history.run_folders import Run, create, open_run
from gputrain_tui.history.run_reader import RunReader
from gputrain_tui.history.status_file import read_status, write_status
from gputrain_tui.lifecycle.attempt import AttemptResult
from gputrain_tui.lifecycle.diagnosis_watch import LiveDiagnosis
from gputrain_tui.lifecycle.run_status import RunStatusWriter
from gputrain_tui.plan.planner import Plan, PlannedNode
from gputrain_tui.state import WINDOW, RunState
from gputrain_tui.tables import duration
from trainer.contract.record import Doing, Finding, RankState, RunDir, RunEnded, Step, encode_event
from trainer.host.boot import BootMoment
from trainer.host.process_identity import identify

BEGIN = 1_800_000_000.0
STEPS, SAMPLES = 160, 16
WARM_UP = 2
"""First steps whose synchronisation is not recorded, as that of DDP's first steps is not."""
TOOK_S, JUMP_S = 57 * 60 + 5.0, 3600.0
"""True duration of the run, and by how much the clock was set forward in its middle."""


def wait_ms(rank: int, step: int) -> float:
    """Return a wait whose last value, mean of the last steps and mean of all steps differ."""
    return (40.0 if step > STEPS - 20 else 10.0 if step % 2 else 20.0) if rank == 0 else 2.0


def step_length(step: int) -> float:
    return wait_ms(0, step) + (60.0 if step > WARM_UP else 600.0)


def step_of(rank: int, step: int) -> Step:
    wait = wait_ms(rank, step)
    length = step_length(step)
    jump_s = JUMP_S if step > STEPS // 2 else 0.0
    time = BEGIN + step * 0.1 + jump_s
    return Step(
        time=time, rank=rank, step=step, epoch=1, steps=1, samples=SAMPLES,
        clock_set_ms=1e3 * jump_s, loss=None if rank else 9.0 / step, lr=0.1,
        step_ms=length, data_ms=length - wait - 50.0, forward_ms=12.0, backward_ms=18.0, optimizer_ms=5.0,
        other_ms=15.0, sync_exposed_ms=wait if step > WARM_UP else None,
    )  # fmt: skip


NAN = Finding(time=BEGIN + 9.0, kind="non_finite", severity="critical", rank=1, step=60, cause="loss", message="NaN")


def recorded(home: Path, *, ended: bool) -> Run:
    """Write the record of a run of two ranks, in which the clock jumps and one rank's loss is NaN."""
    argv = ["python", "-m", "trainer"]
    node = PlannedNode(node=0, host="a", first_rank=0, ranks=[0, 1], devices=["cpu"] * 2, argv=argv, env={})
    plan = Plan(world_size=2, init_method="tcp://a:1", backend="gloo", launcher="local", nodes=[node])
    now = [BEGIN]
    run = create("one", world_size=2, recipe_toml="name = 'one'\n", plan=lambda _: msgspec.json.encode(plan),
                 root=home / "runs", now=lambda: now[0])  # fmt: skip
    writer = RunStatusWriter(run.dir, plan, now=lambda: now[0])
    writer.started()
    moment = writer.status.started_after_boot
    assert moment is not None
    writer.status.started_after_boot = BootMoment(boot_id=moment.boot_id, uptime_s=moment.uptime_s - TOOK_S)
    writer.take_over()
    for rank in (0, 1):
        begin = RankState(time=BEGIN, rank=rank, state="training", host="a", device="cpu", node=0)
        events = [begin, *(step_of(rank, step) for step in range(1, STEPS + 1))]
        run.dir.rank_events(rank).write_bytes(b"".join(map(encode_event, events)))
    writer.record(NAN)
    now[0] += JUMP_S + STEPS * 0.1
    if ended:
        watch = LiveDiagnosis(run.dir)
        writer.close(AttemptResult(status="finished"), left=[], state=watch.read_rest())
        watch.close()
    found = open_run(run.dir.path)
    assert found is not None
    return found


def in_column(titles: str, line: str, title: str) -> str:
    """Return the value below a right-aligned title."""
    return line[: titles.index(title) + len(title)].split()[-1]


def after(name: str, lines: list[str]) -> str:
    """Return the value after a name on a screen."""
    return re.search(rf"{re.escape(name)} +(\S+)", "\n".join(lines)).group(1)  # type: ignore[union-attr]


def screens(run: Run) -> tuple[list[str], list[str]]:
    """Return the run screen and the rank screen of rank 0."""

    async def play() -> tuple[list[str], list[str]]:
        app = console(run)
        async with app.run_test(size=(220, 60)) as pilot:
            await settle(pilot)
            await settle(pilot)
            whole = rows(app)
            await press(pilot, "home", "enter")
            return whole, rows(app)

    return asyncio.run(play())


def comparison_screen(run: Run) -> list[str]:
    """Return the rows of the comparison of a run with itself that have its figures."""

    async def play() -> list[str]:
        app = console(run)
        async with app.run_test(size=(220, 60)) as pilot:
            await app.push_screen(CompareScreen([run, run]))
            for _ in range(3):
                app.tick()
                await settle(pilot)
            return [row for row in rows(app) if "━━" in row]

    return asyncio.run(play())


def command(*argv: str) -> str:
    out = StringIO()
    with redirect_stdout(out):
        assert cli.main(list(argv)) == 0
    return out.getvalue()


def state_of(run_dir: RunDir) -> RunState:
    state, reader = RunState(world_size=2), RunReader(run_dir)
    state.apply_all(reader.poll())
    reader.close()
    return state


@pytest.mark.parametrize("ended", [False, True], ids=["running", "ended"])
def test_each_figure_has_one_value_in_every_view(ended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path))
    run = recorded(tmp_path, ended=ended)
    over = range(1, STEPS + 1) if ended else range(STEPS - WINDOW + 1, STEPS + 1)
    synced = [step for step in over if step > WARM_UP]
    waits = {rank: fmean(wait_ms(rank, step) for step in synced) for rank in (0, 1)}
    step_ms = fmean(map(step_length, over))
    whole_ms = fmean(map(step_length, synced))
    rate = 2 * SAMPLES * 1e3 / step_ms
    share = 100 * sum(waits.values()) / (2 * whole_ms)
    compute = 100 * 30.0 / whole_ms
    span = "whole run" if ended else f"last {WINDOW} steps"

    state = state_of(run.dir)
    whole, page = screens(run)
    titles = next(line for line in whole if "sync ms" in line)
    first, second = whole[whole.index(titles) + 1 : whole.index(titles) + 3]
    assert "nan" in second
    header = "\n".join(whole[:3])
    line = paint(progress_line(state, 200, now=BEGIN), colour=False)

    # Sync wait: table, charts, panel, header, progress line.
    assert float(in_column(titles, first, "sync ms")) == pytest.approx(waits[0], abs=0.06)
    assert float(in_column(titles, second, "sync ms")) == pytest.approx(waits[1], abs=0.06)
    assert float(after("sync wait ms", page)) == pytest.approx(waits[0], abs=0.01)
    chart = next(line for line in page if f"mean of the {span}" in line and "sync wait ms" in line)
    assert float(after("sync wait ms", [chart])) == pytest.approx(sum(waits.values()) / 2, abs=0.01)
    chart = chart[chart.index("sync wait ms") :]
    assert float(after("rank 0", [chart])) == pytest.approx(waits[0], abs=0.01)
    assert after("sync wait", [header]) == f"{share:.0f}%"
    assert after("sync", [line]) == f"{share:.1f}%"
    assert after("sync share", page) == f"{100 * waits[0] / whole_ms:.1f}%"
    assert after("compute", [header]) == f"{compute:.0f}%"

    # Lateness: table, heat map, panel, progress line.
    late = waits[0] - waits[1]
    assert float(in_column(titles, second, "late ms")) == pytest.approx(late, abs=0.06)
    assert float(in_column(titles, first, "late ms")) == 0.0
    assert float(after("late", [text for text in whole if "rank 1 ─" in text])) == pytest.approx(late, abs=0.01)
    assert after("late r1", [line]) == after("late r1", [plain_line(state, now=BEGIN)]) == f"{late:.1f}"
    assert after("late ms", page) == "0.000", "that of rank 0"

    # Step: bars, panel, chart.
    bars = next(text for text in whole if "other" in text and text.lstrip(" │").startswith("step "))
    assert span in bars
    assert float(after("step", [bars])) == pytest.approx(step_ms, abs=0.06)
    assert float(after("step ms", page)) == pytest.approx(step_ms, abs=0.06)
    assert sum(phases_of(state.ranks[0]) or ()) == pytest.approx(step_ms)
    assert float(in_column(titles, first, "fwd ms")) == 12.0
    assert f"means of the {span}" in "\n".join(page)

    # Rate: header, table, progress line, and after the end the list of runs.
    assert re.search(rf"\b{rate:,.0f} samples/s", header)
    assert float(in_column(titles, first, "smp/s")) == pytest.approx(rate / 2, abs=0.06)
    assert f"{rate:,.1f} samples/s" in line
    assert f"{rate:,.1f} samples/s" in plain_line(state, now=BEGIN)
    (entry,) = json.loads(command("runs", "--json"))
    assert entry["samples_per_s"] == (pytest.approx(rate) if ended else None)
    if ended:
        legend = comparison_screen(run)
        assert float(after("samples/s", legend).replace(",", "")) == pytest.approx(rate, abs=0.6)
        assert after("sync", legend) == f"{share:.1f}%"
        compared = CurveReader(run)
        compared.poll(inf)
        compared.close()
        assert compared.history.rates.samples_per_s == pytest.approx(rate)
        assert compared.history.sync_share == pytest.approx(share / 100)
        rates = compared.history.points(1, over_time=False, measure="samples_per_s").values
        assert compared.history.last_second == pytest.approx(0.1 * STEPS, abs=1.0)
        assert rates == [pytest.approx(rate)], "the curve is of the same rate, also where the clock was set forward"

    # The report.
    told = json.loads(command("report", "last", "--json"))
    assert told["samples_per_s"] == pytest.approx(rate)
    assert told["step_ms"] == pytest.approx(step_ms)
    assert {part["name"]: part["share"] for part in told["parts"]}["sync"] == pytest.approx(share / 100)
    assert sum(part["share"] for part in told["parts"][1:3]) == pytest.approx(compute / 100)
    assert [rank["late_ms"] for rank in told["ranks"]] == [0.0, pytest.approx(late)]
    assert told["verdict"]["text"] == "NaN"
    if ended:
        page_of_text = command("report")
        assert f"{share:.1f}%" in page_of_text
        assert f"{rate:,.1f} samples/s" in page_of_text

    # Elapsed, step, loss and what stands.
    took = duration(entry["duration_s"])
    for shown in (took, cell_text(entry, "took"), after("elapsed", [header]), after("elapsed", page)):
        assert shown.split(":")[0] == "57", "minutes: a run that goes on takes longer while it is shown"
    assert cell_text(entry, "step") == f"{STEPS}"
    assert after("loss", [header]) == after("loss", [line]) == "nan"
    if ended:
        assert cell_text(entry, "loss") == "nan"
        closing = [paint(pieces, colour=False) for pieces in closing_lines(state, 200)]
        assert in_column(closing[0], closing[1], "step ms") == f"{step_ms:.1f}"
        assert in_column(closing[0], closing[2], "late ms") == f"{late:.1f}"
        assert in_column(closing[0], closing[1], "sync") == f"{100 * waits[0] / whole_ms:.1f}%"
        assert in_column(closing[0], closing[1], "compute") == f"{compute:.1f}%"
        assert f"{rate:,.1f} samples/s  in {STEPS * step_ms / 1e3:.1f} s of steps" in closing[3]
        assert in_column(closing[0], closing[1], "samples/s") == f"{rate / 2:.1f}"
        shares = [in_column(closing[0], closing[1], each) for each in ("data", "compute", "sync", "optimizer", "other")]
        assert sum(float(each[:-1]) for each in shares) == pytest.approx(100, abs=0.3)
        last = paint(status_line(state), colour=False)
        done = f"{STEPS} steps, {2 * STEPS * SAMPLES:,} samples"
        assert last == f"finished in {took}, {done}, with NaN since step 60 on rank 1"
        assert entry["finding"] == "NaN since step 60 on rank 1"
        assert [found["kind"] for found in entry["findings"]] == ["non_finite"]
        listed = command("runs")
        assert "finished ▲" in listed
        assert "NaN since step 60 on rank 1" in listed
        assert "▲ finished" in header
        assert "NaN since step 60 on rank 1" in header


@pytest.mark.parametrize("end", [pytest.param("stopped", marks=pytest.mark.slow), "lost"])
def test_after_the_end_no_view_shows_a_rank_in_a_phase_of_a_step(
    end: Literal["stopped", "lost"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path))
    run = recorded(tmp_path, ended=False)
    for rank, part in ((0, "sync"), (1, "loss")):
        moment = BEGIN + STEPS * 0.1 + JUMP_S + 5.0
        doing = Doing(time=moment, rank=rank, step=STEPS + 1, part=part, parts_done=3, waited_ms=5e3)  # type: ignore[arg-type]
        with run.dir.rank_events(rank).open("ab") as file:
            file.write(encode_event(doing))
    whole, page = screens(run)
    assert after("state", page) == "sync"
    assert "sync wait" in rank_line(whole, 0)
    assert "loss" in rank_line(whole, 1)
    if end == "stopped":
        with run.dir.run_events.open("ab") as file:
            file.write(encode_event(RunEnded(time=BEGIN + 4000.0, status="stopped", exit_code=130)))
    status = read_status(run.dir)
    assert status is not None
    over = {"status": "stopped", "ended": BEGIN + 4000.0} if end == "stopped" else {}
    killed = structs.replace(identify(), start_ticks=1)
    write_status(run.dir, structs.replace(status, supervisor=killed, **over))
    found = open_run(run.dir.path)
    assert found is not None
    assert found.state == end
    whole, page = screens(found)
    state = "stopped" if end == "stopped" else "unknown"
    assert after("state", page) == state
    for rank in (0, 1):
        assert state in rank_line(whole, rank)
        assert not re.search(r"sync wait|loss", rank_line(whole, rank))


def rank_line(screen: list[str], rank: int) -> str:
    """Return a rank's line of the table."""
    titles = next(index for index, line in enumerate(screen) if "sync ms" in line)
    return screen[titles + 1 + rank]
