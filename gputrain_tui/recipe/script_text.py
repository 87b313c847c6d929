"""What the text of a script says of its ranks: whether it makes a process group, and whether it starts them itself."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import PurePath

MAKES_GROUP = re.compile(r"\b(init_process_group|init_device_mesh|init_distributed|distributed_init)\b")
WITHOUT_GROUP = frozenset(
    (
        "torch", "torchvision", "torchaudio", "torchtext", "numpy", "scipy", "pandas", "sklearn", "matplotlib", "PIL",
        "cv2", "tqdm", "yaml", "requests", "einops", "tiktoken", "tokenizers", "safetensors", "tensorboard", "wandb",
    )
)  # fmt: skip
"""Packages that make no process group by themselves; others, such as accelerate and lightning, may."""


def makes_group(script: str, read_file: Callable[[str], str]) -> bool | None:
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


def _is_file(name: str, read_file: Callable[[str], str]) -> bool:
    try:
        read_file(name)
    except (OSError, ValueError):
        return False
    return True


_SPAWN = re.compile(r"(?:.*\.)?(?:mp|multiprocessing)\.(?:spawn|start_processes)")


def spawned_ranks(text: str) -> int | str | None:
    """Return how many ranks a script starts by ``torch.multiprocessing``; None if it starts none.

    It is a number, ``"all"`` if the script counts the GPUs, or empty if its text does not say.
    """
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError):
        return None
    for call in nodes:
        if isinstance(call, ast.Call):
            named = {keyword.arg: keyword.value for keyword in call.keywords}
            function = ast.unparse(call.func)
            if _SPAWN.fullmatch(function) or (function == "spawn" and "nprocs" in named):
                count = named.get("nprocs", call.args[2] if len(call.args) > 2 else ast.Constant(1))
                return _number_of_ranks(count, nodes)
    return None


def _number_of_ranks(count: ast.expr, nodes: list[ast.AST]) -> int | str:
    if isinstance(count, ast.Name):
        assigned = [each for each in nodes if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == count.id]
        if len(assigned) == 1:
            count = assigned[0].value
    if isinstance(count, ast.Constant) and type(count.value) is int and count.value > 0:
        return count.value
    return "all" if "device_count" in ast.unparse(count) else ""
