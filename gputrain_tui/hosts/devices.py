"""Pure: allocates devices to the ranks of each node, by the recipe and the machines' inventories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gputrain_tui.hosts.host_names import THIS_MACHINE
from gputrain_tui.tables import counted
from trainer.contract.errors import RequestError

if TYPE_CHECKING:
    from gputrain_tui.hosts.inventory import Gpu, Inventory
    from gputrain_tui.recipe.model import Node

Device = int | str
"""A GPU by index or UUID, or ``cpu``."""


class DeviceUnavailableError(RequestError):
    """A machine lacks devices that a node requests; the recipe itself is valid."""

    def __init__(self, where: str, reason: str) -> None:
        """Keep the location, ``FILE:LINE: KEY``, and the reason, which has no location."""
        super().__init__(f"{where} {reason}")
        self.where = where
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class NodeDevices:
    """The devices of one node."""

    devices: tuple[Device, ...]
    """One per rank, in the order of the local ranks."""
    visible: tuple[Device, ...] = ()
    """Value of CUDA_VISIBLE_DEVICES, in PCI order; empty: the environment's value stays."""
    shared: bool = False

    @property
    def cpu(self) -> bool:
        return "cpu" in self.devices


@dataclass(frozen=True, kw_only=True)
class _DeviceRequest:
    """What a node of the recipe asks of its machine."""

    node: Node
    machine: str
    shown: str
    """The machine's name in messages."""
    where: str
    """``FILE:LINE: KEY``."""
    allocated: Sequence[Device]
    """Devices of the machine that other nodes have."""


