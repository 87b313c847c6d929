"""Network probe: finds the interface that reaches the other machines before gloo takes one.

Left alone, gloo takes the address that the machine's own name resolves to, which on many machines is the loopback's,
and where two machines cannot reach each other it waits several times its time-out and names neither.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import selectors
import socket
import time
from collections.abc import Mapping, Sequence

import msgspec
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from trainer.contract.errors import RequestError, TrainingError
from trainer.distributed.rendezvous import LINGER_S, RankMachine, Registration, RendezvousResult
from trainer.distributed.store import (
    KEY_PREFIX,
    JoinTimeoutError,
    RendezvousStore,
    Wait,
    remove_store_file,
)
from trainer.host.addresses import (
    OUTSIDE,
    InterfaceAddress,
    interface_addresses,
    is_interface_up,
    is_loopback,
    plain,
    source_towards,
)

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable: the interface that gloo takes."""

TRY_S = 3.0
"""How long one of several addresses may take to answer: two attempts of TCP's."""
REACH_S = 10.0
"""How long the machines may take to reach each other: three attempts of TCP's."""
SETTLE_S = 30.0
"""How long machines that have joined wait for each other's words on the connections."""
FEW = 4
"""How many of the connections that are blocked a message names."""


class Endpoint(msgspec.Struct, kw_only=True, frozen=True):
    """Where a machine listens while the network is probed."""

    port: int
    addresses: list[str]
    """The one that is settled; before that, all that might do."""
    interface: str = ""
    """The one that holds the address; empty where gloo has to choose."""


def interface_for(rdzv: RendezvousStore, result: RendezvousResult, mine: Registration, *, gloo: bool) -> str | None:
    """Return the interface for gloo, or None where it is given or gloo's own choice is as good as ours.

    Args:
        rdzv: where the ranks have met.
        result: who has.
        mine: this rank.
        gloo: whether gloo carries the collectives, so that machines that do not reach each other end the run here.

    Raises:
        RequestError: there is no interface as the environment names it.
        TrainingError: machines cannot reach each other; the message names which.
    """
    asked = os.environ.get(GLOO_INTERFACE)
    if len(result.machines) == 1:
        names = [name for _, name in socket.if_nameindex()]
        return "lo" if asked is None and "lo" in names else None
    here = next(index for index, machine in enumerate(result.machines) if mine.rank in machine.ranks)
    keys = PrefixStore(KEY_PREFIX, rdzv.store)
    wait = Wait(SETTLE_S, None)
    try:
        if mine.rank == result.machines[here].ranks[0]:
            endpoint = _lead(keys, rdzv, result.machines, here, asked, wait, try_all=gloo)
        else:
            endpoint = _read_endpoint(keys, result.machines, here, wait)
        if gloo and (refusal := _await(keys, "roads", result.machines[0].host, wait)):
            raise TrainingError(refusal)
    except (RequestError, TrainingError) as error:
        # Who waits for this machine ends with the same words.
        with contextlib.suppress(RuntimeError):
            keys.compare_set("roads", "", str(error))
            _leave(keys, rdzv, result.machines[0], mine)
        raise
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        raise TrainingError(f"rank {mine.rank} lost the store at {rdzv.url} while joining: {first}") from None
    return None if asked is not None else endpoint.interface or None


def _lead(
    keys: Store,
    rdzv: RendezvousStore,
    machines: Sequence[RankMachine],
    here: int,
    asked: str | None,
    wait: Wait,
    *,
    try_all: bool,
) -> Endpoint:
    """Settle on this machine's address for all its ranks, and try the way to every other machine."""
    with _listen() as listener:
        port = int(listener.getsockname()[1])
        own = _own_addresses()
        address = _asked_for(own, asked) if asked is not None else _towards(rdzv, own)
        if here == 0:
            candidates = [address] if address else own
            keys.set("root", _text(Endpoint(port=port, addresses=[each.text for each in candidates])))
            if address is None:
                reached = _await(keys, "reached", "another machine", wait)
                address = next((each for each in own if each.text == reached), None)
        else:
            address = _greet_root(keys, rdzv, machines[0], own, address, wait)
        endpoint = Endpoint(
            port=port,
            addresses=[address.text] if address else [],
            interface=address.interface if address else "",
        )
        keys.set(f"door/{here}", _text(endpoint))
        if try_all:
            _try_all(keys, machines, here, wait)
            # Nobody's connection is taken: that the kernel completes it is all there is to know. So the endpoint stays
            # open until everybody has tried it.
            _await(keys, "roads", machines[0].host, wait)
    return endpoint


