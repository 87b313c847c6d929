from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any, Literal

import pytest
from made_runs import make_run
from manual_clock import ManualClock
from msgspec.structs import replace
from row_texts import row_text

from gputrain_tui.console.widgets.run_header import RunHeading, draw_header
from gputrain_tui.headless.closing_report import closing_lines, closing_table, failure_block, finding_lines, status_line
from gputrain_tui.headless.number_text import number
from gputrain_tui.headless.progress import (
    ProgressView,
    clip,
    event_line,
    fitted,
    length,
    paint,
    plain_line,
    progress_line,
)
from gputrain_tui.history.run_columns import cause
from gputrain_tui.history.summary import summarize
from gputrain_tui.state import RunState
from gputrain_tui.state.ended_attempts import is_left_standing
from gputrain_tui.tables import ranks_text
from trainer.contract.outcome import ENDED_EARLY
from trainer.contract.record import (
    AnyEvent,
    Checkpoint,
    Checksum,
    Doing,
    Event,
    Failure,
    Finding,
    Joining,
    ModelFlops,
    NodeSample,
    NoiseScale,
    Queued,
    RankSample,
    RankState,
    RankStateName,
    RunEnded,
    RunStarted,
    Sample,
    Step,
    TrainingPlan,
    Validation,
)


def started(world_size: int = 2) -> RunState:
    state = RunState()
    state.apply(RunStarted(time=1000.0, run="r", recipe="demo", world_size=world_size, run_dir="/r"))
    return state


def trained(world_size: int = 2, *, limit: bool = True, tokens: int | None = None) -> RunState:
    state = started(world_size)
    if limit:
        state.apply(
            TrainingPlan(
                time=1000.0, world_size=world_size, updates_per_epoch=100, samples_per_epoch=6400, max_epochs=4
            )
        )
    for rank in range(world_size):
        state.apply(RankState(time=1001.0, rank=rank, state="training", host="node-a", device="cpu"))
    for n in range(1, 121):
        for rank in range(world_size):
            state.apply(
                Step(
                    time=1001.0 + n * 0.05,
                    rank=rank,
                    step=n,
                    epoch=1 + (n - 1) // 100,
                    steps=1,
                    samples=32,
                    tokens=tokens,
                    loss=5.5 - n * 0.02 + rank * 0.01,
                    step_ms=50.0,
                    data_ms=1.0,
                    forward_ms=10.0,
                    backward_ms=15.0 + 10 * (rank == 1),
                    optimizer_ms=2.0,
                    other_ms=10.0,
                    sync_exposed_ms=12.0 - 10 * (rank == 1),
                )
            )
    return state


def plain(lines: list[list[tuple[str, str]]]) -> str:
    return "\n".join(paint(line, colour=False) for line in lines)


LINES = {
    80: " 30%  ep 2/4  120/400  loss 3.1050  1,280/s  late r1 10 ms  sync 14%  eta 14 s",
    120: "━━━━━━───────────────  30%  epoch 2/4  step 120/400  loss 3.1050  1,280 samples/s"
    "  late r1 10.0 ms  sync 14.0%  eta 14 s",
}


@pytest.mark.parametrize("width", [80, 120])
def test_the_progress_line_has_every_figure_at_the_usual_widths(width: int) -> None:
    assert paint(progress_line(trained(), width, now=1007.0), colour=False) == LINES[width]


@pytest.mark.parametrize("width", [1, 10, 20, 40, 60, 79, 80, 100, 120, 200, 400])
@pytest.mark.parametrize("limit", [True, False])
def test_the_progress_line_never_wraps(width: int, limit: bool) -> None:
    assert length(progress_line(trained(limit=limit), width, now=1007.0)) <= width
    assert length(progress_line(started(), width, now=1007.0)) <= width


@pytest.mark.parametrize("width", [36, 40, 60])
def test_step_and_loss_are_left_out_last(width: int) -> None:
    line = paint(progress_line(trained(), width, now=1007.0), colour=False)
    assert "120/400" in line
    assert "loss 3.1050" in line


def test_without_a_limit_there_is_no_bar_and_no_time_left() -> None:
    line = paint(progress_line(trained(limit=False), 120, now=1007.0), colour=False)
    assert line.startswith("epoch 2  step 120  loss 3.1050")
    assert "%" not in line.replace("sync 14.0%", "")
    assert "eta" not in line


