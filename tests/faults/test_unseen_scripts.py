"""Scripts of which less is seen than of others: no step, no sample, no process group, no synchronisation, few steps."""

from __future__ import annotations

import json
import re
from textwrap import dedent

import pytest
from bench import LIMIT_S, Bench

from gputrain_tui.cli import main
from gputrain_tui.history.run_reader import RunReader
from gputrain_tui.state import RunState
from gputrain_tui.state.finding_text import run_mark

RECIPE = """\
name = "script"

[[cluster.nodes]]
cpu_ranks = {ranks}

[train]
script = "{script}"
"""
DDP = """
import os, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def step():
    optimizer.zero_grad()
    model(torch.randn(8, 4) + rank).square().mean().backward()
    optimizer.step()
"""


def run_script(bench: Bench, text: str, *, ranks: int, code: int = 0) -> tuple[RunState, str, str]:
    """Run a script; return the state after its record, standard output and standard error."""
    script, recipe = bench.folder / "script.py", bench.folder / "script.toml"
    script.write_text(dedent(text))
    recipe.write_text(RECIPE.format(ranks=ranks, script=script))
    process = bench.start("run", recipe)
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == code, err
    state = RunState()
    reader = RunReader(bench.runs()[0].dir)
    while events := reader.poll():
        state.apply_all(events)
    reader.close()
    return state, out, err


def test_ranks_without_a_process_group_are_warned_of_within_ten_steps_with_the_fix(bench: Bench) -> None:
    state, _, err = run_script(
        bench,
        """
        import torch
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(10):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
        """,
        ranks=2,
    )
    assert [key for key in state.findings if key[0] == "no_process_group"] == [("no_process_group", None)]
    assert re.search(
        r"warning: the 2 ranks never meet: .*; call torch.distributed.init_process_group\(\)", " ".join(err.split())
    )


def test_a_training_whose_optimizer_is_not_seen_says_so_on_the_terminal(bench: Bench) -> None:
    state, _, err = run_script(
        bench,
        """
        import torch
        weight = torch.zeros(4, requires_grad=True)
        for _ in range(10):
            weight.square().sum().backward()
            weight.data -= 0.1 * weight.grad
        """,
        ranks=2,
    )
    assert state.unmeasured is not None
    seen = "no optimizer's step was seen, so nothing of this training is measured"
    advice = "let an optimizer of your own inherit from torch.optim.Optimizer and call its step()"
    assert state.unmeasured.message == seen
    assert re.search(rf"^finished in .*; {seen}$", err, re.MULTILINE), err
    assert f"warning: {seen}; {advice}" in " ".join(err.split())
    assert err.count("warning: ") == 1, "not one for each rank"
    assert "0 steps" not in err


