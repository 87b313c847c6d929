"""Launch screen on a temporary folder, for tests of the form and the preflight, and for the pictures."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from screens_at_rest import open_screen, quiet_app, settle
from textual.pilot import Pilot
from textual.widgets import Input

from gputrain_tui.console.app import GputrainApp
from gputrain_tui.console.screens.launch_screen import LaunchScreen
from gputrain_tui.console.validate_recipe import ValidatedRecipe, validate_recipe
from gputrain_tui.hosts.host_names import LocalFacts
from gputrain_tui.plan.planner import plan
from gputrain_tui.preflight import PreflightFacts, run_checks
from gputrain_tui.preflight.facts import Folder, Port
from gputrain_tui.preflight.result import error
from gputrain_tui.recipe.build import build
from gputrain_tui.recipe.form_fields import message_key
from trainer.contract.errors import RequestError

TEXT = """# A recipe with a comment.
name = "tiny"

[[cluster.nodes]]
cpu_ranks = 2           # here

[train]
task = "lm"
max_updates = 2
threads = 1
save_every_epochs = 0

[task]
data = "text.txt"       # beside it
context = 8
dim = 16
layers = 1
heads = 2
sample_bytes = 0
"""


def small_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change into a folder with one recipe that can be launched."""
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "tiny.toml").write_text(TEXT)
    (tmp_path / "text.txt").write_text("to be or not to be " * 200)
    return tmp_path


def two_recipes(folder: Path) -> Path:
    """Write a recipe for this machine and one for two nodes into a folder."""
    (folder / "recipes" / "tiny.toml").write_text(TEXT)
    (folder / "recipes" / "two_nodes.toml").write_text(
        TEXT.replace("cpu_ranks = 2 ", 'host = "10.0.0.1"\ngpus = 4\n\n[[cluster.nodes]]\nhost = "10.0.0.2"\ngpus = 2')
        .replace("tiny", "two-nodes")
        .replace("max_updates = 2", "max_updates = 20_000")
    )
    return folder


HERE = LocalFacts(free_port=21000, names=frozenset({"10.0.0.1"}))
READY = PreflightFacts(
    data_checked=True,
    port=Port(number=21000, state="free"),
    memory_total_bytes=64 << 30,
    memory_available_bytes=48 << 30,
    cores=8,
    home=Folder(path="home/runs", free_bytes=200 << 30),
)
MISSING = error("data", "data/books does not exist", "set task.data to its path", key="task.data")
NOT_READY = msgspec.structs.replace(
    READY,
    data=MISSING,
    port=Port(number=21000, state="busy", holder="python3 (pid 4711)"),
    cores=1,
    save_dir=Folder(path="/scratch/ours", free_bytes=300 << 20, checkpoints=3),
)


def validate_on_fixed_machine(
    text: str,
    *,
    name: str,
    settings: list[str],
    task: str = "",
    hosts_max_age_s: float = 0.0,
    facts: PreflightFacts = READY,
) -> ValidatedRecipe:
    """Validate a recipe with the facts of a fixed machine."""
    try:
        recipe = build(text, name=name, overrides=settings)
        planned = plan(recipe, {}, local=HERE)
    except RequestError as error:
        return ValidatedRecipe(settings=tuple(settings), problem=str(error), key=message_key(str(error)))
    if planned.launcher == "ssh":  # which queries all hosts
        facts = msgspec.structs.replace(facts, queried=frozenset(node.host for node in planned.nodes))
    results = tuple(run_checks(recipe, planned, facts, local=HERE))
    return ValidatedRecipe(settings=tuple(settings), recipe=recipe, plan=planned, results=results)


@asynccontextmanager
async def open_launch_screen(
    size: tuple[int, int] = (140, 40),
    *,
    gpus: dict[str, tuple[int, ...]] | None = None,
    validate: Callable[..., ValidatedRecipe] = validate_recipe,
) -> AsyncIterator[tuple[GputrainApp, Pilot[int], LaunchScreen]]:
    """Open the launch screen on the recipes of the working directory, with previously selected GPUs."""
    app = quiet_app()
    async with app.run_test(size=size, notifications=True) as pilot:
        app.session.gpus = gpus or {}
        screen = LaunchScreen(debounce_s=0, validate=validate)
        await open_screen(pilot, screen)
        yield app, pilot, screen


async def set_field(pilot: Pilot[int], screen: LaunchScreen, key: str, value: str) -> None:
    """Enter a value into a field of the form."""
    screen.form.focus()
    screen.form.go_to(key)
    await pilot.press("enter")
    screen.query_one("#editor", Input).value = value
    await pilot.press("enter")
    await settle(pilot)
