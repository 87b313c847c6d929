"""The options of ``srun``, and what they mean for a recipe with ``[slurm]``.

A job step of srun starts its command once per task; a recipe names the nodes and the ranks of each, and gputrain starts
one step with one task on every node.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gputrain_tui.recipe.command_launchers import LaunchCommand
from gputrain_tui.recipe.shell_text import ASSIGNMENT, EXPANSION, require_no_expansion, shown
from trainer.contract.errors import RequestError, quoted

SHORT = {
    "A": "account", "B": "extra-node-info", "C": "constraint", "D": "chdir", "E": "preserve-env", "G": "gpus",
    "H": "hold", "I": "immediate", "J": "job-name", "K": "kill-on-bad-exit", "L": "licenses", "M": "clusters",
    "N": "nodes", "O": "overcommit", "Q": "quiet", "S": "core-spec", "T": "threads", "W": "wait", "X": "disable-status",
    "Z": "no-allocate", "b": "begin", "c": "cpus-per-task", "d": "dependency", "e": "error", "i": "input",
    "k": "no-kill",
    "l": "label", "m": "distribution", "n": "ntasks", "o": "output", "p": "partition", "q": "qos", "r": "relative",
    "s": "oversubscribe", "t": "time", "u": "unbuffered", "v": "verbose", "w": "nodelist", "x": "exclude",
}  # fmt: skip
SWITCHES = frozenset(
    (
        "contiguous", "disable-status", "exact", "exclusive", "hold", "immediate", "kill-on-bad-exit", "label",
        "multi-prog",
        "no-allocate", "no-kill", "nice", "overcommit", "overlap", "oversubscribe", "preserve-env", "propagate", "pty",
        "quiet", "quit-on-interrupt", "reboot", "resv-ports", "send-libs", "spread-job", "unbuffered", "use-min-nodes",
        "verbose", "no-container-entrypoint", "container-writable", "no-container-mount-home", "container-mount-home",
    )
)  # fmt: skip
"""Options without a value in the next word; some take one after ``=``."""
KEYS = ("partition", "account", "qos", "time", "mem", "constraint")
"""Options that are keys of ``[slurm]``."""
FOR_SBATCH = (
    "begin", "clusters", "comment", "contiguous", "core-spec", "cores-per-socket", "cpus-per-gpu", "deadline",
    "dependency",
    "exclude", "exclusive", "gpu-freq", "hint", "hold", "licenses", "mail-type", "mail-user", "mem-per-cpu",
    "mem-per-gpu",
    "mincpus", "network", "nice", "nodelist", "oversubscribe", "power", "priority", "reboot", "reservation",
    "sockets-per-node", "spread-job", "switches", "thread-spec", "threads-per-core", "time-min", "tmp", "wckey",
)  # fmt: skip
"""Options that sbatch has with the same meaning; they become ``slurm.extra``."""
DONE_BY_GPUTRAIN = (
    "cpu-bind", "disable-status", "distribution", "error", "exact", "gpu-bind", "input", "jobid", "job-name",
    "kill-on-bad-exit", "label", "mpi", "no-kill", "output", "overlap", "pty", "quiet", "quit-on-interrupt",
    "unbuffered",
    "verbose", "wait", "open-mode",
)  # fmt: skip
"""Options of a step that gputrain replaces: its steps, their output, and the end of all when one fails."""


@dataclass(kw_only=True)
class SlurmStep:
    """What srun's options say of a job."""

    nodes: int | None = None
    tasks: int | None = None
    """Tasks of all nodes together."""
    tasks_per_node: int | None = None
    gpus_per_node: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """Keys of ``[slurm]`` without ``nodes``."""
    cpus_per_task: int | None = None
    workdir: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_srun(argv: Sequence[str]) -> tuple[SlurmStep, list[str]]:
    """Return what the options of srun say, and the command behind them.

    Raises:
        RequestError: an option would change the training, and no recipe can say it; or its value is not in the text.
    """
    given, rest = _split(argv)
    step = SlurmStep()
    for name in given:
        if name.startswith("container"):
            raise RequestError(
                f"srun --{name} starts the command in a container, which gputrain does not: give init the command "
                "behind srun, and start gputrain in the image"
            )
    if "multi-prog" in given:
        raise RequestError("srun --multi-prog starts several programs: a recipe is for one")
    step.nodes = _count(given, "nodes")
    step.tasks, step.tasks_per_node = _count(given, "ntasks"), _count(given, "ntasks-per-node")
    step.cpus_per_task = _count(given, "cpus-per-task")
    gpus_per_task, gpus = _gpus(given, "gpus-per-task", step), _gpus(given, "gpus", step)
    step.gpus_per_node = _gpus(given, "gpus-per-node", step) or _gres(given, step)
    step.tasks_per_node = _tasks_per_node(step)
    if step.gpus_per_node is None and gpus_per_task:
        step.gpus_per_node = gpus_per_task * (step.tasks_per_node or 1)
    if step.gpus_per_node is None and gpus:
        step.gpus_per_node = _share(gpus, step.nodes or 1, "gpus")
    for name in KEYS:
        if name in given:
            step.options[name] = given.pop(name)
    extra = [f"--{name}" + (f"={given[name]}" if given[name] else "") for name in FOR_SBATCH if name in given]
    for name in FOR_SBATCH:
        given.pop(name, None)
    require_no_expansion([*step.options.values(), *extra, given.get("chdir", "")])
    if extra:
        step.options["extra"] = extra
    if (folder := given.pop("chdir", None)) is not None:
        step.workdir = folder
    for setting in filter(None, given.pop("export", "").split(",")):
        if (variable := ASSIGNMENT.fullmatch(setting)) is not None:
            step.env[variable[1]] = variable[2]
        elif setting not in ("ALL", "NONE"):
            step.notes.append(f"srun --export={setting} is left out: ranks have the environment of gputrain")
    done = [f"--{name}" for name in DONE_BY_GPUTRAIN if given.pop(name, None) is not None]
    if done:
        step.notes.append(f"srun {', '.join(done)}: not needed, as gputrain starts the step and has each rank's output")
    step.notes += [
        f"srun --{name}{f'={shown(value)}' if value else ''} has no counterpart and is left out"
        for name, value in given.items()
    ]
    return step, rest


