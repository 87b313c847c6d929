"""Welcome screen, shown while there are no runs."""

from __future__ import annotations

from pathlib import Path

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Container
from textual.widgets import Static

from gputrain_tui.console.screens.console_screen import Page

STEPS = (
    ("d", "train the demo: two processes on this CPU, half a minute, no download"),
    ("n", "write a recipe for your script, a task or a torchrun command"),
    ("2", "choose a recipe, see what each machine will run, launch it"),
    ("1", "see the machines and their GPUs"),
    ("?", "every key"),
)


class WelcomeScreen(Page):
    """The welcome screen."""

    PLACE = "welcome"

    def body(self) -> ComposeResult:
        with Container(id="welcome"):
            yield Static(Text("gputrain", style="bold"), id="title")
            yield Static("Plan, launch, watch and diagnose distributed training.", id="claim")
            yield Static("There is no run on this machine yet.", id="state")
            yield Static(_steps(), id="steps")
            demo = "run recipes/demo.toml" if Path("recipes/demo.toml").is_file() else "init --example demo"
            yield Static(f"Or from a shell:  gputrain {demo}", id="shell")


def _steps() -> Text:
    text = Text()
    for key, description in STEPS:
        text.append(f" {key} ", "bold reverse" if key == "d" else "bold")
        text.append(f"  {description}\n")
    text.rstrip()
    return text
