"""Any entry of a checkpoint lost or altered: refused by name before the first step, or it makes no difference."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_log import newest
from examples import examples
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from tiny_task import TinyOptions, TinyTask
from torch import Tensor
from trained import TASK, TrainingResult, train
from worker_contexts import worker_context

from trainer.checkpoint import copy_to_cpu, load, write_file
from trainer.checkpoint.file import sequence_of
from trainer.contract.errors import RequestError
from trainer.contract.options import Training
from trainer.distributed.encoding import encode
from trainer.engine.loop import Loop

Keys = tuple[Any, ...]
SAVED_AT, END = 3, 6
TRAININGS: dict[str, dict[str, Any]] = {
    "adam": {"optimizer": "adam", "lr": (0.01,), "ema_decay": 0.9},
    "sgd in fp16": {"optimizer": "sgd", "momentum": 0.9, "precision": "fp16"},
}


def make_loop(
    options: dict[str, Any], *, updates: int, folder: Path | None = None, narration: list[str] | None = None
) -> Loop:
    """A training of one rank in this process; the checkpoint falls into the middle of its second epoch."""
    return Loop(
        TinyTask(TinyOptions(samples=10, valid_samples=3, dropout=0.2, width=4)),
        Training(task="tiny", batch_size=(5,), max_updates=updates, valid_every_updates=2, **options),
        worker_context(
            print_line=lambda line: None if narration is None else narration.append(line), checkpoints=folder
        ),
    )


def resumed(file: Path, options: dict[str, Any]) -> Tensor:
    """Train from a checkpoint to the end as a rank does; return all of its state."""
    loop = make_loop(options, updates=END)
    loop.state.load_state_dict(load(file), source=str(file))
    loop.run()
    return encode(copy_to_cpu(loop.state.state_dict()))


class StoppedTraining:
    """A training that was stopped, and what comes of it when it goes on."""

    def __init__(self, options: dict[str, Any], folder: Path) -> None:
        self.options = options
        make_loop(options, updates=SAVED_AT, folder=folder / "checkpoints").run()
        found = newest(folder / "checkpoints")
        assert found is not None
        path, self.state = found
        self.altered = folder / "altered.pt"
        self.result = resumed(path, options)
        assert torch.equal(self.result, resumed(path, options)), "the same file gives the same training"

    def outcome(self, state: dict[str, Any]) -> tuple[str, Tensor | None]:
        """Return why a state is refused, or what its training came to."""
        write_file(self.altered, state)
        try:
            return "", resumed(self.altered, self.options)
        except RequestError as error:
            return str(error), None


@pytest.fixture(scope="module", params=TRAININGS)
def stopped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoppedTraining]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield StoppedTraining(TRAININGS[request.param], tmp_path_factory.mktemp("saved"))
    torch.set_num_threads(threads)


def key_paths(state: Any, before: Keys = ()) -> Iterator[Keys]:
    """Yield the keys that lead to every entry."""
    inner = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    for key, value in inner:
        yield (*before, key)
        yield from key_paths(value, (*before, key))


def entry_at(state: Any, path: Keys) -> Any:
    for key in path:
        state = state[key]
    return state


def spelled(path: Keys) -> str:
    """A path as a message spells it."""
    if path[0] == "entries" and len(path) > 1:
        return str(path[1])
    return str(path[0]) + "".join(f"[{key!r}]" for key in path[1:])


def altered(state: dict[str, Any], path: Keys, change: Callable[[Any, Any], None]) -> dict[str, Any]:
    result = copy.deepcopy(state)
    change(entry_at(result, path[:-1]), path[-1])
    return result


def remove(holder: Any, key: Any) -> None:
    del holder[key]


def draw_entry(data: st.DataObject, state: dict[str, Any]) -> Keys:
    """Draw an entry; large parts of the state do not come more often than small ones."""
    top = data.draw(st.sampled_from(sorted(state)))
    return data.draw(st.sampled_from([(top,), *key_paths(state[top], (top,))]))


PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**80), 2**80),
    st.floats(),
    st.text(max_size=4),
    st.binary(min_size=1, max_size=4),  # torch does not load empty bytes
)
TENSORS = st.builds(
    torch.zeros,
    st.lists(st.integers(0, 5), max_size=3),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool]),
)
VALUES = st.recursive(
    PLAIN | TENSORS,
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.lists(inner, max_size=2).map(tuple)
        | st.dictionaries(st.integers(0, 3) | st.sampled_from(["state", "exp_avg", "a"]), inner, max_size=2)
    ),
    max_leaves=4,
)


def same_kind(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return (one.dtype, one.shape) == (other.dtype, other.shape)
    return type(one) is type(other)


OF_KIND: dict[type, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(-(2**80), 2**80) | st.integers(-2, 12),
    float: st.floats(),
    str: st.text(max_size=4),
}


def has_known_kind(path: Keys, stopped: StoppedTraining) -> bool:
    return type(entry_at(stopped.state, path)) in OF_KIND


BOUNDED = settings(
    max_examples=examples(40, 300),
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@BOUNDED
@given(data=st.data())
def test_an_entry_that_is_lost_or_of_another_kind_is_refused_by_name_or_makes_no_difference(
    stopped: StoppedTraining, data: st.DataObject
) -> None:
    path = draw_entry(data, stopped.state)
    if data.draw(st.booleans(), label="removed"):
        state = altered(stopped.state, path, remove)
        # What follows in a list moves up.
        named = spelled(path[:-1]) if isinstance(path[-1], int) and len(path) > 1 else spelled(path)
    else:
        value = data.draw(VALUES, label="value")
        assume(not same_kind(value, entry_at(stopped.state, path)))
        state = altered(stopped.state, path, lambda holder, key: holder.__setitem__(key, value))
        named = spelled(path)
    why, result = stopped.outcome(state)
    if result is None:
        assert str(stopped.altered) in why
        assert named in why
        assert len(why.splitlines()) == 1
    else:
        assert torch.equal(result, stopped.result)


@BOUNDED
@given(data=st.data())
def test_an_entry_of_the_right_kind_and_any_value_is_refused_in_one_line_or_trained_with(
    stopped: StoppedTraining, data: st.DataObject
) -> None:
    path = data.draw(
        st.sampled_from(
            [path for path in key_paths(stopped.state) if path[0] != "entries" and has_known_kind(path, stopped)]
        )
    )
    value = data.draw(OF_KIND[type(entry_at(stopped.state, path))], label="value")
    why, _ = stopped.outcome(altered(stopped.state, path, lambda holder, key: holder.__setitem__(key, value)))
    if why:
        assert str(stopped.altered) in why
        assert len(why.splitlines()) == 1


# ------------------------------------------------------------------------------------------------ the whole command


@pytest.fixture(scope="module")
def first_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with a training's checkpoint of update 2."""
    run_dir = tmp_path_factory.mktemp("first")
    done = train(run_dir, "--batch-size", 10, "--max-updates", 2)
    assert done.code == 0, done.output
    return run_dir / "checkpoints"


