"""``gputrain stacks`` of a run that has ended: what its record has, the ranks of which it has none, exit code 1."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_runs import NOON, make_ended_run
from utc_home import utc_home  # noqa: F401 - a fixture

from gputrain_tui.cli import main
from trainer.contract.record import CodeFrame, Finding, RankStacks, ThreadStack, encode_event


@pytest.mark.parametrize(
    ("recorded", "line", "message"),
    [
        ([], "", "it has none in its record"),
        ([1], "rank 1: train.py:8 in augment\n", "these were recorded at 2026-11-21 12:00:00, and none of ranks 0, 2"),
        ([0, 1, 2], "ranks 0 to 2: train.py:8 in augment\n", "these were recorded at 2026-11-21 12:00:00"),
    ],
)
def test_of_an_ended_run_the_recorded_stacks_are_printed_and_the_other_ranks_named(
    home: Path, capsys: pytest.CaptureFixture[str], recorded: list[int], line: str, message: str
) -> None:
    run = make_ended_run(home, world_size=3)
    stack = ThreadStack("MainThread", [CodeFrame("train.py", 8, "augment", user=True)])
    events = [RankStacks(time=NOON, rank=rank, request="1", threads=[stack]) for rank in recorded]
    run.dir.node_events(0).write_bytes(b"".join(map(encode_event, events)))
    assert main(["stacks", "last"]) == 1
    out, err = capsys.readouterr()
    assert out.startswith(line)
    assert bool(out) is bool(recorded), "no empty line"
    assert err == f"gputrain: {run.id} has ended (finished); {message}\n"


@pytest.mark.parametrize(
    ("times", "when"),
    [
        ([20, 20], "at 2026-11-21 12:00:20, in attempt 2 of 3"),
        ([5, 20], "from 2026-11-21 12:00:05 to 2026-11-21 12:00:20, in attempts 1 and 2 of 3"),
        ([40, 41], "from 2026-11-21 12:00:40 to 2026-11-21 12:00:41, in attempt 3 of 3"),
    ],
)
def test_of_a_restarted_run_time_and_attempt_of_the_stacks_are_named(
    home: Path,
    capsys: pytest.CaptureFixture[str],
    times: list[int],
    when: str,
) -> None:
    run = make_ended_run(home, world_size=2)
    stack = ThreadStack("MainThread", [CodeFrame("train.py", 8, "augment", user=True)])
    for rank, after in enumerate(times):
        answer = RankStacks(time=NOON + after, rank=rank, request="1", threads=[stack])
        run.dir.node_events(rank).write_bytes(encode_event(answer))
    restarts = [Finding(time=NOON + after, kind="restarted", severity="info") for after in (10, 30)]
    run.dir.run_events.write_bytes(b"".join(map(encode_event, restarts)))
    assert main(["stacks", "last"]) == 1
    assert capsys.readouterr().err == f"gputrain: {run.id} has ended (finished); these were recorded {when}\n"
