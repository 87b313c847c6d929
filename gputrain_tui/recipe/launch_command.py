"""Translates a command line of torchrun, accelerate, DeepSpeed or python into the values of a recipe.

Pure: the caller passes the function that reads the files of a command, such as a hostfile.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from gputrain_tui.recipe.script_group import makes_group, without_group
from trainer.contract.errors import RequestError, nearest, quoted

UNKNOWN_HOST = "host{}"
"""Placeholder for a host that the command does not name."""
MAX_NODES = 10_000
"""Most nodes of a pasted command; more are a typing error."""

ReadFile = Callable[[str], str]


@dataclass(kw_only=True)
class LaunchCommand:
    """A launch command as values of a recipe."""

    launcher: str
    """``torchrun``, ``accelerate``, ``deepspeed`` or ``python``."""
    script: str
    args: list[str]
    nodes: list[dict[str, Any]] = field(default_factory=list)
    """``[[cluster.nodes]]``."""
    cluster: dict[str, Any] = field(default_factory=dict)
    """``[cluster]`` without nodes and ``env``."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables that the command sets."""
    makes_group: bool | None = None
    """Whether the script makes a process group; None if that is unknown."""
    notes: list[str] = field(default_factory=list)
    """A line for each part of the command without counterpart in a recipe, or that the user has to complete."""


@dataclass(frozen=True, kw_only=True)
class LauncherFlags:
    """Syntax and meaning of a launcher's flags."""

    switches: tuple[str, ...]
    """Flags without a value, written without leading dashes and with ``_`` for ``-``; all others take one."""
    short: Mapping[str, str]
    """Short names → flags."""
    read: Callable[[LaunchCommand, dict[str, str], ReadFile], None]
    """Removes the flags that it understands, and sets the values of the command; the others become notes."""


# --- words ------------------------------------------------------------------------------------------------------------


def split_command(text: str) -> list[str]:
    """Split pasted text into words, without prompts, comments and continued line ends.

    Raises:
        RequestError: an unclosed quote, no command, or several.
    """
    lines = [re.sub(r"^[$>%] +", "", line.strip()) for line in text.replace("\\\n", " ").splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    if len(lines) != 1:
        how_many = f"{len(lines)} commands are" if lines else "no command is"
        raise RequestError(f"{how_many} given; paste one, such as: torchrun --nproc-per-node 4 train.py")
    try:
        return shlex.split(lines[0], comments=True)
    except ValueError as error:
        raise RequestError(f"the command cannot be read: {str(error).lower()}") from None


def read_launch_command(
    words: Sequence[str], *, read_file: ReadFile, is_secret: Callable[[str], bool]
) -> LaunchCommand:
    """Translate a command of torchrun, accelerate, DeepSpeed or python.

    Args:
        words: the command; it may begin with settings of environment variables.
        read_file: returns the text of a file that the command names; raises OSError.
        is_secret: whether an environment variable holds a secret, by its name.

    Raises:
        RequestError: the command has another program, no script or an invalid value.
    """
    rest, env = list(words), dict[str, str]()
    if rest[:1] == ["env"]:
        rest.pop(0)
    while rest and (setting := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", rest[0], re.DOTALL)):
        env[setting[1]] = setting[2]
        rest.pop(0)
    if not rest:
        raise RequestError("no command is given; start it with torchrun, accelerate launch, deepspeed or python")
    name, python, rest = _program(rest)
    launcher = LAUNCHERS[name]
    flags, rest = _split_flags(launcher, rest)
    is_module = _pop(flags, "module") is not None
    if _pop(flags, "no_python") is not None or _pop(flags, "run_path") is not None:
        raise RequestError(f"this {name} command starts another program than a Python script, which gputrain cannot do")
    if not rest:
        raise RequestError(f"the {name} command names no script")
    command = LaunchCommand(launcher=name, script=rest[0], args=rest[1:])
    if is_module:
        command.script = rest[0].replace(".", "/") + ".py"
        command.notes.append(
            f"-m {rest[0]} is written as the file {command.script}: relative imports in it do not work, and a module "
            "that is installed elsewhere needs its path"
        )
    if python is not None:
        command.cluster["python"] = python
    visible = env.pop("CUDA_VISIBLE_DEVICES", None)
    for variable in [each for each in env if each in RENDEZVOUS_VARIABLES]:
        command.notes.append(f"{variable}={env.pop(variable)} is left out: gputrain computes it")
    for variable in [each for each in env if is_secret(each)]:
        del env[variable]
        command.notes.append(
            f"{variable} is left out: secrets do not belong in a recipe; the ranks inherit it from the shell"
        )
    command.env = env
    command.makes_group = makes_group(command.script, read_file)
    launcher.read(command, flags, read_file)
    if command.makes_group is False:
        command.notes.append(without_group(command.script))
    _choose_devices(command, visible)
    for flag, value in flags.items():
        command.notes.append(f"--{flag}{f' {value}' if value else ''} has no counterpart and is left out")
    return command


RENDEZVOUS_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "CUDA_DEVICE_ORDER")


def _program(words: list[str]) -> tuple[str, str | None, list[str]]:
    """Return the launcher, the interpreter's path if the command gives an absolute one, and the words after both."""
    path = PurePath(words[0])
    name, rest = path.name, words[1:]
    python = str(path) if path.is_absolute() else None
    if re.fullmatch(r"python[\d.]*", name):
        while rest and rest[0] in ("-u", "-O", "-B", "-E", "-I", "-s"):
            rest.pop(0)
        module = rest[1] if rest[:1] == ["-m"] and len(rest) > 1 else ""
        if module in MODULES:
            return MODULES[module], python, _after_launch(MODULES[module], rest[2:])
        return "python", python, rest
    if name in LAUNCHERS:
        return name, str(path.with_name("python")) if python else None, _after_launch(name, rest)
    known = "torchrun, accelerate launch, deepspeed or python"
    raise RequestError(f"{quoted(words[0])} is not a known launcher: use {known}{nearest(name, LAUNCHERS)}")


MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate",
    "accelerate.commands.accelerate_cli": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
}


