"""Translates a command line of torchrun, accelerate, srun, python and other launchers into the values of a recipe.

Pure: the caller passes the function that reads the files of a command, such as a hostfile or the script.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePath

from gputrain_tui.recipe.accelerate_launch import AccelerateLaunch
from gputrain_tui.recipe.command_launchers import (
    RENDEZVOUS_VARIABLES,
    Context,
    LaunchCommand,
    LauncherFlags,
    ReadFile,
    choose_devices,
    pop_flag,
    ranks_of_script,
)
from gputrain_tui.recipe.command_prefixes import read_prefixes
from gputrain_tui.recipe.framework_launchers import LAUNCHERS
from gputrain_tui.recipe.script_text import makes_group, without_group
from gputrain_tui.recipe.shell_text import EXPANSION, SECRET, require_no_expansion, shown
from gputrain_tui.recipe.srun import SlurmStep, apply_step
from trainer.contract.errors import RequestError, nearest, quoted


def read_launch_command(
    argv: Sequence[str], *, read_file: ReadFile, ask_accelerate: Callable[[str | None, Sequence[str]], AccelerateLaunch]
) -> LaunchCommand:
    """Translate a command of one of ``LAUNCHERS``, or of ``srun`` before one.

    Args:
        argv: the command; it may begin with settings of environment variables and with ``PREFIXES``.
        read_file: returns the text of a file that the command names; raises OSError.
        ask_accelerate: returns what accelerate would start; gets its interpreter, None for this one, and its words.
    """
    prefixed = read_prefixes(argv)
    env, step = prefixed.env, prefixed.slurm
    if not prefixed.argv:
        raise RequestError(f"no command is given; start it with {KNOWN}")
    name, python, given = _program(prefixed.argv)
    launcher = LAUNCHERS[name]
    flags, rest, typed_flags = _split_flags(launcher, given)
    left_out = _without_variables(flags, typed_flags, given, step)
    require_no_expansion([*flags.values(), *rest])
    if name == "torchrun":
        for variable in [each for each in env if each.startswith("PET_")]:  # torchrun's defaults
            flags.setdefault(variable.removeprefix("PET_").lower(), env.pop(variable))
    is_module = pop_flag(flags, "module") is not None
    if pop_flag(flags, "no_python") is not None or pop_flag(flags, "run_path") is not None:
        raise RequestError(f"this {name} command starts another program than a Python script, which gputrain cannot do")
    if not rest or (name == "python" and rest[0] == "-"):
        raise RequestError(f"the {name} command names no script" + _without_file(name, flags, typed_flags))
    # argparse, by which all launchers but python itself read their words, takes a -- after the script as its own.
    args = rest[2:] if rest[1:2] == ["--"] and name != "python" else rest[1:]
    command = LaunchCommand(script=rest[0], args=args, module=is_module, notes=[*prefixed.notes, *left_out])
    command.typed, command.typed_flags, command.typed_arguments = prefixed.typed, typed_flags, len(args)
    if python is not None and PurePath(python).is_absolute():
        command.cluster["python"] = python
    elif python is not None:
        command.notes.append(
            f"{python} is left out: ranks have the Python of gputrain; for another write its path into cluster.python"
        )
    command.env, visible = env, env.pop("CUDA_VISIBLE_DEVICES", None)
    _leave_out_variables(command)
    require_no_expansion([*env.values(), visible or ""])
    interpreter = command.cluster.get("python")
    context = Context(
        argv=given,
        read_file=read_file,
        ask_accelerate=lambda argv: ask_accelerate(interpreter, argv),
        script_text=_text(command.file, read_file),
        has_visible_devices=bool(visible),
    )
    command.makes_group = command.trains_a_task or makes_group(command.file, read_file)
    launcher.read(command, flags, context)
    if command.makes_group is False:
        command.notes.append(without_group(command.script))
    if visible is not None and (command.ignores_visible_devices or step is not None):
        reason = "Slurm chooses the GPUs" if step is not None else f"{name} ignores it beside these flags"
        command.notes.append(f"CUDA_VISIBLE_DEVICES={visible} is left out: {reason}")
    else:
        choose_devices(command, visible, given=f"CUDA_VISIBLE_DEVICES={visible}")
    if step is not None:
        apply_step(command, step, launcher=name)
    elif name == "python" and not command.starts_ranks and command.makes_group is not False:
        command.notes.append(_one_rank(command))
    if name != "python" and ranks_of_script(command, context) is not None:
        command.notes.append(
            f"{command.script} starts ranks itself: if it does so under {name} too, each rank starts others; then give "
            f"init python {'-m ' if command.module else ''}{command.script}"
        )
    command.notes += _flags_left_out(command, name, flags)
    return command


def _flags_left_out(command: LaunchCommand, name: str, flags: Mapping[str, str]) -> Iterator[str]:
    """Yield a note for each flag that the launcher's reader has not taken."""
    launcher = LAUNCHERS[name]
    known = launcher.flags if launcher.others else flags  # of other launchers the list is not complete
    for flag, value in flags.items():
        typed = command.typed_flags.get(flag, f"--{flag}")
        why = "has no counterpart and is left out"
        if flag not in known:
            spelled = [f"--{each if name == 'deepspeed' else each.replace('_', '-')}" for each in launcher.flags]
            why = f"is left out: it is no option of {name} that gputrain knows{nearest(typed, spelled)}"
        yield f"{typed}{f' {value}' if value else ''} {why}"


