"""Runs on a host over ssh: reads the facts of the host for one node, and tries connections to the other hosts.

It answers one request per line until its input ends: ``facts`` of the host, its clock and ``route`` to the first node,
the ``token`` of a shared folder, and ``reach``, the unreachable nodes. The request ``serve`` makes it a session of the
host agent. Standard library only, since this file is sent to the host.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gputrain_tui.hosts.host_agent import HOME, node_command, serve_session
from gputrain_tui.hosts.inventory import take_inventory
from gputrain_tui.hosts.machine_facts import folder_facts, port_facts, rendezvous_file
from trainer.contract.home_folder import expand_home
from trainer.host.addresses import source_towards
from trainer.host.boot import boot_id
from trainer.host.import_path import node_environment
from trainer.host.reachability import (
    CONNECT_TIMEOUT_S,
    find_route,
    listen_on_any_port,
    outward_addresses,
    resolve,
    unreachable,
)
from trainer.host.resource_limits import free_shm_bytes, read_limits

LIFE_S = 120
"""Lifetime of this program: it ends by itself on a host whose connection is cut."""
ENVIRONMENT_TIMEOUT_S = 20.0
"""Time limit of a node's line of setup and its interpreter; modules on a network file system load in seconds."""
RUN_PROGRAM = """\
import sys
if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]
exec(compile(sys.argv.pop(1), "environment_facts.py", "exec"))
"""
"""Runs the source in its first argument without the working folder in ``sys.path``; Python 3.10 has no ``-P``."""
MAX_LINE_CHARS = 300
"""Limit of a quoted line."""
SETUP_FAILED = "setup ended with exit code"
"""Begin of the message that the shell of ``node_command`` prints if setup fails."""


def read_environment(request: Mapping[str, Any], mark: str) -> tuple[Mapping[str, Any] | None, str, str]:
    """Run the program ``environment_facts`` in the folder, setup, interpreter and environment of the node's command.

    Returns:
        Its facts; None if it cannot run, with the reason and the recipe's key ``workdir``, ``setup`` or ``python``.
    """
    workdir, setup = expand_home(request["workdir"]), request["setup"]
    python = str(expand_home(request["python"]))
    if not workdir.is_dir():
        return None, f"there is no folder {workdir}", "workdir"
    env = node_environment(os.environ, request["env"], str(workdir))
    if not setup and shutil.which(python, path=env.get("PATH")) is None:
        return None, f"there is no interpreter {python}", "python"
    setup_done = f"{mark}reached "
    # A line of setup may exit by itself: the printed mark proves that the interpreter was started.
    words = ["/bin/sh", "-c", 'printf %s "$0"; exec "$@"', setup_done]
    words += [python, "-c", RUN_PROGRAM, request["program"], mark, json.dumps(request["environment"])]
    try:
        done = subprocess.run(
            node_command(words, setup),
            cwd=workdir,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=ENVIRONMENT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        subject, key = ("setup", "setup") if setup else (python, "python")
        return None, f"{subject} took longer than {ENVIRONMENT_TIMEOUT_S:g} s", key
    except OSError as error:
        return None, f"{python} cannot be run: {error.strerror}", "python"
    output = done.stdout.decode("utf-8", "replace")
    with suppress(ValueError):
        return json.loads(output.rpartition(mark)[2].partition("\n")[0]), "", ""
    lines = [" ".join(line.split()) for line in done.stderr.decode("utf-8", "replace").splitlines()]
    last = next((line for line in reversed(lines) if line and not line.startswith(SETUP_FAILED)), "")
    subject, key = (python, "python") if setup_done in output else ("setup", "setup")
    return None, f"{subject} ended with exit code {done.returncode}{': ' if last else ''}{last[:MAX_LINE_CHARS]}", key


def read_facts(request: Mapping[str, Any], mark: str, probe_port: int) -> dict[str, Any]:
    """Return the facts of this host for one node: the fields of ``gputrain_tui.preflight.host_facts.HostFacts``."""
    environment, problem, key = read_environment(request, mark)
    home = request["env"].get(HOME) or os.environ.get(HOME) or request["home"]
    home = home or str(Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state", "gputrain"))
    written_folders = [os.environ.get("TMPDIR") or "/tmp", home, *request["folders"]]
    port, rendezvous = request["port"], request["rendezvous"]
    return {
        "machine": f"{boot_id()} {network_namespace()}",
        "inventory": asdict(take_inventory()),
        "limits": asdict(read_limits()),
        "shm_free_bytes": free_shm_bytes(),
        "folders": [asdict(folder_facts(Path(place))) for place in dict.fromkeys(written_folders)],
        "port": None if port is None else asdict(port_facts(port["number"], port["host"])),
        "rendezvous": None if rendezvous is None else asdict(rendezvous_file(Path(rendezvous))),
        "probe_port": probe_port,
        "addresses": [each.text for each in outward_addresses()],
        "environment": environment,
        "problem": problem,
        "problem_key": key,
    }


def network_namespace() -> str:
    """Return the kernel's name of the network namespace, one per container with its own network; empty if unknown."""
    try:
        return str(Path("/proc/self/ns/net").readlink())
    except OSError:
        return ""


def route_to(root: Mapping[str, Any]) -> dict[str, Any]:
    """Return this host's address and interface on the route to the first node, and the first node's address.

    Texts are empty if there is no route; ``interfaces`` has the interface of each address of this host.
    """
    own = outward_addresses()
    target = resolve(root["host"]) if root["host"] else None
    route = None
    if target is not None and target not in {each.text for each in own}:
        source = source_towards(target)
        route = (target, source) if source is not None else None
    elif not root["own"]:
        route = find_route(root["addresses"], root["port"], own, CONNECT_TIMEOUT_S)
    source_address = next((each for each in own if route is not None and each.text == route[1]), None)
    return {
        "address": source_address.text if source_address is not None else "",
        "interface": source_address.interface if source_address is not None else "",
        "root": route[0] if route is not None else "",
        "interfaces": {each.text: each.interface for each in own},
    }


def main(words: Sequence[str]) -> None:
    """Answer requests, a line of JSON each, until the input ends; an answer is a line behind a mark, the first word."""
    mark, token, session = words[0], None, None
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LIFE_S)

    def answer(value: Any) -> None:
        sys.stdout.write(f"{mark}{json.dumps(value)}\n")
        sys.stdout.flush()

    try:
        with listen_on_any_port() as listener:
            for line in sys.stdin.buffer:
                request = json.loads(line)
                if request["ask"] == "facts":
                    answer(read_facts(request, mark, int(listener.getsockname()[1])))
                elif request["ask"] == "route":
                    answer({"time": time.time()})
                    path = Path(request["token"]) if request["token"] else None
                    answer({**route_to(request["root"]), "token": path is not None and path.exists()})
                elif request["ask"] == "token":
                    with suppress(OSError):
                        os.close(os.open(request["token"], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
                        token = request["token"]
                    answer({"written": token is not None})
                elif request["ask"] == "reach":
                    endpoints = {int(index): (host, port) for index, (host, port) in request["endpoints"].items()}
                    answer(unreachable(endpoints, request["timeout_s"]))
                elif request["ask"] == "serve":
                    session = request["request"]
                    break
    finally:
        if token is not None:
            with suppress(OSError):
                os.unlink(token)  # noqa: PTH108
    if session is not None:  # the launch continues on this connection
        signal.alarm(0)
        serve_session(mark.encode(), session)


if __name__ == "__main__":
    main(sys.argv[1:])
