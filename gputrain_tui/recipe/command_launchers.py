"""Launchers that a command may name: their flags, and what each means for a recipe; pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import PurePath
from typing import Any

from gputrain_tui.recipe.accelerate_launch import AccelerateLaunch
from gputrain_tui.recipe.script_text import spawned_ranks
from trainer.contract.errors import RequestError, nearest, quoted

MAX_NODES = 10_000
"""Most nodes of a pasted command; more are a typing error."""
RENDEZVOUS_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "CUDA_DEVICE_ORDER")
"""Variables of the rendezvous and the order of devices, which gputrain computes."""

ReadFile = Callable[[str], str]
AskAccelerate = Callable[[Sequence[str]], AccelerateLaunch]


@dataclass(kw_only=True)
class LaunchCommand:
    """A launch command as values of a recipe."""

    script: str
    """Path of the script, or name of the module."""
    args: list[str]
    module: bool = False
    local_rank_flag: str | None = None
    """Flag with which the launcher gives each process its local rank."""
    nodes: list[dict[str, Any]] = field(default_factory=list)
    cluster: dict[str, Any] = field(default_factory=dict)
    """``[cluster]`` without nodes and ``env``."""
    slurm: dict[str, Any] = field(default_factory=dict)
    """``[slurm]``; empty without Slurm."""
    env: dict[str, str] = field(default_factory=dict)
    starts_ranks: bool = False
    """Whether the script starts the ranks of its node."""
    ignores_visible_devices: bool = False
    """Whether the launcher chooses devices without regard to ``CUDA_VISIBLE_DEVICES``."""
    makes_group: bool | None = None
    """Whether the script makes a process group; None if that is unknown."""
    typed: list[str] = field(default_factory=list)
    """The command's words as they were given, those of ``bash -c`` among them."""
    typed_flags: dict[str, str] = field(default_factory=dict, compare=False)
    """The launcher's flags as they were given, by their names."""
    typed_arguments: int = 0
    """How many of them, the last ones, are the script's arguments."""
    notes: list[str] = field(default_factory=list)
    """A line for each part of the command without counterpart in a recipe, or that the user has to complete."""

    @property
    def file(self) -> str:
        """Path of the script, also that of a module."""
        return self.script.replace(".", "/") + ".py" if self.module else self.script

    @property
    def trains_a_task(self) -> bool:
        """Whether it starts our own trainer with a task, not another module of that name."""
        return (
            self.module and self.script == "trainer" and any(word.partition("=")[0] == "--task" for word in self.args)
        )


@dataclass(frozen=True, kw_only=True)
class LauncherFlags:
    """Syntax and meaning of a launcher's flags."""

    switches: tuple[str, ...]
    """Flags without a value, written without leading dashes and with ``_`` for ``-``; all others take one."""
    short: Mapping[str, str]
    read: Callable[[LaunchCommand, dict[str, str], Context], None]
    """Removes the flags that it understands, and sets the values of the command; the others become notes."""
    others: tuple[str, ...] = ()
    """More flags with a value, which may be shortened as those of ``short`` and ``switches`` may."""

    @property
    def flags(self) -> set[str]:
        """Names of all flags that are known."""
        return {*self.switches, *self.short.values(), *self.others}


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a launch command says besides its flags, and what is asked about it."""

    argv: Sequence[str]
    """The launcher's words: flags, script and arguments."""
    read_file: ReadFile
    ask_accelerate: AskAccelerate
    script_text: str
    """Empty if the script cannot be read."""
    has_visible_devices: bool
    """Whether the command sets ``CUDA_VISIBLE_DEVICES`` to some."""


def pop_flag(flags: dict[str, str], *names: str) -> str | None:
    """Remove all spellings of a flag; return the value of the first one present, None if there is none."""
    values = [flags.pop(name) for name in names if name in flags]
    return values[0] if values else None


def parse_number(value: str, flag: str, *, least: int = 1) -> int:
    """Return a flag's whole number; raise if it is none, or below ``least``."""
    if not re.fullmatch(r"[0-9]{1,6}", value) or int(value) < least:
        raise RequestError(not_allowed(value, flag, f"a whole number, at least {least}"))
    return int(value)


def not_allowed(value: str, flag: str, allowed: str) -> str:
    """Return the message about a flag's wrong or missing value."""
    return f"--{flag} {f'is {quoted(value)}, but' if value else 'has no value: it'} must be {allowed}"


