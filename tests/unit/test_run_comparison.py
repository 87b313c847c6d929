"""Comparison of runs: intervals that hold what they say, conditions, and runs that cannot be compared."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from random import Random

import msgspec
import pytest
import synthetic
from jsonschema import validate
from msgspec.structs import replace
from synthetic import BEGIN

from gputrain_tui import cli
from gputrain_tui.headless.comparison_text import comparison_lines
from gputrain_tui.history.comparison import DifferingValues
from gputrain_tui.report.comparison_in_turns import compare_in_turns, mean_interval, student_t_975
from gputrain_tui.report.comparison_limits import check_limits, check_limits_in_turns, parse_condition
from gputrain_tui.report.report_fields import (
    FindingReport,
    HostHardware,
    RankSummary,
    RunReport,
    ValidationReport,
    Verdict,
)
from gputrain_tui.report.run_comparison import (
    RecordedRun,
    RunComparison,
    block_steps,
    compare,
    figure_title,
    incomparable,
)
from gputrain_tui.report.step_blocks import (
    MIN_BLOCKS,
    StepBlocks,
    block_sums,
    difference_interval,
    mean,
    without_core_waits,
)
from gputrain_tui.state.figures import mean_step_ms
from gputrain_tui.state.finding_text import nan_since
from trainer.contract.errors import RequestError
from trainer.contract.record import Failure, Finding, Step

REPORT = RunReport(
    id="a", recipe="r", state="finished", world_size=2, run_dir="/r", step=100,
    verdict=Verdict(kind="compute", text=""),
    ranks=(RankSummary(rank=0, device="cpu", memory_peak_bytes=1000),),
    hosts=(HostHardware(host="h", node=0, cores=4),),
    validations=(ValidationReport(split="valid", step=100, loss=2.0),), loss_unit="nats",
)  # fmt: skip


def recorded(
    name: str = "a",
    *,
    steps: int = 640,
    slower: float = 0.0,
    loss: float = 1.0,
    seed: int = 0,
    noise: float = 0.02,
    core_wait_ms: float = 0.0,
    samples: int = 8,
    first: int = 1,
) -> RecordedRun:
    """Return a run of steps of 20 ms, whose forward pass takes a share of the step longer, and waits for a core."""
    blocks, undisturbed, random = StepBlocks(), StepBlocks(), Random(seed)
    for number in range(first, steps + 1):
        forward = 8.0 * (1 + random.gauss(0, noise)) + 20 * slower + core_wait_ms
        event = Step(
            time=BEGIN + number, rank=0, step=number, epoch=1, steps=1, samples=samples, lr=0.1,
            loss=loss + 10 / number, step_ms=12.0 + forward, data_ms=0.5, forward_ms=forward, backward_ms=9.0,
            optimizer_ms=1.0, other_ms=0.0, sync_exposed_ms=1.5,
            core_wait_ms={"forward": core_wait_ms} if core_wait_ms else None,
        )  # fmt: skip
        blocks.apply(event)
        undisturbed.apply(without_core_waits(event))
    return RecordedRun(report=replace(REPORT, id=name), blocks=blocks, undisturbed=undisturbed)


@pytest.mark.parametrize("counts_anew", [False, True])
def test_losses_of_a_script_that_was_started_again_belong_to_no_step(counts_anew: bool) -> None:
    again = recorded("b")
    runs = [recorded("a"), dataclasses.replace(again, report=replace(again.report, counts_anew=counts_anew))]
    conditions = [parse_condition(each) for each in ("loss@300>+1", "loss>+1", "loss_by_samples>+1", "step_ms>+50%")]
    comparison = check_limits(compare(runs, loss_steps=[300]), runs, conditions)
    told = [(limit.exceeded, limit.text.partition(" is not known of ")[2]) for limit in comparison.limits]
    unknown = (None, "b: its script was started again, and each start counts its steps from 1")
    assert told == [unknown if counts_anew else (False, "")] * 3 + [(False, "")]


def test_a_mean_loss_is_not_called_that_of_a_step() -> None:
    titles = [figure_title(each) for each in compare([recorded("a"), recorded("b")], loss_steps=[300]).figures]
    assert [title for title in titles if "loss" in title] == [
        "mean loss around step 640, nats",
        "mean loss by samples, nats",
        "mean loss by time, nats",
        "mean loss around step 300, nats",
    ]


@pytest.mark.parametrize(("steps", "first"), [(204, 103), (150, 1), (2_000, 1), (2_000, 701)])
def test_equal_losses_do_not_differ_however_long_the_runs_are_and_wherever_one_was_resumed(
    steps: int, first: int
) -> None:
    """A loss that falls: means of other steps would differ."""
    runs = [recorded("a", steps=2_000 if first == 701 else 204), recorded("b", steps=steps, first=first)]
    common = [1_500, 1_900] if first == 701 else [140]
    losses = {figure.name: figure.differences[0] for figure in compare(runs, loss_steps=common).figures}
    for name in ("loss", *(f"loss@{step}" for step in common)):
        assert losses[name].change == pytest.approx(0.0, abs=1e-12), name


def test_losses_before_a_resume_are_unknown_and_those_by_samples_are_not_made_up() -> None:
    runs = [recorded("a", steps=204), recorded("b", steps=204, first=103)]
    comparison = compare(runs, loss_steps=[102])
    assert {figure.name for figure in comparison.figures} >= {"loss", "loss@102"}
    assert not {"loss_by_samples", "loss_by_time"} & {figure.name for figure in comparison.figures}
    texts = ("loss@102>+0.1", "loss_by_samples>+0.1", "loss@300>+0.1")
    checked = check_limits(comparison, runs, [parse_condition(text) for text in texts])
    assert [(limit.exceeded, limit.text) for limit in checked.limits] == [
        (None, "loss@102 is not known of b, whose steps are 103 to 204"),
        (None, "loss_by_samples is not known of a: what a resumed run had seen before is not in its record"),
        (None, "loss@300 is not known of a, whose steps are 1 to 204"),
    ]


def measured(name: str, recall: float) -> RecordedRun:
    """Return a run with a metric of the user's own."""
    run = recorded(name)
    return dataclasses.replace(run, report=replace(run.report, metrics={"recall@5": recall}))