def test_one_rank_alone_is_not_late_and_has_no_sync_share() -> None:
    line = paint(progress_line(trained(1), 120, now=1007.0), colour=False)
    assert "late" not in line
    assert "sync" not in line


def test_the_progress_line_names_the_ranks_that_are_waited_for() -> None:
    state = started(3)
    assert paint(progress_line(state, 80, now=1003.0), colour=False) == "starting 3 ranks  3 s"
    state.apply(Joining(time=1002.0, joined=[0], missing=[1, 2], waited_ms=2000.0))
    assert plain_line(state, now=1004.0) == "joined 1 of 3, waiting for ranks 1, 2  4 s"


def test_a_cause_is_shown_as_soon_as_it_is_known_until_the_next_attempt() -> None:
    state = started(1)
    state.apply(RankState(time=1001.0, rank=0, state="spawned", host="node-a", device="cpu"))
    state.apply(Failure(time=1002.0, kind="exception", rank=0, message="ValueError: bad batch"))
    text = "rank 0 failed: ValueError: bad batch  ending all processes"
    assert paint(progress_line(state, 80, now=1003.0), colour=False) == plain_line(state, now=1003.0) == text
    waits = Finding(time=1003.0, kind="awaits_hosts", severity="info", message="waiting up to 600 s until all answer")
    state.apply(waits)
    assert plain_line(state, now=1003.0) == text.replace("ending all processes", waits.message)
    assert event_line(waits) == [(waits.message, "bold")]
    assert is_left_standing(waits), "the next attempt clears it, for it waits no more"
    over = replace(waits, time=1004.0, state="cleared")
    assert event_line(over) is None
    state.apply(over)
    assert plain_line(state, now=1003.0) == text
    state.apply(RankState(time=1004.0, rank=0, state="spawned", host="node-a", device="cpu"))
    assert plain_line(state, now=1005.0) == "starting 1 rank  5 s"
    state.apply(Failure(time=1006.0, kind="exception", rank=0, message="ValueError: bad batch"))
    assert plain_line(state, now=1007.0) == text


def test_a_plain_line_has_every_measure() -> None:
    assert plain_line(trained(), now=1007.0) == (
        "epoch 2/4  step 120/400 (30%)  loss 3.1050  1,280 samples/s  late r1 10.0 ms  sync 14.0%  eta 14 s"
    )


TABLES = {
    80: """\
rank  host    steps    loss  samples/s  data  compute   sync  optimizer  other
   0  node-a    120  3.1000      640.0  2.0%    50.0%  24.0%       4.0%  20.0%
   1  node-a    120  3.1100      640.0  2.0%    70.0%   4.0%       4.0%  20.0%""",
    120: """\
rank  host    device  steps    loss  samples/s  step ms  late ms  data  compute   sync  optimizer  other
   0  node-a  cpu       120  3.1000      640.0     50.0      0.0  2.0%    50.0%  24.0%       4.0%  20.0%
   1  node-a  cpu       120  3.1100      640.0     50.0     10.0  2.0%    70.0%   4.0%       4.0%  20.0%""",
}


@pytest.mark.parametrize("width", [80, 120])
def test_the_closing_table_has_a_row_per_rank(width: int) -> None:
    assert plain(closing_table(trained(), width)) == TABLES[width]


def test_a_narrow_closing_table_keeps_the_numbers() -> None:
    table = plain(closing_table(trained(), 60)).splitlines()
    assert table[0].split() == ["rank", "steps", "loss", "samples/s", "data", "compute", "sync", "other"]
    assert max(map(len, table)) <= 60


def test_of_very_many_ranks_those_that_were_waited_for_are_listed() -> None:
    lines = plain(closing_table(trained(100), 120)).splitlines()
    assert len(lines) == 34
    assert lines[1].split()[0] == "1"
    assert lines[-1] == "… and 68 ranks that were less late"


def test_the_closing_lines_have_the_condition_that_ended_a_training_early() -> None:
    state = trained()
    state.apply(
        Finding(time=8.0, kind=ENDED_EARLY, severity="info", message="finished: no lower loss in 3 validations")
    )
    assert "ended      no lower loss in 3 validations" in plain(closing_lines(state, 80)).splitlines()