def without_moments(state: dict[str, Any]) -> None:
    state["optimizer"]["state"] = {}


def word_for_moment(state: dict[str, Any]) -> None:
    state["optimizer"]["state"][0]["exp_avg"] = "x"


def without_task(state: dict[str, Any]) -> None:
    del state["task"]


ALTERED: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "moments": (without_moments, "entry optimizer['state'][0] is missing"),
    "word": (word_for_moment, "entry optimizer['state'][0]['exp_avg'] is str, but float32 [16, 8]"),
    "task": (without_task, "entry task is missing"),
}


def test_a_checkpoint_that_lacks_something_ends_the_command_with_2_and_offers_the_good_one(
    first_checkpoints: Path, tmp_path: Path
) -> None:
    good, bad = first_checkpoints / "step_00000002.pt", Path("step_00000003.pt")

    def resume(name: str) -> TrainingResult:
        folder = tmp_path / name
        folder.mkdir()
        os.link(good, folder / good.name)
        state = load(good)
        ALTERED[name][0](state)
        write_file(folder / bad.name, state, sequence=sequence_of(good) + 1)
        return train(folder / "run", "--batch-size", 10, "--max-updates", 6, "--resume", folder)

    with ThreadPoolExecutor(2) as pool:
        for name, done in zip(ALTERED, pool.map(resume, ALTERED), strict=True):
            assert done.code == 2, done.output
            assert "Traceback" not in done.output
            (line,) = (line for line in done.output.splitlines() if ALTERED[name][1] in line)
            folder = tmp_path / name
            assert f"{folder / bad.name}: {ALTERED[name][1]}" in line
            offered = folder / good.name
            assert f"{offered} fits: --resume {offered} continues from step 2" in line
            assert done.events_of("step") == []


