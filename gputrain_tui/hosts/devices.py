"""Pure: which devices a node's ranks get, from what the recipe asks for and what the machine has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.contract.errors import RequestError

if TYPE_CHECKING:
    from gputrain_tui.hosts.inventory import Gpu, Inventory
    from gputrain_tui.recipe.model import Node

Device = int | str
"""A GPU by index or UUID, or ``cpu``."""


class LackingError(RequestError):
    """A machine does not have the devices that a node asks for: the recipe may be right elsewhere, or later."""

    def __init__(self, where: str, told: str) -> None:
        """Keep place and sentence.

        Args:
            where: ``FILE:LINE: KEY``.
            told: what is asked for and what there is, without the place.
        """
        super().__init__(f"{where} {told}")
        self.where = where
        self.told = told


@dataclass(frozen=True, kw_only=True)
class Share:
    """The devices of one node."""

    devices: tuple[Device, ...]
    """One per rank, in the order of the local ranks."""
    visible: tuple[Device, ...] = ()
    """What CUDA_VISIBLE_DEVICES must say, in PCI order; empty: leave it alone."""
    shared: bool = False
    """Whether two ranks use one GPU."""

    @property
    def cpu(self) -> bool:
        """Whether these ranks run on the CPU."""
        return "cpu" in self.devices


class Devices:
    """Hands out the devices of all nodes, each GPU once."""

    def __init__(self, inventories: Mapping[str, Inventory], *, share: bool, cuda_visible_devices: str | None) -> None:
        """Start with nothing taken.

        Args:
            inventories: what is known of each machine, by the name that ``take`` gets.
            share: allow two ranks on one GPU.
            cuda_visible_devices: what the environment allows on this machine, ``localhost``.
        """
        self._inventories = inventories
        self._share = share
        self._cuda_visible_devices = cuda_visible_devices
        self._taken: dict[str, list[Device]] = {}

    def take(self, machine: str, shown: str, node: Node, *, where: str) -> Share:
        """Return the devices of a node.

        Args:
            machine: which machine it is; nodes on one machine have one name.
            shown: the machine as messages name it.
            node: what the recipe asks for.
            where: the place in the recipe, for messages.

        Raises:
            LackingError: the machine does not have what the node asks for.
            RequestError: it cannot be known, or the recipe contradicts itself.
        """
        if node.cpu_ranks is not None:
            return Share(devices=("cpu",) * node.cpu_ranks)
        inventory = self._inventories.get(machine)
        taken = self._taken.setdefault(machine, [])
        if inventory is None:
            share = self._trusted(taken, shown, node, where)
        else:
            has = self._usable(machine, shown, inventory)
            share = self._known(taken, has, shown, node, where, inventory)
        if not share.cpu:
            taken += share.devices
        return share

    def _trusted(self, taken: Sequence[Device], shown: str, node: Node, where: str) -> Share:
        """Devices of a machine that nobody looked at: a count or a list is believed."""
        if isinstance(node.gpus, tuple):
            self._refuse_twice(node.gpus, taken, shown, where)
            order = sorted(node.gpus) if all(isinstance(item, int) for item in node.gpus) else node.gpus
            return Share(devices=tuple(order), visible=_once(order), shared=len(set(order)) < len(order))
        if isinstance(node.gpus, int):
            first = 0 if self._share else len(taken)
            devices = tuple(range(first, first + node.gpus))
            if any(isinstance(item, str) for item in taken):
                raise RequestError(
                    f"{where} is a count, but another node of {shown} names its GPUs by UUID; name them here too"
                )
            free = [index for index in range(len(taken) + node.gpus) if index not in taken]
            if not self._share:
                devices = tuple(free[: node.gpus])
            return Share(devices=devices, visible=devices if taken else ())
        asked = f'"{node.gpus}"' if node.gpus is not None else "not a count"
        raise RequestError(
            f"{where} is {asked}, which needs to know the GPUs of {shown}: give a count or a list of device ids"
        )

    def _known(
        self, taken: Sequence[Device], has: Sequence[Gpu], shown: str, node: Node, where: str, inventory: Inventory
    ) -> Share:
        """Devices of a machine whose inventory is at hand."""
        left = [gpu for gpu in has if gpu.uuid not in taken]
        if isinstance(node.gpus, tuple):
            chosen = self._listed(node.gpus, has, shown, where, inventory)
            self._refuse_twice(chosen, taken, shown, where)
            return Share(devices=chosen, visible=_once(chosen), shared=len(set(chosen)) < len(chosen))
        if node.gpus == "free":
            from gputrain_tui.hosts.inventory import is_free  # at run time only where it is asked for

            free = [gpu for gpu in left if is_free(gpu)]
            if not free:
                busy = f"all {_gpus(len(has))} are in use (see `gputrain gpus`)" if has else "it has none"
                raise LackingError(where, f'is "free", but {shown} has no free GPU: {busy}')
            return _of(free)
        if node.gpus == "all":
            if not left:
                raise LackingError(
                    where, f'is "all", but {shown} has {_no_gpu(has, inventory)}; use cpu_ranks for CPUs'
                )
            return _of(left)
        if node.gpus is None and not has:
            return Share(devices=("cpu",) * (node.ranks or 1))
        if node.gpus is None and node.ranks is None:
            return _of(left)
        count = node.gpus if node.gpus is not None else node.ranks
        assert isinstance(count, int)
        if count <= len(left):
            return _of(left[:count])
        if not has:
            raise LackingError(
                where,
                f"asks for {_gpus(count)}, but {shown} has {_no_gpu(has, inventory)}; use cpu_ranks for CPUs",
            )
        if not self._share:
            others = (
                f", {len(has) - len(left)} of them taken by other nodes of the recipe" if len(left) < len(has) else ""
            )
            raise LackingError(
                where,
                f"asks for {_gpus(count)}, but {shown} has {len(has)}{others}; "
                "train.share_devices = true puts several ranks on one GPU",
            )
        uuids = [gpu.uuid for gpu in has]
        return Share(
            devices=tuple(uuids[index % len(uuids)] for index in range(count)), visible=tuple(uuids), shared=True
        )

    def _usable(self, machine: str, shown: str, inventory: Inventory) -> list[Gpu]:
        """The GPUs that take work and that the environment of this machine allows, in PCI order."""
        gpus = sorted(inventory.gpus, key=lambda gpu: (gpu.pci_bus_id, gpu.index))
        gpus = [gpu for gpu in gpus if not gpu.mig and not gpu.prohibited]
        if machine != "localhost" or self._cuda_visible_devices is None:
            return gpus
        allowed = [word.strip() for word in self._cuda_visible_devices.split(",") if word.strip()]
        return [gpu for gpu in gpus if any(_names(word, gpu) for word in allowed)]

    def _listed(
        self, ids: Sequence[Device], has: Sequence[Gpu], shown: str, where: str, inventory: Inventory
    ) -> tuple[Device, ...]:
        """Find listed GPUs, in the order of the machine: local ranks do not depend on how the list is written."""
        found: list[tuple[str, Device]] = []
        for item in ids:
            if isinstance(item, str) and item.startswith("MIG-"):
                found.append(("~", item))  # an instance, which the inventory does not list: after the whole GPUs
                continue
            gpu = next((gpu for gpu in has if _names(str(item), gpu)), None)
            if gpu is None:
                raise LackingError(where, f"names GPU {item}, but {self._why_not(item, has, shown, inventory)}")
            found.append((f"{gpu.pci_bus_id}/{gpu.index:04}", gpu.uuid))
        return tuple(device for _, device in sorted(found, key=lambda entry: entry[0]))

    def _why_not(self, item: Device, has: Sequence[Gpu], shown: str, inventory: Inventory) -> str:
        there = next((gpu for gpu in inventory.gpus if _names(str(item), gpu)), None)
        if there is not None and there.mig:
            return f"that GPU of {shown} is split into MIG instances: name an instance by its UUID"
        if there is not None and there.prohibited:
            return f"that GPU of {shown} is in compute mode prohibited"
        if there is not None:
            return f"CUDA_VISIBLE_DEVICES={self._cuda_visible_devices} hides it here"
        if not has:
            return f"{shown} has {_no_gpu(has, inventory)}"
        return f"{shown} has {', '.join(str(gpu.index) for gpu in has)}"

    def _refuse_twice(self, devices: Sequence[Device], taken: Sequence[Device], shown: str, where: str) -> None:
        if self._share:
            return
        for index, device in enumerate(devices):
            if device in devices[:index]:
                raise RequestError(f"{where} names GPU {device} twice; train.share_devices = true allows it")
            if device in taken:
                raise RequestError(
                    f"{where} names GPU {device} of {shown}, which another node of the recipe uses; "
                    "train.share_devices = true allows it"
                )


def _of(gpus: Sequence[Gpu]) -> Share:
    uuids = tuple(gpu.uuid or gpu.index for gpu in gpus)
    return Share(devices=uuids, visible=uuids)


def _once(devices: Sequence[Device]) -> tuple[Device, ...]:
    return tuple(dict.fromkeys(devices))


def _names(word: str, gpu: Gpu) -> bool:
    """Whether an entry of CUDA_VISIBLE_DEVICES, an index or the start of a UUID, means this GPU."""
    return word == str(gpu.index) or (word.startswith("GPU-") and gpu.uuid.startswith(word))


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' if count != 1 else ''}"


def _no_gpu(has: Sequence[Gpu], inventory: Inventory) -> str:
    if inventory.gpus and not has:
        return "no GPU that this command may use (CUDA_VISIBLE_DEVICES, MIG or compute mode)"
    return "no GPU left" if has else "no GPU"