def test_the_closing_table_has_evaluation_desync_check_checkpoint_and_sample(tmp_path: Path) -> None:
    state = trained()
    kept = tmp_path / "120.pt"
    kept.touch()
    state.apply(Validation(time=1008.0, step=120, epoch=2, split="valid", loss=2.55, metrics={"accuracy": 0.41}))
    for rank in (0, 1):
        state.apply(Checksum(time=1008.0, rank=rank, step=120, parameters="a", buffers="b"))
    for path in (kept, tmp_path / "deleted.pt"):
        state.apply(Checkpoint(time=1008.0, step=120, path=str(path), bytes=1_234_567, write_ms=5.0))
    state.apply(Sample(time=1008.0, step=120, text="def foo(\n\x1b[2Jself"))
    state.apply(RunEnded(time=1009.0, status="finished", exit_code=0))
    assert plain(closing_lines(state, 80)).splitlines()[3:] == [
        "all ranks  1,280 samples/s  in 6.0 s of steps",
        "valid      epoch 2  step 120  loss 2.5500  accuracy 0.4100",
        "parameters equal on all ranks",
        f"checkpoint {kept}",
        "sample",
        "  │ def foo(",
        "  │ ␛[2Jself",
    ]
    assert paint(status_line(state), colour=False) == "finished in 9 s, 120 steps, 7,680 samples"


SLOW = Finding(time=1007.0, kind="straggler", rank=1, message="rank 1 takes longer", evidence={"excess_ms": 60.0})
HANGS = Finding(time=1007.0, kind="stalled", rank=1, message="rank 1 hangs")


@pytest.mark.parametrize(
    ("status", "kind", "rank", "condition"),
    [
        ("finished", "", None, ", with rank 1 stalled and 1 more finding"),
        ("stopped", "", None, ", with rank 1 stalled and 1 more finding"),
        ("failed", "signal", 0, ""),
        ("failed", "stalled", 1, ", with rank 1 stalled"),
        ("failed", "stalled", 0, ""),
    ],
)
def test_the_closing_line_of_a_failed_run_names_no_finding_but_its_cause(
    status: Literal["finished", "failed", "stopped"], kind: str, rank: int | None, condition: str
) -> None:
    state = trained()
    state.apply_all([SLOW, HANGS])
    if kind:
        state.apply(Failure(time=1008.0, kind=kind, rank=rank, message="it ended"))
    state.apply(RunEnded(time=1009.0, status=status, exit_code=0, message="it ended"))
    assert paint(status_line(state), colour=False) == f"{status} in 9 s, 120 steps, 7,680 samples{condition}"
    assert ("finding    rank 1 takes longer" in plain(closing_lines(state, 80))) is True


def test_the_closing_line_says_that_samples_of_some_steps_are_not_known() -> None:
    state = trained()
    state.apply(Step(time=state.time, rank=0, step=130, epoch=1, steps=10, loss=1.0))
    assert ", at least 7,680 samples" in paint(status_line(state), colour=False)


def again_at_1(state: RunState) -> list[AnyEvent]:
    """Return 120 steps of each rank that begin at 1, twice."""
    step = Step(time=state.time, rank=0, step=120, epoch=1, steps=120, samples=960, loss=1.0)
    return [replace(step, rank=rank) for rank in (0, 1) for _ in range(2)]


@pytest.mark.parametrize(
    ("is_script", "told"),
    [
        (False, "120 steps, 11,520 samples in all attempts"),
        (True, "120 steps since then, 11,520 samples in all attempts"),
    ],
)
def test_the_closing_line_names_the_restarts_after_which_a_script_counts_anew(is_script: bool, told: str) -> None:
    state = trained(limit=not is_script)
    for attempt in (1, 2):
        state.apply(Finding(time=state.time, kind="restarted", severity="info", message=f"attempt {attempt} ended"))
    state.apply_all(again_at_1(state))
    state.apply(RunEnded(time=state.time, status="finished", exit_code=0))
    assert paint(status_line(state), colour=False).endswith(f" after 2 restarts, {told}")


