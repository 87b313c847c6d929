"""``gputrain plan``: what every node would run, with nothing started."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

import msgspec

from gputrain_tui.commands.recipe_flags import add_recipe
from gputrain_tui.output import narrate, print_json
from gputrain_tui.plan import LocalFacts, Plan, PlannedNode, with_run_dir
from gputrain_tui.planning import plan_here
from gputrain_tui.preflight import Facts, errors, judge
from gputrain_tui.preflight.look import meeting_facts
from gputrain_tui.recipe import Recipe, load
from gputrain_tui.running.start import endless
from gputrain_tui.shell_words import shell_joined, shell_quoted
from gputrain_tui.tables import Column, printable, table
from trainer.errors import ExitCode

NAME = "plan"
HELP = "show the command of every node; start nothing"


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the flags."""
    add_recipe(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the plan as one JSON object")
    form.add_argument("--shell", action="store_true", help="print the commands, ready to copy into a shell per node")
    form.add_argument("--sbatch", action="store_true", help="print a batch script for Slurm")
    parser.add_argument("--run-dir", metavar="DIR", help="let the commands keep their record in this folder")


def run(args: Namespace) -> int:
    """Print the plan."""
    recipe = load(args.recipe, overrides=args.overrides, stdin=sys.stdin)
    plan, local = plan_here(recipe, remark=narrate)
    problems = [f"as it is now, this plan cannot start: {problem}" for problem in _problems(recipe, plan, local)]
    for note in (*recipe.notes, *problems):
        narrate(note)
    if args.run_dir is not None:
        plan = with_run_dir(plan, args.run_dir)
    if args.json:
        print_json(msgspec.json.encode(plan).decode())
    elif args.shell:
        print(shell(plan))
    elif args.sbatch:
        from gputrain_tui.sbatch import script

        print(script(plan, name=recipe.name), end="")
    else:
        print(report(plan, recipe.name))
    return ExitCode.FINISHED


def _problems(recipe: Recipe, plan: Plan, local: LocalFacts) -> list[str]:
    """Say why the ranks would not meet or never end; ``gputrain check`` looks at all the rest."""
    meeting, port = meeting_facts(plan, local)
    found = errors(judge(recipe, plan, Facts(meeting=meeting, port=port), local=local))
    return [problem for problem in (endless(recipe), *(result.line for result in found)) if problem]


def report(plan: Plan, name: str) -> str:
    """The plan for people: the run, its nodes, then each node's command."""
    columns = (Column("node", right=True), Column("host"), Column("ranks", right=True), Column("devices"))
    rows = [[str(node.node), node.host, span(node.ranks), devices(node.devices)] for node in plan.nodes]
    head = f"{printable(name)}: {_count(plan.world_size, 'rank')} on {_count(len(plan.nodes), 'node')}, {plan.backend}"
    if plan.init_method is not None:
        head += f", meeting at {plan.init_method}"
    return "\n\n".join([f"{head}, started by {plan.launcher}", table(columns, rows), shell(plan)])


def shell(plan: Plan) -> str:
    """The commands, each under a comment that says where it belongs."""
    parts = []
    for node in plan.nodes:
        ranks = f"rank{'s' if len(node.ranks) > 1 else ''} {span(node.ranks)} of {plan.world_size}"
        title = printable(
            f"# node {node.node}, {node.host}: {ranks}, {devices(node.devices)}"
        )  # a line, or it would run
        parts.append(f"{title}\n{command(node)}")
    return "\n".join(parts)


def command(node: PlannedNode) -> str:
    """One node's command as a line for the shell."""
    settings = [f"{key}={shell_quoted(value)}" for key, value in node.env.items()]
    return " ".join([*settings, shell_joined(node.argv)])


def span(ranks: Sequence[int]) -> str:
    """Consecutive ranks: ``4–7``, or ``14`` for one."""
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}–{ranks[-1]}"


def devices(names: Sequence[int | str]) -> str:
    """The devices of a node in a few words."""
    if names[0] == "cpu":
        return "CPU" if len(names) == 1 else f"CPU × {len(names)}"
    shown = [str(name) if isinstance(name, int) else name[:12] for name in names]
    return f"GPU {', '.join(shown)}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"
