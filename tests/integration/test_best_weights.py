"""The weights of the best validation are tested, and a checkpoint is evaluated alike on any number of ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from checkpoint_log import newest
from gloo_group import Processes, Raised
from tiny_task import TaskWithTest, TinyOptions
from trained import train as train_alone

from trainer import distributed
from trainer.checkpoint import load, step_name
from trainer.contract.options import Training
from trainer.contract.record import EventWriter, Finding, Validation, decode_events

OPTIONS: dict[str, Any] = {
    "task": "tested",
    "batch_size": (4,),
    "lr": (0.05,),
    "max_epochs": 6,
    "save_every_updates": 1,
}
"""The best validation comes after the first of the epochs, of 7 updates on 2 ranks: the loss rises from then on."""


class SampledTask(TaskWithTest):
    """Notes the call for a sample, which comes right before the test."""

    sampled = False

    def sample(self, model: torch.nn.Module) -> None:
        self.sampled = True


def on_ranks(
    rank: int, world_size: int, folder: str, options: dict[str, Any], body: Callable[..., Any], *arguments: Any
) -> dict[str, Any]:
    """Do something with the tested task as one rank of a group; return what came into the record."""
    from worker_contexts import worker_context

    url = f"file://{folder}/rendezvous"
    distributed.distributed_init(
        init_method=url if world_size > 1 else None,
        world_size=world_size,
        rank=rank,
        backend="gloo",
        device=torch.device("cpu"),
        timeout_s=60.0,
        join_timeout_s=60.0,
    )
    task = SampledTask(TinyOptions())
    stop = {"": lambda: False, "at once": lambda: True, "in the test": lambda: task.sampled}[options.get("stop", "")]
    record = Path(folder, f"{rank}.ndjson")
    writer = EventWriter(record, rank=rank)
    narration: list[str] = []
    try:
        kept = options.get("kept", True)
        ctx = worker_context(
            rank,
            world_size,
            writer=writer,
            print_line=narration.append,
            checkpoints=Path(folder, "checkpoints") if kept else None,
            stop_requested=stop,
        )
        chosen = {name: value for name, value in options.items() if name not in ("kept", "stop")}
        outcome = body(task, Training(**{**OPTIONS, **chosen}), ctx, *arguments)
        writer.close()
        events = decode_events(record.read_bytes()) if record.exists() else []
        return {
            "updates": outcome.updates,
            "best": outcome.best.step,
            "stopped": outcome.stopped,
            "evaluated": [event for event in events if isinstance(event, Validation)],
            "findings": [event for event in events if isinstance(event, Finding)],
            "narration": narration,
        }
    finally:
        writer.close()
        distributed.shutdown()


def train(task: TaskWithTest, options: Training, ctx: Any, resume: str | None = None) -> Any:
    from trainer.engine.loop import Loop

    loop = Loop(task, options, ctx)
    if resume is not None:
        loop.state.load_state_dict(load(resume), source=resume)
    return loop.run()


def evaluate(task: TaskWithTest, options: Training, ctx: Any) -> Any:
    from trainer.engine.checkpoint_evaluation import evaluate_checkpoint
    from trainer.engine.starting_point import open_start

    return evaluate_checkpoint(task, options, ctx, open_start(options))


class RankRunner:
    """Does something on so many ranks in a folder of its own, and returns what rank 0 recorded."""

    def __init__(self, processes: Processes, folder: Path) -> None:
        self._processes, self._folder, self._count = processes, folder, 0

    def __call__(self, body: Callable[..., Any], options: dict[str, Any], *arguments: Any, ranks: int = 2) -> Any:
        self._count += 1
        self.folder = self._folder / str(self._count)
        self.folder.mkdir()
        self.checkpoints = self.folder / "checkpoints"
        members = self._processes.take(ranks)
        for rank, member in enumerate(members):
            member.begin(on_ranks, rank, ranks, str(self.folder), options, body, *arguments)
        outcomes = [member.outcome() for member in members]
        return outcomes[0]


@pytest.fixture
def on_ranks_in_folder(processes: Processes, tmp_path: Path) -> RankRunner:
    return RankRunner(processes, tmp_path)


def result_of_test(done: dict[str, Any]) -> Validation:
    (found,) = (event for event in done["evaluated"] if event.split == "test")
    assert isinstance(found, Validation)
    return found


def expected_loss(checkpoint: Path) -> float:
    task = TaskWithTest(TinyOptions())
    model = task.model()
    model.load_state_dict(load(checkpoint)["model"])
    model.eval()
    data = task.datasets()["test"]
    with torch.no_grad():
        loss, count, _ = task.loss(model, task.collate([data[index] for index in range(len(data))]))
    return float(loss / count)


@pytest.fixture(scope="module")
def trained(processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A training whose best weights are not its last ones, and its checkpoints."""
    on_ranks_in_folder = RankRunner(processes, tmp_path_factory.mktemp("trained"))
    done = on_ranks_in_folder(train, {})
    assert 0 < done["best"] < done["updates"], done
    return done, on_ranks_in_folder.checkpoints


