"""``gputrain plan``: prints the commands of all nodes; starts nothing."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from gputrain_tui import paths
from gputrain_tui.commands.shared_flags import add_recipe
from gputrain_tui.history.run_folders import create_by_hand
from gputrain_tui.hosts.host_names import LocalFacts, is_address, is_local, is_pending
from gputrain_tui.lifecycle.prepared import endless_reason, plan_with_inventories
from gputrain_tui.lifecycle.recipe_to_run import recipe_text
from gputrain_tui.output import print_json, print_message
from gputrain_tui.plan.planner import Plan, devices_text, rank_range, rendezvous_port, shell_commands, with_run_dir
from gputrain_tui.preflight import PreflightFacts, errors, run_checks
from gputrain_tui.preflight.checks import device_models, gpu_models
from gputrain_tui.preflight.collect import rendezvous_facts
from gputrain_tui.recipe.build import load
from gputrain_tui.recipe.model import Recipe
from gputrain_tui.recipe.task_description import describe_task
from gputrain_tui.state.share_changes import shares_text
from gputrain_tui.tables import TableColumn, counted, printable, table
from trainer.contract.balanced_shares import equal_shares
from trainer.contract.errors import ExitCode
from trainer.contract.learned_speeds import LearnedSpeeds
from trainer.contract.record import RunDir
from trainer.contract.rendezvous_url import parse_rendezvous_url


def add_arguments(parser: ArgumentParser) -> None:
    add_recipe(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the plan as one JSON object")
    form.add_argument("--shell", action="store_true", help="print the commands, ready to copy into a shell per node")
    form.add_argument("--sbatch", action="store_true", help="print a batch script for Slurm")
    text = "let the commands write their record to this folder, which `runs`, `attach` and `logs` then show"
    parser.add_argument("--run-dir", metavar="DIR", help=text)


def run(args: Namespace) -> int:
    """Print the plan."""
    recipe = load(args.recipe, overrides=args.overrides)
    planned = plan_with_inventories(recipe)
    plan = msgspec.structs.replace(planned.plan, finds_port=False)  # all shells must have one number
    facts = PreflightFacts(inventories=planned.inventories)
    mixed = list(gpu_models(recipe, plan, facts, planned.local))
    problems = [*_problems(recipe, plan, planned.local), *(result.line for result in errors(mixed))]
    notes = [*planned.warnings, *recipe.notes, *(result.text for result in mixed if result.status == "note")]
    notes += [f"this plan cannot start as it is: {problem}" for problem in problems]
    if planned.plan.finds_port and plan.launcher != "local":
        notes.append(
            f"these commands meet at port {rendezvous_port(plan)}; if it is in use there, set cluster.port "
            "to another one (`gputrain run` finds a free one by itself)"
        )
    url = parse_rendezvous_url(plan.init_method or "")
    if plan.launcher == "ssh" and url is not None and url.scheme == "tcp" and not is_address(url.host):
        notes.append(
            f"all hosts must know the name {url.host}; if only your ~/.ssh/config does, set cluster.init_method to "
            f'"tcp://ADDRESS:{url.port}" (`gputrain run` finds the address by itself)'
        )
    if args.sbatch and recipe.slurm is not None and recipe.slurm.requeue:
        notes.append(
            f"{recipe.where('slurm', 'requeue')}: this script ends at its time limit, as no supervisor runs in it that "
            "puts the job back; `gputrain run` on a login node submits a run that goes on, or submit this script again "
            "with train.resume"
        )
    for note in notes:
        print_message(note)
    if args.run_dir is not None:
        directory = RunDir(Path(args.run_dir).absolute())  # one folder, wherever a command is run
        plan = with_run_dir(plan, str(directory.path))
        text = recipe_text(recipe)
        create_by_hand(directory, plan, recipe=recipe.name, recipe_toml=text, runs=paths.runs_folder(), now=time.time())
    if args.shell:
        print(shell_commands(plan, folder=str(Path.cwd())))
    elif args.sbatch:
        from gputrain_tui.lifecycle.saving_time import saving_time_before
        from gputrain_tui.plan.batch_script import script

        saving_s = saving_time_before(recipe)
        print(script(plan, name=recipe.name, options=recipe.slurm, saving_s=saving_s), end="")
    else:
        models = device_models(plan, facts, planned.local)
        shares = _shares(recipe, plan, models)
        if args.json:
            print_json(msgspec.json.encode(_PlanWithShares(**msgspec.structs.asdict(plan), shares=shares)).decode())
        else:
            # Otherwise the first host or the ranks alone know what earlier runs have measured.
            known = bool(models) and not recipe.train.max_tokens and is_local(plan.nodes[0].host, planned.local)
            line = "" if shares is None else _shares_line(recipe, shares, known=known)
            print(report(plan, recipe.name, shares=line))
    return ExitCode.FINISHED


def _problems(recipe: Recipe, plan: Plan, local: LocalFacts) -> list[str]:
    """Return the problems of rendezvous and stop condition; ``gputrain check`` does the other checks."""
    rendezvous, port = rendezvous_facts(plan, local)
    results = errors(run_checks(recipe, plan, PreflightFacts(rendezvous=rendezvous, port=port), local=local))
    return [problem for problem in (endless_reason(recipe), *(result.line for result in results)) if problem]


class _FirstShares(msgspec.Struct):
    """The ranks' shares of the global batch at the start."""

    cause: Literal["start", "learned", "recorded"]
    """As in the record's event ``shares``."""
    shares: Sequence[int] | None
    """Samples of each rank, or tokens; None where they are those of another run."""