@pytest.mark.parametrize(
    ("is_script", "told"),
    [(False, "120 steps, 11,520 samples"), (True, "120 steps in the last one, 11,520 samples in all")],
)
def test_the_closing_line_counts_the_steps_and_samples_of_all_jobs(is_script: bool, told: str) -> None:
    state = trained(limit=not is_script)
    if state.plan is not None:
        state.apply(replace(state.plan, first_update=20))  # of the second job
    state.apply(RunStarted(time=1000.0, run="r", recipe="demo", world_size=2, run_dir="/r"))
    state.apply_all(again_at_1(state))
    state.apply(RunEnded(time=1_200.0, status="finished", exit_code=0))
    assert paint(status_line(state), colour=False) == f"finished in 3:20, in 2 jobs, {told}"


def test_a_log_has_one_line_for_a_wait_in_the_queue_for_the_start_after_it_and_for_a_failure() -> None:
    clock, state = ManualClock(1007.0), trained()
    screen, stream = view(state, clock, live=False)

    def later(event: Event, seconds: float = 60.0) -> list[str]:
        before = len(stream.getvalue().splitlines())
        state.apply(event)
        screen.update([event])
        for _ in range(int(seconds)):
            clock.seconds += 1.0
            screen.update([])
        return stream.getvalue().splitlines()[before:]

    assert later(Finding(time=1008.0, kind="requeued", severity="info", message="its time limit is near")) == [
        "its time limit is near"
    ]
    assert later(Queued(time=1068.0, job=7, partition="main", reason="Priority")) == [
        "queued as job 7 in main: Priority"
    ]
    assert later(RunStarted(time=1000.0, run="r", recipe="demo", world_size=2, run_dir="/r")) == ["starting 2 ranks"]
    later(RankState(time=1200.0, rank=0, state="spawned"), 0.0)
    restarted = later(RankState(time=1200.0, rank=1, state="spawned"))
    assert len(restarted) == 1
    assert restarted[0].endswith("step 120/400 (30%)  loss 3.1050  – steps/s")
    failure = Failure(time=1300.0, kind="exit", rank=1, host="a", message="the script called sys.exit(3)")
    assert later(failure) == ["rank 1 failed: the script called sys.exit(3)  ending all processes"]


def test_the_closing_line_has_the_time_of_the_rank_that_compiled_longest() -> None:
    state = trained()
    for rank, compile_ms in ((0, 61_000.0), (1, 75_000.0), (1, 20_000.0)):
        step = Step(time=state.time, rank=rank, step=121, epoch=1, steps=1, samples=32, lr=0.1, compile_ms=compile_ms)
        state.apply(step)
    state.apply(RunEnded(time=1_200.0, status="finished", exit_code=0))
    assert paint(status_line(state), colour=False).startswith("finished in 3:20, 1:35 of it compiling, ")


def test_the_samples_of_a_resumed_run_are_those_since_its_checkpoint() -> None:
    state = trained()
    assert state.plan is not None
    state.apply(replace(state.plan, first_update=20))
    state.apply(RunEnded(time=state.time, status="finished", exit_code=0))
    assert paint(status_line(state), colour=False).endswith("120 steps, 7,680 samples since step 20")


def test_the_list_of_runs_names_the_restarts(tmp_path: Path) -> None:
    run = make_run(tmp_path, status="finished", restarts=1)
    assert cause(summarize(run, now=0.0)) == "after 1 restart"
    run = make_run(tmp_path, status="failed", restarts=2, message="rank 1 hangs")
    assert cause(summarize(run, now=0.0)) == "after 2 restarts: rank 1 hangs"


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("lost contact with the command that started it at step 6, saved /c/step_6.pt", True),
        ("stopped by SIGTERM at step 6, saved /c/step_6.pt", True),
        ("stopped by SIGINT at step 6, saved /c/step_6.pt", False),
        ("stopped by `gputrain stop` at step 6, saved /c/step_6.pt", False),
    ],
)
def test_the_list_of_runs_says_what_stopped_a_run_if_it_was_no_person(
    tmp_path: Path, message: str, shown: bool
) -> None:
    run = make_run(tmp_path, status="stopped", message=message)
    assert cause(summarize(run, now=0.0)) == (message if shown else "")