def autoregressive(random: Random, count: int, memory: float) -> list[tuple[float, float]]:
    values = [random.gauss(0, 1)]
    while len(values) < count:
        values.append(memory * values[-1] + (1 - memory**2) ** 0.5 * random.gauss(0, 1))
    return [(100 + value, 1.0) for value in values]


@pytest.mark.parametrize("memory", [0.0, 0.3])
def test_about_95_of_100_intervals_hold_the_true_difference(memory: float) -> None:
    random, held = Random(1), 0
    for _ in range(100):
        before, after = (autoregressive(random, 96, memory) for _ in range(2))
        interval = difference_interval(before, after, relative=False)
        assert interval is not None
        held += interval[0] <= 0 <= interval[1]
    assert 84 <= held <= 99


def test_the_other_way_round_a_difference_has_the_other_sign() -> None:
    one, other = autoregressive(Random(1), 64, 0.2), autoregressive(Random(2), 64, 0.2)
    there = difference_interval(one, other, relative=False)
    back = difference_interval(other, one, relative=False)
    assert there is not None
    assert back is not None
    assert there == pytest.approx((-back[1], -back[0]), abs=0.05)


def test_of_few_blocks_there_is_no_interval() -> None:
    assert difference_interval([(1.0, 1.0)] * 15, [(1.0, 1.0)] * 99, relative=True) is None


@pytest.mark.parametrize("steps", [1, 7, 127, 128, 5_000])
def test_blocks_hold_every_step_once_in_bounded_number(steps: int) -> None:
    run = recorded(steps=steps, noise=0.0)
    counted = run.blocks.around(steps) if steps == 1 else [*run.blocks._blocks.values()]
    assert len(counted) <= 2 * MIN_BLOCKS
    assert sum(sums.steps for block in run.blocks._blocks.values() for sums in block.values()) == steps
    step_ms = block_sums(run.blocks.after_warm_up(), mean_step_ms, block_steps)
    assert mean(step_ms) == pytest.approx(20.0)


