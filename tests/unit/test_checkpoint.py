from __future__ import annotations

import errno
import hashlib
import os
import random
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from enum import IntEnum
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_log import CheckpointLog, checkpoint_names, newest, step_of
from torch import nn

from trainer.checkpoint import (
    CheckpointError,
    CheckpointWriter,
    HostTensors,
    Saved,
    capture_rng,
    checkpoint_writer as writing,
    copy_to_cpu,
    load,
    restore_rng,
    write_file,
)
from trainer.contract.errors import RequestError
from trainer.distributed.encoding import encode


@pytest.fixture
def log() -> CheckpointLog:
    return CheckpointLog()


def a_training() -> dict[str, Any]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model(torch.arange(5)).square().sum().backward()
    optimizer.step()
    schedule.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
        "position": {"epoch": 2, "consumed": 96},
        "rng": [capture_rng(), capture_rng()],
        "recipe": 'name = "é"\n',
        "best": None,
    }


# ------------------------------------------------------------------------------------------------- saving and loading


def test_a_training_comes_back_as_it_was_saved(tmp_path: Path, log: CheckpointLog) -> None:
    state = a_training()
    writer = log.writer(tmp_path)
    writer.save(state, step=12)
    writer.close()
    found = newest(tmp_path)
    assert found is not None
    path, back = found
    assert torch.equal(encode(back), encode(copy_to_cpu(state)))
    (saved,) = log.saved
    assert (saved.step, saved.path, saved.bytes, saved.best) == (12, path, path.stat().st_size, False)
    assert saved.write_ms > 0
    assert checkpoint_names(tmp_path) == ["step_00000012.pt"]


def test_any_torch_reads_the_file_without_this_program(tmp_path: Path) -> None:
    write_file(tmp_path / "step_00000001.pt", {"weight": torch.arange(3)})
    assert torch.load(tmp_path / "step_00000001.pt", weights_only=True)["weight"].tolist() == [0, 1, 2]


def test_training_may_go_on_while_its_state_is_written(tmp_path: Path, log: CheckpointLog) -> None:
    weight, nested = torch.zeros(1000, 1000), {"seen": [1, 2]}
    writer = log.writer(tmp_path)
    writer.save({"weight": weight, "nested": nested}, step=1)
    weight.fill_(7.0)
    nested["seen"].append(3)
    writer.close()
    back = load(tmp_path / "step_00000001.pt")
    assert back["weight"].eq(0).all()
    assert back["nested"] == {"seen": [1, 2]}


def test_tied_weights_are_written_once_and_a_view_without_its_base(tmp_path: Path) -> None:
    base = torch.randn(1000, 100)
    size = write_file(tmp_path / "tied.pt", copy_to_cpu({"a": base, "b": base.view(1000, 100), "row": base[3]}))
    assert base.nbytes < size < base.nbytes * 1.1
    back = load(tmp_path / "tied.pt")
    assert back["a"].data_ptr() == back["b"].data_ptr()
    assert torch.equal(back["row"], base[3])
    assert back["row"].untyped_storage().nbytes() == 400


class Kind(IntEnum):
    ONE = 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        (torch.Size([2, 3]), (2, 3)),
        (Kind.ONE, 1),
        (nn.Parameter(torch.ones(2)), torch.ones(2)),
        ((None, True, 2**70, 1.5, "é", b"\0"), (None, True, 2**70, 1.5, "é", b"\0")),
        ({("a", 1): [()]}, {("a", 1): [()]}),
    ],
)
def test_values_come_back_as_plain_ones(tmp_path: Path, value: Any, expected: Any) -> None:
    write_file(tmp_path / "plain.pt", copy_to_cpu({"value": value}))
    back = load(tmp_path / "plain.pt")["value"]
    assert type(back) is type(expected)
    assert torch.equal(encode(back), encode(expected))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (print, "state['x'] is a builtins.builtin_function_or_method"),
        ([Fraction(1, 3)], "state['x'][0] is a fractions.Fraction"),
        ({"deep": {1}}, "state['x']['deep'] is a builtins.set"),
        (torch.eye(2).to_sparse(), "state['x'] is a torch.Tensor"),
        ({None: 1}, "state['x'] has the key None"),
        ([b""], "state['x'][0] is empty bytes"),
    ],
)
def test_a_state_that_could_not_come_back_is_refused_at_once(
    tmp_path: Path, log: CheckpointLog, value: Any, words: str
) -> None:
    writer = log.writer(tmp_path)
    with pytest.raises(CheckpointError) as raised:
        writer.save({"x": value}, step=1)
    assert str(raised.value).startswith(words)
    writer.close()
    assert checkpoint_names(tmp_path) == []