def test_an_unmeasured_training_is_marked_among_the_runs_and_in_its_report(
    bench: Bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_script(
        bench,
        """
        import torch
        from gputrain_tui.scripts import watch
        weight = torch.nn.Linear(1, 1)
        class MySGD:
            def step(self): pass
        with watch(weight, MySGD()) as watched:
            for _ in watched.batches(range(3)):
                weight(torch.ones(1)).backward()
        """,
        ranks=1,
    )
    monkeypatch.setenv("GPUTRAIN_HOME", str(bench.runs()[0].dir.path.parents[1]))
    assert main(["runs"]) == 0
    assert re.search(r"finished ▲.* not measured$", capsys.readouterr().out, re.MULTILINE)
    assert main(["report", "--json"]) == 0
    verdict = json.loads(capsys.readouterr().out)["verdict"]
    assert (verdict["kind"], verdict["is_problem"]) == ("not_measured", True)
    assert verdict["advice"] == "let MySGD inherit from it, with super().__init__(parameters, defaults)"
    assert main(["report"]) == 0
    assert re.search(r"what was found, and when\n  after .*  not measured\n    the optimizer", capsys.readouterr().out)


def test_a_loss_of_several_values_is_not_seen_and_weights_loaded_after_the_last_step_are_no_desync(
    bench: Bench,
) -> None:
    text = f"""{DDP}
for _ in range(15):
    optimizer.zero_grad()
    y = model(torch.randn(8, 4))
    y.backward(torch.ones_like(y))
    optimizer.step()
if rank == 0:
    model.module.load_state_dict({{name: value + 1 for name, value in model.module.state_dict().items()}})
"""
    state, out, _ = run_script(bench, text, ranks=2)
    assert state.desync.equal is True
    assert "equal on all ranks" in out
    lines = [line for line in out.splitlines() if line.startswith("not seen   the loss")]
    assert lines == [
        "not seen   the loss: backward() was called on a tensor of several values (call it on one number, or give a "
        "loss to watched.report(loss=…) of trainer.watch)"
    ]


def test_a_script_without_torch_is_not_said_to_have_done_no_step(bench: Bench) -> None:
    _, _, err = run_script(bench, "print('hello')", ranks=1)
    assert re.search(r"^finished in .*; no step was measured$", err, re.MULTILINE), err


def test_the_last_line_of_a_failed_script_is_its_error(bench: Bench) -> None:
    _, _, err = run_script(bench, "import torch\nraise ValueError('broken')", ranks=1, code=1)
    assert "│ ValueError: broken" in err
    assert "optimizer" not in err + bench.runs()[0].dir.rank_log(0).read_text()


def test_a_loss_that_is_nan_from_the_first_step_on_is_found_without_ddp_and_samples(bench: Bench) -> None:
    state, _, _ = run_script(
        bench,
        """
        import time, torch
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(30):
            optimizer.zero_grad()
            (model(torch.randn(8, 4)).sum() * float("nan")).backward()
            optimizer.step()
            time.sleep(0.1)  # as long as a diagnosis
        """,
        ranks=1,
    )
    assert state.findings["non_finite", 0].step == 1


@pytest.mark.parametrize(
    "steps", [pytest.param(3, marks=pytest.mark.slow), pytest.param(15, marks=pytest.mark.slow), 63]
)
def test_parameters_of_a_short_script_are_compared_at_its_end(bench: Bench, steps: int) -> None:
    text = f"""{DDP}
for number in range({steps}):
    step()
    if number == {steps} - 2 and rank == 1:
        with torch.no_grad():
            model.module.weight += 1.0
"""
    state, out, _ = run_script(bench, text, ranks=2)
    assert state.desync.equal is False
    assert "DIFFER between ranks" in out


def test_parameters_that_are_nan_on_all_ranks_are_not_called_equal(bench: Bench) -> None:
    text = f"""{DDP}
for number in range(15):
    step()
    if number == 5:
        with torch.no_grad():
            model.module.weight.fill_(float("nan"))
"""
    state, out, _ = run_script(bench, text, ranks=2)
    assert state.desync.non_finite == (0, 1)
    assert "parameters NaN or infinite on all ranks" in out
    assert "equal on all ranks" not in out
    assert run_mark(state.findings.values()) == "NaN since step 7 on ranks 0, 1"


def test_local_sgd_is_no_desync(bench: Bench) -> None:
    text = f"""{DDP}
for number in range(120):
    with model.no_sync():
        step()
    if number % 8 == 7:
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= dist.get_world_size()
"""
    state, out, _ = run_script(bench, text, ranks=2)
    assert state.desync.equal is None
    assert not any(finding.kind == "desync" for finding in state.past_findings)
    assert [finding.kind for finding in state.past_findings if finding.kind == "not_compared"] == ["not_compared"] * 2
    assert "DIFFER" not in out


@pytest.mark.parametrize(
    ("rank", "alone"), [(1, "time.sleep(0.3)"), (0, "evaluate()")], ids=["saves alone", "evaluates alone"]
)
def test_a_rank_that_is_alone_at_work_every_ten_steps_is_named(bench: Bench, rank: int, alone: str) -> None:
    text = f"""{DDP}
import time
from torch.utils.data import DataLoader
def evaluate():
    model.module.eval()
    with torch.no_grad():
        for batch in DataLoader(torch.randn(40, 4), batch_size=8):
            model.module(batch)
            time.sleep(0.06)
    model.module.train()
for number in range(1, 72):
    time.sleep(0.02)
    step()
    if number % 10 == 0 and rank == {rank}:
        {alone}
"""
    state, _, err = run_script(bench, text, ranks=2)
    (found,) = (each for key, each in state.findings.items() if key[0] == "periodic_delay")
    assert (found.rank, found.evidence["every_steps"]) == (rank, 10)
    assert re.search(rf"rank {rank} takes 0\.\d+ s longer than the others once in 10 steps, and they wait for it", err)
    assert f"with rank {rank} slow now and then" in " ".join(err.split())