class DeviceAllocator:
    """Allocates the devices of all nodes, each GPU once unless sharing is allowed."""

    def __init__(self, inventories: Mapping[str, Inventory], *, share: bool, cuda_visible_devices: str | None) -> None:
        """Take the inventories by machine, and this machine's CUDA_VISIBLE_DEVICES, None if it is not set."""
        self._inventories = inventories
        self._share = share
        self._cuda_visible_devices = cuda_visible_devices
        self._allocated: dict[str, list[Device]] = {}

    def allocate(self, machine: str, shown: str, node: Node, *, where: str) -> NodeDevices:
        """Allocate the devices of a node; all nodes on one machine have the same key of the inventories, ``machine``.

        ``shown`` and ``where``, the location in the recipe, are for messages.

        Raises:
            DeviceUnavailableError: the machine lacks requested devices.
            RequestError: the request needs an inventory that is missing, or the recipe contradicts itself.
        """
        if node.cpu_ranks is not None:
            return NodeDevices(devices=("cpu",) * node.cpu_ranks)
        allocated = self._allocated.setdefault(machine, [])
        request = _DeviceRequest(node=node, machine=machine, shown=shown, where=where, allocated=allocated)
        inventory = self._inventories.get(machine)
        chosen = self._from_recipe(request) if inventory is None else self._from_inventory(request, inventory)
        if not chosen.cpu:
            allocated += chosen.devices
        return chosen

    def _from_recipe(self, request: _DeviceRequest) -> NodeDevices:
        """Return devices on a machine without inventory: the recipe's count or list, unchecked."""
        gpus, allocated = request.node.gpus, request.allocated
        if isinstance(gpus, tuple):
            self._require_unshared(gpus, request)
            return _listed(tuple(sorted(gpus)) if all(isinstance(item, int) for item in gpus) else gpus)
        if isinstance(gpus, int):
            if any(isinstance(item, str) for item in allocated):
                raise RequestError(
                    f"{request.where} is a count, but another node of {request.shown} names its GPUs by UUID; "
                    "name them here too"
                )
            taken = () if self._share else allocated
            free = [index for index in range(len(taken) + gpus) if index not in taken]
            devices = tuple(free[:gpus])
            return NodeDevices(devices=devices, visible=devices if allocated else ())
        value = f' = "{gpus}"' if gpus is not None else ""
        raise RequestError(
            f"{request.where}{value} depends on the GPUs of {request.shown}, which are not known: "
            "set gpus to a count or a list of device ids"
        )

    def _from_inventory(self, request: _DeviceRequest, inventory: Inventory) -> NodeDevices:
        node, shown = request.node, request.shown
        gpus = self._usable(request.machine, inventory)
        unallocated = [gpu for gpu in gpus if gpu.uuid not in request.allocated]
        if isinstance(node.gpus, tuple):
            chosen = self._find_listed(node.gpus, gpus, request, inventory)
            self._require_unshared(chosen, request)
            return _listed(chosen)
        if node.gpus == "free":
            from gputrain_tui.hosts.inventory import is_free  # imported only when needed: starting a run is fast

            free = [gpu for gpu in unallocated if is_free(gpu)]
            if not free:
                busy = f"all {counted(len(gpus), 'GPU')} are in use (see `gputrain gpus`)" if gpus else "it has no GPU"
                raise DeviceUnavailableError(request.where, f'is "free", but {shown} has no free GPU: {busy}')
            return _whole_gpus(free)
        if node.gpus == "all":
            if not unallocated:
                reason = f'is "all", but {shown} has {_no_gpu(gpus, inventory)}; use cpu_ranks for CPUs'
                raise DeviceUnavailableError(request.where, reason)
            return _whole_gpus(unallocated)
        if node.gpus is None and not gpus:
            return NodeDevices(devices=("cpu",) * (node.ranks or 1))
        if node.gpus is None and node.ranks is None:
            return _whole_gpus(unallocated)
        count = node.gpus if node.gpus is not None else node.ranks
        assert isinstance(count, int)
        if count <= len(unallocated):
            return _whole_gpus(unallocated[:count])
        asks = f"asks for {counted(count, 'GPU')}, but {shown} has"
        if not gpus:
            raise DeviceUnavailableError(request.where, f"{asks} {_no_gpu(gpus, inventory)}; use cpu_ranks for CPUs")
        if not self._share:
            taken = len(gpus) - len(unallocated)
            others = f", {taken} of them taken by other nodes of the recipe" if taken else ""
            reason = f"{asks} {len(gpus)}{others}; train.share_devices = true puts several ranks on one GPU"
            raise DeviceUnavailableError(request.where, reason)
        uuids = [gpu.uuid for gpu in gpus]
        return NodeDevices(
            devices=tuple(uuids[index % len(uuids)] for index in range(count)), visible=tuple(uuids), shared=True
        )

    def _usable(self, machine: str, inventory: Inventory) -> list[Gpu]:
        """Return the usable GPUs in PCI order: no MIG, not prohibited, in this machine's CUDA_VISIBLE_DEVICES."""
        gpus = sorted(inventory.gpus, key=lambda gpu: (gpu.pci_bus_id, gpu.index))
        gpus = [gpu for gpu in gpus if not gpu.mig and not gpu.prohibited]
        if machine != THIS_MACHINE or self._cuda_visible_devices is None:
            return gpus
        allowed = [word.strip() for word in self._cuda_visible_devices.split(",") if word.strip()]
        return [gpu for gpu in gpus if any(_matches(word, gpu) for word in allowed)]

    def _find_listed(
        self, ids: Sequence[Device], gpus: Sequence[Gpu], request: _DeviceRequest, inventory: Inventory
    ) -> tuple[Device, ...]:
        """Return the UUIDs of the listed GPUs in PCI order: local ranks do not depend on the order of the list."""
        uuids: list[tuple[str, Device]] = []
        for item in ids:
            if isinstance(item, str) and item.startswith("MIG-"):
                uuids.append(("~", item))  # an instance, which the inventory does not list: after the whole GPUs
                continue
            gpu = next((gpu for gpu in gpus if _matches(str(item), gpu)), None)
            if gpu is None:
                why = self._why_unusable(item, gpus, request.shown, inventory)
                raise DeviceUnavailableError(request.where, f"names GPU {item}, but {why}")
            uuids.append((f"{gpu.pci_bus_id}/{gpu.index:04}", gpu.uuid))
        return tuple(device for _, device in sorted(uuids, key=lambda entry: entry[0]))

    def _why_unusable(self, item: Device, gpus: Sequence[Gpu], shown: str, inventory: Inventory) -> str:
        hidden = next((gpu for gpu in inventory.gpus if _matches(str(item), gpu)), None)
        if hidden is not None and hidden.mig:
            return f"that GPU of {shown} is split into MIG instances: name an instance by its UUID"
        if hidden is not None and hidden.prohibited:
            return f"that GPU of {shown} is in the prohibited compute mode"
        if hidden is not None:
            return f"CUDA_VISIBLE_DEVICES={self._cuda_visible_devices} hides it here"
        if not gpus:
            return f"{shown} has {_no_gpu(gpus, inventory)}"
        return f"{shown} has {', '.join(str(gpu.index) for gpu in gpus)}"

    def _require_unshared(self, devices: Sequence[Device], request: _DeviceRequest) -> None:
        if self._share:
            return
        allows = "train.share_devices = true allows it"
        for index, device in enumerate(devices):
            if device in devices[:index]:
                raise RequestError(f"{request.where} names GPU {device} twice; {allows}")
            if device in request.allocated:
                raise RequestError(
                    f"{request.where} names GPU {device} of {request.shown}, which another node of the recipe uses; "
                    f"{allows}"
                )


def _whole_gpus(gpus: Sequence[Gpu]) -> NodeDevices:
    uuids = tuple(gpu.uuid or gpu.index for gpu in gpus)
    return NodeDevices(devices=uuids, visible=uuids)


def _listed(devices: tuple[Device, ...]) -> NodeDevices:
    visible = tuple(dict.fromkeys(devices))
    return NodeDevices(devices=devices, visible=visible, shared=len(visible) < len(devices))


def _matches(word: str, gpu: Gpu) -> bool:
    """Whether an index or the beginning of a UUID, as in CUDA_VISIBLE_DEVICES, selects this GPU."""
    return word == str(gpu.index) or (word.startswith("GPU-") and gpu.uuid.startswith(word))


def _no_gpu(gpus: Sequence[Gpu], inventory: Inventory) -> str:
    if inventory.gpus and not gpus:
        return "no GPU that this command may use (CUDA_VISIBLE_DEVICES, MIG or compute mode)"
    return "no GPU left" if gpus else "no GPU"
