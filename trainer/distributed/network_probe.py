"""Find the interface that reaches the other machines, before gloo binds to one.

Without a setting gloo binds to the address of the host name, which is the loopback's on many machines; and if two
machines cannot reach each other, it waits several times its time-out and names neither.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence

import msgspec
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from trainer.contract.errors import RequestError, TrainingError, listed
from trainer.distributed.rendezvous import REFUSAL_LINGER_S, RankMachine, Registration, RendezvousResult
from trainer.distributed.store import (
    KEY_PREFIX,
    JoinTimeoutError,
    RendezvousStore,
    Wait,
    lost_store,
    remove_store_file,
    wait_for_keys,
)
from trainer.host import reachability
from trainer.host.addresses import InterfaceAddress, source_towards

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable with the interface to which gloo binds."""
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
"""Environment variable with the interfaces of NCCL: names or prefixes, one or several."""


class Endpoint(msgspec.Struct, kw_only=True, frozen=True):
    """Port and addresses on which a machine listens during the probe."""

    port: int
    addresses: list[str]
    """Chosen address; for rank 0's machine all candidates, until one is chosen."""
    interface: str = ""
    """Interface of the address; empty if the backend has to choose it."""


def interface_for(rdzv: RendezvousStore, result: RendezvousResult, mine: Registration, *, gloo: bool) -> str | None:
    """Return the interface to which the backend should bind; None if the user has set one or the backend has to choose.

    Raises:
        RequestError: the interface in the environment does not exist.
        TrainingError: machines cannot reach each other; the message names them.
    """
    requested = os.environ.get(GLOO_INTERFACE if gloo else NCCL_INTERFACE)
    alone = len(result.machines) == 1
    if alone and requested is None:
        return "lo" if "lo" in _interface_names() else None
    here = next(index for index, machine in enumerate(result.machines) if mine.rank in machine.ranks)
    keys = PrefixStore(KEY_PREFIX, rdzv.store)
    exchange_timeout_s = 30.0  # time-out for another machine's endpoint or probe result in the store
    wait = Wait(exchange_timeout_s, None)
    try:
        if alone:
            if gloo:
                _check_interfaces(requested or "")
            return None
        if mine.rank == result.machines[here].ranks[0]:
            # Gloo connects every pair of ranks. NCCL interprets its own setting, which may be a prefix or a list.
            forced = requested if gloo else None
            endpoint = _probe_machine(keys, rdzv, result.machines, here, forced, wait, probe_all=gloo)
        else:
            endpoint = _read_endpoint(keys, result.machines, here, wait)
        if gloo and (refusal := _wait_for_key(keys, "probe_result", result.machines[0].host, wait)):
            raise TrainingError(refusal)
    except (RequestError, TrainingError) as error:
        # The machines that wait for this one raise the same message.
        with contextlib.suppress(RuntimeError):
            keys.compare_set("probe_result", "", str(error))
            _await_failure_read(keys, rdzv, result.machines[0], mine)
        raise
    except RuntimeError as error:
        raise lost_store(rdzv, mine.rank, error) from None
    return None if requested is not None else endpoint.interface or None


def interface_setting(interface: str, *, gloo: bool) -> tuple[str, str]:
    """Return name and value of the environment variable that binds the backend to exactly this interface."""
    return (GLOO_INTERFACE, interface) if gloo else (NCCL_INTERFACE, f"={interface}")  # "=": exact name, not a prefix


def _probe_machine(
    keys: Store,
    rdzv: RendezvousStore,
    machines: Sequence[RankMachine],
    here: int,
    requested: str | None,
    wait: Wait,
    *,
    probe_all: bool,
) -> Endpoint:
    """Choose this machine's address, publish it for all its ranks, and connect to every other machine."""
    with reachability.listen_on_all_addresses() as listener:
        port = int(listener.getsockname()[1])
        own = reachability.outward_addresses()
        address = _requested_address(own, requested) if requested is not None else _address_towards_store(rdzv, own)
        if here == 0:
            candidates = [address] if address else own
            keys.set("root", _to_json(Endpoint(port=port, addresses=[each.text for each in candidates])))
            if address is None:
                reached = _wait_for_key(keys, "root_address", "another machine", wait)
                address = next((each for each in own if each.text == reached), None)
        else:
            address = _find_root_address(keys, rdzv, machines[0], own, address, wait)
        endpoint = Endpoint(
            port=port, addresses=[address.text] if address else [], interface=address.interface if address else ""
        )
        keys.set(f"endpoint/{here}", _to_json(endpoint))
        if probe_all:
            _probe_all(keys, machines, here, wait)
            # Connections are completed by the kernel and never accepted, so the listener stays open until every machine
            # has tried to connect.
            _wait_for_key(keys, "probe_result", machines[0].host, wait)
    return endpoint