def test_the_best_weights_are_tested_and_recorded_with_their_step(
    trained: tuple[dict[str, Any], Path],
) -> None:
    done, checkpoints = trained
    found = result_of_test(done)
    assert (found.weights_step, found.step) == (done["best"], done["updates"])
    assert found.loss == pytest.approx(expected_loss(checkpoints / "best.pt"), rel=1e-6)
    last = checkpoints / f"step_{done['updates']:08d}.pt"
    assert found.loss != pytest.approx(expected_loss(last), rel=1e-3), "the last checkpoint is of the last weights"
    assert [line for line in done["narration"] if line.startswith(f"test (weights of step {done['best']}): loss ")]
    assert not done["findings"]


@pytest.mark.parametrize(
    ("options", "last"),
    [
        ({"kept": False}, False),
        ({"test_best": False}, True),
        ({"valid_every_epochs": 9, "max_epochs": 0, "max_updates": 42}, True),
    ],
    ids=["nothing saved", "switched off", "the last is the best"],
)
def test_the_best_weights_need_no_file_and_without_them_the_last_are_tested(
    on_ranks_in_folder: RankRunner, trained: tuple[dict[str, Any], Path], options: dict[str, Any], last: bool
) -> None:
    done = on_ranks_in_folder(train, options)
    assert done["updates"] == trained[0]["updates"]
    assert result_of_test(done).weights_step == (done["updates"] if last else trained[0]["best"])
    assert (result_of_test(done).loss == result_of_test(trained[0]).loss) is not last
    assert not done["findings"]


@pytest.mark.parametrize("when", ["at once", "in the test"])
def test_a_training_that_is_stopped_does_not_test_and_keeps_its_last_weights(
    on_ranks_in_folder: RankRunner, trained: tuple[dict[str, Any], Path], when: str
) -> None:
    first, checkpoints = trained
    done = on_ranks_in_folder(train, {"stop": when})
    assert done["stopped"]
    assert not [event for event in done["evaluated"] if event.split == "test"]
    (kept,) = (
        path for path in on_ranks_in_folder.checkpoints.glob("step_*.pt") if int(path.stem[5:]) == done["updates"]
    )
    assert done["updates"] == (first["updates"] if when == "in the test" else 2)
    if when == "in the test":
        assert expected_loss(kept) == expected_loss(checkpoints / kept.name)


