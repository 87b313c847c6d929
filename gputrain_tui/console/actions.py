"""The action table: bindings, footer, palette, help and the README's list of keys are made from it.

An action's name is the name of the method ``action_<name>`` on the screen, or on the app for ``app`` actions.
"""

from __future__ import annotations

from dataclasses import dataclass

from textual.binding import Binding

EVERYWHERE = "app"
"""The place of actions that every screen has."""


@dataclass(frozen=True, kw_only=True)
class Action:
    """An action: done by key, by a click in the footer, or by name in the palette."""

    name: str
    """The method is ``action_<name>``; arguments may follow, ``show('loss')``, and ``app.`` go before."""
    keys: tuple[str, ...]
    """Textual's names of the keys; the first is the one that is shown."""
    label: str
    """One or two words, for the footer."""
    description: str
    """Its effect, for palette and help."""
    group: str
    """Heading in help."""
    places: tuple[str, ...] = (EVERYWHERE,)
    """Screens that have it: ``cluster``, ``launch``, ``run``, ``rank``, ``history``, ``welcome``; ``app``: all."""
    footer: int = 0
    """Rank in the footer, 1 first: what does not fit is left out from the end. 0: not in the footer."""
    footers: tuple[str, ...] = ()
    """Screens whose footer has it; none: all that have the action."""
    folds: int = 0
    """Those with 1, then those with 2 are shortened to keys and group in a narrow footer; 0: never."""
    shown_as: str = ""
    """How the key is written, where its name is clumsy."""

    @property
    def path(self) -> str:
        """Textual's name of the action, as a screen runs it."""
        return self.name if EVERYWHERE not in self.places else f"app.{self.name}"

    @property
    def key_text(self) -> str:
        """The key as people write it."""
        return self.shown_as or KEY_TEXTS.get(self.keys[0], self.keys[0])

    @property
    def key_texts(self) -> str:
        """All its keys as people write them, the first one first."""
        return " ".join([self.key_text, *(KEY_TEXTS.get(key, key) for key in self.keys[1:])])


KEY_TEXTS = {
    "enter": "⏎",
    "escape": "esc",
    "question_mark": "?",
    "slash": "/",
    "full_stop": ".",
    "comma": ",",
    "tab": "⇥",
    "ctrl+p": "^p",
    "pageup": "pgup",
    "pagedown": "pgdn",
    "backspace": "⌫",
    "delete": "del",
    "f1": "F1",
    "f5": "F5",
    "up": "↑",
    "down": "↓",
    "left": "←",
    "right": "→",
}

RUN = ("run",)
RANK = ("rank",)
BOTH = ("run", "rank")
CLUSTER = ("cluster",)
LAUNCH = ("launch",)
HISTORY = ("history",)
WELCOME = ("welcome",)
COMPARE = ("compare",)
LOG = ("log",)
"""The log, wherever it is shown, while it has the focus."""

