"""Runs that write into one ``save_dir``, in any order: each keeps its own checkpoints, and gets only those."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import run_dirs
import torch
from examples import examples
from hypothesis import given, settings, strategies as st

from gputrain_tui.history.run_folders import Run
from gputrain_tui.lifecycle.run_checkpoints import choose_checkpoint, resumable_checkpoint, run_named_by
from trainer.checkpoint import CheckpointError, CheckpointWriter, Saved, load, open_checkpoint, write_file
from trainer.contract.checkpoint_trailer import owner_of
from trainer.contract.errors import RequestError
from trainer.contract.record import Checkpoint, encode_event

KEEP = 2


def save_file(path: Path, *, run: str, step: int) -> None:
    """Write a checkpoint by hand."""
    write_file(path, {"updates": step, "run": run, "model": {"w": torch.tensor([float(step)])}}, sequence=step, run=run)


@dataclass
class Training:
    """One run in the shared folder."""

    run: Run
    folder: Path
    step: int = 0
    steps: list[int] = field(default_factory=list)
    """Steps saved, oldest first, by this run."""
    best: tuple[str, int] | None = None
    """Run and step of the weights of its best checkpoint."""

    def go_on(self, saves: list[tuple[int, bool]], *, source: Path | None, inherited: tuple[str, int] | None) -> None:
        """Continue from a checkpoint of the folder, or start; save at further steps, some of them the best so far."""

        def record(saved: Saved) -> None:
            event = Checkpoint(
                time=1.0, step=saved.step, path=str(saved.path), bytes=saved.bytes, write_ms=1.0, best=saved.best
            )
            with self.run.dir.rank_events(0).open("ab") as file:
                file.write(encode_event(event))

        writer = CheckpointWriter(
            self.folder,
            keep_last=KEEP,
            run_id=self.run.id,
            continues=source is not None,
            on_saved=record,
            on_failed=lambda step, line: pytest.fail(line),
        )
        if inherited is not None and self.best is None:
            best = next(
                path
                for path in self.folder.glob("*.pt")
                if owner_of(path) == owner_of(source or path) and contents(path) == inherited
            )
            writer.inherit_best(best, step=inherited[1])
        for ahead, best_so_far in saves:
            self.step += ahead
            state = {"updates": self.step, "run": self.run.id, "model": {"w": torch.tensor([float(self.step)])}}
            writer.save(state, step=self.step, best=best_so_far)
            writer.wait()
            self.steps.append(self.step)
            if best_so_far:
                self.best = self.run.id, self.step
            elif self.best is None:
                self.best = inherited
        assert writer.close() == []


def contents(path: Path) -> tuple[str, int]:
    state = load(path)
    return state["run"], state["updates"]


def opened(path: Path, run: str) -> tuple[str, int]:
    _, state, passed_over = open_checkpoint(path, flag="--resume", run=run)
    assert passed_over == []
    return state["run"], state["updates"]


SAVES = st.lists(st.tuples(st.integers(1, 3), st.booleans()), min_size=1, max_size=4)


@settings(max_examples=examples(25, 300), deadline=None, derandomize=True)
@given(
    begins=st.lists(
        st.tuples(st.sampled_from(["new", "again", "continue"]), st.integers(0, 9), st.booleans(), SAVES), max_size=7
    )
)
def test_any_order_of_runs_in_one_folder_leaves_each_run_its_own_newest_and_best(
    tmp_path_factory: pytest.TempPathFactory, begins: list[tuple[str, int, bool, list[tuple[int, bool]]]]
) -> None:
    home = tmp_path_factory.mktemp("home")
    folder = home / "kept"
    trainings: list[Training] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPUTRAIN_HOME", str(home))
        for index, (how, which, from_older, saves) in enumerate(begins):
            other = trainings[which % len(trainings)] if trainings else None
            run = run_dirs.run_dir(home / "runs", f"r{index}", world_size=1, steps=1, started=1_790_000_000.0 + index)
            if other is None:
                new = Training(run, folder)
                new.go_on(saves, source=None, inherited=None)
                trainings.append(new)
            elif how == "new":
                with pytest.raises(
                    RequestError, match=r"holds checkpoints of run .*, which this run does not continue"
                ):
                    Training(run, folder).go_on(saves, source=None, inherited=None)
            else:
                files = sorted(path for path in folder.glob("step_*") if owner_of(path) == other.run.id)
                newest = resumable_checkpoint(other.run.dir)
                assert newest is not None
                source = random.Random(which).choice(files) if from_older else newest
                source, state, _ = open_checkpoint(source, flag="--resume", run=other.run.id)
                if how == "again":
                    other.step = state["updates"]
                    other.go_on(saves, source=source, inherited=None)
                else:
                    new = Training(run, folder, step=state["updates"])
                    new.go_on(saves, source=source, inherited=other.best)
                    trainings.append(new)
            for each in trainings:
                newest = resumable_checkpoint(each.run.dir)
                assert newest is not None
                assert opened(newest, run_named_by(each.run.dir, newest)) == (each.run.id, each.steps[-1])
                if each.best is None:
                    assert "which has no best one" in choose_checkpoint(each.run.id, None).description
                else:
                    chosen = choose_checkpoint(each.run.id, None)
                    assert opened(chosen.path, chosen.run_id) == each.best
                kept = [path for path in folder.glob("step_*") if owner_of(path) == each.run.id]
                assert 1 <= len(kept) <= KEEP + 1


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Run, Run, Path]:
    """Return two runs and a folder in which the second has replaced all that the first has recorded."""
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path))
    first, second = (run_dirs.run_dir(tmp_path / "runs", name, world_size=1, steps=1) for name in ("a", "b"))
    folder = tmp_path / "kept"
    folder.mkdir()
    for name in ("step_00000002.pt", "best.pt"):
        save_file(folder / name, run=second.id, step=2)
    for run in (first, second):
        event = Checkpoint(time=1.0, step=2, path=str(folder / "step_00000002.pt"), bytes=1, write_ms=1.0, best=True)
        with run.dir.rank_events(0).open("ab") as file:
            file.write(encode_event(event))
    return first, second, folder


def test_a_run_whose_files_another_one_has_replaced_has_no_checkpoint_and_says_whose_they_are(
    shared: tuple[Run, Run, Path],
) -> None:
    first, second, folder = shared
    assert resumable_checkpoint(first.dir) is None
    with pytest.raises(RequestError) as refused:
        choose_checkpoint(first.id, None)
    line = f"; the last one it wrote, {folder}/step_00000002.pt, is now a checkpoint of {second.id}"
    assert str(refused.value).endswith(line)
    with pytest.raises(RequestError, match=rf"best\.pt is a checkpoint of {second.id}, not of {first.id}"):
        choose_checkpoint(first.id, "best.pt")
    assert choose_checkpoint(second.id, None).path == folder / "best.pt"


@pytest.mark.parametrize(("run", "names"), [("a", True), ("another", False), ("", False)])
def test_in_place_of_a_torn_checkpoint_a_whole_one_of_the_same_run_is_named(
    tmp_path: Path, run: str, names: bool
) -> None:
    for step in (1, 2):
        save_file(tmp_path / f"step_0000000{step}.pt", run="a", step=step)
    torn = tmp_path / "best.pt"
    torn.write_bytes((tmp_path / "step_00000002.pt").read_bytes()[:-1])
    (tmp_path / "step_00000002.pt").unlink()
    with pytest.raises(CheckpointError) as refused:
        open_checkpoint(torn, flag="--eval-only", run=run)
    assert str(refused.value).endswith(f"; {tmp_path}/step_00000001.pt of the same run is whole") == names
    with pytest.raises(CheckpointError, match=r"is missing$"):
        open_checkpoint(torn, flag="--resume", run=run, names_whole=False)


def test_a_renamed_run_directory_keeps_its_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path))
    run = run_dirs.run_dir(tmp_path / "runs", "a", world_size=1, steps=1)
    save_file(run.dir.checkpoints / "step_00000001.pt", run=run.id, step=1)
    run.dir.path.rename(tmp_path / "runs" / "20260101-000000-renamed")
    chosen = choose_checkpoint("20260101-000000-renamed", None)
    assert opened(chosen.path, chosen.run_id) == (run.id, 1)


def test_the_files_of_a_run_are_pruned_and_those_of_another_one_stay(tmp_path: Path) -> None:
    def save(run: str, steps: range, **options: Any) -> None:
        writer = CheckpointWriter(tmp_path, keep_last=1, run_id=run, **options)
        for step in steps:
            writer.save({"updates": step}, step=step, best=step == steps[0])
            writer.wait()
        writer.close()

    save("a", range(1, 4))
    save("b", range(3, 9), continues=True)
    found = {path.name.partition(".of-")[0].removesuffix(".pt") + owner_of(path) for path in tmp_path.glob("*.pt")}
    assert found == {"step_00000003a", "besta", "step_00000008b", "bestb"}
