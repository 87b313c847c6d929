"""The readers of this machine's facts agree with psutil, which reads the same of the kernel in its own way."""

from __future__ import annotations

import ipaddress
import os
import shutil
import socket
import subprocess
import sys

import psutil
import pytest

from gputrain_tui.hosts.local_facts import local_facts
from trainer.host.addresses import interface_addresses, is_interface_up, is_loopback, own_addresses
from trainer.host.boot import boot_time_s
from trainer.host.memory import read_memory
from trainer.host.ports import free_port, is_port_free, own_connections
from trainer.host.processes import CLOCK_TICKS_HZ, ancestors, descendants, environ_value, owner_and_name, read_stat

LEADERLESS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
print("ready", flush=True)
ctypes.CDLL(None).syscall(60, 0)  # SYS_exit: this thread alone
"""


def test_every_address_of_every_interface_is_read() -> None:
    expected = set()
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                bits = int(ipaddress.ip_address(str(entry.netmask))).bit_count()
                expected.add((name, entry.address.partition("%")[0], bits))
    assert {(each.interface, each.text, each.bits) for each in interface_addresses()} == expected


def test_an_interface_is_up_when_something_can_be_sent_over_it() -> None:
    states = psutil.net_if_stats()
    assert {name: is_interface_up(name) for name in states} == {name: state.isup for name, state in states.items()}
    assert not is_interface_up("no-such-one")


@pytest.mark.parametrize(
    ("host", "ours"),
    [
        ("localhost", True),
        ("LOCALHOST", True),
        ("localhost.localdomain", True),
        ("127.0.1.1", True),
        ("::1", True),
        ("0.0.0.0", True),
        ("10.0.0.1", False),
        ("localhorst", False),
        ("fe80::1", False),
    ],
)
def test_a_loopback_host_means_the_machine_that_uses_it(host: str, ours: bool) -> None:
    assert is_loopback(host) is ours


def test_a_process_s_parent_start_and_owner_are_read() -> None:
    here, stat = psutil.Process(), read_stat(os.getpid())
    assert stat is not None
    assert stat.parent_pid == here.ppid()
    assert stat.start_ticks / CLOCK_TICKS_HZ + boot_time_s() == pytest.approx(here.create_time(), abs=0.02)
    assert ancestors() == [process.pid for process in here.parents()]
    assert owner_and_name(os.getpid()) == (here.username(), here.name())
    assert owner_and_name(2**22 + 1) is None


def test_memory_agrees_with_psutil() -> None:
    memory, expected = read_memory(), psutil.virtual_memory()
    assert memory.total_bytes == expected.total
    assert memory.available_bytes == pytest.approx(expected.available, rel=0.2)


def test_the_environment_is_the_one_that_a_process_was_started_with() -> None:
    words = [sys.executable, "-c", "import os; os.environ['A'] = 'later'; print(flush=True); input()"]
    child = subprocess.Popen(
        words, env={**os.environ, "A": "first", "B": ""}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    values = [environ_value(child.pid, name) for name in ("A", "B", "C")]
    child.communicate(b"\n")
    assert values == [b"first", b"", None]


def test_a_process_whose_first_thread_has_left_is_living() -> None:
    child = subprocess.Popen([sys.executable, "-c", LEADERLESS], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    while (stat := read_stat(child.pid)) is not None and stat.state != "Z":
        pass
    found = descendants(os.getpid())
    child.kill()
    child.communicate()
    assert child.pid in found


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET6, "::1"), (socket.AF_INET, "127.0.0.1")])
def test_a_port_in_use_on_either_version_of_ip_is_not_free(family: socket.AddressFamily, address: str) -> None:
    with socket.create_server((address, 0), family=family) as server:
        assert not is_port_free(server.getsockname()[1])
    assert is_port_free(free_port())


def test_connections_of_either_side_are_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as made:
        found = [each.getsockname() for each in own_connections()]
        assert {server.getsockname(), made.getsockname()} <= set(found)


@pytest.mark.skipif(shutil.which("ip") is None, reason="needs iproute2")
@pytest.mark.parametrize("other", ["203.0.113.9", "10.255.255.1"])
def test_the_address_to_give_the_others_is_that_of_the_route_to_them(other: str) -> None:
    own = next(address for address in own_addresses() if not is_loopback(address) and ":" not in address)
    told = subprocess.run(["ip", "route", "get", other], capture_output=True, text=True).stdout
    source = told.partition(" src ")[2].partition(" ")[0]
    assert local_facts([None, own, other]).address == source
