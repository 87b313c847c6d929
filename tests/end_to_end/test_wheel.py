"""The wheel alone, in a folder without the repository."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from documents import ROOT
from waiting import LIMIT_S

from gputrain_tui import VERSION

PIP = ["-m", "pip", "--disable-pip-version-check", "-q"]


def shell(*words: str | Path, folder: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=4 * LIMIT_S)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    shell(sys.executable, *PIP, "wheel", "--no-deps", "-w", folder, ROOT, folder=folder)
    (found,) = folder.iterdir()
    return found


def test_the_wheel_has_version_licence_recipes_and_addresses_for_an_index_page(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = f"gputrain-{VERSION}.dist-info"
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
    assert metadata["License-Expression"] == "Apache-2.0"
    assert f"{info}/licenses/LICENSE" in names
    recipes = {path.name for path in (ROOT / "recipes").iterdir() if path.is_file()}
    assert {f"gputrain_tui/recipe/examples/{name}" for name in recipes} <= names
    assert not [name for name in names if name.startswith(("tests/", "recipes/"))]
    urls = dict(url.split(", ") for url in metadata.get_all("Project-URL") or [])
    links = re.findall(r"\]\(([^)]*)\)", metadata.get_payload())
    pictures = [link for link in links if link.endswith(".svg")]
    assert pictures
    for link in links:
        assert link.startswith("https://"), link
        owner_and_name, _, path = link.removeprefix("https://").partition(f"/v{VERSION}/")
        assert owner_and_name.removesuffix("/blob").endswith(urls["Repository"].removeprefix("https://github.com"))
        assert (ROOT / path).exists()


def test_an_installed_wheel_trains_the_demo_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    """Its dependencies are those of the tests' environment: only the paths of that are lent, not its gputrain."""
    venv, folder = tmp_path / "venv", tmp_path / "empty"
    folder.mkdir()
    shell(sys.executable, "-m", "venv", "--without-pip", venv, folder=folder)  # that of the tests is lent, too
    lent, own = sysconfig.get_path("purelib"), sysconfig.get_path("purelib", vars={"base": str(venv)})
    Path(own, "lent.pth").write_text(f"{lent}\n")
    alone = ("--no-deps", "--no-index", "--ignore-installed", "--no-compile")
    shell(venv / "bin/python", *PIP, "install", *alone, wheel, folder=folder)
    shell(venv / "bin/python", *PIP, "check", folder=folder)
    env = {"PATH": f"{venv}/bin:{os.defpath}", "HOME": str(tmp_path), "GPUTRAIN_HOME": str(tmp_path / "home")}
    gputrain = venv / "bin/gputrain"
    assert shell(gputrain, "init", "--example", "demo", folder=folder, env=env) == "demo.toml\n"
    told = shell(gputrain, "run", "demo.toml", "--set", "train.max_updates=20", folder=folder, env=env)
    assert "parameters equal on all ranks" in told
    where = shell(venv / "bin/python", "-P", "-c", "import trainer; print(trainer.__file__)", folder=folder, env=env)
    assert Path(where.strip()).is_relative_to(venv)
    assert shell(gputrain, "help", "changelog", folder=folder, env=env).startswith("Changelog")
