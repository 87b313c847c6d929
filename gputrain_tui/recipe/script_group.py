"""Whether a script makes a process group, read from its text: ranks without one each train a copy of their own.

Pure: the caller passes the function that reads the files.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import PurePath

ReadFile = Callable[[str], str]

MAKES_GROUP = re.compile(r"\b(init_process_group|init_device_mesh|init_distributed|distributed_init)\b")
"""Calls that make a process group, by torch or by others."""
WITHOUT_GROUP = frozenset(
    (
        "torch", "torchvision", "torchaudio", "torchtext", "numpy", "scipy", "pandas", "sklearn", "matplotlib", "PIL",
        "cv2", "tqdm", "yaml", "requests", "einops", "tiktoken", "tokenizers", "safetensors", "tensorboard", "wandb",
    )
)  # fmt: skip
"""Packages that make no process group by themselves; others, such as accelerate and lightning, may."""


def makes_group(script: str, read_file: ReadFile) -> bool | None:
    """Return whether a script, or a module beside it that it imports, makes a process group; None if unknown.

    Args:
        script: path of the script.
        read_file: returns the text of a file; raises OSError.
    """
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
