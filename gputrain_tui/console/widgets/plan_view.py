"""Panel of the open recipe's plan: nodes, ranks, devices, init method, and each node's command."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import PurePath

from gputrain_tui.console.widgets.drawing import Row, centred_text, fit_row, row_cells, title_row, wrap_text
from gputrain_tui.console.widgets.panel import ScrolledText
from gputrain_tui.plan.planner import Plan, PlannedNode, devices_text, rank_range
from gputrain_tui.shell_words import shell_quoted
from gputrain_tui.tables import printable

BESIDE_CELLS = 140
"""Fewest cells in which the commands stand beside the table of nodes."""


def wrap_command(node: PlannedNode, width: int, *, program: str = "") -> list[str]:
    """Return a node's command as lines that end in a backslash, each option on the same line as its value.

    ``program`` replaces the first word.
    """
    pieces = [f"{key}={shell_quoted(value)}" for key, value in node.env.items()]
    pieces.append(program or shell_quoted(node.argv[0]))
    for word in map(shell_quoted, node.argv[1:]):
        if pieces[-1].startswith("-") and " " not in pieces[-1] and not word.startswith("-"):
            pieces[-1] += f" {word}"
        else:
            pieces.append(word)
    lines = [""]
    for piece in map(printable, pieces):
        line = lines[-1]
        if line.strip() and len(line) + 1 + len(piece) > width - 2:
            lines[-1] += " \\"
            lines.append(f"    {piece}")
        else:
            lines[-1] = f"{line} {piece}" if line else piece
    return lines


def draw_plan(plan: Plan, width: int) -> list[Row]:
    """Return a plan as rows: table of nodes, then their commands; side by side from ``BESIDE_CELLS`` on."""
    nodes = _nodes(plan)
    if width < BESIDE_CELLS:
        return [fit_row(row, width) for row in [*nodes, [], *_commands(plan, width)]]
    left = min(max(map(row_cells, nodes)), width // 2) + 3
    blank: Row = []
    return [
        [*fit_row(node, left - 3), ("   ", "base"), *fit_row(command, width - left)]
        for node, command in zip_longest(nodes, _commands(plan, width - left), fillvalue=blank)
    ]


def _nodes(plan: Plan) -> list[Row]:
    hosts = max(len(printable(node.host)) for node in plan.nodes) + 2
    ranks = max(max(len(rank_range(node.ranks)) for node in plan.nodes), 5) + 2
    rows: list[Row] = [[(f"{'node':>6}  {'host':<{hosts}}{'first rank':>10}  {'ranks':<{ranks}}devices", "dim")]]
    for node in plan.nodes:
        host, devices = printable(node.host), devices_text(node.devices)
        text = f"{host:<{hosts}}{node.first_rank:>10}  {rank_range(node.ranks):<{ranks}}{devices}"
        rows.append([(f"{node.node:>6}  ", "dim"), (text, "bright")])
    return rows


def _commands(plan: Plan, width: int) -> list[Row]:
    """Return each node's command, with blank lines between them."""
    rows: list[Row] = []
    for node in plan.nodes:
        rows += [[]] if rows else []
        rows.append([(f"# node {node.node}, {printable(node.host)}", "dim")])
        program = node.argv[0]  # only its name if the path takes more than a third of the width
        program = shell_quoted(program) if len(program) <= width // 3 else f"…/{PurePath(program).name}"
        rows += [[(line, "base")] for line in wrap_command(node, max(width, 20), program=program)]
    return rows


class PlanView(ScrolledText):
    """Panel of the open recipe's plan."""

    plan: Plan | None = None
    problem = ""
    """Error of the recipe or of its plan; empty: none."""
    waiting = False

    def show(self, plan: Plan | None, problem: str) -> None:
        """Show a plan, or the problem if there is none."""
        self.plan, self.problem, self.waiting = plan, problem, False
        self.on_resize()
        self.redraw()

    def on_resize(self) -> None:
        """Limit the height to the plan's lines if commands stand beside the table, so that the form gets the rest."""
        width = self.size.width
        least_lines = 6  # the form's height does not change with every recipe
        is_short = self.plan is not None and not self.problem and width >= BESIDE_CELLS
        lines = len(draw_plan(self.plan, width)) + 1 if is_short and self.plan is not None else None
        self.styles.max_height = None if lines is None else max(lines, least_lines)

    def wait(self) -> None:
        self.waiting = True
        self.redraw()

    def draw(self, width: int, height: int) -> list[Row]:
        plan = self.plan
        left: Row = [("plan", "title")]
        rights: list[Row] = []
        if plan is not None:
            nodes = f"{len(plan.nodes)} node{'s' * (len(plan.nodes) != 1)}"
            left += [(f"  {plan.world_size} rank{'s' * (plan.world_size != 1)}", "accent"), (f" on {nodes}", "bright")]
            rights = [[(plan.launcher, "dim")], [(plan.backend, "dim")]]
            if plan.init_method is not None:
                rights.append([(f"rendezvous at {plan.init_method}", "dim")])
        head = [title_row(width, left, rights)]
        if self.problem:
            lines = wrap_text(printable(self.problem), width - 2)
            head += [[("  " if n else "! ", "error"), (line, "error")] for n, line in enumerate(lines)]
        if plan is None:
            return head + centred_text(width, height - len(head), ["…"] if self.waiting else [])
        rows = draw_plan(plan, width)
        seen = self.in_view(rows, height - len(head))
        below = len(rows) - self._top - len(seen)
        if below > 0 and seen:
            note = f" {below} lines below "
            seen[-1] = [*fit_row(seen[-1], width - len(note)), (note, "accent" if self.has_focus else "dim")]
        return head + seen