def _one_rank(command: LaunchCommand) -> str:
    """Return a note for a command that starts one process of a script that may make a process group."""
    more = "name more GPUs in gpus" if "gpus" in command.nodes[0] else f"raise {next(iter(command.nodes[0]))}"
    where = "" if command.makes_group else ", if the script makes a process group (init_process_group)"
    return f"python starts one process: {more} for more{where}; each gets RANK, WORLD_SIZE and LOCAL_RANK"


def _leave_out_variables(command: LaunchCommand) -> None:
    """Remove and note the variables that gputrain computes, and secrets."""
    for variable in [each for each in command.env if each in RENDEZVOUS_VARIABLES]:
        command.notes.append(f"{variable}={shown(command.env.pop(variable))} is left out: gputrain computes it")
    for variable in [each for each in command.env if SECRET.search(each)]:
        del command.env[variable]
        command.notes.append(
            f"{variable} is left out: secrets do not belong in a recipe; export it before `gputrain run`, whose ranks "
            "inherit it"
        )
    for word, following in zip(command.args, [*command.args[1:], ""], strict=False):
        flag, equals, value = word.partition("=")
        value = value if equals else following if flag.startswith("-") else ""
        if SECRET.search(flag) and not re.fullmatch(r"-.*|[\d.]*", value):
            command.notes.append(
                f"the value of {flag} stands in the recipe: if it is a secret, let the script read it from a variable, "
                "and export that before `gputrain run`"
            )


NEUTRAL = {
    **dict.fromkeys(("rdzv_endpoint", "master_addr", "main_process_ip", "main_address"), "localhost"),
    **dict.fromkeys(("master_port", "main_process_port", "main_port"), "29500"),
    **dict.fromkeys(("rdzv_id", "rdzv_conf", "node_rank", "machine_rank", "base_rank", "local_addr"), "0"),
}
"""Flags of the rendezvous, whose values gputrain computes → a value that says nothing."""
NODE_COUNTS = ("nnodes", "num_machines", "num_nodes")


def _text(file: str, read_file: ReadFile) -> str:
    try:
        return read_file(file)
    except (OSError, ValueError):
        return ""


def _without_variables(
    flags: dict[str, str], typed: dict[str, str], argv: list[str], step: SlurmStep | None
) -> list[str]:
    """Remove expansions in the rendezvous' flags, replace a step's number of nodes; return a note about them."""
    replaced = []
    for name, value in list(flags.items()):
        neutral = NEUTRAL.get(name) or (str(step.nodes or 1) if step is not None and name in NODE_COUNTS else None)
        if EXPANSION not in value or neutral is None:
            continue
        if name in NODE_COUNTS:
            flags[name] = neutral
        else:
            del flags[name]
        argv[:] = [word.replace(value, neutral) for word in argv]
        replaced.append(f"{typed.pop(name)} {shown(value)}")
    return [f"{', '.join(replaced)}: not needed, as gputrain computes it"] if replaced else []


def _without_file(name: str, flags: dict[str, str], typed: dict[str, str]) -> str:
    for flag, value in flags.items():
        if value.endswith(".py") and flag in typed:
            return f": {typed[flag]} has no value of its own, so {quoted(value)} is taken for it"
    if name == "python" and "c" in flags:
        return ": python -c has its program on the line; write that into a file"
    return "" if name != "python" else ": write the program into a file"


KNOWN = "torchrun, accelerate launch, deepspeed, fabric run, srun or python"


