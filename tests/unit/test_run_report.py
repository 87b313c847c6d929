"""The report of a run: verdict, findings with their times, and a page that stays one with any record."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import synthetic
from jsonschema import validate
from plans import plan_for
from synthetic import BEGIN, write

from gputrain_tui import cli
from gputrain_tui.diagnosis.roll_up import marking_findings
from gputrain_tui.headless.progress import paint
from gputrain_tui.headless.report_text import report_lines
from gputrain_tui.history.hardware_series import HardwareSeries
from gputrain_tui.history.metric_curves import MetricCurves
from gputrain_tui.history.run_folders import Run, create_by_hand, find
from gputrain_tui.history.series import Series
from gputrain_tui.history.status_file import write_status
from gputrain_tui.lifecycle.remote_nodes import RemoteNode, write_remote_node
from gputrain_tui.report.load_report import previous_run, read_run_record, recipe_changes, run_facts
from gputrain_tui.report.report_fields import RunFacts, RunReport
from gputrain_tui.report.run_charts import run_charts
from gputrain_tui.report.run_report import past_findings, run_report, verdict
from gputrain_tui.report.step_blocks import StepBlocks
from gputrain_tui.state import RunState
from gputrain_tui.state.finding_text import run_mark
from gputrain_tui.state.rank_state import KEPT
from gputrain_tui.tables import duration
from trainer.checkpoint import CheckpointWriter, Saved, write_file
from trainer.contract.record import (
    AnyEvent,
    Checkpoint,
    Checksum,
    CollectiveGroup,
    Failure,
    Finding,
    GpuSample,
    GroupSync,
    NodeSample,
    RankState,
    RunDir,
    ShareChange,
    Step,
    Validation,
    World,
)


def step(number: int, rank: int = 0, **parts: float) -> Step:
    ms = {"data_ms": 1.0, "forward_ms": 4.0, "backward_ms": 6.0, "optimizer_ms": 1.0, "other_ms": 0.0} | parts
    waits = ms.pop("sync_exposed_ms", 0.5)
    return Step(
        time=BEGIN + number, rank=rank, step=number, epoch=1, steps=1, samples=8, loss=1.0, lr=0.1,
        step_ms=sum(ms.values()) + waits, sync_exposed_ms=waits, **ms,
    )  # fmt: skip


def finding(kind: str, at: float, **more: Any) -> Finding:
    return Finding(time=BEGIN + at, kind=kind, message=f"{kind} it is", step=int(at), **more)


CRASH = Failure(time=BEGIN + 9, rank=1, host="a", kind="exception", message="ValueError: no", step=7, in_step=8)
VERDICTS: dict[str, tuple[list[AnyEvent], str, str, str]] = {
    "computing": ([step(1)], "finished", "compute", "compute-bound: forward and backward take 80 % of a step of 12.5"),
    "data": ([step(1, data_ms=30.0)], "finished", "data", "input-bound: waiting for data and copying it takes 72 %"),
    "network": ([step(1, sync_exposed_ms=30.0)], "finished", "sync", "communication-bound: "),
    "the network, on both ranks": (
        [step(1, sync_exposed_ms=30.0), step(1, rank=1, sync_exposed_ms=25.0)], "finished", "sync", "communication-b",
    ),
    "a rank that is late without a finding": (
        [step(1, sync_exposed_ms=30.0), step(1, rank=1, data_ms=28.0)],
        "finished", "sync", "bound by its slowest ranks: waiting for other ranks, least on rank 1, takes 37 %",
    ),
    "optimizer": ([step(1, optimizer_ms=30.0)], "running", "optimizer", "optimizer-bound: the optimizer takes 72 %"),
    "its own code": ([step(1, other_ms=30.0)], "finished", "other", "bound by its own code: "),
    "nothing": ([], "failed", "unmeasured", "no step was recorded"),
    "a finding": ([step(1), finding("straggler", 5, rank=1)], "running", "straggler", "straggler it is"),
    "the gravest finding": (
        [finding("straggler", 5, rank=1), finding("desync", 6, severity="critical")], "running", "desync", "desync it",
    ),
    "a finding that is over": (
        [finding("straggler", 5, rank=1), finding("straggler", 7, rank=1, state="cleared"), step(20)],
        "finished", "compute", "compute-bound",
    ),
    "a finding that stood for most of the steps": (
        [
            finding("straggler", 5, rank=1, diagnosed=True),
            finding("straggler", 16, rank=1, state="cleared", diagnosed=True),
            step(20),
        ],
        "finished", "straggler", "straggler it is; so it was for 11 of 20 steps, until step 16",
    ),
    "what only informs": ([step(1), finding("imbalance", 5, severity="info")], "finished", "compute", "compute-bound"),
    "a failure before a finding": (
        [step(1), finding("straggler", 5, rank=0), CRASH], "failed", "failure", "rank 1 exception in step 8",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VERDICTS)
def test_the_verdict_is_failure_then_finding_then_largest_part(name: str) -> None:
    events, status, kind, text = VERDICTS[name]
    state = RunState(world_size=2)
    state.apply_all(events)
    found = verdict(state, facts(status))
    assert found.kind == kind
    assert found.text.startswith(text)


@pytest.mark.parametrize(
    ("past", "mark"),
    [
        ([(5, 16)], "rank 1 slow, until step 16"),
        ([(2, 7), (10, 19)], "rank 1 slow, until step 19"),
        ([(5, 7)], ""),
    ],
)
def test_what_stood_for_most_steps_marks_the_run_that_it_slowed(past: Sequence[tuple[int, int]], mark: str) -> None:
    state = RunState(world_size=2)
    for raised, cleared in past:
        for at, what in ((raised, "raised"), (cleared, "cleared")):
            state.apply_all([finding("straggler", at, rank=1, state=what, diagnosed=True)])
    state.apply_all([step(20)])
    assert run_mark(marking_findings(state)) == mark
    assert (verdict(state, facts("finished")).kind == "straggler") is bool(mark)
    state.apply_all([finding("restarted", 20, severity="info"), step(21)])
    assert run_mark(marking_findings(state)) == ""


@pytest.mark.parametrize(("duration_s", "is_named"), [(None, False), (60.0, False), (100.0, True)])
def test_the_verdict_names_the_time_outside_of_steps_where_it_is_most_of_the_run(
    duration_s: float | None, is_named: bool
) -> None:
    state = RunState(world_size=2)
    state.apply_all([step(1, rank, data_ms=40_000.0) for rank in range(2)])
    text = verdict(state, facts("finished", duration_s=duration_s)).text
    assert text.startswith("input-bound")
    assert ("; but only 40 s of 1:40 are steps: starting, and evaluations" in text) is is_named


def test_a_run_without_a_step_has_none_in_its_report_as_in_the_list() -> None:
    assert run_report(RunState(world_size=2), facts("failed")).step is None


def facts(status: str, **more: Any) -> RunFacts:
    return RunFacts(id="a", recipe="r", state=status, run_dir="/r", **more)


def test_a_failure_that_a_full_disk_left_out_of_the_record_is_the_verdict_by_the_status() -> None:
    state = RunState(world_size=2)
    state.apply_all([step(1), finding("record_incomplete", 5), finding("checkpoint_lost", 6, severity="critical")])
    assert verdict(state, facts("running")).kind == "checkpoint_lost"
    message = "trained, but the last checkpoint is step 2; that of step 9 was not kept: No space left on device"
    found = verdict(state, facts("failed", message=message, failed_rank=0, failed_host="h2"))
    assert (found.kind, found.text, found.rank, found.host, found.is_problem) == ("failure", message, 0, "h2", True)


def test_a_finding_has_the_time_at_which_it_was_raised_first_and_at_which_it_was_cleared() -> None:
    events = [
        finding("straggler", 10, rank=1),
        finding("straggler", 12, rank=1, severity="critical"),
        finding("imbalance", 15),
        finding("straggler", 20, rank=1, state="cleared"),
        finding("straggler", 30, rank=1),
        finding("memory_creep", 40, rank=0, state="cleared"),
    ]
    state = RunState(world_size=2)
    state.apply_all(events)
    found = past_findings(state)
    assert [(each.kind, each.time - BEGIN, each.step, each.cleared_step, each.severity) for each in found] == [
        ("straggler", 10, 10, 20, "critical"),
        ("imbalance", 15, 15, None, "warning"),
        ("straggler", 30, 30, None, "warning"),
    ]


def test_messages_are_wrapped_and_a_list_of_the_newest_findings_says_so(tmp_path: Path) -> None:
    run = synthetic.run(tmp_path, steps=20, status="finished")
    for number in range(KEPT + 1):
        write(run.dir.run_events, Finding(time=BEGIN + number, kind=f"kind{number % 9}", message="word " * 30))
    data, lines = told(run)
    assert data["earlier_findings"] is True
    assert "  … and earlier ones, which only the record has" in lines
    assert max(map(len, lines)) <= 100
    assert sum(line.startswith("      word") for line in lines) == 9


def test_the_report_of_a_stopped_run_says_what_stopped_it(tmp_path: Path) -> None:
    run = synthetic.run(tmp_path, steps=20, status="stopped")
    message = "lost contact with the command that started it at step 20, saved step_20.pt"
    write_status(run.dir, msgspec.structs.replace(run.status, message=message))
    _, lines = told(find(run.id, run.dir.path.parent))
    assert lines[1] == message


def test_a_finding_of_a_rank_that_the_run_no_longer_has_does_not_stand() -> None:
    state = RunState(world_size=2)
    state.apply_all([step(1), step(1, rank=1), finding("straggler", 5, rank=1)])
    assert [each.cleared for each in past_findings(state)] == [None]
    state.apply_all([finding("imbalance", 8), World(time=BEGIN + 9, world_size=1)])
    assert verdict(state, facts("running")).kind == "imbalance"
    over, stands = past_findings(state)
    assert (over.kind, over.cleared) == ("straggler", BEGIN + 8)
    assert (stands.kind, stands.cleared) == ("imbalance", None)


DAMAGE: dict[str, tuple[bytes, str | None]] = {
    "cut off": (b'{"type":"step","rank":1,"step":61,"lo', "1 line of it cannot be read: damaged, or cut off"),
    "zeros": (bytes(4096), "1 line of it cannot be read: damaged, or cut off"),
    "binary": (b"\xff\xfe\x00\n\x80{}\n", "2 lines of it cannot be read: damaged, or cut off"),
    "of a newer version": (b'{"type":"hologram","rank":1}\n\n', None),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_record_says_so(name: str, tmp_path: Path) -> None:
    appended, gap = DAMAGE[name]
    run = synthetic.run(tmp_path, steps=60, status="finished")
    with run.dir.rank_events(1).open("ab") as file:
        file.write(appended)
    data, lines = told(run)
    assert data["record_gap"] == gap
    assert ("record     " + (gap or "") in lines) == (gap is not None)
    assert data["step"] == 60


def test_a_file_of_the_record_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    run = synthetic.run(tmp_path, steps=60, status="finished")
    run.dir.rank_events(1).unlink()
    run.dir.rank_events(1).mkdir()
    data, lines = told(run)
    assert data["record_gap"].startswith("1.ndjson cannot be read: ")
    assert f"record     {data['record_gap']}" in lines


@pytest.mark.parametrize("status", ["finished", "running"])
def test_without_events_state_and_duration_are_those_of_the_status(status: str, tmp_path: Path) -> None:
    run = synthetic.run(tmp_path, steps=60, status=status)
    for path in run.dir.events.iterdir():
        path.write_bytes(b"")
    data, lines = told(run)
    assert data["state"] == status
    took = f" in {duration(data['duration_s'])}" if data["duration_s"] is not None else ""
    assert lines[0].startswith(f"{run.id}  {status}{took}")
    assert lines[1] == data["verdict"]["text"] == "no step was recorded"


def test_an_unmeasured_run_has_advice_and_no_heading_without_a_finding_below_it(tmp_path: Path) -> None:
    run = synthetic.run(tmp_path, steps=0, status="finished")
    unseen = finding("not_measured", 3, rank=0, severity="info", cause="no_steps", advice="inherit from torch")
    write(run.dir.rank_events(0), unseen)
    data, lines = told(run)
    assert (data["verdict"]["kind"], data["verdict"]["advice"]) == ("unmeasured", "inherit from torch")
    assert "what was found, and when" not in lines
    write(run.dir.rank_events(0), msgspec.structs.replace(unseen, severity="warning"))
    data, lines = told(run)
    assert (data["verdict"]["kind"], data["verdict"]["advice"]) == ("not_measured", "inherit from torch")
    assert lines[lines.index("what was found, and when") + 1].endswith("  not measured")


@pytest.mark.parametrize(("status", "over"), [("finished", "all steps"), ("running", "the last 40 steps")])
def test_a_report_says_which_steps_its_means_are_over(status: str, over: str, tmp_path: Path) -> None:
    data, lines = told(synthetic.run(tmp_path, steps=40, status=status), width=120)
    assert data["means_over"] == over
    assert f"where a step's time goes  means over {over}, `gputrain compare` leaves the first tenth out" in lines


def told(run: Run, width: int = 100) -> tuple[dict[str, Any], list[str]]:
    """Return the report of a run as JSON and as text."""
    live = read_run_record(run)
    report = run_report(live.state, run_facts(live))
    live.close()
    lines = [paint(line, colour=False) for line in report_lines(report, live.state, width)]
    return json.loads(msgspec.json.encode(report)), lines


def scenes(folder: Path) -> dict[str, Run]:
    made = {
        "running": synthetic.run(folder / "1", steps=40),
        "without a step": synthetic.run(folder / "2", steps=0, joined=1, status="failed"),
        "failed": synthetic.run(folder / "3", steps=40, status="failed", failed_rank=1),
        "torn": synthetic.run(folder / "4", steps=40, status="finished"),
        "markup": synthetic.run(folder / "5", name="[red]<b>\x1b[31m&", steps=20, status="finished"),
        "not a number": synthetic.run(folder / "6", steps=20, status="finished"),
    }
    with made["torn"].dir.rank_events(0).open("ab") as file:
        file.write(b'{"type":"step","time":1.')
    write(
        made["not a number"].dir.rank_events(0),
        Validation(time=BEGIN + 30, step=20, epoch=1, split="valid", loss=float("nan"), metrics={"f1": float("inf")}),
    )
    write(made["markup"].dir.run_events, finding("straggler", 9, rank=1, host="\x1b]0;x\x07<script>"))
    return made


@pytest.mark.parametrize("scene", ["running", "without a step", "failed", "torn", "markup", "not a number"])
def test_a_report_of_any_record_fits_its_schema_and_sends_nothing_to_a_terminal(scene: str, tmp_path: Path) -> None:
    data, lines = told(scenes(tmp_path)[scene])
    validate(data, msgspec.json.schema(RunReport))
    assert not any(re.search(r"[\x00-\x1f\x7f-\x9f]", line) for line in lines)
    assert lines[1]


def test_1024_ranks_are_a_page(tmp_path: Path) -> None:
    run = synthetic.run(tmp_path, nodes=128, ranks_per_node=8, steps=2, status="finished", straggler=100)
    data, lines = told(run)
    assert len(data["ranks"]) == 1024
    assert len(lines) < 80
    assert "… and 992 ranks that were less late" in "\n".join(lines)


def test_the_hardware_of_1024_gpus_leaves_room_on_a_page_of_2_mb() -> None:
    hardware = HardwareSeries()
    for node in range(128):
        gpus = [
            GpuSample(index=gpu, uuid=f"GPU-{gpu}", utilization_percent=97.123, memory_used_bytes=77 << 29,
                      memory_total_bytes=80 << 30, temperature_celsius=61.377, power_watts=612.34)
            for gpu in range(8)
        ]  # fmt: skip
        for second in range(0, 400, 10):
            hardware.apply(NodeSample(time=BEGIN + second, node=node, host=f"node{node:03}", gpus=gpus))
    charts = run_charts(Series(1024), hardware, StepBlocks(), MetricCurves())
    assert len(charts.hardware) == 4 * 1024
    assert all(any(value is not None for value in line.values) for line in charts.hardware)
    assert len(msgspec.json.encode(charts)) < 1 << 20


def test_collectives_are_told_by_group_and_operation_as_means_over_ranks(tmp_path: Path) -> None:
    state = RunState(world_size=2)
    for rank, wait_ms in ((0, 6.0), (1, 2.0)):
        state.apply(CollectiveGroup(time=BEGIN, rank=rank, name="dp_shard", ranks=[0, 1]))
        event = step(1, rank, sync_exposed_ms=wait_ms)
        event.groups = [
            GroupSync(
                group="dp_shard", calls=3.0, bytes=4096.0, exposed_ms=wait_ms,
                operations={"all_gather": 2.0, "barrier": 1.0},
                operation_exposed_ms={"all_gather": wait_ms - 1, "barrier": 1.0},
            )
        ]  # fmt: skip
        state.apply(event)
    report = run_report(state, run_facts(read_run_record(synthetic.run(tmp_path, steps=1))))
    (group,) = report.groups
    assert (group.group, group.ranks, group.calls, group.exposed_ms) == ("dp_shard", (0, 1), 3.0, 4.0)
    assert group.operation_exposed_ms == {"all_gather": 3.0, "barrier": 1.0}
    text = "\n".join("".join(piece for piece, _ in line) for line in report_lines(report, state, 120))
    assert re.search(r"dp_shard +0, 1 +3 +4 KiB +4\.0 +\S+% +all_gather 2 \(3\.00 ms\), barrier 1 \(1\.00 ms\)", text)


def test_shares_of_the_parts_add_up_and_hardware_and_versions_are_told(tmp_path: Path) -> None:
    run = synthetic.run(tmp_path, nodes=2, ranks_per_node=2, steps=60, status="finished")
    for rank, torch in ((0, "2.13.0"), (2, "2.12.1")):
        # As the node agent's file may be read later than the rank's own.
        event = RankState(time=BEGIN, rank=rank, state="spawned", pid=100 + rank, versions={"torch": torch})
        write(run.dir.node_events(rank // 2), event)
    data, lines = told(run)
    assert [host["versions"] for host in data["hosts"]] == [{"torch": "2.13.0"}, {"torch": "2.12.1"}]
    assert "  node001  torch 2.12.1" in lines
    assert sum(part["share"] for part in data["parts"]) == pytest.approx(1)
    assert {host["host"] for host in data["hosts"]} == {"node000", "node001"}
    assert any(line.startswith("  node001  ") for line in lines)


def test_balanced_shares_and_equal_parameters_are_data_of_the_report(tmp_path: Path) -> None:
    run = synthetic.run(tmp_path, ranks_per_node=2, steps=60, status="finished")
    data, _ = told(run)
    assert (data["shares"], data["parameters_equal"]) == ([], None)
    assert [rank["share"] for rank in data["ranks"]] == [None, None]
    changes = [
        ShareChange(time=BEGIN, step=1, previous=[], shares=[8, 8], cause="start"),
        ShareChange(time=BEGIN + 20, step=25, previous=[8, 8], shares=[4, 12], cause="measured"),
    ]
    sums = [Checksum(time=BEGIN + 9, rank=rank, step=9, parameters="a", buffers="b") for rank in range(2)]
    write(run.dir.rank_events(0), *changes, sums[0])
    write(run.dir.rank_events(1), sums[1])
    data, lines = told(run)
    validate(data, msgspec.json.schema(RunReport))
    assert [(each["step"], each["shares"], each["cause"]) for each in data["shares"]] == [
        (1, [8, 8], "start"),
        (25, [4, 12], "measured"),
    ]
    assert [rank["share"] for rank in data["ranks"]] == [4, 12]
    assert data["parameters_equal"] is True
    assert "parameters equal on all ranks" in lines
    assert any(line.endswith(data["shares"][-1]["text"].removeprefix("shares ")) for line in lines)


def test_the_checkpoints_that_are_left_are_listed_with_the_best_one(tmp_path: Path) -> None:
    run = synthetic.run(tmp_path / "runs", steps=5, status="finished")
    folder = tmp_path / "saved"

    def record(saved: Saved) -> None:
        path, best = str(saved.path), saved.best
        write(
            run.dir.rank_events(0),
            Checkpoint(time=BEGIN, step=saved.step, path=path, bytes=2048, write_ms=1.0, best=best),
        )

    writer = CheckpointWriter(folder, keep_last=3, run_id=run.id, on_saved=record)
    for number in range(1, 6):
        writer.save({"updates": number}, step=number, best=number == 1)
        writer.wait()
    assert writer.close() == []
    write_file(folder / "step_00000004.pt", {"updates": 4}, sequence=9, run="another")
    data, lines = told(run)
    assert [(each["step"], Path(each["path"]).name, each["best"]) for each in data["checkpoints"]] == [
        (5, "step_00000005.pt", False),
        (3, "step_00000003.pt", False),
        (1, "best.pt", True),
    ]
    assert f"     1  2 KiB  best  {folder / 'best.pt'}" in lines
    (run.dir.agents / "0.1.a").mkdir(parents=True)
    write_remote_node(run.dir, "0.1.a", RemoteNode(host="far", run_dir="/there"))
    data, _ = told(run)
    assert [each["path"] for each in data["checkpoints"]][:2] == [f"far:{folder}/step_0000000{n}.pt" for n in (5, 4)]


def test_the_recipe_is_compared_with_the_run_before(tmp_path: Path) -> None:
    table = '[[cluster.nodes]]\ncpu_ranks = 2\n[task]\ndata = "stdlib"\n[train]\ntask = "lm"\n'
    runs = []
    for seconds, (name, lr) in enumerate([("demo", 0.1), ("other", 0.3), ("demo", 0.2)]):
        run = synthetic.run(tmp_path, name=name, steps=5, status="finished")
        run.dir.recipe.write_text(f"{table}lr = {lr}\n")
        run.status.started += seconds
        runs.append(run)
    found = previous_run(runs[2], [runs[2], runs[1], runs[0]])
    assert found is not None
    assert found.id == runs[0].id
    assert previous_run(runs[0], [runs[2], runs[1], runs[0]]) is None
    planned = RunDir(tmp_path / "20261121-010203-planned")
    plan = plan_for("cpu_ranks = 2")
    create_by_hand(planned, plan, recipe="demo", recipe_toml=table, runs=tmp_path, now=runs[2].status.started - 0.1)
    assert previous_run(runs[2], [find(planned.path.name, tmp_path), runs[0]]) == runs[0], "it was never started"
    (change,) = recipe_changes(found, runs[2])
    assert (change.key, change.before, change.now) == ("train.lr", "0.1", "0.2")
    found.dir.recipe.write_text("torn = [")
    assert recipe_changes(found, runs[2]) == ()


def test_a_file_is_replaced_only_by_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path))
    synthetic.run(tmp_path / "runs", steps=5, status="finished")
    out = tmp_path / "report.json"
    out.write_text("mine")
    assert cli.main(["report", "last", "--json", "-o", str(out)]) == 2
    assert out.read_text() == "mine"
    assert cli.main(["report", "last", "--json", "-o", str(out), "--force"]) == 0
    assert json.loads(out.read_text())["schema_version"] == 1
    for bad in ("", "/", str(tmp_path), str(tmp_path / "none/report.txt")):
        assert cli.main(["report", "last", "-o", bad, "--force"]) == 2
