"""Action table, from which bindings, footer, palette, help and the topic ``keys`` are made.

An action's name is the name of the method ``action_<name>`` on the screen, or on the app for ``app`` actions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from textual.binding import Binding
from textual.keys import format_key

EVERYWHERE = "app"
"""Place of the actions that every screen has."""


@dataclass(frozen=True, kw_only=True)
class Action:
    """Action run by a key, a click in the footer, or its name in the palette."""

    name: str
    """Textual's name of the action, for the method ``action_<name>``; with arguments (``show('loss')``) or ``app.``."""
    keys: tuple[str, ...]
    """Textual's names of the keys; the first one is shown in the footer."""
    label: str
    description: str
    """Effect of the action, for palette and help."""
    group: str
    places: tuple[str, ...]
    """Screens that have the action, or panels that have it while focused: ``log``, ``findings``, ``text`` (a stack)."""
    footer: int = 0
    """Rank in the footer, 1 first; if the footer is narrow, the last ones are left out. 0: not in the footer."""
    footers: tuple[str, ...] = ()
    """Screens whose footers show the action; empty: all of ``places``."""
    folds: int = 0
    """Order in which a narrow footer shortens groups to their keys and the group's name: 1, then 2; 0: never."""
    offered: Literal["always", "while it runs", "after the end"] = "always"
    """Time at which the footer of a run shows the action; the key works at any time."""

    @property
    def path(self) -> str:
        """Textual's name of the action for ``run_action`` of a screen."""
        return self.name if EVERYWHERE not in self.places else f"app.{self.name}"

    @property
    def key_text(self) -> str:
        return key_text(self.keys[0])

    @property
    def key_texts(self) -> str:
        return " ".join(map(key_text, self.keys))


def key_text(key: str) -> str:
    """Return a key as shown to users, such as ``^c`` or ``F5``."""
    if key.startswith("ctrl+"):
        return f"^{key.removeprefix('ctrl+')}"
    return key.upper() if re.fullmatch(r"f\d+", key) else format_key(key)


def _group(
    group: str,
    places: str,
    *rows: tuple[str, str, str, int, str],
    folds: int = 0,
    footers: str = "",
    offered: Literal["always", "while it runs", "after the end"] = "always",
) -> Iterator[Action]:
    """Yield the actions of a group; a row has name, keys, label, rank in the footer and description."""
    for name, keys, label, footer, description in rows:
        yield Action(
            name=name, keys=tuple(keys.split()), label=label, description=description, group=group,
            places=tuple(places.split()), footer=footer, footers=tuple(footers.split()), folds=folds, offered=offered,
        )  # fmt: skip


NEW_RECIPE = "Write a recipe for a script, a task or a torchrun command"

