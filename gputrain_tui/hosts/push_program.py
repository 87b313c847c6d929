"""Answers on a host what ``gputrain push`` must know of it, and installs an environment; standard library only."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.contract.home_folder import expand_home


def probe(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return what this host has: C library, interpreter, rsync, and the folders that it shares with the asking side."""
    base = Path(request["base"])
    return {
        "libc": " ".join(platform.libc_ver()),
        "machine": platform.machine(),
        "base": _version(base) if base.is_file() else "",
        "rsync": shutil.which("rsync") is not None,
        "workdir": str(expand_home(request["workdir"])),
        "shared": [token for token in request["tokens"] if Path(token).exists()],
    }


def prepare(request: Mapping[str, Any]) -> dict[str, Any]:
    """Make folders, and install packages into a new environment where that is asked for; say what went wrong."""
    for folder in request["folders"]:
        Path(folder).mkdir(parents=True, exist_ok=True)
    python, packages = request["python"], request["packages"]
    if not packages:
        return {"problem": ""}
    commands = [[python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", *packages]]
    if not Path(python).exists():
        commands.insert(0, [sys.executable, "-m", "venv", request["prefix"]])
    for command in commands:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines()
            return {"problem": f"{' '.join(command[:4])}: {lines[-1] if lines else f'exit code {done.returncode}'}"}
    purelib = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    found = subprocess.run([python, "-c", purelib], capture_output=True, text=True, check=True).stdout.strip()
    (Path(found) / "gputrain-pushed.pth").write_text("".join(f"{folder}\n" for folder in request["imports"]))
    return {"problem": ""}


def _version(python: Path) -> str:
    asked = "import sys; print('%d.%d.%d' % sys.version_info[:3])"
    done = subprocess.run([str(python), "-I", "-c", asked], capture_output=True, text=True)
    return done.stdout.strip()


def main(words: list[str]) -> None:
    """Answer ``MARK ACTION REQUEST``; the request is JSON in hexadecimal digits, which no shell changes."""
    mark, action, request = words
    try:
        answer = (probe if action == "probe" else prepare)(json.loads(bytes.fromhex(request)))
    except OSError as error:
        answer = {"problem": f"{error.filename}: {error.strerror}"}
    print(f"{mark}{json.dumps(answer)}")
