"""The example recipes: the copies in an installed package, or the files of the repository."""

from __future__ import annotations

import re
from pathlib import Path

from trainer.contract.errors import RequestError, nearest, quoted

FOLDERS = (Path(__file__).with_name("examples"), Path(__file__).parents[2] / "recipes")
"""The folder in an installed package, and that of the repository."""
SCRIPT = "train_script.py"
"""The script that the example ``script`` trains, in the same folder."""


def folder() -> Path:
    """Return the folder of the examples."""
    return next((place for place in FOLDERS if place.is_dir()), FOLDERS[0])


def example_names() -> list[str]:
    """Return the names of the examples, in alphabetical order."""
    return sorted(path.stem for path in folder().glob("*.toml"))


def example_path(name: str) -> Path:
    """Return the file of an example.

    Raises:
        RequestError: there is no example of this name.
    """
    names = example_names()
    if name not in names:
        raise RequestError(
            f"init: {quoted(name)} is not an example{nearest(name, names) or '; there are ' + ', '.join(names)}"
        )
    return folder() / f"{name}.toml"


def example_text(name: str, *, file: str, script: str) -> str:
    """Return an example as it reads outside the repository.

    Args:
        name: the example.
        file: path that its comments call it by.
        script: path of the copy of ``SCRIPT``.

    Raises:
        RequestError: there is no example of this name.
    """
    text = example_path(name).read_text(encoding="utf-8").replace(f"recipes/{SCRIPT}", script)
    return re.sub(r"\A#:schema .*\n", "", text).replace(f"recipes/{name}.toml", file)