def test_figures_are_over_all_steps_however_many_an_event_covers() -> None:
    """Every tenth step takes 300 ms and has an event of its own; two ranks put the others into events differently."""
    blocks = StepBlocks()
    total_ms = [0.0, 0.0]
    for step in range(1, 401):
        for rank, batch in ((0, 9), (1, 3)):
            slow = step % 10 == 0
            covered = 1 if slow else batch if step % 10 % batch == 0 else 0
            if covered:
                ms = 300.0 if slow else 20.0
                total_ms[rank] += ms * covered
                blocks.apply(
                    Step(time=BEGIN + step, rank=rank, step=step, epoch=1, steps=covered, samples=32 * covered,
                         lr=0.1, loss=2.0, step_ms=ms, data_ms=ms - 5, forward_ms=2.0, backward_ms=2.0,
                         optimizer_ms=1.0, other_ms=0.0, sync_exposed_ms=0.0)
                )  # fmt: skip
    run = RecordedRun(report=REPORT, blocks=blocks, undisturbed=blocks)
    found = {each.name: each.differences[0].before for each in compare([run, run]).figures}
    step_ms = total_ms[0] / 400
    assert total_ms == [400 * 48.0] * 2
    assert found["step_ms"] == pytest.approx(step_ms, rel=0.02)
    assert found["data_ms"] == pytest.approx(step_ms - 5, rel=0.02)
    assert found["steps_per_s"] == pytest.approx(1e3 / step_ms, rel=0.02)
    assert found["throughput"] == pytest.approx(64e3 / step_ms, rel=0.02)
    assert found["loss"] == pytest.approx(2.0)


def limited(name: str) -> RecordedRun:
    """Return a run that a straggler has limited for most steps, but not in the last ones."""
    run = recorded(name)
    verdict = Verdict(kind="straggler", text="rank 1 was late until step 600", is_problem=True)
    return dataclasses.replace(run, report=replace(run.report, verdict=verdict))


def checked(condition: str, run: RecordedRun, first: RecordedRun | None = None) -> tuple[bool | None, str]:
    runs, parsed = [first or recorded(), run], parse_condition(condition)
    (limit,) = check_limits(compare(runs, loss_steps=[] if parsed.at is None else [parsed.at]), runs, [parsed]).limits
    return limit.exceeded, limit.text


LIMITS: dict[str, tuple[str, RecordedRun, bool | None, str]] = {
    "slower": ("step_ms>+5%", recorded("b", slower=0.1, seed=1), True, "most by forward (+2.0 ms)"),
    "as fast": ("step_ms>+5%", recorded("b", seed=1), False, "within the limit"),
    "slower among few others": ("step_ms>+5%", recorded("b", slower=0.1, core_wait_ms=0.3, seed=1), True, "by forward"),
    "a phase": ("forward_ms>+10%", recorded("b", slower=0.1, seed=1), True, "forward_ms +25."),
    "less throughput": ("throughput<-5%", recorded("b", slower=0.1, seed=1), True, "most by forward"),
    "more throughput": ("throughput<-5%", recorded("b", slower=-0.1, seed=1), False, "within the limit"),
    "loss at a step": ("loss@300>+0.02", recorded("b", loss=1.1), True, "loss@300 +0.1000"),
    "loss of both ends": ("loss>+0.02", recorded("b", loss=1.01), False, "within the limit"),
    "loss of as many samples": (
        "loss_by_samples>+0.02",
        recorded("b", samples=16, loss=1.1),
        True,
        "loss_by_samples +0.115",
    ),
    "loss after as much time": ("loss_by_time>+0.02", recorded("b", slower=1.0, loss=1.0), False, "loss_by_time +0.01"),
    "a step that is not there": ("loss@9000>+0.02", recorded("b"), None, "loss@9000 is not known of a"),
    "few steps": ("step_ms>+5%", recorded("b", steps=9), None, "too few steps for an interval"),
    "validation": ("valid>+0.1", recorded("b"), False, "valid +0.0000: within the limit"),
    "memory": ("peak_memory>+10%", recorded("b"), False, "peak_memory +0.0 %: within the limit"),
    "a metric": ("metric:recall@5 <-0.01", measured("b", 0.88), True, "metric:recall@5 -0.0200"),
    "a metric that is better": ("metric:recall@5<-0.01", measured("b", 0.92), False, "within the limit"),
    "another metric": ("metric:recal@5>+0.1", measured("b", 0.9), None, "did you mean 'metric:recall@5'"),
    "a metric of one run": ("metric:recall@5>+0.1", recorded("b"), None, "metric:recall@5 is not known of b"),
    "a finding": ("finding:straggler", recorded("b"), False, "no straggler stands"),
    "a finding of most steps": ("finding:straggler", limited("b"), True, "rank 1 was late until step 600"),
}