ACTIONS: tuple[Action, ...] = (
    *_group("Screens", EVERYWHERE,
        ("go('cluster')", "1", "Cluster", 20, "Show the machines and their GPUs"),
        ("go('launch')", "2", "Launch", 20, "Choose a recipe, see its plan, launch it"),
        ("go('run')", "3", "Run", 20, "Watch the run that was opened last"),
        ("go('history')", "4", "History", 20, "List all runs, open and compare them"), folds=1, footers="run rank"),
    *_group("Screens", EVERYWHERE,
        ("help", "question_mark f1", "Help", 90, "Show every key of this screen, and the help about it"),
        ("command_palette", "ctrl+p colon", "Palette", 95, "Find any action by its name"),
        ("next_theme", "T", "Theme", 0, "Switch between dark, light and the terminal's own colours"),
        ("help_quit", "ctrl+c", "Copy", 0, "Copy the selected text; without a selection, show which key quits"),
        ("quit", "q", "Quit", 99, "Leave the console; runs continue")),
    *_group("Ranks", "run",
        ("open_rank", "enter", "Rank", 1, "Open the selected rank"),
        ("sort", "s", "Sort", 22, "Sort the ranks by the next column"),
        ("reverse", "R", "Reverse", 0, "Reverse the order of the ranks"),
        ("filter", "slash", "Filter", 21, "Show only the ranks that match, such as host:node3 or step<100"),
        ("one_of_each", "U", "One of each", 0, "Show the latest rank of each process group, such as tp; then all")),
    *_group("Panels", "run rank",
        ("show('loss')", "l", "Loss", 10, "Show the loss of all ranks; press again to zoom"),
        ("show('sync')", "g", "Sync", 11, "Show the wait for gradient synchronisation; press again to zoom"), folds=2),
    *_group("Panels", "run",
        ("show('bars')", "b", "Bars", 12, "Show the phases of a step, rank by rank; press again to zoom"),
        ("show('late')", "h", "Late", 13, "Show which ranks were late, over time; press again to zoom"),
        ("show('findings')", "f", "Findings", 14, "Show the findings; again to zoom; enter: evidence"), folds=2),
    *_group("Panels", "run rank",
        ("show('log')", "o", "Log", 15, "Show the output of the ranks; press again to zoom"), folds=2),
    *_group("Panels", "rank", ("show('step')", "t", "Step", 12, "Show the rank's step times"), folds=2),
    *_group("Panels", "rank",
        ("show('groups')", "C", "Collectives", 0, "Show the rank's collectives by process group, and single calls")),
    *_group("Panels", "run",
        ("show('ranks')", "t", "Table", 0, "Show the table of ranks; press again to zoom"),
        ("show('hardware')", "H", "Hardware", 0, "Show use, memory, temperature and power of hosts and GPUs over time"),
        ("next_panel", "p", "Panel", 0, "Show the next panel"),
        ("zoom", "z", "Zoom", 23, "Zoom one panel to the whole screen, and back")),
    *_group("Panels", "run rank",
        ("back", "escape", "Back", 2, "Go back one level: cursor, range, zoom, filter, selection, screen"),
        footers="rank"),
    *_group("Charts", "run rank",
        ("scale", "y", "Log scale", 0, "Switch the charts between linear and logarithmic scale"),
        ("window", "w", "Window", 0, "Cycle through the whole run, its last 1,000 and its last 100 steps"),
        ("smooth", "m", "Smooth", 0, "Change the smoothing of the curves"),
        ("metric", "M", "Own metric", 0, "Choose one of the run's own metrics to draw in place of the loss"),
        ("axis", "x", "Axis", 0, "Draw the charts over steps, time, samples or tokens"),
        ("underlay", "E", "Earlier run", 0, "Draw the next earlier run of the recipe behind the curves"),
        ("cursor(-1)", "comma", "Cursor left", 0, "Move the cursor to an earlier step; a click does it, too"),
        ("cursor(1)", "full_stop", "Cursor right", 0, "Move the cursor to a later step"),
        ("cursor(-10)", "less_than_sign", "Cursor far left", 0, "Move the cursor left by ten columns"),
        ("cursor(10)", "greater_than_sign", "Cursor far right", 0, "Move the cursor right by ten columns"),
        ("range(1)", "plus equals_sign", "Closer", 0, "Show half as many steps; or drag the mouse over a range"),
        ("range(0)", "minus", "Wider", 0, "Show twice as many steps")),
    *_group("Run", "run rank stacks",
        ("stop_run", "S", "Stop", 20, "Stop this run on every machine; asks first"), offered="while it runs"),
    *_group("Run", "run",
        ("stacks", "K", "Stacks", 0, "Ask all ranks for their Python stacks; show equal ones together")),
    *_group("Stacks", "stacks",
        ("ask", "K", "Ask again", 1, "Ask for the Python stacks once more"),
        ("threads", "t", "Threads", 2, "Show the threads beside the main one, and hide them again"),
        ("copy", "c", "Copy", 0, "Copy the stacks"),
        ("back", "escape", "Back", 4, "Back to the run or the rank")),
    *_group("Run", "run rank",
        ("copy", "c", "Copy", 0, "Copy the failure, the finding or the line under the cursor")),
    *_group("Run", "run",
        ("resume", "r", "Resume", 3, "Continue from the last checkpoint in a new run; asks first"),
        ("relaunch", "e", "Edit and rerun", 4, "Open the run's recipe on the launch screen"),
        ("compare", "C", "Compare", 5, "Compare with the previous run of the same recipe"), offered="after the end"),
    *_group("Rank", "rank", ("stack", "K", "Stack", 1, "Ask the rank's process for its Python stack")),
    *_group("Rank", "rank",
        ("next_flagged", "e", "Flagged", 4, "Go to the next rank that failed or that a finding is about"),
        ("next_rank", "right n", "Next", 3, "Go to the next rank"),
        ("previous_rank", "left N", "Previous", 3, "Go to the previous rank"), folds=1),
    *_group("GPUs", "cluster",
        ("toggle_gpu", "space", "Choose", 2, "Choose the GPU for the next launch; again to drop it"),
        ("choose_free", "f", "All free", 3, "Choose all free GPUs; again to choose none"),
        ("use_gpus", "enter", "Launch on them", 1, "Put the chosen GPUs into the recipe of the launch screen"),
        ("sample", "ctrl+r", "Refresh", 4, "Sample all machines again now")),
    *_group("Launch", "launch",
        ("launch", "L f5", "Launch", 1, "Start the run, detached, and watch it"),
        ("app.demo", "d", "Run the demo", 11, "Train a small model on this machine, about half a minute")),
    *_group("Form", "launch",
        ("edit", "enter", "Edit", 2, "Change the field, or open the recipe under the cursor"),
        ("cycle(1)", "space right", "Next value", 5, "Change a switch or a choice to its next value"),
        ("cycle(-1)", "left", "Previous value", 0, "Change a choice to its previous value"),
        ("reset", "backspace", "Reset", 6, "Reset the field to its value in the file; again to its default"),
        ("undo", "u", "Undo", 9, "Undo the last change, in any field"),
        ("find", "slash", "Find", 7, "Find a field by its name or help"),
        ("add_node", "a", "Add node", 12, "Add a node to the cluster"),
        ("remove_node", "x", "Remove node", 0, "Remove the node under the cursor")),
    *_group("Recipe", "launch",
        ("new_recipe", "n", "New recipe", 4, NEW_RECIPE),
        ("save", "s", "Save", 3, "Save the recipe; its comments stay"),
        ("save_as", "A", "Save as", 4, "Save the recipe under another name")),
    *_group("Plan", "launch",
        ("copy_commands", "c", "Copy commands", 8, "Copy the command of every node to the clipboard"),
        ("copy", "y", "Copy", 0, "Copy the command of the node under the cursor, or of every node")),
    *_group("Form", "launch",
        ("back", "escape", "Back", 0, "Close the input line unchanged; then go back to the recipes")),
    *_group("Runs", "history",
        ("open", "enter", "Open", 2, "Open the run, running or ended"),
        ("mark", "space", "Mark", 3, "Mark the run for a comparison; again to unmark it"),
        ("compare", "c", "Compare", 4, "Compare two to six marked runs: curves and recipe differences"),
        ("resume", "r", "Resume", 5, "Continue from the run's last checkpoint in a new run; asks first"),
        ("relaunch", "e", "Edit and launch", 6, "Open the run's recipe on the launch screen"),
        ("sort", "s", "Sort", 10, "Sort the runs by the next column"),
        ("reverse", "R", "Reverse", 0, "Reverse the order of the runs"),
        ("filter", "slash", "Filter", 8, "Show only the runs that match, such as state:failed or loss<2"),
        ("note", "n", "Note", 9, "Edit the run's note"),
        ("tags", "t", "Tags", 9, "Edit the run's tags, for use in the filter"),
        ("back", "escape", "Back", 0, "Close the input line; then remove the filter"),
        ("stop_marked", "S", "Stop", 8, "Stop the run on every machine; asks first"),
        ("app.demo", "d", "Run the demo", 9, "Train a small model on this machine, about half a minute"),
        ("delete", "delete x", "Delete", 7, "Delete the run's directory; asks first; refused while it is running")),
    *_group("Comparison", "compare",
        ("axis", "t", "Steps or time", 1, "Draw the curves over optimizer steps, or over time since the start"),
        ("measure", "v", "Measure", 2, "Draw loss, throughput or the wait for gradient synchronisation"),
        ("metric", "M", "Own metric", 0, "Choose one of the runs' own metrics to draw in place of the loss"),
        ("scale", "y", "Log scale", 2, "Switch the chart between linear and logarithmic scale"),
        ("smooth", "m", "Smooth", 3, "Change the smoothing of the curves"),
        ("back", "escape", "Back", 4, "Back to the runs")),
    *_group("Log", "log",
        ("scroll_lines(-1)", "up k", "Up", 0, "Scroll up, and stop following the end"),
        ("scroll_lines(1)", "down j", "Down", 0, "Scroll down"),
        ("scroll_pages(-1)", "pageup", "Page up", 0, "Scroll up by a page"),
        ("scroll_pages(1)", "pagedown space", "Page down", 0, "Scroll down by a page"),
        ("oldest", "home", "Oldest", 0, "Go to the oldest line that is kept"),
        ("follow", "end F G", "Follow", 4, "Go to the end and follow it"),
        ("shift(-1)", "left", "Left", 0, "Scroll long lines back to the left"),
        ("shift(1)", "right", "Right", 0, "Scroll long lines to the right"),
        ("search", "slash", "Search", 1, "Search the log"),
        ("next_match", "n", "Next match", 2, "Go to the next match"),
        ("previous_match", "N", "Previous match", 0, "Go to the previous match"),
        ("level", "L", "Level", 3, "Show all lines, warnings and errors, or errors only"),
        ("next_flagged", "e", "Flagged", 4, "Go to the next line of a rank that failed or that a finding is about"),
        ("clear_search", "escape", "Clear", 0, "Clear the search")),
    *_group("Findings", "findings",
        ("open", "enter", "Evidence", 1, "Show the evidence and advice of a finding; again to hide them")),
    *_group("Text", "log findings text", ("screen.copy", "y", "Copy", 5, "Copy what is under the cursor")),
)  # fmt: skip