def set_nodes(command: LaunchCommand, count: int, first_host: str | None, ranks: dict[str, Any]) -> None:
    """Set the nodes, all with the same ranks; a host that the command does not name is the placeholder ``hostN``."""
    if count > MAX_NODES:
        raise RequestError(f"{count} nodes are too many; at most {MAX_NODES} are allowed")
    if count == 1:
        command.nodes = [ranks]
        return
    named = first_host if first_host and first_host not in LOOPBACK else None
    hosts = [named or "host0", *(f"host{index}" for index in range(1, count))]
    command.nodes = [{"host": host, **ranks} for host in hosts]
    missing = [host for host in hosts if host != named]
    command.notes.append(
        f"the command does not name {len(missing)} of its {count} hosts: put their names in place of "
        f"{', '.join(missing[:4])}{', …' if len(missing) > 4 else ''}; one recipe starts all of them"
    )


ENDPOINT = (
    *("rdzv_endpoint", "master_addr", "master_port", "main_process_ip", "main_process_port", "main_address"),
    "main_port",
)
"""Flags of launchers that name the endpoint of the rendezvous."""
LOOPBACK = ("localhost", "127.0.0.1", "::1", "0.0.0.0", "")


DEFAULT_PORTS = (29500, 29400)
"""Of torch's launchers: of a fixed rendezvous, and of ``c10d``."""


def set_endpoint(command: LaunchCommand, host: str | None, port: str | None, nodes: int) -> None:
    """Set ``init_method`` to the endpoint of several nodes; one, or a launcher's default port, gets a free port."""
    if nodes == 1 or host is None or host in LOOPBACK:
        if given := [command.typed_flags[name] for name in ENDPOINT if name in command.typed_flags]:
            command.notes.append(f"{', '.join(given)}: not needed, as gputrain finds a free port")
        return
    number = parse_number(port, "port") if port else DEFAULT_PORTS[0]
    if number in DEFAULT_PORTS and command.nodes[0].get("host") == host:
        if port:
            command.notes.append(f"port {port}: left out, as the default of the launcher; gputrain finds a free port")
        return
    command.cluster["init_method"] = f"tcp://{f'[{host}]' if ':' in host else host}:{number}"


def _set_restarts(command: LaunchCommand, flags: dict[str, str]) -> None:
    if (restarts := pop_flag(flags, "max_restarts")) and parse_number(restarts, "max_restarts", least=0):
        command.cluster["max_restarts"] = int(restarts)


def leave_out(command: LaunchCommand, flags: dict[str, str], names: Sequence[str]) -> None:
    """Note the flags without use here, as one supervisor starts all nodes and chooses the rendezvous."""
    given = [command.typed_flags.get(name, f"--{name}") for name in names if pop_flag(flags, name) is not None]
    if given:
        command.notes.append(f"{', '.join(given)}: not needed, as one recipe starts all nodes and their rendezvous")


def _torch_launch(command: LaunchCommand, flags: dict[str, str], context: Context) -> None:
    if pop_flag(flags, "use_env") is None:
        command.local_rank_flag = "--local-rank"
    _torchrun(command, flags, context)


def _torchrun(command: LaunchCommand, flags: dict[str, str], _: Context) -> None:
    pop_flag(flags, "standalone")  # as it is here
    leave_out(command, flags, ("rdzv_id", "node_rank", "rdzv_backend", "rdzv_conf", "local_addr"))
    if pop_flag(flags, "virtual_local_rank") is not None:
        raise RequestError("--virtual-local-rank gives each process LOCAL_RANK 0, which gputrain cannot do")
    least, colon, most = (pop_flag(flags, "nnodes") or "1").partition(":")
    nodes = parse_number(most or least, "nnodes")
    if colon and least != most:
        command.notes.append(f"--nnodes {least}:{most} is elastic; the recipe always has {nodes} nodes")
    per_node = pop_flag(flags, "nproc_per_node")
    match "1" if per_node is None else per_node:
        case "gpu" | "auto" as kind:
            ranks: dict[str, Any] = {"gpus": "all"}
            if kind == "auto":
                command.notes.append("--nproc-per-node auto is one rank per GPU: without GPUs set cpu_ranks instead")
        case "cpu":
            ranks = {"cpu_ranks": 1}
            command.notes.append("--nproc-per-node cpu is one rank per core: set cpu_ranks to the number of cores")
        case number if number.isdecimal():
            ranks = {"ranks": parse_number(number, "nproc-per-node")}
        case other:
            allowed = "a whole number, at least 1, or gpu, cpu or auto"
            raise RequestError(not_allowed(other, "nproc-per-node", allowed))
    address, port = pop_flag(flags, "master_addr"), pop_flag(flags, "master_port")
    if endpoint := pop_flag(flags, "rdzv_endpoint"):
        host, number = endpoint.rsplit(":", 1) if re.search(r":\d+$", endpoint) else (endpoint, "")
        address, port = host.strip("[]"), number or port
    set_nodes(command, nodes, address, ranks)
    set_endpoint(command, address, port, nodes)
    _set_restarts(command, flags)