UNDECIDED: dict[str, tuple[str, RecordedRun, str]] = {
    "noise": ("step_ms>+5%", recorded("b", slower=0.03, seed=1, noise=0.5), "this noise; it would take about "),
    "at the limit": ("step_ms>+5%", recorded("b", slower=0.05, seed=1, noise=0.5), "over 100 times as many steps"),
    "slower by others": ("step_ms>+5%", recorded("b", core_wait_ms=9.0, seed=1), "0 % of the time before and 31 % now"),
    "slower among others": ("step_ms>+5%", recorded("b", slower=0.1, core_wait_ms=9.0, seed=1), "waited for cores"),
    "less throughput by others": ("throughput<-5%", recorded("b", core_wait_ms=9.0, seed=1), "waited for cores"),
}


@pytest.mark.parametrize("name", UNDECIDED)
def test_what_noise_or_others_hide_is_said_to_be_undecided(name: str) -> None:
    condition, run, text = UNDECIDED[name]
    runs = [recorded(), run]
    comparison = check_limits(compare(runs), runs, [parse_condition(condition)])
    (limit,) = comparison.limits
    assert (limit.exceeded, limit.decided) == (False, False), limit.text
    assert text in limit.text
    assert "cannot be told" in limit.text
    assert "".join(text for text, _ in comparison_lines(comparison, 100)[-1]).startswith("undecided ")


@pytest.mark.parametrize(("before_ms", "now_ms"), [(20.0, 0.0), (3.0, 3.0)], ids=["others left", "equal others"])
def test_a_change_within_what_others_took_is_not_decided(before_ms: float, now_ms: float) -> None:
    """Of steps of 20 ms: equal runs differ by more than a tenth where each waits for an eighth of the time."""
    runs = [recorded(core_wait_ms=before_ms), recorded("b", slower=0.1, core_wait_ms=now_ms, seed=1)]
    (limit,) = check_limits(compare(runs), runs, [parse_condition("step_ms>+5%")]).limits
    assert (limit.exceeded, limit.decided) == (False, False), limit.text


@pytest.mark.parametrize("name", LIMITS)
def test_a_limit_is_exceeded_only_beyond_the_interval(name: str) -> None:
    condition, run, exceeded, text = LIMITS[name]
    found = checked(condition, run, measured("a", 0.9))
    assert found[0] is exceeded
    assert text in found[1]


def test_a_change_without_an_interval_is_not_called_noise() -> None:
    found = {each.name: each.differences[0] for each in compare([recorded(), recorded("b", loss=1.5)]).figures}
    assert found["loss"].interval is None
    assert (found["loss"].change, found["loss"].is_noise, found["loss"].beyond_noise) == (
        pytest.approx(0.5),
        False,
        False,
    )
    assert (found["valid"].is_noise, found["step_ms"].is_noise) == (True, True)


def test_versions_that_differ_are_named_unless_one_record_has_none() -> None:
    def on(*versions: dict[str, str]) -> RecordedRun:
        hosts = tuple(HostHardware(host=f"h{node}", node=node, versions=each) for node, each in enumerate(versions))
        run = recorded(steps=9)
        return dataclasses.replace(run, report=replace(run.report, hosts=hosts))

    before = on({"torch": "2.12.0", "Python": "3.12.1"}, {"torch": "2.12.0", "Python": "3.12.1"})
    after = on({"torch": "2.13.0", "Python": "3.12.1", "NCCL": "2.28"}, {"torch": "2.12.0", "Python": "3.12.1"})
    comparison = compare([before, after])
    assert {each.key: each.values for each in comparison.versions} == {
        "torch": ("2.12.0", "2.12.0, 2.13.0"),
        "NCCL": ("", "2.28"),
    }
    text = "\n".join("".join(piece for piece, _ in line) for line in comparison_lines(comparison, 100))
    assert "torch  2.12.0 → 2.12.0, 2.13.0" in text
    assert "NCCL  – → 2.28" in text
    assert compare([before, on({})]).versions == ()


