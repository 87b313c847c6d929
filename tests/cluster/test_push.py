"""``gputrain push`` to hosts that have a Python, an sshd, and a disk of their own with nothing on it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import blocks
from host_recipe import TESTS, recipe
from ssh_lab import SshLab, require_ssh, ssh_lab
from ssh_server import ROOT


@pytest.fixture(scope="module")
def lab() -> Iterator[SshLab]:
    require_ssh()
    if missing := [name for name in ("rsync", "git") if shutil.which(name) is None]:
        pytest.skip(f"needs {' and '.join(missing)}")
    folder = Path(tempfile.mkdtemp(prefix="gt-", dir="/tmp"))
    with ssh_lab(
        folder, {"h0": "eth0", "gpu1": "ens3", "gpu2": "eth0", "gpu3": "eth0"}, start_up={"gpu3": "echo a line"}
    ) as running:
        fill(running)
        yield running
    shutil.rmtree(folder)


def fill(lab: SshLab) -> None:
    """Put code, data and an environment on the first host's disk alone."""
    disk = lab.disk_of(lab.hosts[0])
    code = disk / "code"
    for name in ("support/tiny_task.py", "cluster/host_task.py"):
        (code / "data").mkdir(parents=True, exist_ok=True)
        shutil.copy(TESTS / name, code)
    (code / "data" / "large").touch()
    (code / "data_elsewhere").touch()
    (code / "notes.tmp").touch()
    (code / ".gitignore").write_text("*.tmp\n")
    (code / "recipe.toml").write_text(recipe(["gpu1", "gpu2"], [1, 1]))
    (code / "two.toml").write_text(blocks("ssh", "toml")[0])
    (code / "#odd").touch()
    (code / "library").mkdir()  # as a submodule, or another project that was cloned here
    (code / "library" / "part.py").touch()
    for repository in (code, code / "library"):
        subprocess.run(["git", "init", "-q", repository], check=True)
    lab.hosts[0].run(sys.executable, "-m", "venv", "--without-pip", lab.disk / "env")
    packages = disk / "env" / Path(sysconfig.get_paths()["purelib"]).relative_to(sys.prefix)
    # Everybody sees the packages of the tests; what is under test is the environment that leads to them.
    folders = [name for name in sys.path if name.endswith("-packages")]
    (packages / "tests.pth").write_text("\n".join([str(ROOT), *folders]) + "\n")


def run_gputrain(lab: SshLab, *words: str) -> subprocess.CompletedProcess[str]:
    python = lab.disk / "env" / "bin" / "python"
    environ = {name: value for name, value in lab.environ.items() if name != "PYTHONPATH"}
    return lab.hosts[0].run(python, "-m", "gputrain_tui", *words, cwd=lab.disk / "code", env=environ, check=False)


def test_the_three_commands_of_the_page_about_ssh_lead_from_empty_disks_to_training(lab: SshLab) -> None:
    (page,) = blocks("ssh", "shell")
    commands = [line.split() for line in page.splitlines()]
    assert [words[:2] for words in commands] == [["gputrain", "push"], ["gputrain", "check"], ["gputrain", "run"]]
    done = run_gputrain(lab, *commands[0][1:])
    assert done.returncode == 0, done.stderr
    code = lab.disk / "code"
    for host in ("gpu1", "gpu2"):
        assert (
            f"{host}: code: 8 files of {code} to {code}; data and files that git ignores are not copied\n"
            in done.stdout
        )
        assert f"{host}: environment: {lab.disk}/env by rsync to the same path\n" in done.stdout
    for host in lab.hosts[1:3]:
        there = lab.disk_of(host) / "code"
        assert {str(path.relative_to(there)) for path in there.rglob("*") if path.is_file()} == {
            "tiny_task.py", "host_task.py", "data_elsewhere", "recipe.toml", "two.toml", ".gitignore", "#odd",
            "library/part.py",
        }  # fmt: skip
    done = run_gputrain(lab, *commands[1][1:])
    assert done.returncode == 0, done.stdout
    done = run_gputrain(lab, *commands[2][1:])
    assert done.returncode == 0, done.stderr
    assert "finished in " in done.stderr


def test_a_second_push_brings_what_has_changed_and_keeps_what_is_only_there(lab: SshLab) -> None:
    assert run_gputrain(lab, "push", "recipe.toml").returncode == 0
    (h0, h1) = (lab.disk_of(host) / "code" for host in lab.hosts[:2])
    (h1 / "own").write_text("of this host")
    (h0 / "data_elsewhere").write_text("changed")
    before = (h1 / "host_task.py").stat().st_mtime_ns
    done = run_gputrain(lab, "push", "--hosts", "gpu1", "--dry-run")
    assert (done.returncode, (h1 / "data_elsewhere").read_text()) == (0, "")
    assert run_gputrain(lab, "push", "--hosts", "gpu1").returncode == 0
    assert (h1 / "data_elsewhere").read_text() == "changed"
    assert (h1 / "own").read_text() == "of this host"
    assert (h1 / "host_task.py").stat().st_mtime_ns == before
    (h1 / "own").unlink()  # the other test lists the folder, and the tests may run in any order


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["--hosts", "gpu1,nowhere"], 3, "nowhere: no such host: nowhere is not in DNS or ~/.ssh/config"),
        (
            ["--hosts", "gpu3"],
            3,
            "gpu3: its shell start-up files print, which breaks rsync; make them print in interactive shells only",
        ),
        ([], 2, "name a recipe, or hosts by --hosts or --hostfile"),
        (["recipe.toml", "--hosts", "gpu1"], 2, "name a recipe, or hosts by --hosts or --hostfile"),
    ],
)
def test_a_push_that_cannot_be_is_one_line(lab: SshLab, words: list[str], code: int, line: str) -> None:
    done = run_gputrain(lab, "push", *words)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(f"gputrain: {line}")
    assert done.stderr.count("\n") == 1
    assert not list(lab.disk_of(lab.hosts[0]).glob("code/.gputrain-*"))


def test_a_push_from_a_folder_whose_git_cannot_tell_what_it_ignores_is_refused_with_gits_reason(lab: SshLab) -> None:
    code = lab.disk_of(lab.hosts[0]) / "code"
    os.chown(code, 1000, 1000)  # as in a container that runs as root
    try:
        done = run_gputrain(lab, "push", "--hosts", "gpu1")
    finally:
        os.chown(code, 0, 0)
    assert (done.returncode, done.stdout) == (3, "")
    why = "that are not ignored: fatal: detected dubious ownership in repository at"
    assert done.stderr.startswith(f"gputrain: git cannot list the files of {lab.disk}/code {why}")
    assert done.stderr.count("\n") == 1