def test_figures_of_an_incomplete_record_are_called_those_of_the_recorded_part() -> None:
    state = trained()
    message = "the end of the record is missing: No space left on device"
    state.apply(RunEnded(time=state.time, status="finished", exit_code=0, message=message))
    line = paint(status_line(state), colour=False)
    assert line.endswith(f"; {message}; recorded: 120 steps, 7,680 samples")
    assert message in plain(finding_lines(state))


@pytest.mark.parametrize("seen", [True, False], ids=["with the reason", "without a reason"])
def test_a_script_without_measured_steps_is_not_said_to_have_done_none(seen: bool) -> None:
    state = started()
    message = "no optimizer's step was seen, so nothing of this training is measured"
    if seen:
        finding = Finding(time=2.0, kind="not_measured", severity="info", rank=0, cause="no_steps", message=message)
        state.apply(finding)
        for rank in (0, 1):
            state.apply(RankState(time=2.5, rank=rank, state="training"))
        assert plain_line(state, now=3.0).startswith("2 ranks started, no optimizer's step was seen")
    state.apply(RunEnded(time=4.0, status="finished", exit_code=0))
    assert paint(status_line(state), colour=False).endswith(f"; {message if seen else 'no step was measured'}")


@pytest.mark.parametrize(
    ("scale", "batch", "line"),
    [
        (3241.7, 512, "noise      the noise scale is about 3,200 samples: a larger batch than 512 still helps"),
        (96.4, 2048, "noise      the noise scale is about 96 samples: a larger batch than 2,048 saves few steps"),
        (13.4, 32, "noise      the noise scale is about 13 samples, near the batch of 32"),
    ],
)
def test_the_noise_scale_is_told_with_its_meaning_for_the_batch(scale: float, batch: int, line: str) -> None:
    state = trained()
    assert not any("noise" in each for each in plain(closing_lines(state, 80)).splitlines())
    for samples in (None, scale):
        state.apply(NoiseScale(time=1.0, step=40, batch=batch, gradient_sq=-0.5, noise_sq=2.0, samples=samples))
    assert line in plain(closing_lines(state, 80)).splitlines()


def test_rates_of_a_record_with_a_gap_are_said_to_be_of_its_steps() -> None:
    state = trained()
    state.apply(Finding(time=1007.0, kind="record_incomplete", severity="warning", message="h2's disk is full"))
    assert "in 6.0 s of recorded steps" in plain(closing_lines(state, 80))


def test_before_the_first_step_a_compilation_has_its_name() -> None:
    state = started()
    for rank in (0, 1):
        state.apply(RankState(time=1.0, rank=rank, state="training"))
    state.apply(Doing(time=2.0, rank=1, step=1, part="compile", parts_done=0, waited_ms=2e3))
    assert "2 ranks, compiling" in plain_line(state, now=40.0)


@pytest.mark.parametrize(
    ("states", "lines", "told"),
    [
        (("spawned", "spawned"), ("", ""), "starting 2 ranks  40 s"),
        (("spawned", "training"), ("a.py:1 in <module>", ""), "starting 2 ranks: rank 0 at a.py:1 in <module>  40 s"),
        (("ready", "ready"), ("", ""), "2 ranks started, no step yet: loading data and model  40 s"),
        (("training", "training"), ("a.py:9 in load",) * 2, "2 ranks started, no step yet: at a.py:9 in load  40 s"),
        (
            ("training", "training"),
            ("a.py:9 in load", "a.py:12 in main"),
            "2 ranks started, no step yet: rank 0 at a.py:9 in load, rank 1 at a.py:12 in main  40 s",
        ),
        (("training", "training"), ("", ""), "2 ranks started, no step yet  40 s"),
    ],
)
def test_before_the_first_step_the_progress_says_where_the_ranks_are(
    states: tuple[Any, Any], lines: tuple[str, str], told: str
) -> None:
    state = started()
    for rank, each in enumerate(states):
        state.apply(RankState(time=1.0, rank=rank, state=each))
    samples = [RankSample(rank=rank, line=line) for rank, line in enumerate(lines)]
    state.apply(NodeSample(time=2.0, node=0, host="a", ranks=samples))
    assert plain_line(state, now=state.started + 40.0).endswith(told)


