"""Reads facts of a machine: folders of a run, the rendezvous port and the rendezvous file.

Standard library only, since this file is sent to remote hosts; frozen dataclasses, which msgspec decodes as well.
"""

from __future__ import annotations

import errno
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gputrain_tui.hosts.host_names import address_of
from trainer.contract.home_folder import expand_home
from trainer.host.ports import is_port_free, port_holder
from trainer.host.resource_limits import free_bytes


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder that a run writes into."""

    path: str
    problem: str = ""
    """Reason why it cannot be written; empty if it can."""
    free_bytes: int | None = None
    """Free for ordinary users on its file system; None if that is not reported."""
    free_files: int | None = None
    """Free inodes of its file system; None if they are not reported."""
    checkpoints: int = 0
    owner: str = ""
    """Run of the newest of them; empty if it names none."""


@dataclass(frozen=True, kw_only=True)
class Port:
    """The port on which rank 0 listens."""

    number: int
    state: Literal["free", "busy", "root"]
    """``root``: only the superuser may listen on it."""
    holder: str = ""
    """Process that listens on a busy port; empty for another state."""
    address: str = ""
    """Host or address that the ranks connect to."""
    is_own: bool = True
    """Whether ``address`` is one of this machine."""


@dataclass(frozen=True, kw_only=True)
class RendezvousFile:
    """The rendezvous file of a ``file://`` init method."""

    path: str
    problem: str = ""
    fix: str = ""


def port_facts(number: int, host: str, *, is_own: bool | None = None) -> Port:
    """Return state and holder of the port on which rank 0 would listen, if this is its machine.

    ``host`` is what the ranks connect to; ``is_own`` whether that is this machine, None to find out.
    """
    is_own = _is_own_address(host) if is_own is None else is_own
    if number < 1024 and os.geteuid() != 0:
        return Port(number=number, state="root", address=host, is_own=is_own)
    free = is_port_free(number)
    try:
        holder = "" if free else port_holder(number)
    except ImportError:  # psutil, which a host need not have
        holder = "a process"
    return Port(number=number, state="free" if free else "busy", holder=holder, address=host, is_own=is_own)


def _is_own_address(host: str) -> bool:
    """Whether an address is one of this machine; True for a name, because resolving it may take seconds."""
    address = address_of(host)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        socket.inet_pton(family, address)
    except OSError:
        return True
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            return error.errno != errno.EADDRNOTAVAIL
    return True


def rendezvous_file(path: Path) -> RendezvousFile:
    """Return the facts of a rendezvous file: whether the ranks can create it."""
    folder = path.parent
    problem, fix = "", ""
    try:
        if path.is_dir():
            problem, fix = f"{path} is a folder", "file:// names a file that the ranks create"
        elif path.exists() and path.stat().st_size > 0:
            problem = f"{path} is left from an earlier run, and a rendezvous on it would hang"
            fix = "remove it or name a new one"
        elif not folder.is_dir():
            problem, fix = f"{path} cannot be created: there is no folder {folder}", "create the folder on every node"
        elif not os.access(folder, os.W_OK):
            problem, fix = f"{path} cannot be created: {folder} is not writable", "name a writable folder"
    except OSError as error:
        problem, fix = f"{path} cannot be used: {error.strerror}", "name another file"
    return RendezvousFile(path=str(path), problem=problem, fix=fix)


def folder_facts(path: Path) -> Folder:
    """Return the facts of a folder that may not exist yet."""
    path = expand_home(path)
    try:
        existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        if not existing.is_dir():
            return Folder(path=str(path), problem=f"{existing} is not a folder")
        if not os.access(existing, os.W_OK | os.X_OK):
            return Folder(path=str(path), problem=f"{existing} is not writable")
    except OSError as error:
        return Folder(path=str(path), problem=f"{path} cannot be used: {error.strerror}")
    return Folder(path=str(path), free_bytes=free_bytes(existing), free_files=free_files(existing))


def free_files(path: Path) -> int | None:
    """Return the number of free inodes for ordinary users on the file system of a path; None if it is not reported."""
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    # File systems that allocate inodes on demand, such as btrfs, report zero.
    return status.f_favail if status.f_files else None
