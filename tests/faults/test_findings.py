"""Real ranks that are held up on purpose: who is named, for what, and how soon."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pytest

from gputrain_tui.history.run_folders import list_runs
from gputrain_tui.history.run_reader import RunReader
from trainer.contract.record import AnyEvent, Finding, NodeSample, Step

RECIPE = """\
name = "faults"

[[cluster.nodes]]
cpu_ranks = {ranks}

[train]
task = "{task}:FaultTask"
batch_size = 192
max_updates = {updates}
save_every_epochs = 0
threads = 1
broadcast_buffers = {batch_norm}

[task]
faults = "{faults}"
delay_ms = {delay_ms}
batch_norm = {batch_norm}
samples = {samples}
"""

SCRIPT = """\
name = "fast"

[[cluster.nodes]]
cpu_ranks = {ranks}

[train]
script = "{script}"
args = ["{where}", "{rank}", "{first}", "{steps}"]
"""

BALANCED = 60
"""Steps before a fault."""
WARM = 10
"""Steps after which their time is the usual one."""
PERIOD = 70
"""Steps from one fault to the next."""
SOON = 20
"""Steps after which it must have been named."""
PARTS = ("forward", "backward", "data", "optimizer")


@dataclass(frozen=True)
class Fault:
    where: str
    rank: int | str
    first: int = BALANCED + 1
    last: int = 10**6

    def __str__(self) -> str:
        return f"{self.where}:{self.rank}:{self.first}:{self.last}"


@dataclass(frozen=True)
class Record:
    events: list[AnyEvent]
    stderr: str

    @property
    def findings(self) -> list[Finding]:
        return [event for event in self.events if isinstance(event, Finding) and event.severity != "info"]

    def step_at(self, moment: float) -> int:
        """Steps that had been done at a moment, by the rank that was furthest."""
        return max(event.step for event in self.events if isinstance(event, Step) and event.time <= moment)


def train(
    folder: Path,
    *,
    ranks: int,
    updates: int,
    faults: Sequence[Fault] = (),
    batch_norm: bool = False,
    delay_ms: float = 30.0,
    timeout: float = 300,
    cores: int | None = None,
) -> Record:
    task = Path(__file__).with_name("fault_task.py")
    words = {
        "ranks": ranks,
        "updates": updates,
        "task": task,
        "faults": ",".join(map(str, faults)),
        "delay_ms": delay_ms,
        "batch_norm": str(batch_norm).lower(),
        "samples": 192 * 24 if batch_norm else 4096,  # a batch norm takes no batch of one, as the last one may be
    }
    return run(folder, RECIPE.format(**words), timeout=timeout, cores=cores)


def run(folder: Path, text: str, *, timeout: float, cores: int | None = None) -> Record:
    """Run a recipe, on so many cores; None: on all of them."""
    recipe = folder / "recipe.toml"
    recipe.write_text(text)
    home = folder / "home"
    bound = ["taskset", "--cpu-list", ",".join(map(str, sorted(os.sched_getaffinity(0))[:cores]))]
    done = subprocess.run(
        [*bound, sys.executable, "-m", "gputrain_tui", "run", str(recipe)],
        env={**os.environ, "GPUTRAIN_HOME": str(home), "NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    reader = RunReader(list_runs(home / "runs")[0].dir)
    events: list[AnyEvent] = []
    while batch := reader.poll():
        events += batch
    reader.close()
    return Record(events, done.stderr)


FAULTS = [Fault(where, rank=n % 2, first=61 + PERIOD * n, last=86 + PERIOD * n) for n, where in enumerate(PARTS)]


@pytest.fixture(scope="module")
def held_up(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Two ranks; one after the other is held up for 25 steps in each part of the step."""
    return train(tmp_path_factory.mktemp("held_up"), ranks=2, updates=90 + PERIOD * len(FAULTS), faults=FAULTS)


@pytest.mark.slow  # its milliseconds are true only where nothing else runs
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.where)
def test_a_rank_that_is_held_up_is_named_with_its_part_and_cleared_when_it_is_over(
    held_up: Record, fault: Fault
) -> None:
    raised, cleared = (f for f in held_up.findings if f.cause == fault.where)
    assert (raised.kind, raised.state, raised.rank) == ("straggler", "raised", fault.rank)
    assert (cleared.kind, cleared.state, cleared.rank) == ("straggler", "cleared", fault.rank)
    assert raised.step is not None
    assert fault.first <= raised.step < fault.first + SOON
    assert raised.evidence["excess_ms"] == pytest.approx(30.0, rel=0.3)
    assert cleared.step is not None
    assert cleared.step >= fault.last


@pytest.mark.slow
def test_only_the_injected_faults_are_found(held_up: Record) -> None:
    assert len([f for f in held_up.findings if f.kind != "cpu_contention"]) == 2 * len(FAULTS)


@pytest.mark.slow
def test_findings_are_reported_when_raised_and_cleared_and_the_machine_is_sampled(held_up: Record) -> None:
    assert "ms longer than the others in each step" in held_up.stderr
    assert "cleared at step" in held_up.stderr
    samples = [event for event in held_up.events if isinstance(event, NodeSample)]
    assert any(process.rss_bytes for sample in samples for process in sample.ranks)


