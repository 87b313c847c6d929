"""Which checkpoint of a run is evaluated and exported, also where its folder is not its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import run_dirs

from gputrain_tui.lifecycle import recipe_to_run
from gputrain_tui.lifecycle.remote_nodes import RemoteNode, write_remote_node
from gputrain_tui.lifecycle.run_checkpoints import choose_checkpoint, describe_newest
from trainer.contract.checkpoint_trailer import DIGEST_BYTES, head_of
from trainer.contract.errors import RequestError
from trainer.contract.record import Checkpoint, RunDir, encode_event


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path / "home"))
    return tmp_path


def make_run(home: Path, *, own: str, elsewhere: str, recorded: str, name: str = "trained") -> str:
    """Make a run with these checkpoints in its directory and in another folder, and in its record; return its id.

    Those with ``!`` are of another run, those in the record with ``*`` are the best.
    """
    run = run_dirs.run_dir(home / "home" / "runs", name)
    kept = home / "kept"
    kept.mkdir(exist_ok=True)
    for folder, names in ((run.dir.checkpoints, own), (kept, elsewhere)):
        for file in names.split():
            owner = head_of(payload=0, sequence=1, run="another" if file.endswith("!") else run.id)
            (folder / file.rstrip("!")).write_bytes(owner + bytes(DIGEST_BYTES))
    with run.dir.rank_events(0).open("ab") as record:
        for word in recorded.split():
            path = str(kept / word.rstrip("*"))
            record.write(
                encode_event(Checkpoint(time=1.0, step=1, path=path, bytes=1, write_ms=1.0, best=word.endswith("*")))
            )
    return run.id


@pytest.mark.parametrize(
    ("own", "elsewhere", "recorded", "which", "chosen"),
    [
        ("step_2.pt best.pt", "", "", None, "own/best.pt"),
        ("step_2.pt best.pt", "", "", "newest", "own"),
        ("step_2.pt best.pt", "", "", "step_2.pt", "own/step_2.pt"),
        ("step_2.pt", "", "", None, "own"),
        ("", "step_2.pt best.pt", "step_1.pt* step_2.pt", None, "kept/best.pt"),
        ("", "step_2.pt best.pt", "step_1.pt* step_2.pt", "step_2.pt", "kept/step_2.pt"),
        # Another training left its best one in the folder, or still has its files there.
        ("", "step_2.pt best.pt!", "step_1.pt step_2.pt", None, "kept/step_2.pt"),
        ("", "step_2.pt best.pt! step_9.pt!", "step_1.pt* step_2.pt", None, "kept/step_2.pt"),
    ],
)
def test_the_best_checkpoint_is_taken_where_it_is_known_to_be_the_runs(
    home: Path, own: str, elsewhere: str, recorded: str, which: str | None, chosen: str
) -> None:
    run = make_run(home, own=own, elsewhere=elsewhere, recorded=recorded)
    found = choose_checkpoint("last", which)
    folder = home / "home" / "runs" / run / "checkpoints"
    assert found.path == {"own": folder, "kept": home / "kept"}[chosen.partition("/")[0]] / chosen.partition("/")[2]
    assert found.run is not None
    assert found.run.id == run
    assert run in found.description


def test_checkpoints_of_another_host_are_evaluated_there_and_named_where_they_are_read_here(home: Path) -> None:
    run = RunDir(home / "home" / "runs" / make_run(home, own="", elsewhere="", recorded="step_2.pt"))
    (run.agents / "0.1.a").mkdir(parents=True)
    write_remote_node(run, "0.1.a", RemoteNode(host="far", run_dir="/there"))
    assert choose_checkpoint("last", None).path == home / "kept" / "step_2.pt"
    with pytest.raises(RequestError, match=f"on its first host: copy far:{home}/kept/step_2.pt here, and name that"):
        choose_checkpoint("last", None, here=True)


@pytest.mark.parametrize(
    ("own", "which", "message"),
    [
        ("", None, "{run} has no checkpoint in "),
        ("step_2.pt", "best", "{run} has no best checkpoint: take the newest with --checkpoint newest"),
        (
            "step_2.pt best.pt",
            "step_3.pt",
            "--checkpoint 'step_3.pt' is not a checkpoint of {run}; allowed are best, newest or a file; "
            "did you mean 'step_2.pt'?",
        ),
    ],
)
def test_a_missing_checkpoint_of_a_run_is_one_line(home: Path, own: str, which: str | None, message: str) -> None:
    run = make_run(home, own=own, elsewhere="", recorded="")
    with pytest.raises(RequestError) as refused:
        choose_checkpoint(run, which)
    assert str(refused.value).startswith(message.format(run=run))


def test_a_run_that_was_stopped_before_its_first_step_names_the_run_that_it_was_to_continue(home: Path) -> None:
    parent = make_run(home, own="step_2.pt", elsewhere="", recorded="")
    run = make_run(home, own="", elsewhere="", recorded="")
    runs = home / "home" / "runs"
    (runs / run / "recipe.toml").write_text(f'[train]\nresume = "{runs / parent / "checkpoints"}"\n')
    with pytest.raises(RequestError, match=f"{run} has no checkpoint in .*: it was to continue {parent}, so resume"):
        choose_checkpoint(run, None)


def test_of_a_run_of_a_script_a_resume_names_the_command_that_starts_it_again_and_eval_what_can_be_had(
    home: Path,
) -> None:
    run = make_run(home, own="", elsewhere="", recorded="")
    (home / "home" / "runs" / run / "recipe.toml").write_text('[train]\nscript = "/work/train.py"\n')
    for which in (None, "best", "step_2.pt"):
        with pytest.raises(RequestError, match=f"^{run} ran a script, .*; gputrain export {run} --to csv writes"):
            choose_checkpoint(run, which)
    with pytest.raises(RequestError) as refused:
        recipe_to_run.load(None, overrides=[], resume=run)
    again = f"gputrain run {home / 'home' / 'runs' / run / 'recipe.toml'} starts it again, in the same folder; "
    assert f"{run} ran a script, which keeps checkpoints of its own: {again}" in str(refused.value)
    assert "the script must find its checkpoint by itself" in str(refused.value)


@pytest.mark.parametrize(
    ("train", "step", "kept"),
    [
        ('task = "demo"', 8, "the newest checkpoint is that of step 8"),
        ('task = "demo"', None, "no checkpoint was saved"),
        ('script = "train.py"', None, "the checkpoints of a script are its own"),
        ('script = "package.train"\nmodule = true', None, "the checkpoints of a script are its own"),
    ],
)
def test_of_a_script_that_is_ended_no_checkpoint_is_said_to_be_missing(
    home: Path, train: str, step: int | None, kept: str
) -> None:
    run = RunDir(home / "home" / "runs" / make_run(home, own="", elsewhere="", recorded=""))
    run.recipe.write_text(f"[train]\n{train}\n")
    assert describe_newest(run, step) == kept