def test_several_runs_are_one_table_of_settings_and_figures_with_the_best_named() -> None:
    def of(name: str, accuracy: float, **changes: float) -> RecordedRun:
        run = recorded(name, **changes)  # type: ignore[arg-type]
        return dataclasses.replace(run, report=replace(run.report, metrics={"accuracy": accuracy}))

    runs = [of("base", 0.7), of("same", 0.8, seed=1), of("slow", 0.9, slower=0.2), of("good", 0.6, loss=0.5, seed=2)]
    settings = [
        DifferingValues(key="name", values=("base", "same", "slow", "good")),
        DifferingValues(key="train.lr", values=("0.1", "", "0.3", "0.4")),
    ]

    def shown(width: int, recipe: list[DifferingValues]) -> list[str]:
        lines = comparison_lines(compare(runs, recipe=recipe), width)
        return ["".join(text for text, _ in line) for line in lines]

    title, *rows = shown(100, settings)
    assert " ".join(title.split()) == "run lr loss near 640 valid accuracy step ms samples/s memory"
    base, same, slow, good = (row.split() for row in rows[:4])
    assert (base[:2], same[:2], slow[:2]) == (["base", "0.1"], ["same", "–"], ["slow", "0.3"])
    assert good[2].endswith("*"), "the lowest loss"
    assert "*" not in "".join(slow), "more of a user's own metric is not known to be better"
    assert "~" in "".join(same)
    assert "~" not in "".join(slow[5:]), "a fifth slower is no noise"
    narrow = shown(60, settings)
    assert max(map(len, narrow)) <= 60
    assert any(line.startswith("  too wide for this terminal: ") for line in narrow)
    many = [DifferingValues(key=f"train.key_{n}", values=("a" * 30, "b", "c", "d")) for n in range(9)]
    text = "\n".join(shown(100, [*settings, *many]))
    assert max(map(len, text.splitlines())) <= 100
    assert "  setting      1" in text
    assert "train.key_8" in text
    assert shown(100, [])[5] == "  the same recipe"


