"""Reads facts of a machine that a run needs: folders, a port, and a file to meet at.

Standard library only, since this file travels to remote hosts; frozen dataclasses, which msgspec reads as well.
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

CHECKPOINTS = "step_*.pt"
"""How ``trainer.checkpoint`` names its files."""
SHM = Path("/dev/shm")


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder that a run writes into."""

    path: str
    problem: str = ""
    """Why it cannot be written; empty when it can."""
    free_bytes: int | None = None
    """Free for ordinary users on its file system; None where that is not reported."""
    free_files: int | None = None
    """Free inodes of its file system; None where they are not reported."""
    checkpoints: int = 0
    """Number of checkpoints in it."""


@dataclass(frozen=True, kw_only=True)
class Port:
    """The port on which rank 0 listens."""

    number: int
    state: Literal["free", "busy", "root"]
    """``root``: only the superuser may listen on it."""
    holder: str = ""
    """The process that listens on a busy one."""
    address: str = ""
    """Host that the ranks connect to."""
    ours: bool = True
    """Whether ``address`` is one of this machine."""


@dataclass(frozen=True, kw_only=True)
class RendezvousFile:
    """The rendezvous file of a ``file://`` init method."""

    path: str
    problem: str = ""
    fix: str = ""


def port_facts(number: int, host: str, *, ours: bool | None = None) -> Port:
    """Return whether rank 0 can listen on a port of this machine.

    Args:
        number: the port.
        host: under which the ranks connect to it.
        ours: whether that is known to be this machine; None to find out.
    """
    ours = _is_ours(host) if ours is None else ours
    if number < 1024 and os.geteuid() != 0:
        return Port(number=number, state="root", address=host, ours=ours)
    free = is_port_free(number)
    try:
        holder = "" if free else port_holder(number)
    except ImportError:  # psutil, which a host need not have
        holder = "a process"
    return Port(number=number, state="free" if free else "busy", holder=holder, address=host, ours=ours)


def _is_ours(host: str) -> bool:
    """Whether this machine has an address; True for a name, because a name server may take seconds."""
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
    """Return whether ranks can meet at a file."""
    folder = path.parent
    problem, fix = "", ""
    try:
        if path.is_dir():
            problem, fix = f"{path} is a folder", "file:// names a file that the ranks create"
        elif path.exists() and path.stat().st_size > 0:
            problem = f"{path} is left from an earlier run, and ranks would wait for it in vain"
            fix = "remove it or name a new one"
        elif not folder.is_dir():
            problem, fix = f"{path} cannot be created: there is no folder {folder}", "make the folder, on every node"
        elif not os.access(folder, os.W_OK):
            problem, fix = f"{path} cannot be created: {folder} is not writable", "name a folder that is"
    except OSError as error:
        problem, fix = f"{path} cannot be used: {error.strerror}", "name another file"
    return RendezvousFile(path=str(path), problem=problem, fix=fix)


def folder_facts(path: Path, *, count: bool = False) -> Folder:
    """Return the facts of a folder that need not exist yet."""
    path = expand_home(path)
    try:
        there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        if not there.is_dir():
            return Folder(path=str(path), problem=f"{there} is no folder")
        if not os.access(there, os.W_OK | os.X_OK):
            return Folder(path=str(path), problem=f"{there} is not writable")
        checkpoints = len(list(path.glob(CHECKPOINTS))) if count and there == path else 0
    except OSError as error:
        return Folder(path=str(path), problem=f"{path} cannot be used: {error.strerror}")
    return Folder(path=str(path), free_bytes=free_bytes(there), free_files=free_files(there), checkpoints=checkpoints)


def free_bytes(path: Path) -> int | None:
    """Return what ordinary users can still write on the file system of a path; None where it does not say."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    # Some network file systems answer zero for their size; that says nothing about room.
    return found.f_bavail * found.f_frsize if found.f_blocks else None


def free_files(path: Path) -> int | None:
    """Return how many more files the file system of a path takes; None where it does not say."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    # File systems that make room for files as they come, btrfs among them, answer zero for their number.
    return found.f_favail if found.f_files else None
