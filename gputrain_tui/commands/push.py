"""``gputrain push``: copies code and environment to hosts without a shared disk."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from gputrain_tui.commands.shared_flags import add_recipe
from gputrain_tui.output import print_message
from gputrain_tui.tables import printable
from trainer.contract.errors import ExitCode, RequestError


def add_arguments(parser: ArgumentParser) -> None:
    add_recipe(parser, optional=True)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--hosts", metavar="A,B", help="these hosts, to the same folder as here")
    where.add_argument("--hostfile", metavar="FILE", help="the hosts of a file, one per line")
    parser.add_argument("--dry-run", action="store_true", help="print what would be done, and do nothing")


def run(args: Namespace) -> int:
    """Print the plan of each host, and carry it out unless ``--dry-run`` is given."""
    from gputrain_tui.hosts.host_names import is_local
    from gputrain_tui.hosts.hostfile import parse_host_list, read_hostfile
    from gputrain_tui.hosts.local_facts import local_facts
    from gputrain_tui.hosts.ssh import Ssh
    from gputrain_tui.lifecycle import push_to_hosts
    from gputrain_tui.recipe.build import load

    named = args.hosts is not None or args.hostfile is not None
    if named == (args.recipe is not None):
        raise RequestError("name a recipe, or hosts by --hosts or --hostfile: `gputrain push RECIPE`")
    if named:
        entries = parse_host_list(args.hosts) if args.hosts is not None else read_hostfile(Path(args.hostfile))
        hosts = [entry.host for entry in entries]
        to = [push_to_hosts.Destination(host=host, workdir=str(Path.cwd())) for host in hosts]
        data: set[Path] = set()
    else:
        recipe = load(args.recipe, overrides=args.overrides)
        local = local_facts(node.host for node in recipe.cluster.nodes)
        to, data = push_to_hosts.destinations(recipe, lambda host: is_local(host, local)), push_to_hosts.data_of(recipe)
    if not to:
        print_message("all nodes are this machine: there is nothing to push")
        return ExitCode.FINISHED
    ssh = Ssh()
    try:
        planned = push_to_hosts.plan_push(ssh, to, data)
    except push_to_hosts.PushError as error:
        print_message(str(error))
        return ExitCode.REFUSED
    for item in planned:
        for line in item.lines:
            print(printable(f"{item.host}: {line}"), flush=True)
    if args.dry_run:
        return ExitCode.FINISHED
    try:
        for line in push_to_hosts.push(ssh, planned):
            print(printable(line))
    except push_to_hosts.PushError as error:
        print_message(str(error))
        return ExitCode.FAILED
    return ExitCode.FINISHED
