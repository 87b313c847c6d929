"""GPUs visible under CUDA_VISIBLE_DEVICES, by NVML and without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One GPU in PCI order."""

    uuid: str
    name: str


def visible_devices(environ: Mapping[str, str]) -> list[Device]:
    """Return the GPUs in the order in which a rank numbers them under CUDA_VISIBLE_DEVICES and PCI order."""
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is not None and not wanted.strip():
        return []
    from trainer.host.nvml import list_gpus  # CPU ranks need not import it

    return select([Device(uuid=uuid, name=name) for uuid, name in list_gpus()], wanted)


def select(installed: Sequence[Device], wanted: str | None) -> list[Device]:
    """Select GPUs in PCI order by the value of CUDA_VISIBLE_DEVICES, as the CUDA driver does; None selects all.

    The list ends at its first invalid entry, and a GPU that is listed twice makes all of them invisible.
    """
    if wanted is None:
        return list(installed)
    chosen: list[Device] = []
    for entry in (part.strip() for part in wanted.split(",")):
        device = _device_of(entry, installed)
        if device is None:
            break
        if device in chosen:
            return []
        chosen.append(device)
    return chosen


def _device_of(entry: str, installed: Sequence[Device]) -> Device | None:
    if entry.isdecimal():
        return next((device for index, device in enumerate(installed) if entry == str(index)), None)
    if entry.startswith("MIG-"):
        # A slice of a GPU: CUDA has it as a device, but NVML lists it only under its GPU.
        return Device(uuid=entry, name="MIG slice") if installed else None
    matches = [device for device in installed if entry.startswith("GPU-") and device.uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


def label(device_id: int | None, devices: Sequence[Device]) -> str:
    """Return the name of a device in the record: ``cpu``, or ``cuda:<index> <UUID or name>``."""
    if device_id is None:
        return "cpu"
    known = devices[device_id].uuid or devices[device_id].name if device_id < len(devices) else ""
    return f"cuda:{device_id} {known}".rstrip()
