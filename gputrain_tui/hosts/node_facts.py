"""Functions of a host for the checks before a run: its facts for one node, and connections to the other hosts.

Standard library only, since this file is sent to the host; ``host_program`` calls what takes a ``CallServer``.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gputrain_tui.hosts.host_agent import home_folder, node_command
from gputrain_tui.hosts.inventory import take_inventory
from gputrain_tui.hosts.machine_facts import folder_facts, port_facts, rendezvous_file
from trainer.contract.home_folder import expand_home
from trainer.host.addresses import source_towards
from trainer.host.boot import boot_id
from trainer.host.import_path import node_environment
from trainer.host.reachability import (
    CONNECT_TIMEOUT_S,
    find_route,
    listen_on_all_addresses,
    look_up,
    outward_addresses,
    unreachable,
)
from trainer.host.resource_limits import SHM, free_bytes, read_limits

if TYPE_CHECKING:
    from gputrain_tui.hosts.host_program import CallServer

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
SETUP_FAILED = "setup ended with exit code"
"""Begin of the message that the shell of ``node_command`` prints if setup fails."""


def read_environment(request: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, str, str]:
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
    mark = f"gputrain-{secrets.token_hex(8)}:"
    setup_done = f"{mark}reached "
    # A line of setup may exit by itself: the printed mark proves that the interpreter was started.
    argv = ["/bin/sh", "-c", 'printf %s "$0"; exec "$@"', setup_done]
    argv += [python, "-c", RUN_PROGRAM, request["program"], mark, json.dumps(request["environment"])]
    try:
        done = subprocess.run(
            node_command(argv, setup),
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


def facts(server: CallServer, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of this host for one node: the fields of ``gputrain_tui.preflight.collect_hosts.HostFacts``.

    Its ``probe_port`` accepts connections of the other hosts until the checks are over.
    """
    listener = server.held.enter_context(listen_on_all_addresses())
    environment, problem, key = read_environment(request)
    written_folders = [os.environ.get("TMPDIR") or "/tmp", str(home_folder(request)), *request["folders"]]
    port, rendezvous = request["port"], request["rendezvous"]
    return {
        "machine": f"{boot_id()} {network_namespace()}",
        "inventory": asdict(take_inventory()),
        "limits": asdict(read_limits()),
        "shm_free_bytes": free_bytes(SHM),
        "folders": [asdict(folder_facts(Path(folder))) for folder in dict.fromkeys(written_folders)],
        "port": None if port is None else asdict(port_facts(port["number"], port["host"])),
        "rendezvous": None if rendezvous is None else asdict(rendezvous_file(Path(rendezvous))),
        "probe_port": int(listener.getsockname()[1]),
        "addresses": [each.text for each in outward_addresses()],
        "environment": environment,
        "problem": problem,
        "problem_key": key,
    }


def listen(server: CallServer, _: Mapping[str, Any]) -> dict[str, Any]:
    """Accept connections of the other hosts until ``release``; return the port, and the interface of each address."""
    listener = server.held.enter_context(listen_on_all_addresses())
    addresses = {each.text: each.interface for each in outward_addresses()}
    return {"port": int(listener.getsockname()[1]), "addresses": addresses}


def network_namespace() -> str:
    """Return the kernel's name of the network namespace, one per container with its own network; empty if unknown."""
    try:
        return str(Path("/proc/self/ns/net").readlink())
    except OSError:
        return ""


def clock(_: CallServer, __: Mapping[str, Any]) -> float:
    """Return this host's time, Unix seconds."""
    return time.time()


def token(server: CallServer, request: Mapping[str, Any]) -> bool:
    """Create the file of a token for as long as the checks last; return whether it was created."""
    with suppress(OSError):
        os.close(os.open(request["token"], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        server.held.callback(_delete, request["token"])
        return True
    return False


def _delete(path: str) -> None:
    with suppress(OSError):
        Path(path).unlink()


def exists(_: CallServer, request: Mapping[str, Any]) -> bool:
    """Return whether a path exists on this host."""
    return Path(request["path"]).exists()


def release(server: CallServer, _: Mapping[str, Any]) -> None:
    """End what the checks keep open on this host: its port, and the token."""
    server.held.close()


def reach(_: CallServer, request: Mapping[str, Any]) -> dict[int, str]:
    """Return the nodes that this host cannot reach at their endpoints, with the reasons."""
    endpoints = {int(index): (host, port) for index, (host, port) in request["endpoints"].items()}
    return unreachable(endpoints, request["timeout_s"])


def route(_: CallServer, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return this host's address and interface on the route to the first node, and the first node's address.

    Texts are empty if there is no route; ``named`` is whether the first node's name has an address here,
    ``interfaces`` has the interface of each address of this host, and ``token`` is whether the token is visible here.
    """
    root, token_path = request["root"], request["token"]
    own = outward_addresses()
    named, target = look_up(root["host"]) if root["host"] else (True, None)
    found = None
    if target is not None and target not in {each.text for each in own}:
        source = source_towards(target)
        found = (target, source) if source is not None else None
    elif not root["own"]:
        found = find_route(root["addresses"], root["port"], own, CONNECT_TIMEOUT_S)
    source_address = next((each for each in own if found is not None and each.text == found[1]), None)
    return {
        "address": source_address.text if source_address is not None else "",
        "interface": source_address.interface if source_address is not None else "",
        "root": found[0] if found is not None else "",
        "named": named,
        "interfaces": {each.text: each.interface for each in own},
        "token": bool(token_path) and Path(token_path).exists(),
    }
