"""Ranks in a real cgroup whose quota or cpuset is too small: it is named, and nothing else is blamed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from text_cache import with_task_options
from waiting import until

from gputrain_tui.history.run_folders import list_runs
from gputrain_tui.history.run_reader import RunReader
from trainer.contract.record import AnyEvent, Finding, NodeSample, ShareChange
from trainer.host.cpu_cgroup import cpu_cgroup

RECIPE = """\
name = "quota"

[[cluster.nodes]]
cpu_ranks = 2

[train]
task = "{task}:QuotaTask"
{batch}
max_updates = 1000000
save_every_epochs = 0
threads = 1

[task]
cgroup = "{cgroup}"
held = {held}
width = 64
layers = 2
"""
SAMPLES_AFTER = 10
"""Samples, one a second, after the finding: as many as any other finding about cores needs."""

MakeCgroup = Callable[..., Path]


@pytest.fixture
def cgroup() -> Iterator[MakeCgroup]:
    """Return a maker of a cgroup from its controller and the contents of its files, where this user may make one."""
    made = []

    def make(controller: str, **settings: str) -> Path:
        groups = cpu_cgroup()
        for top in reversed(groups.folders if controller == "cpu" else groups.cpuset_folders):
            folder = top / f"gputrain-test-{uuid.uuid4().hex}"
            try:
                folder.mkdir()
            except OSError:
                continue
            made.append(folder)
            files = {folder / f"{controller}.{name}": value for name, value in settings.items()}
            known = [file for file in files if file.exists()]
            for file in known:
                file.write_text(files[file])
            if known:
                return folder
        pytest.skip(f"needs to make a cgroup with the controller {controller}")

    yield make
    for folder in made:
        until(lambda folder=folder: not (folder / "cgroup.procs").read_text(), "the cgroup is empty")
        folder.rmdir()


def events_until(
    enough: Callable[[list[AnyEvent]], bool],
    folder: Path,
    cgroup: Path,
    *,
    held: list[int],
    batch: str = "batch_size = 16",
) -> list[AnyEvent]:
    """Run with ranks in the cgroup, until there are enough events; return them."""
    task = Path(__file__).with_name("quota_task.py")
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.format(task=task, cgroup=cgroup, held=held, batch=batch))
    command = subprocess.Popen(
        [sys.executable, "-m", "gputrain_tui", "run", str(recipe)],
        env={
            **os.environ,
            "GPUTRAIN_HOME": str(with_task_options(folder)),
            "NO_COLOR": "1",
            "PYTHONPATH": str(task.parent),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=(folder / "stderr").open("w"),
    )
    try:
        until(lambda: command.poll() is not None or list_runs(folder / "runs"), "the run has begun")
        reader = RunReader(list_runs(folder / "runs")[0].dir)
        events: list[AnyEvent] = []

        def seen() -> bool:
            while batch := reader.poll():
                events.extend(batch)
            return command.poll() is not None or enough(events)

        until(seen, "the events that are awaited", limit_s=240)
        reader.close()
        assert command.poll() is None, (folder / "stderr").read_text()
    finally:
        command.send_signal(signal.SIGINT)
        command.wait()
    return events


def findings_of(folder: Path, cgroup: Path, *, held: list[int], samples_after: int = SAMPLES_AFTER) -> list[Finding]:
    """Run until so many samples have followed the first finding about cores; return all findings."""

    def enough(events: list[AnyEvent]) -> bool:
        kinds = [event.kind if isinstance(event, Finding) else "" for event in events]
        after = events[kinds.index("cpu_contention") :] if "cpu_contention" in kinds else []
        return sum(isinstance(event, NodeSample) for event in after) >= samples_after and bool(after)

    found = [event for event in events_until(enough, folder, cgroup, held=held) if isinstance(event, Finding)]
    print(*[(each.state, each.kind, each.rank, each.cause, each.message, each.advice) for each in found], sep="\n")
    return found


@pytest.mark.parametrize(
    "held", [pytest.param([0, 1], id="both ranks", marks=pytest.mark.slow), pytest.param([1], id="one rank")]
)
def test_a_quota_that_holds_ranks_back_is_named_and_neither_others_nor_batches_are_blamed(
    tmp_path: Path, cgroup: MakeCgroup, held: list[int]
) -> None:
    # Less than a rank's share of the cores on a machine where much else goes on, which would be a cause of its own.
    quota = cgroup("cpu", cfs_period_us="100000", cfs_quota_us="5000", max="5000 100000")
    found = findings_of(tmp_path, quota, held=held)
    first = next(each for each in found if each.kind == "cpu_contention")
    who = "2 ranks" if len(held) == 2 else "rank 1"
    assert first.message.startswith(f"a cpu quota of 0.05 cores holds {who} on ")
    assert first.advice.startswith("raise that quota (cpu.max or cpu.cfs_quota_us")
    assert {(each.kind, each.cause) for each in found} <= {("cpu_contention", "cpu_quota"), ("straggler", "cpu_quota")}


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="a cpuset that is smaller than the machine needs two cores")
def test_a_cpuset_with_fewer_cores_than_threads_is_named(tmp_path: Path, cgroup: MakeCgroup) -> None:
    core = min(os.sched_getaffinity(0))
    cpuset = cgroup("cpuset", mems="0", cpus=str(core))
    found = findings_of(tmp_path, cpuset, held=[0, 1], samples_after=0)
    first = next(each for each in found if each.kind == "cpu_contention")
    assert first.cause == "cpuset"
    assert first.message.endswith(f"on 1 core of {os.cpu_count()}, all that the cpuset of its cgroup allows")
    assert "cpuset.cpus of the cgroup" in first.advice
    assert "other processes" not in first.message


def test_balanced_shares_follow_a_quota(tmp_path: Path, cgroup: MakeCgroup) -> None:
    quota = cgroup("cpu", cfs_period_us="100000", cfs_quota_us="10000", max="10000 100000")

    def enough(events: list[AnyEvent]) -> bool:
        shares = [event.shares for event in events if isinstance(event, ShareChange)]
        return bool(shares) and 2 * shares[-1][1] <= shares[-1][0]

    batch = 'batch_size = "balanced"\nglobal_batch_size = 64'
    events = events_until(enough, tmp_path, quota, held=[1], batch=batch)
    changes = [event for event in events if isinstance(event, ShareChange)]
    assert [each.cause for each in changes[:2]] == ["start", "measured"]
    assert all(sum(each.shares) == 64 for each in changes)