def _after_launch(name: str, words: list[str]) -> list[str]:
    if name == "accelerate" and words[:1] == ["launch"]:
        return words[1:]
    if name == "accelerate" and words and not words[0].startswith("-") and not words[0].endswith(".py"):
        raise RequestError(f"accelerate {words[0]} does not start training; use accelerate launch")
    return words


def _split_flags(launcher: LauncherFlags, words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the launcher's flags with their values, and the script with its arguments."""
    found: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word, equals, value = rest.pop(0).partition("=")
        flag = launcher.short.get(word, word.lstrip("-").replace("-", "_"))
        if word == "--":
            break
        if equals:
            found[flag] = value
        else:  # an unknown switch of a newer version is followed by the script or another flag, not by a value
            takes_value = flag not in launcher.switches and rest and not re.fullmatch(r"-\D.*|.*\.py", rest[0])
            found[flag] = rest.pop(0) if takes_value else ""
    return found, rest


def _pop(flags: dict[str, str], *names: str) -> str | None:
    """Remove all spellings of a flag; return the value of the first one present, None if there is none."""
    values = [flags.pop(name) for name in names if name in flags]
    return values[0] if values else None


def _number(value: str, flag: str, *, least: int = 1) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", value) or int(value) < least:
        raise RequestError(f"--{flag} is {quoted(value)}, but must be a whole number, at least {least}")
    return int(value)


# --- the launchers ----------------------------------------------------------------------------------------------------


def _set_nodes(command: LaunchCommand, count: int, first_host: str | None, ranks: dict[str, Any]) -> None:
    """Set the nodes, all with the same ranks; a host that the command does not name is a placeholder."""
    if count > MAX_NODES:
        raise RequestError(f"{count} nodes are too many; at most {MAX_NODES} are allowed")
    if count == 1:
        command.nodes = [ranks]
        return
    named = first_host if first_host and first_host not in LOOPBACK else None
    hosts = [named or UNKNOWN_HOST.format(0), *(UNKNOWN_HOST.format(index) for index in range(1, count))]
    command.nodes = [{"host": host, **ranks} for host in hosts]
    missing = [host for host in hosts if host != named]
    command.notes.append(
        f"the command does not name {len(missing)} of its {count} hosts: put their names in place of "
        f"{', '.join(missing[:4])}{', …' if len(missing) > 4 else ''}; one recipe starts all of them"
    )


LOOPBACK = ("localhost", "127.0.0.1", "::1", "0.0.0.0", "")


def _set_endpoint(command: LaunchCommand, host: str | None, port: str | None, nodes: int) -> None:
    """Set ``init_method`` to the command's endpoint for several nodes; one node finds a free port by itself."""
    if nodes == 1 or host is None or host in LOOPBACK:
        return
    number = _number(port, "port") if port else 29500
    command.cluster["init_method"] = f"tcp://{f'[{host}]' if ':' in host else host}:{number}"


def _set_restarts(command: LaunchCommand, flags: dict[str, str]) -> None:
    if (restarts := _pop(flags, "max_restarts")) and _number(restarts, "max_restarts", least=0):
        command.cluster["max_restarts"] = int(restarts)


def _torchrun(command: LaunchCommand, flags: dict[str, str], _: ReadFile) -> None:
    for name in ("standalone", "rdzv_id", "node_rank", "use_env", "rdzv_backend", "rdzv_conf", "local_addr"):
        _pop(flags, name)  # of no use with one supervisor for all nodes
    least, colon, most = (_pop(flags, "nnodes") or "1").partition(":")
    nodes = _number(most or least, "nnodes")
    if colon and least != most:
        command.notes.append(f"--nnodes {least}:{most} is elastic; the recipe always has {nodes} nodes")
    per_node = _pop(flags, "nproc_per_node") or "1"
    ranks: dict[str, Any] = {"gpus": "all"} if per_node in ("gpu", "auto") else {"ranks": 1}
    if per_node.isdecimal():
        ranks = {"ranks": _number(per_node, "nproc_per_node")}
    elif per_node == "cpu":
        ranks = {"cpu_ranks": 1}
        command.notes.append("--nproc-per-node cpu is one rank per core: set cpu_ranks to the number of cores")
    elif per_node not in ("gpu", "auto"):
        raise RequestError(f"--nproc-per-node is {quoted(per_node)}, but must be a number, gpu, cpu or auto")
    address, port = _pop(flags, "master_addr"), _pop(flags, "master_port")
    if endpoint := _pop(flags, "rdzv_endpoint"):
        host, number = endpoint.rsplit(":", 1) if re.search(r":\d+$", endpoint) else (endpoint, "")
        address, port = host.strip("[]"), number or port
    _set_nodes(command, nodes, address, ranks)
    _set_endpoint(command, address, port, nodes)
    _set_restarts(command, flags)


ACCELERATE_ENVIRONMENT = {
    "mixed_precision": "ACCELERATE_MIXED_PRECISION",
    "num_cpu_threads_per_process": "OMP_NUM_THREADS",
}
"""Flags of accelerate → environment variables by which it passes them to the script."""


def _accelerate(command: LaunchCommand, flags: dict[str, str], read_file: ReadFile) -> None:
    if path := _pop(flags, "config_file"):
        try:
            settings = re.findall(r"^(\w+): *['\"]?([^'\"\n#]*?)['\"]? *$", read_file(path), re.MULTILINE)
        except OSError as error:
            raise RequestError(f"--config_file {path} cannot be read: {error.strerror}") from None
        for name, value in settings:
            if name in CONFIG_FILE_KEYS and value not in ("", "null", "no", "false"):
                flags.setdefault(name, value)
    elif "num_processes" not in flags:
        command.notes.append("the file saved by `accelerate config` is not read: pass it with --config_file")
    for name in ("multi_gpu", "machine_rank", "rdzv_backend", "same_network"):
        _pop(flags, name)
    nodes = _number(_pop(flags, "num_machines") or "1", "num_machines")
    total, ids, cpu = _pop(flags, "num_processes"), _pop(flags, "gpu_ids"), _pop(flags, "cpu", "use_cpu") is not None
    if total is not None and _number(total, "num_processes") % nodes:
        raise RequestError(f"--num_processes is {total}, but must be a multiple of the {nodes} machines")
    per_node = None if total is None else int(total) // nodes
    ranks: dict[str, Any] = {"cpu_ranks" if cpu else "ranks": per_node} if per_node else {"gpus": "all"}
    if per_node is None and cpu:
        ranks = {"cpu_ranks": 1}
    if ids and ids != "all":
        ranks = {"gpus": _devices(ids, "gpu_ids")}
    address, port = _pop(flags, "main_process_ip"), _pop(flags, "main_process_port")
    _set_nodes(command, nodes, address, ranks)
    _set_endpoint(command, address, port, nodes)
    for name, variable in ACCELERATE_ENVIRONMENT.items():
        if (value := _pop(flags, name)) is not None:
            command.env.setdefault(variable, value)
    _set_restarts(command, flags)


CONFIG_FILE_KEYS = (
    *("num_processes", "num_machines", "gpu_ids", "main_process_ip", "main_process_port"),
    *("mixed_precision", "use_cpu"),
)
"""Keys that are read from accelerate's configuration file."""


def _deepspeed(command: LaunchCommand, flags: dict[str, str], read_file: ReadFile) -> None:
    for name in ("launcher", "force_multi", "node_rank", "no_local_rank"):
        _pop(flags, name)
    command.notes.append("deepspeed passes --local_rank to the script; here it reads LOCAL_RANK from the environment")
    include, hostfile = _pop(flags, "include"), _pop(flags, "hostfile")
    count, gpus = _pop(flags, "num_nodes"), _pop(flags, "num_gpus")
    address, port = _pop(flags, "master_addr"), _pop(flags, "master_port")
    ranks: dict[str, Any] = {"gpus": _number(gpus, "num_gpus")} if gpus and gpus != "-1" else {"gpus": "all"}
    if include:
        command.nodes = []
        for part in include.split("@"):
            host, colon, ids = part.partition(":")
            node = {"gpus": _devices(ids, "include")} if colon else dict(ranks)
            command.nodes.append(node if host in LOOPBACK else {"host": host, **node})
    elif hostfile:
        try:
            lines = [line.partition("#")[0].split() for line in read_file(hostfile).splitlines()]
        except OSError as error:
            raise RequestError(f"--hostfile {hostfile} cannot be read: {error.strerror}") from None
        for host, *settings in filter(None, lines):
            slots = next((word.removeprefix("slots=") for word in settings if word.startswith("slots=")), None)
            node = {"gpus": _number(slots, "hostfile")} if slots and not gpus else dict(ranks)
            command.nodes.append({"host": host, **node})
        command.nodes = command.nodes[: _number(count, "num_nodes")] if count and count != "-1" else command.nodes
    else:
        _set_nodes(command, _number(count, "num_nodes") if count and count != "-1" else 1, address, ranks)
    _set_endpoint(command, address, port, len(command.nodes))


def _python(command: LaunchCommand, flags: dict[str, str], _: ReadFile) -> None:
    command.nodes = [{"ranks": 1}]
    if command.makes_group is not False:
        where = "" if command.makes_group else ", if the script makes a process group (init_process_group)"
        command.notes.append(
            f"python starts one process: raise ranks for more{where}; each gets RANK, WORLD_SIZE and LOCAL_RANK"
        )


def _devices(text: str, flag: str) -> list[int]:
    return [_number(part.strip(), flag, least=0) for part in text.split(",")]


def _choose_devices(command: LaunchCommand, visible: str | None) -> None:
    """Replace counts and indices of the nodes' GPUs by the devices of ``CUDA_VISIBLE_DEVICES``, one rank each."""
    if visible is None:
        return
    listed = [int(part) if part.isdecimal() else part for part in visible.replace(" ", "").split(",") if part]
    for node in command.nodes:
        count = node.get("ranks", node.get("gpus"))
        if isinstance(count, list):  # indices into the visible devices
            chosen = [listed[index] for index in count if index < len(listed)]
        else:
            chosen = listed[:count] if isinstance(count, int) else listed
        if chosen and "cpu_ranks" not in node:
            node.pop("ranks", None)
            node["gpus"] = chosen


LAUNCHERS = {
    "torchrun": LauncherFlags(
        switches=("standalone", "module", "no_python", "run_path", "use_env"), short={"-m": "module"}, read=_torchrun
    ),
    "accelerate": LauncherFlags(
        switches=(
            *("multi_gpu", "cpu", "use_cpu", "module", "no_python", "use_deepspeed", "use_fsdp", "use_megatron_lm"),
            *("tpu", "use_xpu", "quiet", "debug", "enable_cpu_affinity", "dynamo_use_dynamic", "dynamo_use_fullgraph"),
        ),
        short={"-m": "module", "-q": "quiet"},
        read=_accelerate,
    ),
    "deepspeed": LauncherFlags(
        switches=(
            *("module", "no_python", "no_local_rank", "no_ssh_check", "no_ssh", "force_multi", "elastic_training"),
            *("enable_each_rank_log", "bind_cores_to_rank"),
        ),
        short={"-H": "hostfile", "-i": "include", "-e": "exclude"},
        read=_deepspeed,
    ),
    "python": LauncherFlags(switches=("module",), short={"-m": "module"}, read=_python),
}
"""Flags of each launcher, by its name."""