def of_place(place: str) -> list[Action]:
    """Return the actions of a place, without those of every screen."""
    return [action for action in ACTIONS if place in action.places]


def available(place: str) -> list[Action]:
    """Return the actions of a place, then those of every screen."""
    return of_place(place) + (of_place(EVERYWHERE) if place != EVERYWHERE else [])


def bindings(place: str) -> list[Binding]:
    """Return Textual's bindings of a place."""
    return [
        Binding(",".join(action.keys), action.name, action.label, id=f"{place}.{action.name}")
        for action in of_place(place)
    ]


def footer(place: str, *, over: bool = False) -> list[Action]:
    """Return the actions of a screen's footer, the most important first; ``over``: its run has ended."""
    absent = "while it runs" if over else "after the end"
    offered = [
        action
        for action in available(place)
        if action.footer and place in (action.footers or (place,)) and action.offered != absent
    ]
    return sorted(offered, key=lambda action: action.footer)


def footer_of_focus(place: str, focused: str, *, over: bool = False) -> list[Action]:
    """Return the actions of the footer while a widget with actions of its own is focused; its keys come first."""
    own = sorted((action for action in of_place(focused) if action.footer), key=lambda action: action.footer)
    taken = {key for action in of_place(focused) for key in action.keys}
    return own + [action for action in footer(place, over=over) if not taken.intersection(action.keys)]


def groups(place: str) -> dict[str, list[Action]]:
    """Return a screen's actions by heading, in the order of the table."""
    by_group: dict[str, list[Action]] = {}
    for action in available(place):
        by_group.setdefault(action.group, []).append(action)
    return by_group