@pytest.mark.slow
@pytest.mark.parametrize("where", PARTS)
def test_the_right_rank_and_part_are_named_twenty_times_out_of_twenty(tmp_path: Path, where: str) -> None:
    wrong = []
    for turn in range(20):
        ranks = 2 + turn % 3
        fault = Fault(where, rank=turn % ranks)
        folder = tmp_path / str(turn)
        folder.mkdir()
        record = train(folder, ranks=ranks, updates=BALANCED + SOON + 10, faults=[fault])
        reported = [(f.rank, f.cause, f.step, record.step_at(f.time)) for f in record.findings]
        right = [(rank, cause) for rank, cause, _, _ in reported] == [(fault.rank, where)]
        soon = bool(reported) and reported[0][3] <= BALANCED + SOON
        print(f"{where} rank {fault.rank} of {ranks}: {reported}")
        if not (right and soon):
            wrong.append((ranks, fault, reported))
    assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "slow"), [(2, 0), (2, 1), (3, 0), (3, 1)])
def test_ranks_that_wait_for_another_s_buffers_in_their_forward_pass_are_not_blamed(
    tmp_path: Path, ranks: int, slow: int
) -> None:
    fault = Fault("data", rank=slow)
    record = train(tmp_path, ranks=ranks, updates=BALANCED + SOON + 10, faults=[fault], batch_norm=True)
    steps = [event for event in record.events if isinstance(event, Step) and event.step > fault.first]
    forward = {r: median(step.forward_ms or 0.0 for step in steps if step.rank == r) for r in range(ranks)}
    print(f"rank {slow} of {ranks} held up before its forward pass: forward {forward}")
    neighbour = 1 if slow == 0 else 0
    assert forward[neighbour] - forward[slow] == pytest.approx(30.0, rel=0.4), "it waits in its forward pass"
    print([finding.message for finding in record.findings])
    assert [(f.kind, f.rank, f.cause) for f in record.findings] == [("straggler", slow, "data")]
    assert "DDP broadcasts buffers" in record.findings[0].message


@pytest.mark.slow
@pytest.mark.parametrize(("who", "spared_ms"), [("turns", 50.0), ("random", 45.0), ("lengths", 35.0)])
def test_ranks_that_are_late_in_turns_are_uneven_work_and_no_slow_network(
    tmp_path: Path, who: str, spared_ms: float
) -> None:
    """Two ranks: of 100 ms by which one is late the half is spared where both have as much to do."""
    record = train(tmp_path, ranks=2, updates=100, faults=[Fault("forward", who, first=1)], delay_ms=100.0)
    print([finding.message for finding in record.findings])
    # Other work on the machine may take its cores meanwhile, which is a finding of its own.
    (found,) = (finding for finding in record.findings if finding.kind != "cpu_contention")
    assert (found.kind, found.state, found.cause) == ("imbalance", "raised", "unattributed")
    assert found.evidence["imbalance_ms"] == pytest.approx(spared_ms, rel=0.35)
    assert "uneven work costs" in record.stderr


@pytest.mark.slow
def test_ranks_without_a_core_each_are_one_lasting_finding_with_the_threads_to_set(tmp_path: Path) -> None:
    record = train(tmp_path, ranks=4, updates=250, cores=2, timeout=600)
    print([(finding.state, finding.message, finding.advice) for finding in record.findings])
    (found,) = [finding for finding in record.findings if finding.kind == "cpu_contention"]
    assert (found.state, found.rank, found.evidence["cores"], found.evidence["ranks"]) == ("raised", None, 2, 4)
    assert found.advice.startswith("start at most 2 ranks on this host, one per core (cpu_ranks = 2, threads = 1)")
    assert {finding.kind for finding in record.findings}.isdisjoint({"communication_bound", "imbalance"})


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_thousand_balanced_steps_are_no_finding(tmp_path: Path, ranks: int) -> None:
    record = train(tmp_path, ranks=ranks, updates=1000, timeout=600)
    # Four ranks on two cores wait for them, and so do two where other work goes on: that is a finding.
    assert [(f.kind, f.rank, f.message) for f in record.findings if f.kind != "cpu_contention"] == []


@pytest.mark.slow
@pytest.mark.parametrize("first", [BALANCED + 1, 601])
@pytest.mark.parametrize("where", PARTS)
def test_in_a_script_of_two_millisecond_steps_the_rank_and_part_are_named_as_soon(
    tmp_path: Path, where: str, first: int
) -> None:
    wrong = []
    for turn in range(5):
        rank = turn % 2
        folder = tmp_path / str(turn)
        folder.mkdir()
        script = Path(__file__).with_name("fast_script.py")
        words = {"ranks": 2, "script": script, "where": where, "rank": rank, "first": first, "steps": first + 40}
        record = run(folder, SCRIPT.format(**words), timeout=300)
        balanced = [e for e in record.events if isinstance(e, Step) and WARM < e.step < first]
        step_ms = median(event.step_ms or 0.0 for event in balanced)
        reported = [(f.rank, f.cause, f.step, record.step_at(f.time)) for f in record.findings]
        print(f"{where} rank {rank}, steps of {step_ms:.1f} ms: {reported}")
        if [(by, cause) for by, cause, _, _ in reported] != [(rank, where)] or reported[0][3] >= first + SOON:
            wrong.append((rank, reported))
    assert wrong == []