ACTIONS: tuple[Action, ...] = (
    # Going somewhere
    Action(name="go('cluster')", keys=("1",), label="Cluster", group="Screens", footer=20, folds=1, footers=BOTH,
           description="Show the machines and their GPUs"),
    Action(name="go('launch')", keys=("2",), label="Launch", group="Screens", footer=20, folds=1, footers=BOTH,
           description="Choose a recipe, see its plan, launch it"),
    Action(name="go('run')", keys=("3",), label="Run", group="Screens", footer=20, folds=1, footers=BOTH,
           description="Watch the run that was opened last"),
    Action(name="go('history')", keys=("4",), label="History", group="Screens", footer=20, folds=1, footers=BOTH,
           description="List all runs, open and compare them"),
    Action(name="help", keys=("question_mark", "f1"), label="Help", group="Screens", footer=90,
           description="Show every key of this screen"),
    Action(name="command_palette", keys=("ctrl+p",), label="Palette", group="Screens", footer=95,
           description="Find any action by its name"),
    Action(name="next_theme", keys=("T",), label="Theme", group="Screens",
           description="Change between dark, light and the terminal's own colours"),
    Action(name="quit", keys=("q",), label="Quit", group="Screens", footer=99,
           description="Leave the console; every run goes on"),
    # The first start
    Action(name="app.demo", keys=("d",), label="Run the demo", group="Start", footer=1, places=WELCOME,
           description="Train a small model on this machine, about half a minute"),
    # A run
    Action(name="open_rank", keys=("enter",), label="Rank", group="Ranks", places=RUN, footer=1,
           description="Open the selected rank"),
    Action(name="sort", keys=("s",), label="Sort", group="Ranks", places=RUN, footer=22,
           description="Sort the ranks by the next column"),
    Action(name="reverse", keys=("r",), label="Reverse", group="Ranks", places=RUN,
           description="Turn the order of the ranks around"),
    Action(name="filter", keys=("slash",), label="Filter", group="Ranks", places=RUN, footer=21,
           description="Show only the ranks that match, such as host:node3 or step<100"),
    Action(name="show('loss')", keys=("l",), label="Loss", group="Panels", places=BOTH, footer=10, folds=2,
           description="Show the loss of all ranks; again to enlarge it"),
    Action(name="show('sync')", keys=("g",), label="Sync", group="Panels", places=BOTH, footer=11, folds=2,
           description="Show the wait for gradient synchronisation; again to enlarge it"),
    Action(name="show('bars')", keys=("b",), label="Bars", group="Panels", places=RUN, footer=12, folds=2,
           description="Show what a step is made of, rank by rank; again to enlarge it"),
    Action(name="show('late')", keys=("h",), label="Late", group="Panels", places=RUN, footer=13, folds=2,
           description="Show which ranks were late, over time; again to enlarge it"),
    Action(name="show('findings')", keys=("f",), label="Findings", group="Panels", places=RUN, footer=14, folds=2,
           description="Show what was diagnosed; enter shows evidence and advice"),
    Action(name="show('log')", keys=("o",), label="Log", group="Panels", places=BOTH, footer=15, folds=2,
           description="Show what the ranks printed; again to enlarge it"),
    Action(name="show('step')", keys=("t",), label="Step", group="Panels", places=RANK, footer=12, folds=2,
           description="Show how long its steps took"),
    Action(name="show('ranks')", keys=("t",), label="Table", group="Panels", places=RUN,
           description="Show the table of ranks; again to enlarge it"),
    Action(name="next_panel", keys=("p",), label="Panel", group="Panels", places=RUN,
           description="Show the next panel"),
    Action(name="zoom", keys=("z",), label="Zoom", group="Panels", places=RUN, footer=23,
           description="Give the whole screen to one panel, and back"),
    Action(name="back", keys=("escape",), label="Back", group="Panels", places=BOTH, footer=2, footers=RANK,
           description="One step back: filter, zoom, selection, screen"),
    Action(name="scale", keys=("y",), label="Log scale", group="Charts", places=BOTH,
           description="Change the charts between linear and logarithmic"),
    Action(name="window", keys=("w",), label="Window", group="Charts", places=BOTH,
           description="Change between the whole run and its last 1,000 and 100 steps"),
    Action(name="smooth", keys=("m",), label="Smooth", group="Charts", places=BOTH,
           description="Smooth the curves less or more"),
    Action(name="stop_run", keys=("S",), label="Stop", group="Run", places=BOTH, footer=20,
           description="Stop this run on every machine; asks first"),
    Action(name="stack", keys=("k",), label="Stack", group="Rank", places=RANK, footer=1,
           description="Ask the rank's process for its Python stack"),
    Action(name="next_rank", keys=("right", "n"), label="Next", group="Rank", places=RANK, footer=3, folds=1,
           description="Go to the next rank"),
    Action(name="previous_rank", keys=("left", "N"), label="Previous", group="Rank", places=RANK, footer=3, folds=1,
           description="Go to the previous rank"),
    # The machines
    Action(name="toggle_gpu", keys=("space",), label="Choose", group="GPUs", places=CLUSTER, footer=2,
           description="Choose the GPU for the next launch, or not"),
    Action(name="choose_free", keys=("f",), label="All free", group="GPUs", places=CLUSTER, footer=3,
           description="Choose every GPU that nobody uses; again to choose none"),
    Action(name="use_gpus", keys=("enter",), label="Launch on them", group="GPUs", places=CLUSTER, footer=1,
           description="Put the chosen GPUs into the recipe of the launch screen"),
    Action(name="sample", keys=("r",), label="Look again", group="GPUs", places=CLUSTER, footer=4,
           description="Look at the machine now"),
    # A launch
    Action(name="launch", keys=("L", "f5"), label="Launch", group="Launch", places=LAUNCH, footer=1,
           description="Start the run, detached, and watch it"),
    Action(name="app.demo", keys=("d",), label="Run the demo", group="Launch", places=LAUNCH, footer=11,
           description="Train a small model on this machine, about half a minute"),
    Action(name="edit", keys=("enter",), label="Edit", group="Form", places=LAUNCH, footer=2,
           description="Change the field, or open the recipe under the cursor"),
    Action(name="cycle(1)", keys=("space", "right"), label="Next value", group="Form", places=LAUNCH, footer=5,
           description="Change a switch or a choice to its next value"),
    Action(name="cycle(-1)", keys=("left",), label="Previous value", group="Form", places=LAUNCH,
           description="Change a choice to its value before"),
    Action(name="reset", keys=("backspace", "u"), label="Reset", group="Form", places=LAUNCH, footer=6,
           description="Take back what was changed in the field; again for its default"),
    Action(name="find", keys=("slash",), label="Find", group="Form", places=LAUNCH, footer=7,
           description="Find a field by its name or help"),
    Action(name="add_node", keys=("a",), label="Add node", group="Form", places=LAUNCH, footer=12,
           description="Add a node to the cluster"),
    Action(name="remove_node", keys=("x",), label="Remove node", group="Form", places=LAUNCH,
           description="Remove the node under the cursor"),
    Action(name="save", keys=("s",), label="Save", group="Recipe", places=LAUNCH, footer=3,
           description="Save the recipe; its comments stay"),
    Action(name="save_as", keys=("A",), label="Save as", group="Recipe", places=LAUNCH, footer=4,
           description="Save the recipe under another name"),
    Action(name="copy_commands", keys=("c",), label="Copy commands", group="Plan", places=LAUNCH, footer=8,
           description="Copy the command of every node to the clipboard"),
    Action(name="write_commands", keys=("C",), label="Commands to a file", group="Plan", places=LAUNCH,
           description="Write the command of every node into a file beside the recipe"),
    Action(name="back", keys=("escape",), label="Back", group="Form", places=LAUNCH,
           description="Leave the editor without a change; then go back to the recipes"),
    # The runs
    Action(name="open", keys=("enter",), label="Open", group="Runs", places=HISTORY, footer=2,
           description="Watch the run, or look at how it went"),
    Action(name="mark", keys=("space",), label="Mark", group="Runs", places=HISTORY, footer=3,
           description="Mark the run for a comparison, or not"),
    Action(name="compare", keys=("c",), label="Compare", group="Runs", places=HISTORY, footer=4,
           description="Compare two to six marked runs: curves, and how their recipes differ"),
    Action(name="resume", keys=("r",), label="Resume", group="Runs", places=HISTORY, footer=5,
           description="Go on from the run's last checkpoint, as a new run"),
    Action(name="relaunch", keys=("e",), label="Edit and launch", group="Runs", places=HISTORY, footer=6,
           description="Open the run's recipe on the launch screen"),
    Action(name="stop_marked", keys=("S",), label="Stop", group="Runs", places=HISTORY, footer=8,
           description="Stop the run on every machine; asks first"),
    Action(name="app.demo", keys=("d",), label="Run the demo", group="Runs", places=HISTORY, footer=9,
           description="Train a small model on this machine, about half a minute"),
    Action(name="delete", keys=("delete", "x"), label="Delete", group="Runs", places=HISTORY, footer=7,
           description="Delete the run's directory; asks first, and refuses while it is running"),
    # A comparison
    Action(name="axis", keys=("t",), label="Steps or time", group="Comparison", places=COMPARE, footer=1,
           description="Draw the curves over optimizer steps, or over time since the start"),
    Action(name="scale", keys=("y",), label="Log scale", group="Comparison", places=COMPARE, footer=2,
           description="Change the chart between linear and logarithmic"),
    Action(name="smooth", keys=("m",), label="Smooth", group="Comparison", places=COMPARE, footer=3,
           description="Smooth the curves less or more"),
    Action(name="back", keys=("escape",), label="Back", group="Comparison", places=COMPARE, footer=4,
           description="Back to the runs"),
    # The log, while it has the focus
    Action(name="scroll_lines(-1)", keys=("up", "k"), label="Up", group="Log", places=LOG,
           description="Scroll back; the end is no longer followed"),
    Action(name="scroll_lines(1)", keys=("down", "j"), label="Down", group="Log", places=LOG,
           description="Scroll on"),
    Action(name="scroll_pages(-1)", keys=("pageup",), label="Page up", group="Log", places=LOG,
           description="Scroll back by a page"),
    Action(name="scroll_pages(1)", keys=("pagedown", "space"), label="Page down", group="Log", places=LOG,
           description="Scroll on by a page"),
    Action(name="oldest", keys=("home",), label="Oldest", group="Log", places=LOG,
           description="Go to the oldest line that is kept"),
    Action(name="follow", keys=("end", "F"), label="Follow", group="Log", places=LOG, footer=4,
           description="Go to the end and follow it"),
    Action(name="shift(-1)", keys=("left",), label="Left", group="Log", places=LOG,
           description="Move long lines back"),
    Action(name="shift(1)", keys=("right",), label="Right", group="Log", places=LOG,
           description="Move long lines sideways"),
    Action(name="search", keys=("slash",), label="Search", group="Log", places=LOG, footer=1,
           description="Search the log"),
    Action(name="next_match", keys=("n",), label="Next match", group="Log", places=LOG, footer=2,
           description="Go to the next line that was searched for"),
    Action(name="previous_match", keys=("N",), label="Previous match", group="Log", places=LOG,
           description="Go to the line before that was searched for"),
    Action(name="level", keys=("L",), label="Level", group="Log", places=LOG, footer=3,
           description="Show all lines, warnings and errors, or errors only"),
    Action(name="clear_search", keys=("escape",), label="Clear", group="Log", places=LOG,
           description="Forget the search"),
)  # fmt: skip
"""Every action of the console. A screen's module takes its own rows with ``bindings``."""