def test_rates_of_tokens_and_the_utilization_stand_where_they_are_known_and_agree() -> None:
    state = trained(tokens=3200)
    assert "  1,280 samples/s  128,000 tokens/s  late" in plain_line(state, now=1007.0)
    assert plain(closing_lines(state, 80)).splitlines()[3] == (
        "all ranks  1,280 samples/s  128,000 tokens/s  in 6.0 s of steps"
    )
    for rank in (0, 1):
        state.apply(
            ModelFlops(
                time=1001.0, rank=rank, flops_per_sample=1e9, number_format="bf16", peak_flops_per_s=1.6e14
            )
        )  # fmt: skip
    assert "  128,000 tokens/s  MFU 0.4%  late" in plain_line(state, now=1007.0)
    assert plain(closing_lines(state, 80)).splitlines()[3] == (
        "all ranks  1,280 samples/s  128,000 tokens/s  MFU 0.4%  in 6.0 s of steps"
    )
    assert paint(progress_line(state, 80, now=1007.0), colour=False) == LINES[80]
    head = RunHeading(status="running", name="n", id="i", world_size=2, hosts=1, summary=state.figures)
    header = " ".join(row_text(draw_header(head, 200, 2)[1]).split())
    assert "1,280 samples/s 128,000 tokens/s MFU 0.4%" in header


def test_without_tokens_and_a_known_peak_there_are_samples_only() -> None:
    state = trained()
    head = RunHeading(status="running", name="n", id="i", world_size=2, hosts=1, summary=state.figures)
    texts = [plain_line(state, now=1007.0), plain(closing_lines(state, 80)), row_text(draw_header(head, 200, 2)[1])]
    assert all("samples/s" in text and "tokens" not in text and "MFU" not in text for text in texts)


def test_the_closing_table_of_an_evaluation_has_its_result_and_no_steps() -> None:
    state = started()
    for rank in (0, 1):
        state.apply(RankState(time=1001.0, rank=rank, state="validating", host="node-a", device="cpu"))
    assert plain_line(state, now=1002.0) == "2 ranks evaluate  2 s"
    state.apply(Validation(time=1003.0, step=340, epoch=3, split="test", loss=2.55, weights_step=340))
    for rank in (0, 1):
        state.apply(RankState(time=1003.0, rank=rank, state="ready", host="node-a", device="cpu"))
    assert plain_line(state, now=1003.0) == "2 ranks evaluate  3 s"
    state.apply(RunEnded(time=1004.0, status="finished", exit_code=0))
    assert plain(closing_lines(state, 80)).splitlines() == ["test       (weights of step 340)  loss 2.5500"]
    assert paint(status_line(state), colour=False) == "finished in 4 s"


def test_the_closing_table_has_raised_and_cleared_findings() -> None:
    state = trained()
    state.apply(Finding(time=1005.0, kind="straggler", rank=1, step=70, message="rank 1 is late", advice="look"))
    state.apply(Finding(time=1006.0, kind="straggler", rank=1, step=90, message="rank 1 is late", state="cleared"))
    state.apply(Finding(time=1007.0, kind="input_bound", step=110, message="data takes 40 % of a step"))
    state.apply(Finding(time=1007.0, kind="not_measured", severity="info", message="no bucket times"))
    assert plain(closing_lines(state, 80)).splitlines()[4:] == [
        "finding    step 110: data takes 40 % of a step",
        "cleared    rank 1 is late",
    ]


@pytest.mark.parametrize(
    ("bad", "texts", "line"),
    [
        ((), "aa", "parameters equal on all ranks"),
        ((0, 1), "aa", "parameters NaN or infinite on all ranks"),
        ((1,), "ab", "parameters DIFFER between ranks; NaN or infinite on rank 1"),
    ],
)
def test_parameters_that_are_no_numbers_are_never_called_equal(bad: tuple[int, ...], texts: str, line: str) -> None:
    state = trained()
    for rank, text in enumerate(texts):
        bits = {"parameters": text, "buffers": "", "non_finite": rank in bad}
        state.apply(Checksum(time=1008.0, rank=rank, step=120, **bits))
    assert line in plain(closing_lines(state, 80)).splitlines()


