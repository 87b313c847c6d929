from __future__ import annotations

import pytest

from gputrain_tui.state.rank_stacks import group_lines, group_stacks
from trainer.contract.record import CodeFrame, Collective, RankStacks, ThreadStack

C10D = "/opt/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py"
LOADER = "/opt/venv/lib/python3.12/site-packages/torch/utils/data/dataloader.py"


def answer(rank: int, *frames: CodeFrame, problem: str = "") -> RankStacks:
    threads = [ThreadStack("MainThread", list(frames))] if frames else []
    return RankStacks(time=1.0, rank=rank, request="1", threads=threads, problem=problem)


def user(line: int, function: str = "step") -> CodeFrame:
    return CodeFrame("train.py", line, function, True)


def test_ranks_at_the_same_place_are_together_and_the_odd_one_comes_first() -> None:
    waiting = [answer(rank, CodeFrame(C10D, 2501 + rank, "all_reduce"), user(41)) for rank in (3, 0, 2)]
    groups = group_stacks([*waiting, answer(1, user(12, "augment"), user(40))])
    assert [group.ranks for group in groups] == [[1], [0, 2, 3]]
    assert [group.line for group in groups] == ["train.py:12 in augment", "in all_reduce, train.py:41 in step"]


def test_another_line_of_the_users_code_is_another_place() -> None:
    assert [group.ranks for group in group_stacks([answer(0, user(1)), answer(1, user(2))])] == [[0], [1]]


@pytest.mark.parametrize(
    ("frames", "line"),
    [
        ([CodeFrame(LOADER, 700, "_next_data"), user(5)], "waiting for a batch of the DataLoader, train.py:5 in step"),
        ([CodeFrame(C10D, 1, "_helper"), CodeFrame(C10D, 2, "barrier"), user(5)], "in barrier, train.py:5 in step"),
        ([user(5), CodeFrame(C10D, 2, "barrier")], "train.py:5 in step"),
        ([CodeFrame("/usr/lib/python3.12/threading.py", 9, "wait")], "threading.py:9 in wait"),
        ([], ""),
    ],
)
def test_the_line_says_what_a_rank_waits_for_and_where(frames: list[CodeFrame], line: str) -> None:
    (group,) = group_stacks([answer(0, *frames)])
    assert group.line == line


def test_a_loader_worker_is_shown_where_it_is_and_those_without_work_are_counted() -> None:
    waiting = [CodeFrame(LOADER, 700, "_get_data"), user(5)]
    idle = ThreadStack("worker process 8", [CodeFrame("/usr/lib/python3.12/multiprocessing/queues.py", 113, "get")])
    busy = ThreadStack("worker process 9", [CodeFrame("/opt/PIL/Image.py", 3, "open"), user(88, "load")])
    answers = [answer(rank, *waiting) for rank in range(3)]
    answers[1].workers, answers[2].workers = [idle, busy], [idle]
    groups = group_stacks(answers)
    assert [group.ranks for group in groups] == [[1], [0, 2]], "a rank whose worker is elsewhere is elsewhere"
    assert [group.line for group in groups] == [
        "waiting for a batch of the DataLoader, train.py:5 in step; worker process 9: train.py:88 in load",
        "waiting for a batch of the DataLoader, train.py:5 in step",
    ]
    first, _ = group_lines(groups, threads=False)
    assert [text for text, _ in first][3:] == [
        "  worker process 9",
        "    /opt/PIL/Image.py:3 in open",
        "  > train.py:88 in load",
        "  1 worker process waits for the next batch's indices",
    ]


def test_ranks_without_an_answer_are_together_by_the_reason() -> None:
    groups = group_stacks([answer(0, problem="no answer"), answer(1, problem="no answer"), answer(2, user(1))])
    assert [(group.ranks, group.problem, group.line) for group in groups] == [
        ([2], "", "train.py:1 in step"),
        ([0, 1], "no answer", ""),
    ]


def test_a_group_names_its_hosts_and_the_collectives_of_the_ranks_behind_first() -> None:
    def at(rank: int, number: int, state: str = "complete") -> RankStacks:
        done = [Collective("all_reduce", number, state, [[4, 8]], "default_pg")]
        stacks = [ThreadStack("MainThread", [user(41)]), ThreadStack("loader", [user(3)])]
        return RankStacks(time=1.0, rank=rank, request="1", host=f"h{rank // 2}", threads=stacks, collectives=done)

    (lines,) = group_lines(group_stacks([at(0, 8), at(1, 8), at(2, 8), at(3, 7, "started")]), threads=False)
    assert [text for text, _ in lines] == [
        "ranks 0 to 3 on h0, h1: train.py:41 in step",
        "  > train.py:41 in step",
        "  1 other thread: --threads shows them",
        "  last collectives of rank 3: all_reduce 7 of [4, 8] (started)",
        "  last collectives of ranks 0 to 2: all_reduce 8 of [4, 8]",
    ]


@pytest.mark.parametrize(
    ("native", "problem", "expected"),
    [
        ([ThreadStack("MainThread", [CodeFrame("libc.so.6", 0, "read"), user(5)])], "", "    libc.so.6 in read"),
        ([], "py-spy: Permission denied", "  no native frames: py-spy: Permission denied"),
    ],
)
def test_native_frames_or_their_lack_are_shown(native: list[ThreadStack], problem: str, expected: str) -> None:
    held = RankStacks(
        time=1.0, rank=0, request="1", problem="the interpreter is held", native=native, native_problem=problem
    )
    groups = group_stacks([held])
    (lines,) = group_lines(groups, threads=False)
    assert expected in [text for text, _ in lines]
    assert groups[0].line == ("train.py:5 in step" if native else "")


@pytest.mark.parametrize(
    ("frames", "is_said"),
    [
        ([CodeFrame(LOADER, 1464, "_get_data"), CodeFrame(LOADER, 1505, "_next_data"), user(20)], True),
        ([user(9, "__getitem__"), CodeFrame(LOADER, 700, "_next_data"), user(20)], False),
        ([CodeFrame(C10D, 1, "barrier"), user(5), CodeFrame(LOADER, 1464, "_get_data")], False),
    ],
)
def test_a_rank_that_waits_for_a_loader_worker_says_that_it_has_no_stack_and_how_to_see_it(
    frames: list[CodeFrame], is_said: bool
) -> None:
    stacks = RankStacks(time=1.0, rank=1, request="1", pid=4711, threads=[ThreadStack("MainThread", frames)])
    (lines,) = group_lines(group_stacks([stacks]), threads=False)
    said = [text for text, _ in lines if "its worker processes have no stack" in text]
    assert len(said) == is_said
    assert all(text.endswith("`py-spy dump --pid N` shows one of `pgrep -P 4711`") for text in said)
