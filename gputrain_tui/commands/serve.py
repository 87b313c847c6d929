"""``gputrain serve``: shows the runs in a browser, read-only."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from urllib.parse import quote

from gputrain_tui import paths
from gputrain_tui.commands.shared_flags import RUN_HELP
from gputrain_tui.history.run_folders import find
from gputrain_tui.output import print_message
from gputrain_tui.report.page_server import LOOPBACK, OWN, PageServer
from trainer.contract.errors import ExitCode


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", help=f"open the page of this run: {RUN_HELP}")
    parser.add_argument("--port", type=int, default=8686, metavar="P", help="default: %(default)s; 0: a free one")
    text = "address to listen at, which others then reach without encryption; default: this machine alone"
    parser.add_argument("--host", default=LOOPBACK, metavar="H", help=text)


def run(args: Namespace) -> int:
    """Serve until it is interrupted.

    Raises:
        RequestError: there is no such run, or the port is in use.
    """
    chosen = None if args.run is None else find(args.run)
    outside = {} if chosen is None or chosen.dir.path.parent == paths.runs_folder() else {chosen.id: chosen}
    with PageServer(args.host, args.port, named=outside) as server:
        path = "/" if chosen is None else f"/run/{quote(chosen.id)}"
        if args.host not in OWN:
            print_message(f"others reach {args.host} without encryption: who reads the address below reads the runs")
        print(f"http://{server.named_host}:{server.port}{path}?token={server.token}", flush=True)
        server.serve_forever(poll_interval=0.2)
    return ExitCode.FINISHED