REFUSED = {
    "stepms>+5%": "did you mean 'step_ms'",
    "step_ms": "write FIGURE>+LIMIT",
    "step_ms>+5": "step_ms takes a limit in percent",
    "loss@10>+5%": "loss takes an absolute limit",
    "step_ms@10>+5%": "only a loss is taken at a step",
    "step_ms>-5%": "> takes a limit of 0 or more",
    "throughput<5%": "< one of 0 or less",
    "finding:": "name a kind of finding",
    "finding:stragler": "did you mean 'straggler'",
    "finding:of mine": "`gputrain help findings` lists them",
    "": "is no condition",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_no_condition_is_refused_in_a_line(text: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_condition(text)
    assert REFUSED[text] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_hardware_or_ranks_are_named() -> None:
    gpu = RankSummary(rank=0, device="NVIDIA H100 GPU-1")
    assert incomparable([REPORT, replace(REPORT, id="b")]) == []
    assert incomparable([REPORT, replace(REPORT, id="b", world_size=3)]) == ["a has 2 ranks, b has 3"]
    assert incomparable([REPORT, replace(REPORT, id="b", step=0)]) == ["b has no step"]
    assert incomparable([REPORT, replace(REPORT, id="b", ranks=(gpu,))]) == [
        "devices: 1 x cpu in a, 1 x NVIDIA H100 in b"
    ]
    other = HostHardware(host="h", node=0, cores=8)
    assert incomparable([REPORT, replace(REPORT, id="b", hosts=(other,))]) == ["cores of the hosts: 4 in a, 8 in b"]
    same = replace(gpu, device="NVIDIA H100 GPU-2")
    assert incomparable([replace(REPORT, ranks=(gpu,)), replace(REPORT, id="b", ranks=(same,))]) == []


def test_the_command_tells_by_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path))
    runs = tmp_path / "runs"
    first_run = synthetic.run(runs, name="a", steps=300, status="finished")
    first = first_run.id
    equal = synthetic.run(runs, name="b", steps=300, status="finished", seed=8).id
    late_run = synthetic.run(runs, name="c", steps=300, status="finished", straggler=1)
    late = late_run.id
    for run, lr in ((first_run, 0.1), (late_run, 0.2)):
        table = f'[[cluster.nodes]]\ncpu_ranks = 2\n[task]\ndata = "stdlib"\n[train]\ntask = "lm"\nlr = {lr}\n'
        run.dir.recipe.write_text(table)
    late_text = late_run.dir.recipe.read_text()
    late_run.dir.recipe.write_text(late_text.replace('"lm"', '"gone.py:Task"'))
    assert cli.main(["compare", first, late]) == 0
    out, _ = capsys.readouterr()
    assert "the recipes are not compared" in out
    assert "task file gone.py does not exist" in out
    assert "the same recipe" not in out
    late_run.dir.recipe.write_text(late_text)
    wide = synthetic.run(runs, name="d", steps=300, ranks_per_node=3, status="finished").id
    limit = ("--fail-on", "step_ms>+5%")
    assert cli.main(["compare", first, equal, *limit]) == 0
    assert cli.main(["compare", first, equal, late, *limit]) == 1
    out, err = capsys.readouterr()
    assert "most by data" in out
    assert f"{late} exceeds step_ms>+5%" in err
    assert cli.main(["compare", first, equal, "--fail-on", "loss@9000>+1"]) == 2
    out, err = capsys.readouterr()
    assert "unknown   loss@9000>+1: loss@9000 is not known" in out
    assert "cannot be checked: " in err
    assert cli.main(["compare", first, wide]) == 2
    assert "has 2 ranks" in capsys.readouterr().err
    assert cli.main(["compare", first, wide, "--anyway"]) == 0
    without = synthetic.run(runs, name="e", steps=0, status="finished").id
    assert cli.main(["compare", first, without, "--anyway", *limit]) == 2
    assert f"step_ms is not known of {without}\n" in capsys.readouterr().err
    assert cli.main(["compare", first, late, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    validate(data, msgspec.json.schema(RunComparison))
    assert data["schema_version"] == 1
    unsure = ("--fail-on", "step_ms>+0%")
    assert [cli.main(["compare", first, equal, *unsure, *strict]) for strict in ([], ["--strict"])] == [0, 1]
    assert "may exceed step_ms>+0%" in capsys.readouterr().err
    assert {key["key"]: key["values"] for key in data["recipe"]} == {"train.lr": ["0.1", "0.2"]}


def test_the_loss_near_a_step_does_not_depend_on_which_steps_share_an_event() -> None:
    losses = [3.0 - 0.004 * number + (number % 3) * 0.1 for number in range(600)]
    found = []
    for longest in (1, 3, 7):
        blocks, begin = StepBlocks(), 0
        while begin < len(losses):
            several = losses[begin : begin + longest]
            begin += len(several)
            event = Step(time=BEGIN + begin, rank=0, step=begin, epoch=1, steps=len(several), samples=8 * len(several),
                         loss=sum(several) / len(several), losses=several, step_ms=20.0)  # fmt: skip
            blocks.apply(event)
        run = RecordedRun(report=REPORT, blocks=blocks, undisturbed=blocks)
        figures = {each.name: each.differences[0].before for each in compare([run, run], loss_steps=[200]).figures}
        found.append((figures["loss"], figures["loss@200"]))
    assert found == [pytest.approx(found[0])] * 3


def turns(
    *, rounds: int, slower: float, seed: int = 0, own_noise: float = 0.02
) -> list[tuple[RecordedRun, RecordedRun]]:
    """Return rounds on a machine that takes up to three times as long in some rounds, for both runs of it."""
    random = Random(0)
    pairs = []
    for number in range(rounds):
        machine = random.uniform(0.0, 2.0)
        one, other = (machine + (1 + machine) * random.gauss(0, 0.02) for _ in range(2))
        pairs.append(
            (
                recorded(f"a{number}", slower=one, seed=2 * number, steps=70),
                recorded(f"b{number}", slower=other + (1 + machine) * slower, seed=2 * number + 1, steps=70),
            )
        )
    return pairs


T_975 = {2: 4.30265, 3: 3.18245, 4: 2.77645, 9: 2.26216, 29: 2.04523}


def test_the_quantile_of_students_distribution_is_that_of_the_tables() -> None:
    assert {freedom: student_t_975(freedom) for freedom in T_975} == pytest.approx(T_975, rel=2e-3)


def test_about_95_of_100_intervals_of_means_hold_the_true_mean() -> None:
    random = Random(1)
    held = 0
    for _ in range(2000):
        low, high = mean_interval([random.gauss(0.1, 0.3) for _ in range(5)])
        held += low <= 0.1 <= high
    assert 0.935 <= held / 2000 <= 0.965


@pytest.mark.parametrize(("slower", "result"), [(0.0, (False, True)), (0.15, (True, True)), (0.05, (False, False))])
def test_in_turns_what_a_machine_takes_from_both_runs_is_in_no_difference(
    slower: float, result: tuple[bool, bool]
) -> None:
    rounds = turns(rounds=6, slower=slower)
    comparison = check_limits_in_turns(compare_in_turns(rounds), rounds, [parse_condition("step_ms>+5%")])
    (limit,) = comparison.limits
    assert (limit.exceeded, limit.decided) == result, limit.text
    if limit.exceeded:
        assert "most by forward" in limit.text
    if not limit.decided:
        assert "rounds" in limit.text
    text = "".join(piece for piece, _ in comparison_lines(comparison, 100)[0])
    assert text == "b5 against a5, means of 6 rounds"
    assert comparison.rounds[0] == ("a0", "b0")


def test_in_turns_the_other_way_round_a_difference_has_the_other_sign() -> None:
    rounds = turns(rounds=4, slower=0.2)
    forth, back = (
        {each.name: each.differences[0] for each in compare_in_turns(pairs).figures}["step_ms"]
        for pairs in (rounds, [(other, one) for one, other in rounds])
    )
    assert forth.change is not None
    assert back.change is not None
    assert forth.interval is not None
    assert back.interval is not None
    assert (1 + forth.change) * (1 + back.change) == pytest.approx(1)
    assert (1 + forth.interval[0]) * (1 + back.interval[1]) == pytest.approx(1)
    assert forth.before is not None
    assert forth.now is not None
    assert forth.now / forth.before == pytest.approx(1 + forth.change), "the change is that of the values beside it"


def test_in_turns_a_figure_that_a_round_lacks_is_left_out_and_what_changed_is_named() -> None:
    rounds = turns(rounds=3, slower=0.0)
    rounds[2] = (measured("a2", 0.9), measured("b2", 0.8))
    values = {
        "train.lr": ("0.1", "0.2", "0.1", "0.2", "0.1", "0.2"),
        "train.seed": ("1", "1", "2", "2", "3", "3"),
        "train.momentum": ("0", "0", "0", "0", "0", "0.9"),
    }
    recipe = [DifferingValues(key=key, values=each) for key, each in values.items()]
    comparison = compare_in_turns(rounds, recipe=recipe)
    assert "metric:recall@5" not in {each.name for each in comparison.figures}
    assert {each.key: each.values for each in comparison.recipe} == {
        "train.lr": ("0.1", "0.2"),
        "train.momentum": ("0", "0.9"),
    }
    assert comparison.incomparable == ("train.momentum is not the same in all rounds",)


def test_in_turns_a_finding_counts_that_is_new_in_most_rounds() -> None:
    late = FindingReport(kind="straggler", severity="warning", message="rank 1 is late", time=BEGIN)
    rounds = turns(rounds=3, slower=0.0)
    for number, new in enumerate((True, True, False)):
        one, other = rounds[number]
        found = (late,) if new else ()
        rounds[number] = (one, dataclasses.replace(other, report=replace(other.report, findings=found)))
    condition = parse_condition("finding:straggler")
    (limit,) = check_limits_in_turns(compare_in_turns(rounds), rounds, [condition]).limits
    assert (limit.exceeded, limit.text) == (True, "rank 1 is late (in 2 of 3 rounds)")
    rounds[0] = (rounds[0][1], rounds[0][1])
    (limit,) = check_limits_in_turns(compare_in_turns(rounds), rounds, [condition]).limits
    assert limit.exceeded is False


def test_the_command_compares_rounds_of_two_recipes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path))
    runs = tmp_path / "runs"
    for number, name in enumerate(["base", "change", "change", "base", "base", "change"]):
        late = 1 if name == "change" else None
        synthetic.run(runs, name=name, status="finished", straggler=late, seed=number, started=BEGIN + 60 * number)
    limit = ("--rounds", "3", "--fail-on", "step_ms>+5%")
    assert cli.main(["compare", "base", "change", *limit]) == 1
    out, err = capsys.readouterr()
    assert "means of 3 rounds" in out
    assert "exceeds step_ms>+5%" in err
    assert "most by data" in err
    assert cli.main(["compare", "change", "base", *limit]) == 0
    capsys.readouterr()
    assert cli.main(["compare", "base", "change", *limit, "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    validate(data, msgspec.json.schema(RunComparison))
    assert [len(each) for each in data["rounds"]] == [2, 2, 2]
    refused = {
        ("base", "change", "--rounds", "2"): "N is 3 or more, with two names of recipes",
        ("base", "--rounds", "3"): "name two runs or more",
        ("base", "change", "--rounds", "4"): "the recipe 'base' has 3 runs",
        ("base", "chang", "--rounds", "3"): "the recipe 'chang' has 0 runs; did you mean 'change'?",
        ("base", "base", "--rounds", "3"): "name two recipes",
    }
    for words, message in refused.items():
        assert cli.main(["compare", *words]) == 2
        err = capsys.readouterr().err
        assert message in err
        assert err.count("\n") == 1
    synthetic.run(runs, name="change", status="finished", started=BEGIN + 999)
    synthetic.run(runs, name="base", status="finished", started=BEGIN + 1999)
    synthetic.run(runs, name="base", status="finished", started=BEGIN + 2999)
    assert cli.main(["compare", "base", "change", "--rounds", "3"]) == 2
    assert "follow each other; make the runs in turns" in capsys.readouterr().err


NAN_AT_300 = dataclasses.replace(recorded("bad"), nan_since=300)
SINCE = "the loss of bad is NaN or infinite since step 300"


@pytest.mark.parametrize(
    ("runs", "condition", "exceeded", "text"),
    [
        ((recorded("a"), NAN_AT_300), "loss>+9", True, SINCE),
        ((recorded("a"), NAN_AT_300), "loss_by_samples>+9", True, SINCE),
        ((recorded("a"), NAN_AT_300), "valid>+9", True, SINCE),
        ((recorded("a"), NAN_AT_300), "loss@300>+9", True, SINCE),
        ((recorded("a"), NAN_AT_300), "loss@200>+9", False, "loss@200 "),
        ((NAN_AT_300, recorded("b")), "loss>+9", False, SINCE),
        ((NAN_AT_300, NAN_AT_300), "loss>+9", None, SINCE),
        ((recorded("a"), NAN_AT_300), "step_ms>+50%", False, "step_ms "),
    ],
)
def test_a_loss_that_became_nan_is_beyond_any_limit_and_blamed_on_its_own_run(
    runs: tuple[RecordedRun, RecordedRun], condition: str, exceeded: bool | None, text: str
) -> None:
    conditions = [parse_condition(condition)]
    steps = [each.at for each in conditions if each.at is not None]
    comparison = check_limits(compare(runs, loss_steps=steps), runs, conditions)
    (limit,) = comparison.limits
    assert (limit.exceeded, limit.run) == (exceeded, runs[1].report.id)
    assert limit.text.startswith(text)
    told = "\n".join("".join(text for text, _ in line) for line in comparison_lines(comparison, 100))
    assert ("no loss  NaN or infinite since step 300 in bad" in told) == (NAN_AT_300 in runs)


def test_over_rounds_a_first_run_with_nan_leaves_no_mean() -> None:
    rounds = [(recorded("a"), recorded("b")), (NAN_AT_300, recorded("c")), (recorded("d"), recorded("e"))]
    comparison = check_limits_in_turns(compare_in_turns(rounds), rounds, [parse_condition("loss>+9")])
    assert [(limit.exceeded, limit.text) for limit in comparison.limits] == [(None, SINCE)]


@pytest.mark.parametrize(
    ("failure", "findings", "since"),
    [
        (None, [], None),
        (Failure(time=1.0, kind="non_finite", message="m", rank=0, step=4), [], 4),
        (Failure(time=1.0, kind="exception", message="m", rank=0, step=4), [], None),
        (None, [Finding(time=1.0, kind="non_finite", message="m", rank=0, step=13, cause="loss")], 13),
        (None, [Finding(time=1.0, kind="straggler", message="m", rank=0, step=13)], None),
    ],
)
def test_the_loss_is_nan_since_the_failure_or_the_finding(
    failure: Failure | None, findings: list[Finding], since: int | None
) -> None:
    assert nan_since(failure, findings) == since