ACCELERATE_ENVIRONMENT = {
    "mixed_precision": "ACCELERATE_MIXED_PRECISION",
    "num_cpu_threads_per_process": "OMP_NUM_THREADS",
}
ACCELERATE_FLAGS = (
    *("num_processes", "num_machines", "gpu_ids", "main_process_ip", "main_process_port", "mixed_precision"),
    *("num_cpu_threads_per_process", "cpu", "use_cpu", "multi_gpu", "machine_rank", "rdzv_backend", "same_network"),
    "max_restarts",
)
"""Flags that are translated here; for any other one, as for a configuration file, accelerate is asked."""


def _accelerate(command: LaunchCommand, flags: dict[str, str], context: Context) -> None:
    if set(flags) - set(ACCELERATE_FLAGS):
        _take_captured(command, flags, context)
        return
    if "num_processes" not in flags:
        command.notes.append("the file saved by `accelerate config` is not read: pass it with --config_file")
    pop_flag(flags, "multi_gpu")
    leave_out(command, flags, ("machine_rank", "rdzv_backend", "same_network"))
    nodes = parse_number(pop_flag(flags, "num_machines") or "1", "num_machines")
    total, ids = pop_flag(flags, "num_processes"), pop_flag(flags, "gpu_ids")
    cpu = pop_flag(flags, "cpu", "use_cpu") is not None
    if total is not None and parse_number(total, "num_processes") % nodes:
        raise RequestError(f"--num_processes is {total}, but must be a multiple of the {nodes} machines")
    if total is not None:
        ranks: dict[str, Any] = {"cpu_ranks" if cpu else "ranks": int(total) // nodes}
    else:
        ranks = {"cpu_ranks": 1} if cpu else {"gpus": "all"}
    address, port = pop_flag(flags, "main_process_ip"), pop_flag(flags, "main_process_port")
    set_nodes(command, nodes, address, ranks)
    if ids and ids != "all":  # accelerate sets CUDA_VISIBLE_DEVICES to them
        parse_devices(ids, "gpu_ids")
        choose_devices(command, ids, given=f"--gpu_ids {ids}")
        command.ignores_visible_devices = True
    set_endpoint(command, address, port, nodes)
    for name, variable in ACCELERATE_ENVIRONMENT.items():
        if (setting := pop_flag(flags, name)) is not None:
            command.env.setdefault(variable, setting)
    _set_restarts(command, flags)


def _take_captured(command: LaunchCommand, flags: dict[str, str], context: Context) -> None:
    """Set the values of what accelerate itself would start."""
    started = context.ask_accelerate(context.argv)
    flags.clear()  # accelerate has read them
    environment = {name: value for name, value in started.env.items() if name not in RENDEZVOUS_VARIABLES}
    devices = environment.pop("CUDA_VISIBLE_DEVICES", None)
    command.env = {**environment, **command.env}
    if started.torchrun is not None:
        flags |= started.torchrun
        _torchrun(command, flags, context)
    elif (program := PurePath(started.command[0]).name).startswith("python"):
        command.nodes = [{"cpu_ranks" if environment.get("ACCELERATE_USE_CPU") == "True" else "ranks": 1}]
    else:
        raise RequestError(f"accelerate would start {program} for this command: give init that command instead")
    command.notes.append(
        "the variables of [cluster.env] are those that accelerate sets for these flags and its configuration file"
    )
    if devices is not None:
        choose_devices(command, devices, given=f"accelerate's CUDA_VISIBLE_DEVICES={devices}")
        command.ignores_visible_devices = True


DEEPSPEED_HOSTFILE = "/job/hostfile"  # which deepspeed reads if the command names none
DEEPSPEED_ENVIRONMENT = ("~/.deepspeed_env", ".deepspeed_env")


def _deepspeed(command: LaunchCommand, flags: dict[str, str], context: Context) -> None:
    for name, instead in (("exclude", "name the GPUs with --include"), ("autotuning", "it starts trainings itself")):
        if pop_flag(flags, name):
            raise RequestError(f"--{name} cannot be translated: {instead}")
    leave_out(command, flags, ("launcher", "force_multi", "node_rank", "no_ssh", "no_ssh_check"))
    if pop_flag(flags, "no_local_rank") is None:
        command.local_rank_flag = "--local_rank"
    include, hostfile = pop_flag(flags, "include"), pop_flag(flags, "hostfile")
    counts = {"num_nodes": pop_flag(flags, "num_nodes"), "num_gpus": pop_flag(flags, "num_gpus", "num_accelerators")}
    count, gpus = (None if text in (None, "-1") else parse_number(text, name) for name, text in counts.items())
    address, port = pop_flag(flags, "master_addr"), pop_flag(flags, "master_port")
    if include and (count or gpus):
        raise RequestError("--include names nodes and GPUs: leave out --num_nodes and --num_gpus, as deepspeed demands")
    slots = _deepspeed_slots(hostfile, context)
    if include:
        command.nodes = _included_nodes(include, slots)
    elif slots:
        command.nodes = [{"host": host, "gpus": gpus or slots[host]} for host in [*slots][:count]]
    else:
        set_nodes(command, count or 1, address, {"gpus": gpus or "all"})
    command.ignores_visible_devices = bool(include or slots or gpus or (count or 1) > 1)
    set_endpoint(command, address, port, len(command.nodes))
    if len(command.nodes) > 1:
        _note_deepspeed_environment(command, context)


def _deepspeed_slots(hostfile: str | None, context: Context) -> dict[str, int | str]:
    """Return the GPUs of each host of a hostfile, in its order; none without a hostfile."""
    try:
        text = context.read_file(hostfile or DEEPSPEED_HOSTFILE)
    except OSError as error:
        if not hostfile:
            return {}
        raise RequestError(f"--hostfile {hostfile} cannot be read: {error.strerror}") from None
    hosts: dict[str, int | str] = {}
    for host, *settings in filter(None, (line.partition("#")[0].split() for line in text.splitlines())):
        slots = next((word.removeprefix("slots=") for word in settings if word.startswith("slots=")), None)
        hosts[host] = parse_number(slots, "hostfile") if slots else "all"
    return hosts


def _included_nodes(include: str, slots: Mapping[str, int | str]) -> list[dict[str, Any]]:
    """Return the nodes of ``--include``, in the order of the hostfile if there is one."""
    chosen: dict[str, Any] = {}
    for part in include.split("@"):
        host, colon, ids = part.partition(":")
        if slots and host not in slots:
            raise RequestError(f"--include names {quoted(host)}, which is not in the hostfile{nearest(host, slots)}")
        chosen[host] = parse_devices(ids, "include") if colon else slots.get(host, "all")
    hosts = [host for host in slots if host in chosen] or chosen
    return [{**({} if host in LOOPBACK else {"host": host}), "gpus": chosen[host]} for host in hosts]


def _note_deepspeed_environment(command: LaunchCommand, context: Context) -> None:
    for file in DEEPSPEED_ENVIRONMENT:
        try:
            names = [line.partition("=")[0] for line in context.read_file(file).splitlines() if "=" in line]
        except OSError:
            continue
        if names:
            command.notes.append(f"{file} sets {', '.join(names)}, which is left out: add what the ranks need to env")


SPAWN_FLAG = "--multiprocessing-distributed"
"""Flag by which scripts in the style of PyTorch's imagenet example start their ranks themselves."""


def ranks_of_script(command: LaunchCommand, context: Context) -> int | str | None:
    """Return how many ranks the script starts itself, as ``spawned_ranks`` does; None if it starts none."""
    if SPAWN_FLAG in command.args:
        return "all"
    needs_flag = SPAWN_FLAG.strip("-").replace("-", "_") in context.script_text
    return None if needs_flag else spawned_ranks(context.script_text)


def _python(command: LaunchCommand, _: dict[str, str], context: Context) -> None:
    command.nodes = [{"ranks": 1}]
    if (count := ranks_of_script(command, context)) is None:
        return
    command.starts_ranks = True
    if count == "all" or (count == "" and context.has_visible_devices):
        command.nodes = [{"gpus": "all"}]
        advice = "gpus is how many it starts on a node; for ranks without GPUs write cpu_ranks in its place"
    else:
        command.nodes = [{"ranks": count or 1}]
        advice = "ranks is how many it starts on a node" + (
            "" if count else ": write the number, which its text does not give"
        )
    why = SPAWN_FLAG if SPAWN_FLAG in command.args else "torch.multiprocessing"
    command.notes.append(f"{command.script} starts its ranks itself ({why}): {advice}")


def parse_devices(text: str, flag: str) -> list[int]:
    """Return a flag's device indices, separated by commas."""
    return [parse_number(part.strip(), flag, least=0) for part in text.split(",")]


def choose_devices(command: LaunchCommand, visible: str | None, *, given: str) -> None:
    """Replace counts and indices of the nodes' GPUs by the devices of ``CUDA_VISIBLE_DEVICES``, one rank each.

    Raises:
        RequestError: there are fewer devices than the ranks of a node need; ``given`` is what names them.
    """
    if visible is None:
        return
    parts = takewhile(lambda part: part != "-1", visible.replace(" ", "").split(","))  # as CUDA reads them
    listed = [int(part) if part.isdecimal() else part for part in parts if part]
    for node in command.nodes:
        if "cpu_ranks" in node:
            continue
        if not listed and "ranks" in node:
            node["cpu_ranks"] = node.pop("ranks")
            continue
        count = node.pop("ranks", node.get("gpus"))
        needed = max(count) + 1 if isinstance(count, list) else count if isinstance(count, int) else 1
        if needed > len(listed):
            raise RequestError(
                f"{given} names {len(listed)} GPU{'s' * (len(listed) != 1)}, but the command needs {needed} on a node: "
                "name one for each rank, or give it fewer ranks"
            )
        if isinstance(count, list):  # indices into the visible devices
            node["gpus"] = [listed[index] for index in count]
        else:
            node["gpus"] = listed[:count] if isinstance(count, int) else listed


TORCHRUN_FLAGS = LauncherFlags(
    switches=("standalone", "module", "no_python", "run_path", "virtual_local_rank"),
    short={"-m": "module", "-r": "redirects", "-t": "tee"},
    others=(
        *("nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "max_restarts"),
        *("monitor_interval", "start_method", "event_log_handler", "role", "log_dir", "local_ranks_filter"),
        *("duplicate_stdout_filters", "duplicate_stderr_filters", "node_rank", "master_addr", "master_port"),
        *("local_addr", "logs_specs", "numa_binding", "signals_to_handle", "shutdown_timeout"),
        "log_line_prefix_template",
    ),
    read=_torchrun,
)
LAUNCHERS = {
    "torchrun": TORCHRUN_FLAGS,
    "torch.distributed.launch": replace(
        TORCHRUN_FLAGS, switches=(*TORCHRUN_FLAGS.switches, "use_env"), read=_torch_launch
    ),
    "accelerate": LauncherFlags(
        switches=(
            *("multi_gpu", "cpu", "use_cpu", "module", "no_python", "use_deepspeed", "use_fsdp", "use_megatron_lm"),
            *("tpu", "use_xpu", "quiet", "debug", "enable_cpu_affinity", "dynamo_use_dynamic", "dynamo_use_fullgraph"),
            *("use_parallelism_config", "dynamo_use_regional_compilation", "same_network", "tpu_use_cluster"),
            *("tpu_use_sudo", "no_tpu_cluster"),
        ),
        short={"-m": "module", "-q": "quiet"},
        read=_accelerate,
    ),
    "deepspeed": LauncherFlags(
        switches=(
            *("module", "no_python", "no_local_rank", "no_ssh_check", "no_ssh", "force_multi", "elastic_training"),
            *("bind_cores_to_rank", "save_pid", "quiet"),
        ),
        short={"-H": "hostfile", "-i": "include", "-e": "exclude", "-q": "quiet"},
        others=(
            *("num_nodes", "num_gpus", "num_accelerators", "master_port", "master_addr", "node_rank", "launcher"),
            *("launcher_args", "enable_each_rank_log", "autotuning", "bind_core_list", "ssh_port", "venv_script"),
            *("log_level", "min_elastic_nodes", "max_elastic_nodes"),
        ),
        read=_deepspeed,
    ),
    "python": LauncherFlags(
        switches=("module", "O", "OO", "B", "E", "I", "s", "S", "v", "q", "P"), short={"-m": "module"}, read=_python
    ),
}