def test_the_reason_why_no_checkpoint_is_usable_is_one_line(first_checkpoints: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    whole = (first_checkpoints / "step_00000002.pt").read_bytes()
    for name in ("step_00000002.pt", "step_00000003.pt"):
        (folder / name).write_bytes(whole[:-100])
    done = train(tmp_path / "run", "--batch-size", 10, "--max-updates", 6, "--resume", folder)
    assert done.code == 2, done.output
    (line,) = (line for line in done.output.splitlines() if "no intact checkpoint" in line)
    assert f"{folder / 'step_00000003.pt'}: is incomplete" in line
    (failure,) = done.events_of("failure")
    assert f"{folder / 'step_00000003.pt'}: is incomplete" in failure["message"]


def test_a_torn_file_that_is_passed_over_is_on_the_record(first_checkpoints: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    whole = (first_checkpoints / "step_00000002.pt").read_bytes()
    (folder / "step_00000002.pt").write_bytes(whole)
    torn = folder / "step_00000003.pt"
    torn.write_bytes(whole[:-100])
    done = train(tmp_path / "run", "--batch-size", 10, "--max-updates", 4, "--resume", folder)
    assert done.code == 0, done.output
    found = {finding["kind"]: finding["message"] for finding in done.events_of("finding")}
    assert sorted(found) == ["checkpoint_passed_over", "settings_on_resume"]
    assert str(torn) in found["checkpoint_passed_over"]
    assert "--max-updates 4 (was " in found["settings_on_resume"]


def test_another_seed_and_other_data_on_resume_are_reported(first_checkpoints: Path, tmp_path: Path) -> None:
    other = tmp_path / "other_data.py"
    source = Path(TASK.partition(":")[0]).read_text()
    other.write_text(source.replace("_Points(self.options.samples, 7)", "_Points(self.options.samples, 9)"))
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    state = load(first_checkpoints / "step_00000002.pt")
    task = f"{other}:TinyTask"
    write_file(folder / "step_00000002.pt", {**state, "task": task})
    flags = ("--task", task, "--batch-size", 10, "--max-updates", 6, "--resume", folder, "--seed", 99)
    done = train(tmp_path / "run", *flags)
    assert done.code == 0, done.output
    found = {finding["kind"]: finding for finding in done.events_of("finding")}
    seed = found["seed_on_resume"]["message"]
    assert "seed 99 orders the data from epoch 2 on, the rest of epoch 1 keeps the order of seed 1" in seed
    data = found["data_changed"]
    # On a busy machine not all of them are read in time.
    assert re.search(r"\b(\d+) of \1 samples that were compared have changed", data["message"]), data["message"]
    log = (tmp_path / "run" / "logs" / "0.log").read_text()
    assert seed in log
    assert data["message"] in log
    same = train(
        tmp_path / "same", "--batch-size", 10, "--max-updates", 6, "--resume", first_checkpoints, "--num-workers", 2
    )
    assert same.code == 0, same.output
    told = [finding["kind"] for finding in same.events_of("finding")]
    assert told == ["settings_on_resume"], "the same data under the same seed, and other flags"
