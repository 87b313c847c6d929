"""Functions of a host for ``gputrain push``: its platform, and the installation of packages; standard library only."""

from __future__ import annotations

import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gputrain_tui.hosts.host_frames import RefusedCallError
from trainer.contract.home_folder import expand_home


def probe(_: object, request: Mapping[str, Any]) -> dict[str, Any]:
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


def prepare(_: object, request: Mapping[str, Any]) -> None:
    """Make folders and, for a request with packages, install them into an environment; refuse with pip's reason."""
    signal.alarm(0)  # torch over a slow network takes longer than a connection may be silent
    for folder in request["folders"]:
        Path(folder).mkdir(parents=True, exist_ok=True)
    python, packages = request["python"], request["packages"]
    if not packages:
        return
    pip = [python, "-I", "-m", "pip"]
    commands = [[*pip, "install", "--quiet", "--disable-pip-version-check", "--no-deps", *packages]]
    if not Path(python).exists():
        commands.insert(0, [sys.executable, "-I", "-m", "venv", request["prefix"]])
    for command in commands:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines()
            why = lines[-1] if lines else f"exit code {done.returncode}"
            raise RefusedCallError(f"{' '.join(command[:5])}: {why}")
    purelib = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    site = subprocess.run([python, "-I", "-c", purelib], capture_output=True, text=True, check=True).stdout.strip()
    (Path(site) / "gputrain-pushed.pth").write_text("".join(f"{folder}\n" for folder in request["imports"]))


def _version(python: Path) -> str:
    code = "import sys; print('%d.%d.%d' % sys.version_info[:3])"
    done = subprocess.run([str(python), "-I", "-c", code], capture_output=True, text=True)
    return done.stdout.strip()