# ---------------------------------------------------------------------------------------------------- what is kept


@pytest.mark.parametrize(
    ("keep_last", "best", "expected"),
    [
        (1, (), ["step_00000050.pt"]),
        (2, (), ["step_00000040.pt", "step_00000050.pt"]),
        (9, (), [f"step_000000{step}.pt" for step in (10, 20, 30, 40, 50)]),
        (1, (20,), ["best.pt", "step_00000050.pt"]),
        (2, (20, 50), ["best.pt", "step_00000040.pt", "step_00000050.pt"]),
    ],
)
def test_the_last_ones_and_the_best_stay(
    tmp_path: Path, log: CheckpointLog, keep_last: int, best: tuple[int, ...], expected: list[str]
) -> None:
    writer = log.writer(tmp_path, keep_last=keep_last)
    for step in (10, 20, 30, 40, 50):
        writer.save({"step": step}, step=step, best=step in best)
        writer.wait()
    writer.close()
    assert checkpoint_names(tmp_path) == expected
    assert [saved.step for saved in log.saved if saved.best] == list(best)
    if best:
        assert load(tmp_path / "best.pt")["step"] == best[-1]
    assert step_of(newest(tmp_path)) == 50


def test_the_best_is_a_name_and_not_a_second_copy(tmp_path: Path, log: CheckpointLog) -> None:
    writer = log.writer(tmp_path)
    for _ in range(2):  # saving a step again as the best replaces both names
        writer.save({"step": 1}, step=1, best=True)
        writer.wait()
    writer.close()
    assert (tmp_path / "best.pt").samefile(tmp_path / "step_00000001.pt")
    assert checkpoint_names(tmp_path) == ["best.pt", "step_00000001.pt"]


def test_a_gpus_tensors_are_waited_for_by_the_writing_thread_and_not_by_training(tmp_path: Path) -> None:
    queued: list[Any] = []
    waited_on: list[str] = []

    class Pinned(torch.Tensor):
        def copy_(self, source: Any, non_blocking: bool = False) -> Any:  # type: ignore[override]
            assert non_blocking
            queued.append((self.as_subclass(torch.Tensor), source.clone()))
            return self.as_subclass(torch.Tensor)

    class CopyEvent:
        def record(self) -> None:
            assert len(queued) == 2, "after all copies"

        def synchronize(self) -> None:
            waited_on.append(threading.current_thread().name)
            for pinned, source in queued:
                pinned.copy_(source)

    def on_a_device() -> HostTensors:
        return HostTensors(
            on_gpu=lambda tensor: True,
            empty_like=lambda like: torch.empty_like(like).fill_(-1.0).as_subclass(Pinned),
            event=CopyEvent,
        )

    writer = CheckpointWriter(tmp_path, keep_last=1, host_tensors=on_a_device)
    state = {"weight": torch.arange(3.0), "bias": torch.ones(2), "step": 7}
    writer.save(state, step=7)
    state["weight"].zero_()  # type: ignore[union-attr]
    writer.close()
    assert waited_on == ["checkpoint-writer"]
    back = load(tmp_path / "step_00000007.pt")
    assert (back["weight"].tolist(), back["bias"].tolist(), back["step"]) == ([0.0, 1.0, 2.0], [1.0, 1.0], 7)