def _greet_root(
    keys: Store,
    rdzv: RendezvousStore,
    root: RankMachine,
    own: Sequence[InterfaceAddress],
    address: InterfaceAddress | None,
    wait: Wait,
) -> InterfaceAddress | None:
    """Tell rank 0's machine under which of its addresses it is known here; return this machine's on the way there."""
    if address is not None and rdzv.host is not None and (known := _resolve(rdzv.host)):
        keys.compare_set("reached", "", known)
        return address
    endpoint = msgspec.json.decode(_await(keys, "root", root.host, wait), type=Endpoint)
    ours = {each.text for each in own}
    # What this machine has too, such as Docker's bridge, leads to itself.
    foreign = [text for text in endpoint.addresses if text not in ours]
    near = [text for text in foreign if any(_within(text, each) for each in own)]
    for text in [*near, *(text for text in foreign if text not in near)]:
        try:
            with socket.create_connection((text, endpoint.port), timeout=max(min(TRY_S, wait.left_s), 0.1)) as reached:
                local = plain(str(reached.getsockname()[0]))
        except OSError:
            continue
        keys.compare_set("reached", "", text)
        return address or next((each for each in own if each.text == local), None)
    if keys.compare_set("reached", "", "nothing").decode() == "nothing":
        tried = ", ".join(foreign) or "any address"
        keys.set("lost", f"{socket.gethostname()} cannot reach {root.name} at {tried}")
    return address


def _try_all(keys: Store, machines: Sequence[RankMachine], here: int, wait: Wait) -> None:
    """Connect to every other machine; rank 0's collects what did not work."""
    endpoints = [_read_endpoint(keys, machines, index, wait) for index in range(len(machines))]
    failed = _unreachable({index: endpoint for index, endpoint in enumerate(endpoints) if index != here}, wait)
    keys.set(f"tried/{here}", _text(failed))
    if here != 0:
        return
    blocked = [keys.get("lost").decode()] if keys.check(["lost"]) else []
    for index, machine in enumerate(machines):
        told = msgspec.json.decode(_await(keys, f"tried/{index}", machine.host, wait), type=dict[int, str])
        blocked += [
            f"{machine.host} cannot reach {machines[other].name} at {endpoints[other].addresses[0]} ({why})"
            for other, why in told.items()
        ]
    refusal = ", ".join(blocked[:FEW]) + (f" and {len(blocked) - FEW} more" if len(blocked) > FEW else "")
    if refusal:
        refusal += (
            ": every rank connects to every other one, on any port; let the machines through to each other, or name "
            f"the interface that leads there with {GLOO_INTERFACE}"
        )
    keys.compare_set("roads", "", refusal)


def _unreachable(endpoints: Mapping[int, Endpoint], wait: Wait) -> dict[int, str]:
    """Connect to all endpoints at once; return why it did not work, by endpoint."""
    failed: dict[int, str] = {}
    pending: dict[socket.socket, int] = {}
    deadline = time.monotonic() + max(min(REACH_S, wait.left_s), 0.1)
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        for index, endpoint in endpoints.items():
            if not endpoint.addresses:
                continue
            family = socket.AF_INET6 if ":" in endpoint.addresses[0] else socket.AF_INET
            attempt = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            attempt.setblocking(False)
            error = attempt.connect_ex((endpoint.addresses[0], endpoint.port))
            if error == errno.EINPROGRESS:
                pending[attempt] = index
                selector.register(attempt, selectors.EVENT_WRITE)
            elif error:
                failed[index] = os.strerror(error)
        while pending and time.monotonic() < deadline:
            for key, _ in selector.select(max(deadline - time.monotonic(), 0.0)):
                attempt = key.fileobj  # type: ignore[assignment]
                selector.unregister(attempt)
                error = attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                index = pending.pop(attempt)
                if error:
                    failed[index] = os.strerror(error)
    silent = f"no answer within {REACH_S:g} s"
    return failed | dict.fromkeys(pending.values(), silent)


