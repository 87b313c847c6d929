"""Recipes written in any of TOML's ways are saved with what was changed, and with all their comments."""

from __future__ import annotations

from random import Random

import pytest

from gputrain_tui.recipe.build import build
from gputrain_tui.recipe.draft import Draft
from gputrain_tui.recipe.toml_writer import dump_toml
from trainer.contract.errors import RequestError

WAYS = {
    "cluster": (
        '[cluster]\nbackend = "gloo"\n',
        '[cluster]\nmax_restarts = 1\n[cluster.env]\nA = "1"\n',
        "[[cluster.nodes]]\nranks = 2\n",
        '[cluster]\nbackend = "gloo"\n[[cluster.nodes]]\ncpu_ranks = 1\n',
        'cluster.backend = "gloo"\n',
        'cluster = {backend = "gloo"}\n',
    ),
    "train": (
        '[train]\ntask = "lm"\nmax_epochs = 1\n',
        'train.task = "lm"\ntrain.max_epochs = 1\n',
        'train = {task = "lm", max_epochs = 1}\n',
    ),
    "task": ('[task]\ndata = "stdlib"\n', "", "[task]\n", 'task.data = "stdlib"\n'),
    "report": ("[report]\ntensorboard = true\n", ""),
    "slurm": ("", '[slurm]\npartition = "a"\n'),
}
"""Texts of each table."""
CHANGES = (
    *(("name", "other"), ("task.data", "x"), ("task.data", ""), ("task.context", "8"), ("train.lr", "0.5")),
    *(("cluster.max_restarts", "3"), ("cluster.backend", ""), ("cluster.env", "B=2"), ("cluster.nodes[0].ranks", "3")),
    *(("report.wandb", "p"), ("report.tensorboard", ""), ("slurm.partition", "q")),
)


def _any_recipe(random: Random) -> str:
    texts = [random.choice(ways) for ways in WAYS.values()]
    tables = [text for text in texts if text.startswith("[")]
    random.shuffle(tables)
    lines = [random.choice(["", "# head\n", "# head\n\n", 'name = "n" # its name\n'])]
    for number, text in enumerate([*(text for text in texts if not text.startswith("[")), *tables]):
        about = f"# about {number}\n"
        lines += [random.choice(["", about, f"\n{about}", f"\n\n{about}\n", "\n"]), text]
    lines.append(random.choice(["", "# end", "\n# [report]\n# wandb = 1\n", "\n"]))
    return "".join(lines).replace("\n", random.choice(["\n"] * 9 + ["\r\n"]))


def _comments(text: str) -> list[str]:
    return sorted(line.strip() for line in text.splitlines() if line.strip().startswith("#"))


@pytest.mark.parametrize("seed", range(4))
def test_any_recipe_is_saved_with_its_changes_and_all_comments(seed: int) -> None:
    random, saved = Random(seed), 0
    for _ in range(150):
        text = _any_recipe(random)
        draft = Draft(text, name="any.toml")
        for key, value in random.sample(CHANGES, random.randint(1, 4)):
            draft.set(key, value)
        try:
            recipe = build(draft.text, name="any.toml", overrides=draft.settings)
        except RequestError:
            continue  # it lacks what its task needs
        written = dump_toml(recipe)
        again = build(written, name="any.toml")
        for part in ("name", "cluster", "slurm", "train", "task_options", "report"):
            assert getattr(again, part) == getattr(recipe, part), (text, draft.settings)
        assert _comments(written) == _comments(text), (text, draft.settings)
        saved += 1
    assert saved > 50