def test_of_very_many_findings_the_first_are_listed() -> None:
    state = trained(40)
    for rank in range(40):
        state.apply(Finding(time=1005.0, kind="straggler", rank=rank, message=f"rank {rank} is late"))
    lines = plain(finding_lines(state)).splitlines()
    assert len(lines) == 13
    assert lines[-1] == "… and 28 findings more"


def test_a_failure_names_the_failed_rank_and_shows_its_log_tail() -> None:
    failure = Failure(time=1.0, kind="out_of_memory", rank=3, host="b", in_step=7, message="tried to allocate 80 GiB")
    assert plain(failure_block(failure, ["loading", "boom"], "/r/logs/3.log")) == (
        "rank 3 failed on b in step 7: out of memory\n"
        "  tried to allocate 80 GiB\n"
        "  its last output, of /r/logs/3.log:\n"
        "  │ loading\n"
        "  │ boom"
    )


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (
            Validation(time=1.0, step=5, epoch=1, split="test", loss=0.5, metrics={"accuracy": 0.9}),
            "test epoch 1  step 5  loss 0.5000  accuracy 0.9000",
        ),
        (
            Validation(time=1.0, step=360, epoch=3, split="test", loss=0.5, weights_step=340),
            "test (weights of step 340)  loss 0.5000",
        ),
        (
            Checkpoint(time=1.0, step=5, path="/c/5.pt", bytes=1_572_864, write_ms=3.0),
            "saved step 5  /c/5.pt (1.5 MiB)",
        ),
        (
            Checkpoint(time=1.0, step=5, path="/c\x1b]52;c;eA==\x07\n/5.pt", bytes=1, write_ms=3.0),
            "saved step 5  /c␛]52;c;eA==␇␊/5.pt (1 B)",
        ),
        (
            Finding(time=1.0, kind="straggler", rank=1, message="rank 1 is late", advice="look at its loader"),
            "warning: rank 1 is late; look at its loader",
        ),
        (
            Finding(time=1.0, kind="straggler", state="cleared", rank=1, step=90, message="rank 1 is late"),
            "cleared at step 90: rank 1 is late",
        ),
        (Finding(time=1.0, kind="seed_on_resume", severity="info", message="seed 9 orders"), "seed 9 orders"),
        (Finding(time=1.0, kind="evaluated_checkpoint", severity="info", message="evaluates b.pt"), "evaluates b.pt"),
        (Finding(time=1.0, kind="note", severity="info"), None),
        (RankState(time=1.0, rank=0, state="ready"), None),
    ],
)
def test_events_that_deserve_a_line_get_one(event: Validation, line: str | None) -> None:
    pieces = event_line(event)
    assert (None if pieces is None else paint(pieces, colour=False)) == line


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (0.123, "0.1"), (999.94, "999.9"), (1234.5, "1,234"), (1e6, "1,000,000")]
)
def test_numbers_are_short(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([1, 2], "ranks 1, 2"),
        ([4, 5, 6], "ranks 4 to 6"),
        ([0, 2, 3, 7], "ranks 0, 2, 3, 7"),
        (list(range(12)), "ranks 0 to 11"),
        (list(range(0, 24, 2)), "ranks 0, 2, 4, 6, 8, 10, 12, 14, … (12)"),
    ],
)
def test_many_ranks_are_named_shortly(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text


def test_a_cut_line_is_marked() -> None:
    assert paint(clip([("abc", "bold"), ("defg", "")], 5), colour=False) == "abcd…"


def test_colour_is_left_out_where_it_is_not_wanted() -> None:
    line = progress_line(trained(), 120, now=1007.0)
    assert "\x1b" not in paint(line, colour=False)
    assert re.sub(r"\x1b\[[0-9;]*m", "", paint(line, colour=True)) == paint(line, colour=False)


def view(state: RunState, clock: ManualClock, *, live: bool) -> tuple[ProgressView, io.StringIO]:
    stream = io.StringIO()
    return ProgressView(state, stream, live=live, colour=False, width=lambda: 80, now=clock, clock=clock), stream


def test_a_terminal_is_drawn_at_most_ten_times_a_second_and_only_when_something_changed() -> None:
    clock = ManualClock(1007.0)
    screen, stream = view(trained(), clock, live=True)
    for _ in range(50):
        screen.update([])
        clock.seconds += 0.02
    assert stream.getvalue().count("\r") == 1


def test_a_line_that_stays_takes_the_progress_line_away_first() -> None:
    screen, stream = view(trained(), ManualClock(1007.0), live=True)
    screen.update([])
    screen.print_line([("hello", "")])
    assert stream.getvalue().endswith("\r\x1b[Khello\n")


def test_a_log_gets_a_line_every_few_seconds_and_per_validation() -> None:
    clock = ManualClock(1007.0)
    screen, stream = view(trained(), clock, live=False)
    for _ in range(101):
        screen.update([])
        clock.seconds += 0.1
    screen.update([Validation(time=1.0, step=5, epoch=1, split="valid", loss=0.5)])
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[-1] == "valid epoch 1  step 5  loss 0.5000"
    assert "\r" not in stream.getvalue()


@pytest.mark.parametrize(("state", "lines"), [("joining", []), ("ready", []), ("training", ["run 1"])])
def test_the_first_line_waits_until_the_ranks_can_no_longer_refuse(state: RankStateName, lines: list[str]) -> None:
    run = RunState(world_size=1)
    screen, stream = view(run, ManualClock(1007.0), live=False)
    screen.introduce([("run 1", "")])
    run.apply(RankState(time=1.0, rank=0, state=state))
    screen.update([])
    assert stream.getvalue().splitlines() == lines
    screen.print_line([("said", "")])
    assert stream.getvalue().splitlines() == ["run 1", "said"]


def test_a_log_mentions_the_start_only_when_it_takes_long() -> None:
    clock = [1000.0]
    stream = io.StringIO()
    view = ProgressView(
        RunState(world_size=2), stream, live=False, colour=False, width=lambda: 80, now=lambda: clock[0],
        clock=lambda: clock[0],
    )  # fmt: skip
    view.introduce([("run one", "")])
    clock[0] += 14.0  # torch loads on a slow machine; a rank may still refuse
    view.update([])
    assert stream.getvalue() == ""
    clock[0] += 2.0
    view.update([])
    assert stream.getvalue().splitlines() == ["starting 2 ranks"], "a refused run would not be there any more"
    view.open()
    assert stream.getvalue().splitlines() == ["starting 2 ranks", "run one"]


def test_a_finding_is_broken_at_words_on_a_terminal_and_not_at_all_in_a_log() -> None:
    clock = ManualClock(1007.0)
    finding = Finding(
        time=1007.0, kind="cpu_contention", message="the rank waits " * 9, advice="set threads = 1; " * 12
    )
    line = f"warning: {finding.message}; {finding.advice}"
    screen, stream = view(trained(), clock, live=False)
    screen.update([finding])
    assert f"{line}\n" in stream.getvalue()
    screen, stream = view(trained(), clock, live=True)
    screen.update([finding])
    lines = stream.getvalue().partition("\r")[0].splitlines()
    assert len(lines) > 2
    assert max(map(len, lines)) <= 80
    assert " ".join(lines).split() == line.split(), "no word is broken"


def test_a_line_that_is_broken_keeps_its_styles_and_goes_on_below_its_text() -> None:
    pieces = [("finding    ", "dim"), ("rank 1 takes longer; compare its device", "alarm"), ("", "")]
    assert fitted(pieces, 80) == [pieces]
    assert fitted([("saved in ", ""), ("a\nb c", "dim")], 12) == [
        [("saved in ", ""), ("a␊b", "dim")],
        [(" " * 9, ""), ("c", "dim")],
    ]
    printed = [("  │ ", "dim"), ("Traceback (most recent call last)", "")]
    assert fitted(printed, 12) == [printed]
    assert fitted(pieces, 32) == [
        [("finding    ", "dim"), ("rank 1 takes longer;", "alarm")],
        [(" " * 11, ""), ("compare its device", "alarm")],
    ]
    assert fitted([("failed", "alarm"), (" in 9 s; no step", ""), (", with NaN", "alarm")], 16) == [
        [("failed", "alarm"), (" in 9 s;", "")],
        [("  ", ""), ("no step", ""), (", with", "alarm")],
        [("  ", ""), ("NaN", "alarm")],
    ]