def _leave(keys: Store, rdzv: RendezvousStore, root: RankMachine, mine: Registration) -> None:
    """Tell that this rank knows of the refusal; rank 0's machine stays until all do, and the store with it."""
    keys.set(f"told/{mine.rank}", "")
    if mine.rank not in root.ranks:
        return
    deadline = time.monotonic() + LINGER_S
    everybody = [f"told/{rank}" for rank in range(mine.world_size)]
    with contextlib.suppress(RuntimeError):
        while not keys.check(everybody) and time.monotonic() < deadline:
            time.sleep(0.005)
    if mine.rank == 0:
        remove_store_file(rdzv)


def _await(keys: Store, key: str, whose: str, wait: Wait) -> str:
    """Return what another machine writes into the store.

    Raises:
        TrainingError: the machines will not come together.
    """
    pause_s = 0.001
    while not keys.check([key]):
        if key != "roads" and keys.check(["roads"]):
            raise TrainingError(keys.get("roads").decode())
        if wait.left_s <= 0:
            raise JoinTimeoutError(
                f"{whose} said nothing for {wait.timeout_s:g} s while the machines tried to reach each other"
            )
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.1)
    return keys.get(key).decode()


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _read_endpoint(keys: Store, machines: Sequence[RankMachine], index: int, wait: Wait) -> Endpoint:
    return msgspec.json.decode(_await(keys, f"door/{index}", machines[index].host, wait), type=Endpoint)


# ------------------------------------------------------------------------------------------------------- this machine


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=2048, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=2048)


def _own_addresses() -> list[InterfaceAddress]:
    """Return this machine's addresses that others may know: the one that leads outward first, IPv4 before IPv6."""
    found = [
        each
        for each in interface_addresses()
        if is_interface_up(each.interface)
        and not is_loopback(each.text)
        and not ipaddress.ip_address(each.text).is_link_local
    ]
    outward = source_towards(OUTSIDE)
    return sorted(found, key=lambda each: (each.text != outward, ":" in each.text, each.interface))


def _asked_for(own: Sequence[InterfaceAddress], asked: str) -> InterfaceAddress | None:
    """Return the address of the interface that the environment names; None where that is gloo's to understand."""
    names = [name for _, name in socket.if_nameindex()]
    first = asked.split(",")[0]
    if first not in names:
        raise RequestError(
            f"{GLOO_INTERFACE} is {asked!r}, but the interfaces of {socket.gethostname()} are {', '.join(names)}"
        )
    return next((each for each in own if each.interface == first), None)


def _towards(rdzv: RendezvousStore, own: Sequence[InterfaceAddress]) -> InterfaceAddress | None:
    """Return the address on the way to the host of the store, unless it is this machine's loopback that leads there."""
    known = _resolve(rdzv.host) if rdzv.host is not None else None
    source = source_towards(known) if known else None
    return next((each for each in own if each.text == source), None)


def _resolve(host: str) -> str | None:
    """Return the address that the host's name means here; None when that is this machine's loopback."""
    with contextlib.suppress(OSError):
        address = plain(str(socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0][4][0]))
        return None if is_loopback(address) else address
    return None


def _within(text: str, own: InterfaceAddress) -> bool:
    return ipaddress.ip_address(text) in ipaddress.ip_network(f"{own.text}/{own.bits}", strict=False)