def of_place(place: str) -> list[Action]:
    """Return the actions that belong to a screen itself."""
    return [action for action in ACTIONS if place in action.places]


def available(place: str) -> list[Action]:
    """Return a screen's own actions, then those of every screen."""
    return of_place(place) + (of_place(EVERYWHERE) if place != EVERYWHERE else [])


def bindings(place: str) -> list[Binding]:
    """Return the bindings of a screen, or of the app for ``app``."""
    return [
        Binding(
            ",".join(action.keys),
            action.name,
            action.label,
            key_display=action.key_text,
            show=action.footer > 0,
            tooltip=action.description,
            id=f"{place}.{action.name}",
        )
        for action in of_place(place)
    ]


def footer(place: str) -> list[Action]:
    """Return the actions in a screen's footer, the most important first."""
    offered = [action for action in available(place) if action.footer and place in (action.footers or (place,))]
    return sorted(offered, key=lambda action: action.footer)


def footer_of_focus(place: str, focused: str) -> list[Action]:
    """Return the actions in the footer while a widget with actions of its own has the focus."""
    own = sorted((action for action in of_place(focused) if action.footer), key=lambda action: action.footer)
    taken = {key for action in of_place(focused) for key in action.keys}
    return own + [action for action in footer(place) if not taken.intersection(action.keys)]


def groups(place: str) -> dict[str, list[Action]]:
    """Return a screen's actions by heading, in the order of the table."""
    found: dict[str, list[Action]] = {}
    for action in available(place):
        found.setdefault(action.group, []).append(action)
    return found