def _find_root_address(
    keys: Store,
    rdzv: RendezvousStore,
    root: RankMachine,
    own: Sequence[InterfaceAddress],
    address: InterfaceAddress | None,
    wait: Wait,
) -> InterfaceAddress | None:
    """Publish an address at which rank 0's machine can be reached; return this machine's address on that route."""
    if address is not None and rdzv.host is not None and (known := reachability.resolve(rdzv.host)):
        keys.compare_set("root_address", "", known)
        return address
    endpoint = msgspec.json.decode(_wait_for_key(keys, "root", root.host, wait), type=Endpoint)
    route = reachability.find_route(
        endpoint.addresses, endpoint.port, own, max(min(reachability.CONNECT_TIMEOUT_S, wait.left_s), 0.1)
    )
    if route is not None:
        keys.compare_set("root_address", "", route[0])
        return address or next((each for each in own if each.text == route[1]), None)
    if keys.compare_set("root_address", "", "nothing").decode() == "nothing":
        own_texts = {each.text for each in own}
        tried = ", ".join(text for text in endpoint.addresses if text not in own_texts) or "any address"
        keys.set("root_unreachable", f"{socket.gethostname()} cannot reach {root.name} at {tried}")
    return address


def _probe_all(keys: Store, machines: Sequence[RankMachine], here: int, wait: Wait) -> None:
    """Connect to every other machine; rank 0's machine publishes the pairs that failed."""
    endpoints = [_read_endpoint(keys, machines, index, wait) for index in range(len(machines))]
    tried = {
        index: (endpoint.addresses[0], endpoint.port)
        for index, endpoint in enumerate(endpoints)
        if index != here and endpoint.addresses
    }
    # Time-out of the connections between machines; enough for TCP to send its first packet three times.
    probe_timeout_s = 10.0
    failed = reachability.unreachable(tried, max(min(probe_timeout_s, wait.left_s), 0.1))
    keys.set(f"unreachable/{here}", _to_json(failed))
    if here != 0:
        return
    pairs = [keys.get("root_unreachable").decode()] if keys.check(["root_unreachable"]) else []
    for index, machine in enumerate(machines):
        failed = msgspec.json.decode(
            _wait_for_key(keys, f"unreachable/{index}", machine.host, wait), type=dict[int, str]
        )
        pairs += [
            f"{machine.host} cannot reach {machines[other].name} at {endpoints[other].addresses[0]} ({why})"
            for other, why in failed.items()
        ]
    refusal = listed(pairs)
    if refusal:
        refusal += (
            ": every rank connects to every other one, on any port; allow this in the firewalls, or name the interface "
            f"that connects the machines with {GLOO_INTERFACE}"
        )
    keys.compare_set("probe_result", "", refusal)


def _await_failure_read(keys: Store, rdzv: RendezvousStore, root: RankMachine, mine: Registration) -> None:
    """Mark the failure as read by this rank; ranks on rank 0's machine, which has the store, wait for the others."""
    keys.set(f"probe_failure_read/{mine.rank}", "")
    if mine.rank not in root.ranks:
        return
    with contextlib.suppress(RuntimeError):
        wait_for_keys(keys, [f"probe_failure_read/{rank}" for rank in range(mine.world_size)], REFUSAL_LINGER_S)
    if mine.rank == 0:
        remove_store_file(rdzv)


def _wait_for_key(keys: Store, key: str, setter: str, wait: Wait) -> str:
    """Wait for a key that another machine, ``setter``, sets; return its value."""
    while not keys.check([key]):
        if key != "probe_result" and keys.check(["probe_result"]):
            raise TrainingError(keys.get("probe_result").decode())
        if wait.left_s <= 0:
            raise JoinTimeoutError(
                f"no report from {setter} for {wait.timeout_s:g} s while connections between machines were checked"
            )
        wait.pause(lambda: ([], []))
    return keys.get(key).decode()


def _to_json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _read_endpoint(keys: Store, machines: Sequence[RankMachine], index: int, wait: Wait) -> Endpoint:
    return msgspec.json.decode(_wait_for_key(keys, f"endpoint/{index}", machines[index].host, wait), type=Endpoint)


# ------------------------------------------------------------------------------------------------------- this machine


def _requested_address(own: Sequence[InterfaceAddress], requested: str) -> InterfaceAddress | None:
    """Return the address of the interface named in the environment; None if it has none that peers could use."""
    _check_interfaces(requested)
    return next((each for each in own if each.interface == requested.split(",")[0]), None)


def _check_interfaces(requested: str) -> None:
    """Raise ``RequestError`` if an interface in the environment does not exist; gloo ignores a single character."""
    names = _interface_names()
    if len(requested) > 1 and not set(requested.split(",")) <= set(names):
        raise RequestError(
            f"{GLOO_INTERFACE} is {requested!r}, but the interfaces of {socket.gethostname()} are {', '.join(names)}"
        )


def _interface_names() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def _address_towards_store(rdzv: RendezvousStore, own: Sequence[InterfaceAddress]) -> InterfaceAddress | None:
    """Return this machine's address on the route to the store's host; None if the route is the loopback interface."""
    known = reachability.resolve(rdzv.host) if rdzv.host is not None else None
    source = source_towards(known) if known else None
    return next((each for each in own if each.text == source), None)
