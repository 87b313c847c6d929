"""Runs on a host for ``gputrain push``: reads its platform, and installs an environment; standard library only."""

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
    """Return the host's C library, architecture, version of ``base``, rsync, folder and the visible ``tokens``.

    A token is a file that the pushing side has written into a folder: a visible one proves that the folder is shared.
    """
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
    """Make folders and, for a request with packages, install them into an environment; return the problem, if any."""
    for folder in request["folders"]:
        Path(folder).mkdir(parents=True, exist_ok=True)
    python, packages = request["python"], request["packages"]
    if not packages:
        return {"problem": ""}
    pip = [python, "-I", "-m", "pip"]
    commands = [[*pip, "install", "--quiet", "--disable-pip-version-check", "--no-deps", *packages]]
    if not Path(python).exists():
        commands.insert(0, [sys.executable, "-I", "-m", "venv", request["prefix"]])
    for command in commands:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines()
            return {"problem": f"{' '.join(command[:5])}: {lines[-1] if lines else f'exit code {done.returncode}'}"}
    purelib = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    site = subprocess.run([python, "-I", "-c", purelib], capture_output=True, text=True, check=True).stdout.strip()
    (Path(site) / "gputrain-pushed.pth").write_text("".join(f"{folder}\n" for folder in request["imports"]))
    return {"problem": ""}


def _version(python: Path) -> str:
    code = "import sys; print('%d.%d.%d' % sys.version_info[:3])"
    done = subprocess.run([str(python), "-I", "-c", code], capture_output=True, text=True)
    return done.stdout.strip()


def main(words: list[str]) -> None:
    """Print the answer to the words ``MARK ACTION REQUEST``; the request is JSON in hexadecimal, for any shell."""
    mark, action, request = words
    try:
        answer = (probe if action == "probe" else prepare)(json.loads(bytes.fromhex(request)))
    except OSError as error:
        answer = {"problem": f"{error.filename}: {error.strerror}"}
    print(f"{mark}{json.dumps(answer)}")