def _split(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return srun's options by their long names, and the command."""
    given: dict[str, str] = {}
    rest = list(argv)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
        else:
            name, equals, value = SHORT.get(word[1:2], word[1:2]), word[2:3], word[2:].removeprefix("=")
            if name in SWITCHES and value and not value.isdecimal():  # several in one word, such as -lu
                rest.insert(0, f"-{value}")
                equals = value = ""
        if not equals and name not in SWITCHES and rest:
            value = rest.pop(0)
        given[name] = value
    return given, rest


def _count(given: dict[str, str], name: str) -> int | None:
    """Remove an option and return its number; None without one, and where it is a variable of the job."""
    value = given.pop(name, None)
    if value is None or EXPANSION in value:
        return None
    if not re.fullmatch("[1-9][0-9]{0,5}", value):
        raise RequestError(f"srun --{name} is {quoted(value)}, but must be a whole number, at least 1")
    return int(value)


def _gpus(given: dict[str, str], name: str, step: SlurmStep) -> int | None:
    """Remove an option ``[TYPE:]COUNT`` and return its count; keep the type."""
    kind, _, count = given.get(name, "").rpartition(":")
    if name in given:
        given[name] = count
    if kind:
        step.options["gpu_type"] = kind
    return _count(given, name)


def _gres(given: dict[str, str], step: SlurmStep) -> int | None:
    """Remove ``--gres=gpu[:TYPE][:COUNT]`` and return its count; other resources stay."""
    listed = [each for each in given.get("gres", "").split(",") if each]
    of_gpus = next((each for each in listed if each.split(":")[0] == "gpu"), None)
    if of_gpus is None:
        return None
    others = [each for each in listed if each != of_gpus]
    given["gres"] = ",".join(others)
    if not others:
        del given["gres"]
    parts = of_gpus.split(":")[1:]
    count = parts.pop() if parts and not re.fullmatch(r"[A-Za-z].*", parts[-1]) else "1"
    if parts:
        step.options["gpu_type"] = parts[0]
    return _count({"gres": count}, "gres")


def _share(total: int, nodes: int, name: str) -> int:
    if total % nodes:
        raise RequestError(f"srun --{name} is {total}, but must be a multiple of the {nodes} nodes")
    return total // nodes


def _tasks_per_node(step: SlurmStep) -> int | None:
    if step.tasks is None:
        return step.tasks_per_node
    if step.nodes is None and step.tasks_per_node is not None:  # beside --ntasks it is the most that a node may have
        step.nodes = -(-step.tasks // step.tasks_per_node)
    return _share(step.tasks, step.nodes or 1, "ntasks")


def apply_step(command: LaunchCommand, step: SlurmStep, *, launcher: str) -> None:
    """Set the nodes and ``[slurm]`` of a command that srun starts.

    Raises:
        RequestError: srun and the launcher behind it disagree, or a number that Slurm needs is missing.
    """
    tasks = step.tasks_per_node or 1
    if launcher == "python":
        count = step.nodes or 1
        node: dict[str, Any] = {"gpus": tasks}
        if command.starts_ranks:
            node["gpus"] = step.gpus_per_node or command.nodes[0].get("ranks", tasks)
    else:
        count = step.nodes or len(command.nodes)
        if tasks > 1:
            raise RequestError(
                f"srun starts {launcher} {tasks} times on each node, but a recipe starts the ranks of a node once: "
                "give srun --ntasks-per-node=1"
            )
        if len(command.nodes) not in (1, count) or (len(command.nodes) == 1 and count > 1):
            raise RequestError(
                f"srun starts {launcher} on {count} node{'s' * (count > 1)}, but its own flags say "
                f"{len(command.nodes)}: give both the same number"
            )
        node = {name: value for name, value in command.nodes[0].items() if name != "host"}
        command.notes = [note for note in command.notes if "put their names in place" not in note]
        if "ranks" in node:
            node = {"gpus": node.pop("ranks"), **node}
        if not isinstance(node.get("gpus", 1), int):
            if step.gpus_per_node is None:
                raise RequestError(
                    f"Slurm needs a number of GPUs: give srun --gpus-per-node, or {launcher} its processes"
                )
            node["gpus"] = step.gpus_per_node
    options = dict(step.options)
    if step.cpus_per_task is not None:  # a step of gputrain has one task on a node
        options["extra"] = [*options.get("extra", []), f"--cpus-per-task={step.cpus_per_task * tasks}"]
    command.cluster.pop("init_method", None)  # Slurm's first node, which the job knows
    command.slurm = {"nodes": count, **options}
    if any("env" in each for each in command.nodes):
        command.nodes = [{**node, "env": each["env"]} for each in command.nodes]
        del command.slurm["nodes"]
    else:
        command.nodes = [node]
    if step.workdir is not None:
        command.cluster["workdir"] = step.workdir
    command.notes += step.notes
    _note_what_the_job_knows(command, step, node)


def _note_what_the_job_knows(command: LaunchCommand, step: SlurmStep, node: Mapping[str, Any]) -> None:
    if step.nodes is None or not step.options.keys() & {"partition", "account", "time"}:
        command.notes.append(
            "srun takes what it does not name from its job: put the job's nodes, partition and time into [slurm]"
        )
    if "gpus" in node and step.gpus_per_node is None:
        command.notes.append("gpus counts the ranks of a node; for ranks without GPUs write cpu_ranks in its place")
    elif step.gpus_per_node is not None and node.get("gpus", step.gpus_per_node) < step.gpus_per_node:
        command.notes.append(
            f"srun asks for {step.gpus_per_node} GPUs on each node, but the recipe has {node['gpus']} there, one for "
            "each rank"
        )
