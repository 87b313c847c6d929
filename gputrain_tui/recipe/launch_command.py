"""Translates a command line of torchrun, accelerate, DeepSpeed or python into the values of a recipe.

Pure: the caller passes the function that reads the files of a command, such as a hostfile or the script. The script's
text says whether it makes a process group: ranks without one each train a copy of their own.
"""

from __future__ import annotations

import ast
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath

from gputrain_tui.recipe.accelerate_launch import AccelerateLaunch
from gputrain_tui.recipe.command_launchers import (
    LAUNCHERS,
    RENDEZVOUS_VARIABLES,
    Context,
    LaunchCommand,
    LauncherFlags,
    ReadFile,
    choose_devices,
    pop_flag,
)
from trainer.contract.errors import RequestError, nearest, quoted


def split_command(text: str) -> list[str]:
    """Split pasted text into words, without prompts, comments and continued line ends."""
    lines = [re.sub(r"^[$>%] +", "", line.strip()) for line in text.replace("\\\n", " ").splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    if len(lines) != 1:
        how_many = f"{len(lines)} commands are" if lines else "no command is"
        raise RequestError(f"{how_many} given; paste one, such as: torchrun --nproc-per-node 4 train.py")
    try:
        return shlex.split(lines[0], comments=True)
    except ValueError as error:
        raise RequestError(f"the command cannot be read: {str(error).lower()}") from None


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
    """Translate a command of torchrun, accelerate, DeepSpeed or python.

    Args:
        argv: the command; it may begin with settings of environment variables.
        read_file: returns the text of a file that the command names; raises OSError.
        ask_accelerate: returns what accelerate would start; gets its interpreter, None for this one, and its words.
    """
    rest, env = list(argv), dict[str, str]()
    if rest[:1] == ["env"]:
        rest.pop(0)
    while rest and (setting := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", rest[0], re.DOTALL)):
        env[setting[1]] = setting[2]
        rest.pop(0)
    if not rest:
        raise RequestError("no command is given; start it with torchrun, accelerate launch, deepspeed or python")
    name, python, rest = _program(rest)
    launcher = LAUNCHERS[name]
    given = list(rest)
    flags, rest = _split_flags(launcher, rest)
    if name == "torchrun":
        for variable in [each for each in env if each.startswith("PET_")]:  # torchrun's defaults
            flags.setdefault(variable.removeprefix("PET_").lower(), env.pop(variable))
    is_module = pop_flag(flags, "module") is not None
    if pop_flag(flags, "no_python") is not None or pop_flag(flags, "run_path") is not None:
        raise RequestError(f"this {name} command starts another program than a Python script, which gputrain cannot do")
    if not rest:
        raise RequestError(f"the {name} command names no script")
    # argparse, by which all launchers but python itself read their words, takes a -- after the script as its own.
    args = rest[2:] if rest[1:2] == ["--"] and name != "python" else rest[1:]
    command = LaunchCommand(script=rest[0], args=args, module=is_module)
    if python is not None:
        command.cluster["python"] = python
    visible = env.pop("CUDA_VISIBLE_DEVICES", None)
    for variable in [each for each in env if each in RENDEZVOUS_VARIABLES]:
        command.notes.append(f"{variable}={env.pop(variable)} is left out: gputrain computes it")
    for variable in [each for each in env if is_secret_variable(each)]:
        del env[variable]
        command.notes.append(
            f"{variable} is left out: secrets do not belong in a recipe; the ranks inherit it from the shell"
        )
    command.env = env
    context = Context(argv=given, read_file=read_file, ask_accelerate=lambda argv: ask_accelerate(python, argv))
    file = command.script.replace(".", "/") + ".py" if command.module else command.script
    command.makes_group = makes_group(file, read_file)
    launcher.read(command, flags, context)
    if command.makes_group is False:
        command.notes.append(without_group(command.script))
    if visible is not None and command.ignores_visible_devices:
        command.notes.append(f"CUDA_VISIBLE_DEVICES={visible} is left out: {name} ignores it beside these flags")
    else:
        choose_devices(command, visible)
    for flag, value in flags.items():
        command.notes.append(f"--{flag}{f' {value}' if value else ''} has no counterpart and is left out")
    return command


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
    if name in LAUNCHERS:
        return name, str(path.with_name("python")) if python else None, _after_launch(name, rest)
    known = "torchrun, accelerate launch, deepspeed or python"
    raise RequestError(f"{quoted(argv[0])} is not a known launcher: use {known}{nearest(name, LAUNCHERS)}")


MODULES = {
    "torch.distributed.run": "torchrun",
    "accelerate.commands.launch": "accelerate",
    "accelerate.commands.accelerate_cli": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
}


def _after_launch(name: str, argv: list[str]) -> list[str]:
    if name == "accelerate" and argv[:1] == ["launch"]:
        return argv[1:]
    if name == "accelerate" and argv and not argv[0].startswith("-") and not argv[0].endswith(".py"):
        raise RequestError(f"accelerate {argv[0]} does not start training; use accelerate launch")
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