class _PlanWithShares(Plan):
    """A plan as ``--json`` prints it."""

    shares: _FirstShares | None = None
    """None where shares are not balanced."""


def _shares(recipe: Recipe, plan: Plan, models: Sequence[str]) -> _FirstShares | None:
    """Return the shares with which the ranks begin, on GPUs of these models; None where they are not balanced."""
    train = recipe.train
    if train.batch_size != "balanced":
        return None
    if train.shares_from:
        return _FirstShares("recorded", None)
    known = LearnedSpeeds(train, describe_task(train.task), recipe.task_options)
    # With tokens a share also depends on the longest sample, which only the ranks know.
    if not train.max_tokens and (learned := known.shares(models, train.global_batch_size)) is not None:
        return _FirstShares("learned", learned)
    return _FirstShares("start", equal_shares(train.global_batch_size, plan.world_size))


def _shares_line(recipe: Recipe, first: _FirstShares, *, known: bool) -> str:
    train = recipe.train
    total = f"{train.global_batch_size:,} {'tokens' if train.max_tokens else 'samples'}"
    if first.shares is None:
        return f"shares of {total} as in the run of {printable(train.shares_from or '')}"
    why = ", by earlier runs on such devices"
    if first.cause == "start":
        why = ": equal, until the ranks have measured their speeds"
        why += "" if known else ", or by earlier runs on such devices"
    return f"shares {shares_text(first.shares)} of {total} at the start{why}"


def report(plan: Plan, name: str, *, shares: str = "") -> str:
    """Return the plan as text: the run, a table of its nodes, the ranks' shares of the batch, each node's command."""
    titles = ("node", "host", "ranks", "devices")
    columns = [TableColumn(title, right=title in ("node", "ranks")) for title in titles]
    rows = [[str(node.node), node.host, rank_range(node.ranks), devices_text(node.devices)] for node in plan.nodes]
    head = (
        f"{printable(name)}: {counted(plan.world_size, 'rank')} on {counted(len(plan.nodes), 'node')}, {plan.backend}"
    )
    if plan.init_method is not None:
        head += f", rendezvous at {plan.init_method}"
    head += f", started by {plan.launcher}"
    if pending := [node.host for node in plan.nodes if is_pending(node.host)]:
        head += f", which chooses the hosts: {pending[0]} stands for the first of them"
    parts = [head, table(columns, rows), shares, shell_commands(plan, folder=str(Path.cwd()))]
    return "\n\n".join(filter(None, parts))
