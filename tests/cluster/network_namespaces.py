"""Hosts on a network of their own: a network, host name and hosts file each, joined by a switch.

The machine that runs the tests is not touched: no name, address or bridge of it changes, and what is made here goes
when its processes are gone, also when pytest was killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

DELAY_WIRE = Path(__file__).with_name("delay_wire.py")
LIMIT_S = 300.0
"""No wait is longer; what takes so long hangs."""


def require_namespaces() -> None:
    """Skip where there can be no such hosts."""
    missing = [name for name in ("unshare", "nsenter", "setpriv", "ip") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)} (util-linux, iproute2)")
    if os.geteuid() != 0:
        pytest.skip("network namespaces and bridges need root")
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "ip", "link", "add", "br0", "type", "bridge"],
        capture_output=True,
        text=True,
    )
    if tried.returncode:
        pytest.skip(f"this kernel or container allows no network namespaces: {tried.stderr.strip()}")


@dataclass(frozen=True)
class NamespaceHost:
    """A machine, as far as networks tell one from another; files and processes are shared with all others."""

    name: str
    address: str
    interface: str
    holder: int
    """Process that keeps the namespaces."""

    def words(self, *words: str | Path, cwd: Path = Path("/")) -> list[str]:
        """What runs a command on this host; it keeps its pid."""
        # It ends with this process. Entering a mount namespace leads to its root.
        enter = ["setpriv", "--pdeathsig", "KILL", "nsenter", "--target", str(self.holder), "--net", "--uts", "--mount"]
        return [*enter, "sh", "-c", 'cd "$0" && exec "$@"', str(cwd), *map(str, words)]

    def start(self, *words: str | Path, cwd: Path = Path("/"), **options: Any) -> subprocess.Popen[str]:
        options = {"stdin": subprocess.DEVNULL, "text": True, "start_new_session": True} | options
        return subprocess.Popen(self.words(*words, cwd=cwd), **options)

    def run(
        self, *words: str | Path, cwd: Path = Path("/"), check: bool = True, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        options = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": LIMIT_S} | options
        done = subprocess.run(self.words(*words, cwd=cwd), **options)
        assert not check or done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def link(self, state: str) -> None:
        """Set the interface ``up`` or ``down``."""
        self.run("ip", "link", "set", self.interface, state)

    def processes(self) -> dict[int, str]:
        """Command lines by pid of what runs here, zombies and the holder left out."""
        here = Path(f"/proc/{self.holder}/ns/net").readlink()
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if not entry.name.isdecimal() or (entry / "ns" / "net").readlink() != here:
                    continue
                words = (entry / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip()
            except OSError:
                continue  # ended meanwhile
            if words and int(entry.name) != self.holder:
                found[int(entry.name)] = words
        return found


@contextmanager
def network(
    folder: Path,
    interfaces: Mapping[str, str],
    *,
    own_name: str = "127.0.1.1",
    subnet: str = "10.77.0",
    round_trip_s: Mapping[str, float] | None = None,
) -> Iterator[list[NamespaceHost]]:
    """Make hosts with these interfaces by name, each of which reaches all others.

    Args:
        folder: for the hosts files.
        interfaces: name of the network interface by name of the host.
        own_name: what a host's own name resolves to on itself: Debian writes 127.0.1.1 into its hosts file; an empty
            text is the address under which the others know it.
        subnet: the first three numbers of the addresses.
        round_trip_s: how long a packet to a host and its answer take on the way, by name of the host.
    """
    with ExitStack() as stack:
        switch = stack.enter_context(_namespaces(["--net"], "ip link add br0 type bridge && ip link set br0 up"))
        addresses = {name: f"{subnet}.{number}" for number, name in enumerate(interfaces, 1)}
        hosts = []
        for number, (name, interface) in enumerate(interfaces.items(), 1):
            lines = ["127.0.0.1 localhost", f"{own_name or addresses[name]} {name}"]
            lines += [f"{address} {other}" for other, address in addresses.items() if other != name]
            file = folder / f"hosts.{name}"
            file.write_text("\n".join(lines) + "\n")
            setup = f"hostname {name} && mount --bind '{file}' /etc/hosts && ip link set lo up"
            holder = stack.enter_context(_namespaces(["--net", "--uts", "--mount"], setup))
            host = NamespaceHost(name, addresses[name], interface, holder)
            veth = ["link", "add", f"port{number}", "type", "veth", "peer", "name", interface, "netns", str(holder)]
            _ip(switch, *veth)
            delay_s = (round_trip_s or {}).get(name, 0.0) / 2
            if delay_s:
                stack.enter_context(_delayed(switch, number, delay_s))
            else:
                _ip(switch, "link", "set", f"port{number}", "master", "br0", "up")
            if round_trip_s:
                _enter(holder, sys.executable, DELAY_WIRE, "--plain", interface)
            _ip(holder, "address", "add", f"{host.address}/24", "dev", interface)
            _ip(holder, "link", "set", interface, "up")
            # As where Docker is installed: an interface with an address, the same everywhere, that leads nowhere.
            _ip(holder, "link", "add", "docker0", "type", "bridge")
            _ip(holder, "address", "add", "172.17.0.1/16", "dev", "docker0")
            _ip(holder, "link", "set", "docker0", "up")
            hosts.append(host)
        try:
            yield hosts
        finally:
            for host in hosts:
                _clear(host)


def wait_until(happened: Any, what: str, processes: Sequence[subprocess.Popen[str]] = ()) -> Any:
    """Wait until a condition holds, and return its value; fail when the processes that it hangs on have ended.

    Looking takes at most a third of a core.
    """
    deadline = time.monotonic() + LIMIT_S
    while True:
        begun = time.monotonic()
        over = bool(processes) and all(process.poll() is not None for process in processes)
        value = happened()
        if value:
            return value
        assert not over, f"everything has ended without this: {what}"
        looked = time.monotonic()
        assert looked < deadline, f"waited in vain for this: {what}"
        time.sleep(max(0.02, 2 * (looked - begun)))


@contextmanager
def _namespaces(kinds: Sequence[str], setup: str) -> Iterator[int]:
    """Hold new namespaces by a process that ends with this one; give its pid."""
    words = ["setpriv", "--pdeathsig", "KILL", "unshare", *kinds]
    words += ["sh", "-ec", f"{setup}; echo ready; exec cat >/dev/null"]
    holder = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == b"ready\n", "the namespace could not be set up"
        yield holder.pid
    finally:
        holder.stdin.close()
        holder.wait(LIMIT_S)
        holder.stdout.close()


@contextmanager
def _delayed(switch: int, number: int, delay_s: float) -> Iterator[None]:
    """Join a host's port to the switch by a wire that holds each frame."""
    _ip(switch, "link", "add", f"near{number}", "type", "veth", "peer", "name", f"far{number}")
    _ip(switch, "link", "set", f"far{number}", "master", "br0", "up")
    for name in (f"near{number}", f"port{number}"):
        _ip(switch, "link", "set", name, "up")
    words = ["setpriv", "--pdeathsig", "KILL", "nsenter", "--target", str(switch), "--net", sys.executable]
    words += [str(DELAY_WIRE), f"port{number}", f"near{number}", str(delay_s)]
    wire = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True)
    assert wire.stdout is not None
    try:
        assert wire.stdout.readline() == b"up\n", "the wire could not be set up"
        yield
    finally:
        wire.kill()
        wire.wait()
        wire.stdout.close()


def _ip(holder: int, *words: str) -> None:
    _enter(holder, "ip", *words)


def _enter(holder: int, *words: str | Path) -> None:
    subprocess.run(["nsenter", "--target", str(holder), "--net", *map(str, words)], check=True)


def _clear(host: NamespaceHost) -> None:
    """End what still runs on a host: only this test's processes are there."""
    deadline = time.monotonic() + LIMIT_S
    while left := host.processes():
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        assert time.monotonic() < deadline, f"these cannot be ended: {left}"
        time.sleep(0.02)
