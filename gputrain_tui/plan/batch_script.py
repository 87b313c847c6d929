"""Pure: formats a plan as a batch script for Slurm, with one step of one task for each node.

Steps are started one by one because their GPU counts may differ. A plan without Slurm's node names takes its nodes from
the allocation.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

from gputrain_tui.hosts.host_names import address_of, is_address, is_pending
from gputrain_tui.plan.planner import Plan, PlannedNode, shell_setup
from gputrain_tui.recipe.model import SlurmOptions
from gputrain_tui.shell_words import shell_joined, shell_quoted
from trainer.contract.errors import ExitCode, RequestError, printable
from trainer.contract.rendezvous_url import parse_rendezvous_url
from trainer.host.addresses import is_loopback

MASTER = "MASTER_ADDR="
SLURM_VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
"""Variables that a step does not get from the plan: Slurm chooses its GPUs."""
GPU_OPTIONS = ("--gres=gpu", "--gpus", "-G")
"""Beginnings of the options of sbatch that ask for GPUs; some clusters know one of them only."""
GPU_REQUESTS = ("SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK")
"""Variables of a job by which srun, too, asks for its GPUs. A step may not ask for them by type and without."""
CORE_OPTIONS = ("-c", "--cpus", "--exclusive", "--oversubscribe")
"""Beginnings of the options of sbatch that set the cores of a node; without any, a job takes whole nodes."""


SIGNAL = "--signal=B:USR1@"
"""Option of ``sbatch`` for a signal to the supervisor, with the seconds before the time limit after it."""


def sbatch_arguments(
    plan: Plan, options: SlurmOptions, *, name: str, output: str, saving_s: float | None = None
) -> list[str]:
    """Return the arguments of ``sbatch`` for the nodes of a plan: a heterogeneous job if their GPU counts differ.

    ``saving_s``: how long saving took before, seconds; None if unknown.
    """
    hosts = [address_of(node.host) for node in plan.nodes]
    counts = [_gpus(node) for node in plan.nodes]
    components = [(len(list(alike)), count) for count, alike in itertools.groupby(counts)]
    if not all(map(is_pending, hosts)):  # named hosts are taken whole, with all of their GPUs
        components = [(len(plan.nodes), counts[0] if len(set(counts)) == 1 else 0)]
    arguments = [f"--job-name={_job_name(name)}", f"--output={output.replace('%', '%%')}", "--open-mode=append"]
    for index, (nodes, gpus) in enumerate(components):
        arguments += [":"] if index else []
        arguments += [f"--nodes={nodes}", "--ntasks-per-node=1", *_resource_arguments(options)]
        if not all(map(is_pending, hosts)):
            arguments.append(f"--nodelist={','.join(hosts)}")
        arguments += [*_gpus_per_node(gpus, options), *options.extra]
    if options.requeue:
        arguments[:0] = ["--requeue", f"{SIGNAL}{save_before_limit_s(options.time, saving_s)}"]
    return arguments


def save_before_limit_s(limit: str | None, saving_s: float | None = None) -> int:
    """Return how long before its time limit a job is signalled to save, seconds.

    That is twice the time that saving took, ``saving_s``, and half a minute; two minutes while that is unknown. It is
    at most half of the limit, and a quarter while unknown.

    Args:
        limit: the time limit as ``sbatch`` takes it; None for that of the partition.
        saving_s: from the stop request to the end of all processes, or a write of a checkpoint, seconds.
    """
    wanted_s, share = (120, 4) if saving_s is None else (math.ceil(2 * saving_s + 30), 2)
    limit_s = _seconds(limit)
    return wanted_s if limit_s is None else max(1, min(wanted_s, limit_s // share))


def _seconds(limit: str | None) -> int | None:
    """Return a time limit in seconds; None without one that is a number."""
    match = re.fullmatch(r"(?:(?P<d>\d+)-)?(?P<a>\d+)(?::(?P<b>\d+))?(?::(?P<c>\d+))?", limit or "")
    if match is None:
        return None
    first, second, third = (int(match[name] or 0) for name in "abc")
    if match["d"] is not None:  # D-HH[:MM[:SS]]
        return (int(match["d"]) * 24 + first) * 3600 + second * 60 + third
    if match["c"] is not None:  # HH:MM:SS
        return first * 3600 + second * 60 + third
    return first * 60 + second  # MM[:SS]


def signal_before_limit_s(arguments: Sequence[str]) -> int | None:
    """Return how long before its time limit a job of these arguments of ``sbatch`` is signalled; None if it is not."""
    return next((int(word.removeprefix(SIGNAL)) for word in arguments if word.startswith(SIGNAL)), None)


def with_signal(arguments: Sequence[str], before_limit_s: int) -> list[str]:
    """Return arguments of ``sbatch`` with another time of the signal to save, seconds before the time limit."""
    return [f"{SIGNAL}{before_limit_s}" if word.startswith(SIGNAL) else word for word in arguments]


def successor_arguments(arguments: Sequence[str], *, after: int, excluded: str = "") -> list[str]:
    """Return the arguments of ``sbatch`` for a job that starts when another one of the same run is over.

    Words at the end of a component go before the same options of the recipe, as ``sbatch`` takes the last.

    Args:
        arguments: of the job before.
        after: its number.
        excluded: hosts to leave out, as Slurm abbreviates them.
    """
    components: list[list[str]] = [[]]
    for word in arguments:
        if word == ":":
            components.append([])
        else:
            components[-1].append(word)
    components[0].append(f"--dependency=afterany:{after}")
    if excluded:
        components = [[*words, f"--exclude={excluded}"] for words in components]
    return [word for index, words in enumerate(components) for word in ([":"] if index else []) + words]


def excluded_by(arguments: Sequence[str]) -> list[str]:
    """Return the host lists that arguments of ``sbatch`` leave out, as ``--exclude`` or ``-x``."""
    before = ["", *arguments]
    found = []
    for previous, word in zip(before, arguments, strict=False):
        if previous in ("-x", "--exclude"):
            found.append(word)
        elif word.startswith("--exclude="):
            found.append(word.removeprefix("--exclude="))
        elif word.startswith("-x") and word != "-x":
            found.append(word.removeprefix("-x"))
    return list(dict.fromkeys(found))


def _resource_arguments(options: SlurmOptions) -> list[str]:
    names = ("partition", "account", "qos", "time", "mem", "constraint")
    arguments = [f"--{name}={getattr(options, name)}" for name in names if getattr(options, name) is not None]
    return arguments if any(word.startswith(CORE_OPTIONS) for word in options.extra) else [*arguments, "--exclusive"]


def _setup(setup: str | None) -> list[str]:
    if setup is None:
        return []
    report = f'echo "gputrain: slurm.setup ended with exit code $?" >&2; exit {ExitCode.REFUSED}'
    return [f"trap '{report}' EXIT", setup, "[ $? -eq 0 ] || exit $?", "trap - EXIT"]


def supervisor_script(run_dir: str, *, python: str, setup: str | None) -> str:
    """Return a batch script that ends in ``exec`` of a run's supervisor, so that Slurm's signals reach it."""
    folder = shell_quoted(run_dir)
    lines = [
        "#!/bin/bash",
        "# A signal to save must not end this shell before the supervisor handles it.",
        "trap '' USR1 USR2 RTMIN+1 RTMIN+2 RTMIN+3",
    ]
    lines += _setup(setup)
    lines += [
        f"if ! [ -e {folder}/plan.json ]; then",
        f'  echo "gputrain: $(hostname) does not see the run directory" {folder} >&2',
        f"  exit {ExitCode.REFUSED}",
        "fi",
        f"exec {shell_joined([python, '-P', '-m', 'gputrain_tui.lifecycle.supervisor', run_dir])}",
    ]
    return "\n".join(lines) + "\n"


def script(plan: Plan, *, name: str, options: SlurmOptions | None = None, saving_s: float | None = None) -> str:
    """Return a script for ``sbatch``; interpreter, working directory and data of the plan must exist on every node.

    ``saving_s``: how long saving took before, seconds; None if unknown.
    """
    counts = [_gpus(node) for node in plan.nodes]
    hosts = [address_of(node.host) for node in plan.nodes]
    nameless = [host for host in hosts if is_loopback(host) or is_address(host) or is_pending(host)]
    named = not nameless
    if len(set(hosts)) < len(hosts) and named:
        raise RequestError("--sbatch needs a machine per node, but two nodes of the recipe have the same host")
    if not named and len(set(counts)) > 1:
        raise RequestError(
            "--sbatch needs Slurm's node names in the recipe: the nodes have different numbers of GPUs, "
            f"and {nameless[0]} is not a node name"
        )
    head = [
        "#!/bin/bash",
        f"#SBATCH --job-name={_job_name(name)}",
        f"#SBATCH --nodes={len(plan.nodes)}",
        "#SBATCH --ntasks-per-node=1",
        "# Whole nodes: all cores and GPUs, also where the nodes have different numbers of them.",
        "#SBATCH --exclusive",
    ]
    if named:
        head.append(f"#SBATCH --nodelist={printable(','.join(hosts))}")  # a line break would begin a line of its own
    if len(set(counts)) == 1:
        head += [f"#SBATCH {printable(shell_quoted(word))}" for word in _gpus_per_node(counts[0], options)]
    limit = None if options is None else options.time
    head.append("# Time to save before the limit: the signal goes to the steps, which end.")
    head.append(f"#SBATCH --signal=USR1@{save_before_limit_s(limit, saving_s)}")
    if options is not None:
        arguments = [*_resource_arguments(options), *options.extra]
        head += [f"#SBATCH {printable(shell_quoted(word))}" for word in arguments if word != "--exclusive"]
    lines = [*head, "", *_setup(None if options is None else options.setup), "set -u"]
    lines.append('[ -n "${SLURM_JOB_NODELIST:-}" ] || { echo "gputrain: submit this script with sbatch" >&2; exit 2; }')
    if not named:
        count = len(plan.nodes)
        lines.append('nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))')
        lines.append(f'if [ "${{#nodes[@]}}" -ne {count} ]; then')
        lines.append(f'  echo "gputrain: this plan is for {count} nodes, but the job has ${{#nodes[@]}}" >&2')
        lines += ["  exit 2", "fi"]
    lines += ["", *_steps(plan, counts, named), ""]
    lines += [
        "# When a step fails, the ranks of the others lose a peer, report it and end; steps that still run after that",
        "# are killed. When Slurm ends the job, it signals the ranks itself and leaves them time to save.",
        "code=0",
        "tries=50",
        "trap tries=100000 TERM",
        'for _ in "${steps[@]}"; do',
        "  wait -n || { code=$?; break; }",
        "done",
        'if [ "$code" -ne 0 ]; then',
        '  while [ "$((tries--))" -gt 0 ] && kill -0 "${steps[@]}" 2>/dev/null; do sleep 0.2; done',
        '  kill "${steps[@]}" 2>/dev/null',
        "  wait",
        "fi",
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


def _steps(plan: Plan, counts: Sequence[int], named: bool) -> list[str]:
    lines = [f"unset {' '.join(GPU_REQUESTS)}"] if any(counts) else []
    lines.append("steps=()")
    for node, gpus in zip(plan.nodes, counts, strict=True):
        host = shell_quoted(address_of(node.host)) if named else f'"${{nodes[{node.node}]}}"'
        step = f"srun --nodes=1 --ntasks=1 --nodelist={host} --cpu-bind=none"
        if gpus:
            # Not --gpus-per-node: Slurm 22.05 holds it against the smallest node of an exclusive job.
            step += f" --gpus={gpus}"
        env = {key: value for key, value in node.env.items() if key not in SLURM_VARIABLES}
        arguments = [*(["env", *(f"{key}={value}" for key, value in env.items())] if env else []), *node.argv]
        if before := shell_setup(node):  # in a login shell, because sites define `module` in its start-up files
            arguments = ["bash", "-lc", f'{before} && exec "$@"', "setup", *arguments]
        lines.append(f"# node {node.node}: ranks {node.ranks[0]} to {node.ranks[-1]} of {plan.world_size}")
        lines.append(f"{step} {_command(arguments, plan, named)} &")
        lines.append("steps+=($!)")
    return lines


def _command(arguments: Sequence[str], plan: Plan, named: bool) -> str:
    """Join words for the shell; without node names, rank 0's address becomes the first node of the allocation."""
    if named or len(plan.nodes) == 1:
        return shell_joined(arguments)
    first = address_of(plan.nodes[0].host)
    texts = []
    for word in arguments:
        url = parse_rendezvous_url(word)
        if url is not None and url.scheme == "tcp" and (url.host == first.lower() or is_loopback(url.host)):
            texts.append(f'tcp://"${{nodes[0]}}":{url.port}')
        elif word.startswith(MASTER) and ((host := word.removeprefix(MASTER)) == first or is_loopback(host)):
            texts.append(f'{MASTER}"${{nodes[0]}}"')
        else:
            texts.append(shell_quoted(word))
    return " ".join(texts)


def _gpus_per_node(count: int, options: SlurmOptions | None) -> list[str]:
    if not count or (options is not None and any(word.startswith(GPU_OPTIONS) for word in options.extra)):
        return []
    kind = "" if options is None or options.gpu_type is None else f"{options.gpu_type}:"
    return [f"--gpus-per-node={kind}{count}"]


def _gpus(node: PlannedNode) -> int:
    return 0 if "cpu" in node.devices else len(set(node.devices))


def _job_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-") or "gputrain"
