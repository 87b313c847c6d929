"""Translates a command line of torchrun, accelerate, srun, python and other launchers into the values of a recipe.

Pure: the caller passes the function that reads the files of a command, such as a hostfile or the script. The script's
text says whether it makes a process group: ranks without one each train a copy of their own.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator, Sequence
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
)
from gputrain_tui.recipe.command_prefixes import read_prefixes
from gputrain_tui.recipe.framework_launchers import LAUNCHERS
from gputrain_tui.recipe.shell_text import EXPANSION, require_no_expansion, shown
from gputrain_tui.recipe.srun import SlurmStep, apply_step
from trainer.contract.errors import RequestError, nearest, quoted

SECRET_WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "WEBHOOK", "AUTHORIZATION")
"""Words in the name of a variable whose value a recipe should not keep."""


def is_secret_variable(name: str) -> bool:
    """Whether a recipe leaves out a variable of a command by its name: the ranks inherit it from the shell."""
    return any(word in name.upper() for word in SECRET_WORDS)


def read_launch_command(
    argv: Sequence[str],
    *,
    read_file: ReadFile,
    ask_accelerate: Callable[[str | None, Sequence[str]], AccelerateLaunch],
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
    flags, rest = _split_flags(launcher, given)
    left_out = _without_variables(flags, given, step)
    require_no_expansion([*flags.values(), *rest])
    if name == "torchrun":
        for variable in [each for each in env if each.startswith("PET_")]:  # torchrun's defaults
            flags.setdefault(variable.removeprefix("PET_").lower(), env.pop(variable))
    is_module = pop_flag(flags, "module") is not None
    if pop_flag(flags, "no_python") is not None or pop_flag(flags, "run_path") is not None:
        raise RequestError(f"this {name} command starts another program than a Python script, which gputrain cannot do")
    if not rest or (name == "python" and rest[0] == "-"):
        raise RequestError(f"the {name} command names no script" + _without_file(name, flags))
    # argparse, by which all launchers but python itself read their words, takes a -- after the script as its own.
    args = rest[2:] if rest[1:2] == ["--"] and name != "python" else rest[1:]
    command = LaunchCommand(script=rest[0], args=args, module=is_module, notes=[*prefixed.notes, *left_out])
    command.typed, command.typed_arguments = prefixed.typed, len(args)
    if python is not None:
        command.cluster["python"] = python
    command.env, visible = env, env.pop("CUDA_VISIBLE_DEVICES", None)
    _leave_out_variables(command)
    require_no_expansion([*env.values(), visible or ""])
    context = Context(argv=given, read_file=read_file, ask_accelerate=lambda argv: ask_accelerate(python, argv))
    file = command.script.replace(".", "/") + ".py" if command.module else command.script
    command.makes_group = makes_group(file, read_file)
    launcher.read(command, flags, context)
    if command.makes_group is False:
        command.notes.append(without_group(command.script))
    if visible is not None and (command.ignores_visible_devices or step is not None):
        reason = "Slurm chooses the GPUs" if step is not None else f"{name} ignores it beside these flags"
        command.notes.append(f"CUDA_VISIBLE_DEVICES={visible} is left out: {reason}")
    else:
        choose_devices(command, visible)
    if step is not None:
        apply_step(command, step, launcher=name)
    for flag, value in flags.items():
        command.notes.append(f"--{flag}{f' {value}' if value else ''} has no counterpart and is left out")
    return command


def _leave_out_variables(command: LaunchCommand) -> None:
    """Remove and note the variables that gputrain computes, and secrets."""
    for variable in [each for each in command.env if each in RENDEZVOUS_VARIABLES]:
        command.notes.append(f"{variable}={shown(command.env.pop(variable))} is left out: gputrain computes it")
    for variable in [each for each in command.env if is_secret_variable(each)]:
        del command.env[variable]
        command.notes.append(
            f"{variable} is left out: secrets do not belong in a recipe; the ranks inherit it from the shell"
        )


NEUTRAL = {
    **dict.fromkeys(("rdzv_endpoint", "master_addr", "main_process_ip", "main_address"), "localhost"),
    **dict.fromkeys(("master_port", "main_process_port", "main_port"), "29500"),
    **dict.fromkeys(("rdzv_id", "rdzv_conf", "node_rank", "machine_rank", "base_rank", "local_addr"), "0"),
}
"""Flags of the rendezvous, whose values gputrain computes → a value that says nothing."""
NODE_COUNTS = ("nnodes", "num_machines", "num_nodes")


def _without_variables(flags: dict[str, str], argv: list[str], step: SlurmStep | None) -> list[str]:
    """Replace expansions in the rendezvous' flags, and in a step's number of nodes; return a note about them."""
    replaced = []
    for name, value in flags.items():
        neutral = NEUTRAL.get(name) or (str(step.nodes or 1) if step is not None and name in NODE_COUNTS else None)
        if EXPANSION not in value or neutral is None:
            continue
        flags[name] = neutral
        argv[:] = [word.replace(value, neutral) for word in argv]
        replaced.append(f"--{name.replace('_', '-')} {shown(value)}")
    return [f"{', '.join(replaced)}: not needed, as gputrain computes it"] if replaced else []


def _without_file(name: str, flags: dict[str, str]) -> str:
    if name == "python" and "c" in flags:
        return ": python -c has its program on the line; write that into a file"
    return "" if name != "python" else ": write the program into a file"


KNOWN = "torchrun, accelerate launch, deepspeed, fabric run, srun or python"


def _program(argv: list[str]) -> tuple[str, str | None, list[str]]:
    """Return the launcher, the interpreter's path if the command gives an absolute one, and the words after both."""
    path = PurePath(argv[0])
    name, rest = path.name, argv[1:]
    python = str(path) if path.is_absolute() else None
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
    else:
        advice = (
            f"use {KNOWN}{nearest(name, LAUNCHERS)}; of MPI, a container, a profiler or a remote shell give init the "
            "command behind it, as torchrun --nproc-per-node N SCRIPT.py"
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
    wanted = SUBCOMMANDS.get(name)
    if wanted is not None and argv[:1] == [wanted]:
        argv = argv[1:]
        if name == "fabric" and argv[:1] == ["app"]:
            raise RequestError("lightning run app starts no training; use fabric run")
        return argv[1:] if name == "fabric" and argv[:1] == ["model"] else argv  # as earlier versions spell it
    if wanted is not None and argv and not argv[0].startswith("-") and not argv[0].endswith(".py"):
        raise RequestError(f"{name} {argv[0]} does not start training; use {name} {wanted}")
    return argv


def _split_flags(launcher: LauncherFlags, argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the launcher's flags with their values, and the script with its arguments."""
    flags: dict[str, str] = {}
    rest = list(argv)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word, equals, value = rest.pop(0).partition("=")
        if word == "--":
            break
        flag = _whole_flag(launcher, word)
        if (short := launcher.short.get(word[:2])) not in (None, *launcher.switches) and word[2:]:  # -Hhosts
            flags[short or ""] = word[2:] + equals + value
        elif equals:
            flags[flag] = value
        else:  # an unknown switch of a newer version is followed by the script or another flag, not by a value
            takes_value = flag not in launcher.switches and rest and not re.fullmatch(r"-\D.*|.*\.py", rest[0])
            flags[flag] = rest.pop(0) if takes_value else ""
    return flags, rest


def _whole_flag(launcher: LauncherFlags, word: str) -> str:
    """Return the name of a flag, which may be shortened to a beginning that no other flag has."""
    if word in launcher.short:
        return launcher.short[word]
    name = word.lstrip("-").replace("-", "_")
    known = {*launcher.switches, *launcher.short.values(), *launcher.others}
    longer = [each for each in known if each.startswith(name)] if word.startswith("--") else []
    return longer[0] if name not in known and len(longer) == 1 else name


MAKES_GROUP = re.compile(r"\b(init_process_group|init_device_mesh|init_distributed|distributed_init)\b")
WITHOUT_GROUP = frozenset(
    (
        "torch", "torchvision", "torchaudio", "torchtext", "numpy", "scipy", "pandas", "sklearn", "matplotlib", "PIL",
        "cv2", "tqdm", "yaml", "requests", "einops", "tiktoken", "tokenizers", "safetensors", "tensorboard", "wandb",
    )
)  # fmt: skip
"""Packages that make no process group by themselves; others, such as accelerate and lightning, may."""


def makes_group(script: str, read_file: ReadFile) -> bool | None:
    """Return whether a script, or a module beside it that it imports, makes a process group; None if unknown."""
    folder, pending, seen, unknown = PurePath(script).parent, [script], {script}, False
    max_files = 50  # most files of a script that are read
    while pending:
        name = pending.pop()
        try:
            text = read_file(name)
            modules = list(_imports(ast.parse(text)))
        except (OSError, SyntaxError, ValueError, RecursionError):
            if name == script:
                return None
            continue  # no module beside the script
        if MAKES_GROUP.search(text):
            return True
        for module in modules:
            top = module.partition(".")[0]
            if top in WITHOUT_GROUP or top in sys.stdlib_module_names:
                continue
            beside = [str(folder / f"{module.replace('.', '/')}{end}") for end in (".py", "/__init__.py")]
            if not any(_is_file(each, read_file) for each in beside):
                unknown = True
            pending += [each for each in beside if each not in seen]
            seen.update(beside)
        if len(seen) > max_files:
            return None
    return None if unknown else False


def without_group(script: str) -> str:
    """Return a note for a script that makes no process group."""
    return (
        f"{script} makes no process group, so it is for one rank: of more, each would train a copy of its own; for "
        "several call torch.distributed.init_process_group() and wrap the model in DistributedDataParallel"
    )


def _imports(tree: ast.Module) -> Iterator[str]:
    """Yield the modules that a file imports; relative ones as if they were beside the script."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ([node.module] if node.module else [alias.name for alias in node.names])


def _is_file(name: str, read_file: ReadFile) -> bool:
    try:
        read_file(name)
    except (OSError, ValueError):
        return False
    return True
