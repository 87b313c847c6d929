"""Which causes of a failed attempt are tried again."""

from __future__ import annotations

import msgspec
import pytest

from gputrain_tui.diagnosis.restart_cause import class_of, code_line, place_of
from gputrain_tui.lifecycle.restart import Restarts
from gputrain_tui.recipe.model import ClusterOptions
from trainer.contract.record import Failure

TRACEBACK = """Traceback (most recent call last):
  File "/env/lib/python3.12/site-packages/trainer/engine/loop.py", line 240, in _update
    loss = self.task.loss(batch)
  File "/work/train.py", line {line}, in loss
    return self.model(batch)
  File "/env/lib/python3.12/site-packages/torch/nn/modules/module.py", line 1776, in _call_impl
    return forward_call(*args)
{error}
"""
LOADER = """Traceback (most recent call last):
  File "/work/train.py", line 30, in batches
    for batch in loader:
  File "/env/lib/python3.12/site-packages/torch/_utils.py", line 733, in reraise
    raise exception
KeyError: Caught KeyError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/env/lib/python3.12/site-packages/torch/utils/data/_utils/worker.py", line 349, in _worker_loop
    data = fetcher.fetch(index)
  File "/work/images.py", line 88, in __getitem__
    return self.images[name]
KeyError: '17.png'
"""


def failure(kind: str, message: str, *, step: int | None = None, rank: int = 0, line: int | None = None) -> Failure:
    traceback = None if line is None else TRACEBACK.format(line=line, error=message)
    return Failure(time=0.0, kind=kind, message=message, rank=rank, step=step, traceback=traceback)


@pytest.mark.parametrize(
    ("kind", "message", "expected"),
    [
        ("node_lost", "h3 with rank 3 lost: no contact for 30 s", "may_heal"),
        ("launch", "node 1 on h2: Connection timed out", "may_heal"),
        ("lost_peer", "Connection closed by peer", "may_heal"),
        ("silent", "rank 3 reported nothing", "may_heal"),
        ("join_timeout", "rank 3 did not join", "may_heal"),
        ("stalled", "rank 2 on h2 hangs after step 4", "may_heal"),
        ("signal", "the process was ended by SIGKILL", "may_heal"),
        ("out_of_memory", "the process was ended by SIGKILL by the kernel's out-of-memory killer", "may_heal"),
        ("exit", "the process ended with exit code 7 before its training was complete", "may_heal"),
        ("exception", "AcceleratorError: CUDA error: an illegal memory access was encountered", "may_heal"),
        ("exception", "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled system error", "may_heal"),
        ("exception", "RuntimeError: CUDA error: device-side assert triggered", "once"),
        ("exception", "RuntimeError: all tensors must be on one device, found cuda:0 and cpu", "once"),
        ("exception", "ValueError: bad batch", "once"),
        ("non_finite", "the loss is NaN at step 12", "once"),
        ("of another release", "something", "once"),
        ("exception", "ModuleNotFoundError: No module named 'timm'", "will_not_heal"),
        ("exit", "ended with exit code 1: ImportError: libcudart.so.12: cannot open", "will_not_heal"),
        ("request", "--lr is 0", "will_not_heal"),
        ("run_directory", "the run directory was deleted during the run", "will_not_heal"),
    ],
)
def test_each_cause_has_a_class(kind: str, message: str, expected: str) -> None:
    assert class_of(failure(kind, message)) == expected


def test_memory_that_runs_out_at_a_line_of_the_program_is_not_the_kernels_killer() -> None:
    assert class_of(failure("out_of_memory", "OutOfMemoryError: CUDA out of memory", line=12)) == "once"


def test_an_exceptions_place_is_the_users_innermost_line_and_not_torchs() -> None:
    assert code_line(failure("exception", "ValueError: size 3", line=12)) == "/work/train.py:12"
    loader = msgspec.structs.replace(failure("exception", "KeyError: '17.png'"), traceback=LOADER)
    assert code_line(loader) == "/work/images.py:88"


ONE = failure("exception", "ValueError: row 17 is bad", step=4, rank=0, line=12)


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (failure("exception", "ValueError: row 94,113 is empty", step=9, rank=1, line=12), True),
        (failure("exception", "ValueError: row 17 is bad", step=4, line=13), False),
        (failure("exception", "KeyError: 'row 17'", step=4, line=12), False),
        (failure("exception", "ValueError: row 17 is bad", step=4), False),
    ],
)
def test_the_same_place_is_the_same_line_and_type_whatever_message_step_and_rank(other: Failure, same: bool) -> None:
    assert (place_of(other) == place_of(ONE)) == same


def restarted(*failures: Failure, most: int = 9) -> list[str]:
    """Hand failures to a supervisor's restarts in order; return the messages of those that end the run."""
    restarts = Restarts(ClusterOptions(max_restarts=most), done=0)
    found = []
    for each in failures:
        if restarts.is_over(each):
            found.append(each.message)
        elif (ended := restarts.lasting(each)) is not None:
            found.append(ended.message)
    return found


def test_an_exception_at_the_same_place_ends_the_restarts_also_with_another_failure_between() -> None:
    again = failure("exception", "ValueError: row 94 is bad", step=9, rank=1, line=12)
    killed = failure("signal", "ended by SIGKILL")
    assert restarted(ONE, killed, killed) == []
    assert restarted(ONE, killed, again) == [
        "ValueError: row 94 is bad; it happened twice at train.py:12, so the run is not restarted"
    ]


def test_an_import_error_is_not_tried_again_and_a_signal_is_as_often_as_allowed() -> None:
    (text,) = restarted(failure("exception", "ImportError: no libcuda"))
    assert text == "ImportError: no libcuda; another attempt would end alike, so the run is not restarted"
    killed = failure("signal", "ended by SIGKILL")
    assert restarted(killed, killed, killed, most=2) == ["ended by SIGKILL"]


def test_numbers_in_a_message_without_a_place_do_not_count() -> None:
    assert len(restarted(failure("non_finite", "the loss is NaN at step 12"))) == 0
    texts = restarted(
        failure("non_finite", "the loss is NaN at step 12"), failure("non_finite", "the loss is NaN at step 9")
    )
    assert texts == ["the loss is NaN at step 9; it happened twice, so the run is not restarted"]
