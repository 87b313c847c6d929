"""Panel of the open recipe's plan: nodes, ranks, devices, init method, and each node's command."""

from __future__ import annotations

from pathlib import PurePath
from typing import ClassVar

from textual.binding import BindingType

from gputrain_tui.console.widgets.canvas import SCROLL_KEYS, Canvas
from gputrain_tui.console.widgets.drawing import Row, centred_text, fit_row, row_cells, title_row, wrap_text
from gputrain_tui.plan.planner import Plan, PlannedNode, devices_text, rank_range
from gputrain_tui.shell_words import shell_quoted
from gputrain_tui.tables import printable

BESIDE_CELLS = 140
"""Fewest cells in which the commands stand beside the table of nodes."""


def wrap_command(node: PlannedNode, width: int, *, program: str = "") -> list[str]:
    """Return a node's command as lines that end in a backslash, each option on the same line as its value.

    ``program`` replaces the first word.
    """
    words = [f"{key}={shell_quoted(value)}" for key, value in node.env.items()]
    pieces = [*words, program or shell_quoted(node.argv[0])]
    for word in map(shell_quoted, node.argv[1:]):
        option = pieces[-1].startswith("-") and " " not in pieces[-1]
        if option and not word.startswith("-"):
            pieces[-1] += f" {word}"
        else:
            pieces.append(word)
    lines: list[str] = []
    line = ""
    for piece in map(printable, pieces):
        if line.strip() and len(line) + 1 + len(piece) > width - 2:
            lines.append(line + " \\")
            line = f"    {piece}"
        else:
            line = f"{line} {piece}" if line else piece
    return [*lines, line]


def shorten_program(program: str, width: int) -> str:
    """Return a program's path, or only its name if the path takes more than a third of ``width``."""
    return shell_quoted(program) if len(program) <= width // 3 else f"…/{PurePath(program).name}"


def draw_plan(plan: Plan, width: int) -> list[Row]:
    """Return a plan as rows: table of nodes, then their commands; side by side from ``BESIDE_CELLS`` on."""
    nodes = _nodes(plan)
    if width < BESIDE_CELLS:
        return [fit_row(row, width) for row in [*nodes, [], *_commands(plan, width)]]
    gap_cells = 3  # cells between the table and the commands
    left = min(max(map(row_cells, nodes)), width // 2) + gap_cells
    commands = _commands(plan, width - left)
    count = max(len(nodes), len(commands))
    nodes += [[]] * (count - len(nodes))
    commands += [[]] * (count - len(commands))
    gap: Row = [(" " * gap_cells, "base")]
    return [
        [*fit_row(node, left - gap_cells), *gap, *fit_row(command, width - left)]
        for node, command in zip(nodes, commands, strict=True)
    ]


def _nodes(plan: Plan) -> list[Row]:
    """Return the table of nodes."""
    hosts = max(len(printable(node.host)) for node in plan.nodes) + 2
    ranks = max(max(len(rank_range(node.ranks)) for node in plan.nodes), 5) + 2
    rows: list[Row] = [
        [(f"{'node':>6}  {'host':<{hosts}}{'first rank':>10}  {'ranks':<{ranks}}devices", "dim")],
    ]
    for node in plan.nodes:
        rows.append(
            [
                (f"{node.node:>6}  ", "dim"),
                (printable(node.host).ljust(hosts), "bright"),
                (f"{node.first_rank:>10}  ", "bright"),
                (rank_range(node.ranks).ljust(ranks), "bright"),
                (devices_text(node.devices), "bright"),
            ]
        )
    return rows


def _commands(plan: Plan, width: int) -> list[Row]:
    """Return each node's command, with blank lines between them."""
    rows: list[Row] = []
    for node in plan.nodes:
        rows += [[]] if rows else []
        rows.append([(f"# node {node.node}, {printable(node.host)}", "dim")])
        rows += [
            [(line, "base")]
            for line in wrap_command(node, max(width, 20), program=shorten_program(node.argv[0], width))
        ]
    return rows


class PlanView(Canvas, can_focus=True):
    """Panel of the open recipe's plan."""

    BINDINGS: ClassVar[list[BindingType]] = [*SCROLL_KEYS]

    plan: Plan | None = None
    problem = ""
    """Error of the recipe or of its plan; empty: none."""
    waiting = False
    """Whether the plan is being computed."""
    _top = 0

    def show(self, plan: Plan | None, problem: str) -> None:
        """Show a plan, or the problem if there is none."""
        self.plan, self.problem, self.waiting = plan, problem, False
        self._fit()
        self.redraw()

    def on_resize(self) -> None:
        """Set the greatest height again at the new width."""
        self._fit()

    def _fit(self) -> None:
        """Limit the height to the plan's lines if commands stand beside the table, so that the form gets the rest."""
        width = self.size.width
        is_short = self.plan is not None and not self.problem and width >= BESIDE_CELLS
        lines = len(draw_plan(self.plan, width)) + 1 if is_short and self.plan is not None else None
        # Fewest lines of a plan beside the commands, so that the form's height does not change with every recipe.
        least_lines = 6
        self.styles.max_height = None if lines is None else max(lines, least_lines)

    def wait(self) -> None:
        """Show that the plan is being computed."""
        self.waiting = True
        self.redraw()

    def draw(self, width: int, height: int) -> list[Row]:
        """Return the title, the problem, and the visible lines of the plan."""
        plan = self.plan
        left: Row = [("plan", "title")]
        remarks: list[Row] = []
        if plan is not None:
            nodes = f"{len(plan.nodes)} node{'s' * (len(plan.nodes) != 1)}"
            left += [(f"  {plan.world_size} rank{'s' * (plan.world_size != 1)}", "accent"), (f" on {nodes}", "bright")]
            remarks = [[(plan.launcher, "dim")], [(plan.backend, "dim")]]
            if plan.init_method is not None:
                remarks.append([(f"rendezvous at {plan.init_method}", "dim")])
        head = [title_row(width, left, remarks)]
        if self.problem:
            lines = wrap_text(printable(self.problem), width - 2)
            head += [fit_row([("  " if n else "! ", "error"), (line, "error")], width) for n, line in enumerate(lines)]
        if plan is None:
            if self.waiting:
                return head + centred_text(width, height - len(head), ["…"])
            return head
        rows = draw_plan(plan, width)
        room = height - len(head)
        self._top = min(self._top, max(len(rows) - room, 0))
        seen = rows[self._top : self._top + room]
        below = len(rows) - self._top - room
        if below > 0 and seen:
            note = f" {below} lines below "
            seen[-1] = [*fit_row(seen[-1], width - len(note)), (note, "accent" if self.has_focus else "dim")]
        return head + seen

    def action_scroll_by(self, lines: int) -> None:
        """Scroll the plan."""
        self._top = max(self._top + lines, 0)
        self.redraw()

    def action_edge(self, side: int) -> None:
        """Go to the first or the last line."""
        plan_lines = 1 << 20  # more lines than any plan has, for scrolling to its end
        self.action_scroll_by(side * plan_lines)

    def wheel(self, lines: int) -> None:
        """Scroll the plan."""
        self.action_scroll_by(lines)