def _program(argv: list[str]) -> tuple[str, str | None, list[str]]:
    """Return the launcher, the interpreter if the command names a certain one, and the words after both."""
    path = PurePath(argv[0])
    name, rest = path.name, argv[1:]
    is_version = "." in name and name != f"python{sys.version_info.major}.{sys.version_info.minor}"
    python = str(path) if path.is_absolute() or (is_version and name.startswith("python")) else None
    if re.fullmatch(r"python[\d.]*", name):
        while rest and rest[0] == "-u":  # as ranks do
            rest.pop(0)
        module = rest[1] if rest[:1] == ["-m"] and len(rest) > 1 else ""
        if module == "torch.distributed.launch":
            return "torch.distributed.launch", python, rest[2:]
        if module in MODULES:
            return MODULES[module], python, _after_launch(MODULES[module], rest[2:])
        return "python", python, rest
    launcher = "fabric" if name == "lightning" else name.removesuffix("-launch")
    if launcher in LAUNCHERS and launcher != "torch.distributed.launch":
        return launcher, str(path.with_name("python")) if python else None, _after_launch(launcher, rest)
    if name.endswith(("sh", "bash", ".slurm", ".sbatch")):
        advice = "a shell script may do anything: give init the line in it that starts torchrun or python"
    elif path.suffix == ".toml" and rest:
        advice = f"the recipe is written there by --output {quoted(str(path))}, before the command"
    else:
        advice = (
            f"use {KNOWN}{nearest(name, LAUNCHERS)}; where MPI, a container, a profiler or a remote shell starts the "
            "command, give init only the command, such as torchrun --nproc-per-node N SCRIPT.py"
        )
    raise RequestError(f"{quoted(shown(argv[0]))} is not a known launcher: {advice}")


MODULES = {
    "torch.distributed.run": "torchrun",
    "accelerate.commands.launch": "accelerate",
    "accelerate.commands.accelerate_cli": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
    "lightning.fabric.cli": "fabric",
    "lightning_fabric.cli": "fabric",
}
SUBCOMMANDS = {"accelerate": "launch", "fabric": "run"}
"""Launchers that are one command of several of their program."""


def _after_launch(name: str, argv: list[str]) -> list[str]:
    require_no_expansion(argv[:1] if name in SUBCOMMANDS else [])
    wanted = SUBCOMMANDS.get(name)
    if wanted is not None and argv[:1] == [wanted]:
        argv = argv[1:]
        if name == "fabric" and argv[:1] == ["app"]:
            raise RequestError("lightning run app starts no training; use fabric run")
        return argv[1:] if name == "fabric" and argv[:1] == ["model"] else argv  # as earlier versions spell it
    if wanted is not None and argv and not argv[0].startswith("-") and not argv[0].endswith(".py"):
        raise RequestError(f"{name} {argv[0]} does not start training; use {name} {wanted}")
    return argv


def _split_flags(launcher: LauncherFlags, argv: Sequence[str]) -> tuple[dict[str, str], list[str], dict[str, str]]:
    """Return the launcher's flags with their values, the script with its arguments, and the flags as typed."""
    flags: dict[str, str] = {}
    typed: dict[str, str] = {}
    rest = list(argv)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word, equals, value = rest.pop(0).partition("=")
        if word == "--":
            break
        flag = _whole_flag(launcher, word)
        if (short := launcher.short.get(word[:2])) not in (None, *launcher.switches) and word[2:]:  # -Hhosts
            flag = short or ""
            flags[flag], word = word[2:] + equals + value, word[:2]
        elif equals:
            flags[flag] = value
        else:  # an unknown switch of a newer version is followed by the script or another flag, not by a value
            no_value = r"-\D.*" if flag in launcher.others else r"-\D.*|.*\.py"
            takes_value = flag not in launcher.switches and rest and not re.fullmatch(no_value, rest[0])
            flags[flag] = rest.pop(0) if takes_value else ""
        typed[flag] = word
    return flags, rest, typed


def _whole_flag(launcher: LauncherFlags, word: str) -> str:
    """Return the name of a flag, which may be shortened to a beginning that no other flag has."""
    if word in launcher.short:
        return launcher.short[word]
    name = word.lstrip("-").replace("-", "_")
    longer = [each for each in launcher.flags if each.startswith(name)] if word.startswith("--") else []
    return longer[0] if name not in launcher.flags and len(longer) == 1 else name