def test_memory_that_cannot_be_locked_costs_a_wait_and_no_checkpoint() -> None:
    def refused(like: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    tensors = HostTensors(on_gpu=lambda tensor: True, empty_like=refused)
    assert copy_to_cpu({"weight": torch.ones(2)}, tensors)["weight"].tolist() == [1.0, 1.0]
    tensors.wait()


def test_where_a_file_system_has_no_links_the_best_is_a_copy(
    tmp_path: Path, log: CheckpointLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_links)
    writer = log.writer(tmp_path, keep_last=1)
    writer.save({"step": 1}, step=1, best=True)
    writer.wait()
    writer.save({"step": 2}, step=2)
    writer.close()
    assert checkpoint_names(tmp_path) == ["best.pt", "step_00000002.pt"]
    assert load(tmp_path / "best.pt")["step"] == 1


@pytest.mark.parametrize("there", [True, False])
def test_the_best_of_the_training_before_is_kept_beside_the_first_checkpoint_and_is_never_the_newest(
    tmp_path: Path, log: CheckpointLog, there: bool
) -> None:
    before = tmp_path / "before"
    first = CheckpointLog().writer(before)
    for step in (7, 8, 9):  # so that the places there are higher than the first ones here
        first.save({"step": step}, step=step, best=step == 9)
        first.wait()
    first.close()
    writer = log.writer(tmp_path / "here")
    writer.inherit_best(before / "best.pt", step=9)
    assert checkpoint_names(tmp_path / "here") == [], "alone it would be the newest"
    if not there:
        shutil.rmtree(before)
    for step in (10, 11):
        writer.save({"step": step}, step=step)
        writer.wait()
    writer.close()
    kept = ["step_00000010.pt", "step_00000011.pt"]
    assert checkpoint_names(tmp_path / "here") == (["best.pt", *kept] if there else kept)
    assert step_of(newest(tmp_path / "here")) == 11
    if there:
        assert load(tmp_path / "here" / "best.pt") == {"step": 9}
        assert [(saved.step, saved.best) for saved in log.saved] == [(9, True), (10, False), (11, False)]
        assert not log.failed
    else:
        assert log.failed == [
            (
                9,
                f"the earlier best checkpoint, {before / 'best.pt'}, was not copied to this folder: "
                "No such file or directory",
            )
        ]


def test_a_run_continued_from_an_earlier_step_is_newer_than_the_branch_it_left(
    tmp_path: Path, log: CheckpointLog
) -> None:
    writer = log.writer(tmp_path)
    for step in (100, 200, 110):
        writer.save({"step": step}, step=step)
        writer.wait()
    writer.close()
    assert checkpoint_names(tmp_path) == ["step_00000110.pt", "step_00000200.pt"]
    assert step_of(newest(tmp_path)) == 110


def test_a_clock_that_is_set_back_costs_no_checkpoint(
    tmp_path: Path, log: CheckpointLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(10**18, 0, -(10**15)))
    monkeypatch.setattr(time, "time_ns", lambda: next(clock))
    for steps in ((10, 20), (30, 40)):  # the second time as after a restart
        writer = log.writer(tmp_path)
        for step in steps:
            writer.save({"step": step}, step=step)
            writer.wait()
            assert step_of(newest(tmp_path)) == step
        writer.close()
    assert checkpoint_names(tmp_path) == ["step_00000030.pt", "step_00000040.pt"]


def dated(path: Path, time_ns: int) -> None:
    """Give a checkpoint a sequence number as high as this time, in nanoseconds."""
    data = path.read_bytes()
    head, payload_bytes = data[:-48], data[-48:-40]
    changed = head + payload_bytes + time_ns.to_bytes(8, "little")
    path.write_bytes(changed + hashlib.blake2b(changed, digest_size=32).digest())


def test_a_saved_checkpoint_is_newer_than_files_dated_in_the_future(tmp_path: Path, log: CheckpointLog) -> None:
    for step in (100, 200):
        write_file(tmp_path / f"step_{step:08}.pt", {"step": step})
        dated(tmp_path / f"step_{step:08}.pt", time.time_ns() + step * 10**12)
    assert step_of(newest(tmp_path)) == 200
    writer = log.writer(tmp_path)
    for step in (210, 220):
        writer.save({"step": step}, step=step)
        writer.wait()
        assert step_of(newest(tmp_path)) == step
    writer.close()
    assert checkpoint_names(tmp_path) == ["step_00000210.pt", "step_00000220.pt"]


def test_foreign_files_in_the_folder_are_left_alone(tmp_path: Path, log: CheckpointLog) -> None:
    torch.save({"mine": 1}, tmp_path / "step_00000001.pt")
    (tmp_path / "notes.txt").write_text("keep")
    writer = log.writer(tmp_path, keep_last=1)
    for step in (2, 3):
        writer.save({"step": step}, step=step)
        writer.wait()
    writer.close()
    assert checkpoint_names(tmp_path) == ["notes.txt", "step_00000001.pt", "step_00000003.pt"]


# ------------------------------------------------------------------------------------- when saves come fast or fail


def held_writer(
    folder: Path, log: CheckpointLog, monkeypatch: pytest.MonkeyPatch
) -> tuple[CheckpointWriter, threading.Event]:
    """Return a writer whose disk holds up the first save until the event is set."""
    go, begun = threading.Event(), threading.Event()
    write = writing.write_file

    def slow(path: Path, state: Any, **options: Any) -> int:
        begun.set()
        assert go.wait(30)
        return write(path, state, **options)

    monkeypatch.setattr(writing, "write_file", slow)
    writer = log.writer(folder, keep_last=9)
    writer.save({"step": 1}, step=1)
    assert begun.wait(30)
    return writer, go


@pytest.mark.parametrize(
    ("following", "best", "written"),
    [
        ((2,), (), [1, 2]),
        ((2, 3, 4), (), [1, 4]),
        ((2, 3, 4), (2,), [1, 2, 4]),
        ((2, 3, 4), (2, 4), [1, 4]),
    ],
)
def test_saves_faster_than_the_disk_are_superseded_but_the_best_is_not_lost(
    tmp_path: Path,
    log: CheckpointLog,
    monkeypatch: pytest.MonkeyPatch,
    following: tuple[int, ...],
    best: tuple[int, ...],
    written: list[int],
) -> None:
    writer, go = held_writer(tmp_path, log, monkeypatch)
    for step in following:
        writer.save({"step": step}, step=step, best=step in best)
    go.set()
    writer.close()
    assert [saved.step for saved in log.saved] == written


def test_a_save_waits_for_nothing_but_its_copy(
    tmp_path: Path, log: CheckpointLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, go = held_writer(tmp_path, log, monkeypatch)
    writer.save({"step": 2}, step=2)  # would never return if it waited for the held one
    assert checkpoint_names(tmp_path) == []
    go.set()
    writer.wait()
    assert checkpoint_names(tmp_path) == ["step_00000001.pt", "step_00000002.pt"]
    writer.close()


def test_a_folder_that_was_deleted_is_made_again_and_held(tmp_path: Path, log: CheckpointLog) -> None:
    folder = tmp_path / "checkpoints"
    writer = log.writer(folder)
    writer.save({"step": 1}, step=1)
    writer.wait()
    shutil.rmtree(folder)
    writer.save({"step": 2}, step=2)
    writer.wait()
    with pytest.raises(RequestError, match="another training writes its checkpoints here"):
        log.writer(folder)
    assert writer.close() == []
    assert [saved.step for saved in log.saved] == [1, 2]
    assert log.failed == [(2, f"{folder} and its checkpoints were deleted; the folder was created again")]
    assert checkpoint_names(folder) == ["step_00000002.pt"]


def test_a_deleted_run_directory_stays_deleted(tmp_path: Path, log: CheckpointLog) -> None:
    writer = log.writer(tmp_path / "run" / "checkpoints")
    shutil.rmtree(tmp_path / "run")
    for step in (1, 2, 3):
        writer.save({"step": step}, step=step, best=step == 2)
        writer.wait()
    lost = [(one.step, one.best, one.why) for one in writer.close()]
    assert lost == [(2, True, "No such file or directory"), (3, False, "No such file or directory")]
    assert not (tmp_path / "run").exists()


def test_a_fault_in_telling_of_one_checkpoint_does_not_cost_the_next(tmp_path: Path) -> None:
    saved_steps: list[int] = []
    failed: list[int] = []

    def on_saved(saved: Saved) -> None:
        saved_steps.append(saved.step)
        if saved.step == 1:
            raise ValueError("surrogates not allowed")

    writer = CheckpointWriter(tmp_path, keep_last=2, on_saved=on_saved, on_failed=lambda step, _: failed.append(step))
    for step in (1, 2):
        writer.save({"step": step}, step=step)
        writer.wait()
    writer.close()
    assert (saved_steps, failed) == ([1, 2], [1])
    assert checkpoint_names(tmp_path) == ["step_00000001.pt", "step_00000002.pt"]


@pytest.mark.parametrize("name", ["file/checkpoints", "file"])
def test_a_folder_that_cannot_be_is_refused_in_one_line(tmp_path: Path, log: CheckpointLog, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match="cannot be used as the folder for checkpoints"):
        log.writer(tmp_path / name)


# -------------------------------------------------------------------------------------------------- what is refused


def damage_middle(data: bytes) -> bytes:
    median = len(data) // 2
    return data[:median] + bytes([data[median] ^ 1]) + data[median + 1 :]


def foreign(_: bytes) -> bytes:
    path = Path("/tmp", f"foreign-{os.getpid()}.pt")
    torch.save({"step": 9}, path)
    data = path.read_bytes()
    path.unlink()
    return data


DAMAGES: list[tuple[Callable[[bytes], bytes], str]] = [
    (lambda data: b"", "is empty"),
    (lambda data: b"hello", "is not a checkpoint"),
    (lambda data: os.urandom(4096), "is not a checkpoint"),
    (lambda data: data[:10], "is incomplete, or was written by another program"),
    (lambda data: data[: len(data) // 2], "is incomplete, or was written by another program"),
    (lambda data: data[:-1], "is incomplete, or was written by another program"),
    (lambda data: data + b"\n", "is incomplete, or was written by another program"),
    (lambda data: data[100:], "is not a checkpoint"),
    (damage_middle, "is damaged: its checksum does not match"),
    (lambda data: data[:-40] + bytes([data[-40] ^ 1]) + data[-39:], "is damaged: its checksum does not match"),
    (foreign, "is incomplete, or was written by another program"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGES, ids=[f"{words}-{i}" for i, (_, words) in enumerate(DAMAGES)])
def test_a_bad_file_is_refused_in_one_line_and_the_one_before_is_used(
    tmp_path: Path, log: CheckpointLog, damage: Callable[[bytes], bytes], words: str
) -> None:
    writer = log.writer(tmp_path)
    for step in (1, 2):
        writer.save({"step": step, "weight": torch.zeros(100)}, step=step)
        writer.wait()
    writer.close()
    last = tmp_path / "step_00000002.pt"
    last.write_bytes(damage(last.read_bytes()))
    with pytest.raises(CheckpointError) as raised:
        load(last)
    assert str(raised.value).startswith(f"{last}: {words}")
    assert "\n" not in str(raised.value)
    skipped: list[str] = []
    assert step_of(newest(tmp_path, on_skipped=skipped.append)) == 1
    assert skipped == [f"skipped: {raised.value}"]


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "step_00000001.pt"
    write_file(path, {"step": 1, "harmless": Path("x")})
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load(path)


def test_a_missing_file_is_one_line_and_an_empty_folder_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read \\(No such file or directory\\)"):
        load(tmp_path / "step_00000001.pt")
    assert newest(tmp_path) is None
    assert newest(tmp_path / "missing") is None


def test_the_best_is_used_when_nothing_else_is_good(tmp_path: Path, log: CheckpointLog) -> None:
    writer = log.writer(tmp_path, keep_last=1)
    for step in (1, 2):
        writer.save({"step": step}, step=step, best=step == 1)
        writer.wait()
    writer.close()
    (tmp_path / "step_00000002.pt").write_bytes(b"")
    assert step_of(newest(tmp_path, on_skipped=lambda _: None)) == 1


# -------------------------------------------------------------------------------------------------- random numbers


def draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), *torch.rand(3).tolist(), *torch.randn(3).tolist()]


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    random.seed(5)
    torch.manual_seed(5)
    random.gauss(0, 1)  # leaves a second value behind, which is part of the state
    write_file(tmp_path / "rng.pt", copy_to_cpu({"rng": capture_rng()}))
    expected = draw()
    assert draw() != expected
    restore_rng(load(tmp_path / "rng.pt")["rng"])
    assert draw() == expected