@pytest.mark.parametrize("there", [True, False])
def test_a_resumed_training_tests_the_best_weights_of_before_or_reports_that_they_are_missing(
    on_ranks_in_folder: RankRunner, trained: tuple[dict[str, Any], Path], tmp_path: Path, there: bool
) -> None:
    first, checkpoints = trained
    folder = tmp_path / "before"
    folder.mkdir()
    for path in checkpoints.glob("*.pt"):
        # On a busy machine fewer checkpoints are written, and that of the best step may not be deleted.
        if there or path.name not in ("best.pt", step_name(first["best"])):
            (folder / path.name).write_bytes(path.read_bytes())
    source = folder / f"step_{first['updates']:08d}.pt"
    if there:  # from one training to the next, of which the first two are stopped at once, and none has better ones
        for _ in range(2):
            stopped = on_ranks_in_folder(train, {"max_epochs": 7, "stop": "at once"}, str(source))
            shutil.rmtree(source.parent)
            source = on_ranks_in_folder.checkpoints / f"step_{stopped['updates']:08d}.pt"
            found = newest(on_ranks_in_folder.checkpoints)
            assert found is not None
            assert found[0] == source
            assert load(on_ranks_in_folder.checkpoints / "best.pt")["updates"] == first["best"]
    done = on_ranks_in_folder(train, {"max_epochs": 7}, str(source))
    assert done["best"] == first["best"]
    found = result_of_test(done)
    if there:
        assert (found.weights_step, found.loss) == (first["best"], result_of_test(first).loss)
        assert not done["findings"]
        return
    assert found.weights_step == done["updates"]
    (finding,) = done["findings"]
    assert (finding.kind, finding.severity) == ("best_not_tested", "warning")
    assert finding.message == (
        f"testing the last weights (step {done['updates']}), not the best (step {first['best']}): "
        f"{folder}, from which the training was resumed, has no checkpoint of that step"
    )


def test_an_evaluation_is_the_same_to_the_last_bit_on_any_number_of_ranks(
    on_ranks_in_folder: RankRunner, trained: tuple[dict[str, Any], Path]
) -> None:
    first, checkpoints = trained
    before = {path: path.stat() for path in checkpoints.iterdir()}
    results = []
    for ranks in (1, 2, 3):
        done = on_ranks_in_folder(
            evaluate, {"eval_only": str(checkpoints / "best.pt"), "valid_batch_size": 4}, ranks=ranks
        )
        results.append((result_of_test(done).loss, result_of_test(done).metrics, result_of_test(done).weights_step))
        assert (
            f"evaluating test with the weights of step {first['best']}: {checkpoints / 'best.pt'}" in done["narration"]
        )
        assert not on_ranks_in_folder.checkpoints.exists(), "nothing is saved"
    assert results == [(result_of_test(first).loss, result_of_test(first).metrics, first["best"])] * 3
    assert {path: path.stat() for path in checkpoints.iterdir()} == before


@pytest.mark.parametrize(("flags", "split"), [([], "valid"), (["--eval-split", "test"], None)])
def test_without_a_test_split_of_a_user_s_task_its_validation_is_evaluated(
    tmp_path: Path, flags: list[str], split: str | None
) -> None:
    assert train_alone(tmp_path / "first", "--max-updates", 2).code == 0
    done = train_alone(tmp_path / "again", "--eval-only", tmp_path / "first" / "checkpoints", *flags)
    assert [event["split"] for event in done.events_of("validation")] == ([split] if split else []), done.output
    assert done.code == (0 if split else 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eval_only": "{folder}/none.pt"}, "{folder}/none.pt: cannot be read (No such file or directory)"),
        ({"eval_only": "{folder}/empty"}, "--eval-only {folder}/empty: the folder holds no checkpoint"),
        (
            {"eval_only": "{folder}/dcp"},
            "--eval-only {folder}/dcp: the folder holds no checkpoint; torch.distributed.checkpoint wrote it",
        ),
        ({"eval_only": "{best}", "resume": "{best}"}, "--eval-only does not train, and --resume does: leave one"),
        ({"eval_only": "{best}", "task": "other"}, "{best} is of task 'tested', but this run's is 'other': a renamed"),
    ],
)
def test_a_wrong_eval_only_is_refused_in_one_line(
    on_ranks_in_folder: RankRunner,
    trained: tuple[dict[str, Any], Path],
    tmp_path: Path,
    options: dict[str, str],
    message: str,
) -> None:
    (tmp_path / "empty").mkdir()
    torch.distributed.checkpoint.save({"step": torch.zeros(())}, checkpoint_id=tmp_path / "dcp")
    places = {"folder": tmp_path, "best": trained[1] / "best.pt"}
    refused = on_ranks_in_folder(evaluate, {name: text.format(**places) for name, text in options.items()})
    assert isinstance(refused, Raised), refused
    assert refused.kind in ("RequestError", "CheckpointError")
    assert refused.message.startswith(message.format(**places))
    assert "\n" not in refused.message
