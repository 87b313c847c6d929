"""NVML through ctypes, so that no Python package is needed for it.

Standard library only, since this file travels to remote hosts with ``inventory.py``. Supported queries differ between
GPUs and drivers, so a refused query gives None. Layouts and codes are those of ``nvml.h``, which NVIDIA keeps
compatible.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_char, c_int, c_uint, c_ulonglong, c_void_p, create_string_buffer
from dataclasses import dataclass
from typing import Any, cast

from trainer.host.gpu_claims import GpuClaim

LIBRARY = "libnvidia-ml.so.1"
DONE, INSUFFICIENT_SIZE = 0, 7
NOT_AVAILABLE = (1 << 64) - 1
"""Value for the memory of a process that the driver does not know."""
TEMPERATURE_GPU, CLOCK_SM, COMPUTEMODE_PROHIBITED = 0, 1, 2

NO_LIBRARY = "no NVIDIA driver on this machine; CPU ranks work"
REFUSALS = {
    4: "no permission to use the NVIDIA driver: check the permissions of /dev/nvidiactl",
    9: "the NVIDIA driver is installed but not loaded: try `nvidia-smi`, then dmesg",
    18: "the NVIDIA driver was updated while loaded: reboot or reload it",
}
"""Reasons why the driver cannot be queried at all, by NVML's code."""

THROTTLE_REASONS = (
    (0x002, "application_clocks"),
    (0x004, "power_cap"),
    (0x008, "hardware_slowdown"),
    (0x010, "sync_boost"),
    (0x020, "thermal_software"),
    (0x040, "thermal_hardware"),
    (0x080, "power_brake"),
    (0x100, "display_clocks"),
)
"""NVML's bits of the reasons for a clock below its maximum, without that of an idle GPU (0x001)."""


class _MemoryV2(Structure):
    _fields_ = (
        ("version", c_uint),
        ("total", c_ulonglong),
        ("reserved", c_ulonglong),
        ("free", c_ulonglong),
        ("used", c_ulonglong),
    )


class _Memory(Structure):
    _fields_ = (("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong))


class _Utilization(Structure):
    _fields_ = (("gpu", c_uint), ("memory", c_uint))


class _Pci(Structure):
    _fields_ = (("legacy", c_char * 16), ("numbers", c_uint * 5), ("bus_id", c_char * 32))


class _Process(Structure):
    _fields_ = (("pid", c_uint), ("memory", c_ulonglong), ("gpu_instance", c_uint), ("compute_instance", c_uint))


class _ProcessV1(Structure):
    _fields_ = (("pid", c_uint), ("memory", c_ulonglong))


@dataclass(frozen=True, kw_only=True)
class GpuReadings:
    """Readings that change while a GPU works; None for a refused query."""

    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    utilization_percent: int | None = None
    temperature_celsius: int | None = None
    power_watts: float | None = None
    sm_clock_mhz: int | None = None
    max_sm_clock_mhz: int | None = None
    throttle_reasons: tuple[str, ...] = ()
    """Of ``THROTTLE_REASONS``."""


@dataclass(frozen=True, kw_only=True)
class GpuProcess:
    """A process that holds memory on a GPU."""

    pid: int
    user: str | None = None
    """Its owner; None for a process that is invisible here, in a container for instance."""
    name: str | None = None
    memory_bytes: int | None = None
    kind: str = "compute"
    """``compute`` or ``graphics``."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One NVIDIA GPU."""

    index: int
    """NVML's index: PCI order."""
    uuid: str
    pci_bus_id: str = ""
    name: str = ""
    capability: tuple[int, int] | None = None
    """CUDA compute capability, such as 8 and 0."""
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    utilization_percent: float | None = None
    """Share of the last sampling period in which any kernel ran, 0 to 100."""
    temperature_celsius: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    sm_clock_mhz: int | None = None
    max_sm_clock_mhz: int | None = None
    throttle_reasons: tuple[str, ...] = ()
    """Reasons for a clock below its maximum at that moment: names of ``THROTTLE_REASONS``."""
    mig: bool = False
    """Whether it is split into instances (MIG): no process can use it as a whole."""
    prohibited: bool = False
    """Whether its compute mode is *prohibited*: no process may use it."""
    processes: tuple[GpuProcess, ...] | None = None
    """None if the driver does not report them."""
    claim: GpuClaim | None = None
    """The run that claimed it, possibly before the driver shows a process; None if unclaimed."""


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Facts of the driver of this machine and of its GPUs."""

    driver: str | None = None
    cuda: str | None = None
    """Newest CUDA version that the driver runs."""
    gpus: tuple[Gpu | None, ...] = ()
    """GPUs in PCI order; None for one that has fallen off the bus."""
    refusal: str = ""
    """Reason why the driver could not be queried, one line; empty if it could."""


def ask_driver() -> Answers:
    """Query the driver for all facts of all GPUs."""
    nvml = load_driver()
    if nvml is None:
        return Answers(refusal=NO_LIBRARY)
    if refusal := nvml.start():
        return Answers(refusal=refusal)
    try:
        version = nvml.number("nvmlSystemGetCudaDriverVersion_v2", kind=c_int)
        return Answers(
            driver=nvml.text("nvmlSystemGetDriverVersion"),
            cuda=None if version is None else f"{version // 1000}.{version % 1000 // 10}",
            gpus=tuple(nvml.gpu(index) for index in range(nvml.count())),
        )
    finally:
        nvml.stop()


def list_gpus() -> list[tuple[str, str]]:
    """Return UUID and name of every GPU in PCI order; an empty list if one of them is unknown."""
    nvml = load_driver()
    if nvml is None or nvml.start():
        return []
    try:
        gpus = []
        for index in range(nvml.count()):
            device = nvml.handle(index)
            if device is None:
                return []
            uuid, name = nvml.text("nvmlDeviceGetUUID", device), nvml.text("nvmlDeviceGetName", device)
            if uuid is None or name is None:
                return []
            gpus.append((uuid, name))
        return gpus
    finally:
        nvml.stop()


def load_driver() -> Nvml | None:
    """Load the NVML library; return None on a machine without it."""
    try:
        return Nvml(ctypes.CDLL(LIBRARY))
    except OSError:
        return None


class Nvml:
    """NVML library; a refused query returns None."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def start(self) -> str:
        """Initialize NVML; return the reason of a failure in one line, else an empty string."""
        code = self.call("nvmlInitWithFlags", c_uint(0))
        if code == DONE:
            return ""
        return REFUSALS.get(code or 0) or f"the NVIDIA driver refused: {self._error_text(code)}"

    def stop(self) -> None:
        self.call("nvmlShutdown")

    def count(self) -> int:
        return self.number("nvmlDeviceGetCount_v2") or 0

    def handle(self, index: int) -> Any:
        device = c_void_p()
        return device if self.call("nvmlDeviceGetHandleByIndex_v2", c_uint(index), byref(device)) == DONE else None

    def handle_of(self, uuid: str) -> Any:
        """Return the handle of the GPU with a UUID; None if there is none."""
        device = c_void_p()
        return device if self.call("nvmlDeviceGetHandleByUUID", uuid.encode(), byref(device)) == DONE else None

    def index_of(self, device: Any) -> int | None:
        """Return the index of a GPU in PCI order."""
        return self.number("nvmlDeviceGetIndex", args=(device,))

    def call(self, name: str, *args: Any) -> int | None:
        """Call a function; return NVML's code, or None if this driver lacks the function."""
        try:
            function = getattr(self._library, name)
        except AttributeError:
            return None
        return cast(int, function(*args))

    def _error_text(self, code: int | None) -> str:
        try:
            function = self._library.nvmlErrorString
        except AttributeError:
            return f"code {code}"
        function.restype = ctypes.c_char_p
        return (function(c_int(code or 0)) or b"").decode("utf-8", "replace")

    def number(self, *names: str, args: Sequence[Any] = (), kind: Any = c_uint) -> int | None:
        """Return the number, of a C type, that the first function to succeed writes into its last argument."""
        for name in names:
            number = kind(0)
            if self.call(name, *args, byref(number)) == DONE:
                return int(number.value)
        return None

    def text(self, name: str, *args: Any) -> str | None:
        """Return the text that a query writes into a buffer; None if it is refused."""
        buffer = create_string_buffer(96)
        return _decoded(buffer.value) if self.call(name, *args, buffer, c_uint(96)) == DONE else None

    def struct(self, name: str, device: Any, struct: Any) -> Any:
        """Return the struct after the query has filled it; None if it is refused."""
        return struct if self.call(name, device, byref(struct)) == DONE else None

    def gpu(self, index: int) -> Gpu | None:
        """Query all facts of one GPU; return None if it has fallen off the bus."""
        device = self.handle(index)
        if device is None:
            return None
        pci = self.struct("nvmlDeviceGetPciInfo_v3", device, _Pci())
        mig, pending = c_uint(0), c_uint(0)
        split = self.call("nvmlDeviceGetMigMode", device, byref(mig), byref(pending)) == DONE
        return Gpu(
            index=index,
            uuid=self.text("nvmlDeviceGetUUID", device) or "",
            pci_bus_id="" if pci is None else _decoded(pci.bus_id).lower(),
            name=self.text("nvmlDeviceGetName", device) or "",
            capability=self._capability(device),
            power_limit_watts=self._watts("nvmlDeviceGetEnforcedPowerLimit", device),
            mig=split and mig.value == 1,
            prohibited=self.number("nvmlDeviceGetComputeMode", args=(device,)) == COMPUTEMODE_PROHIBITED,
            processes=self._all_processes(device),
            **vars(self.readings(device)),
        )

    def readings(self, device: Any) -> GpuReadings:
        # Version 2 does not count the driver's own memory as used.
        memory = self.struct(
            "nvmlDeviceGetMemoryInfo_v2", device, _MemoryV2(version=ctypes.sizeof(_MemoryV2) | 2 << 24)
        ) or self.struct("nvmlDeviceGetMemoryInfo", device, _Memory())
        utilization = self.struct("nvmlDeviceGetUtilizationRates", device, _Utilization())
        clock = (device, c_uint(CLOCK_SM))
        events, throttling = "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"
        mask = self.number(events, throttling, args=(device,), kind=c_ulonglong) or 0
        return GpuReadings(
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            utilization_percent=None if utilization is None else int(utilization.gpu),
            temperature_celsius=self.number("nvmlDeviceGetTemperature", args=(device, c_uint(TEMPERATURE_GPU))),
            power_watts=self._watts("nvmlDeviceGetPowerUsage", device),
            sm_clock_mhz=self.number("nvmlDeviceGetClockInfo", args=clock),
            max_sm_clock_mhz=self.number("nvmlDeviceGetMaxClockInfo", args=clock),
            throttle_reasons=tuple(name for bit, name in THROTTLE_REASONS if mask & bit),
        )

    def _capability(self, device: Any) -> tuple[int, int] | None:
        major, minor = c_int(0), c_int(0)
        done = self.call("nvmlDeviceGetCudaComputeCapability", device, byref(major), byref(minor)) == DONE
        return (major.value, minor.value) if done else None

    def _watts(self, name: str, device: Any) -> float | None:
        milliwatts = self.number(name, args=(device,))
        return None if milliwatts is None else milliwatts / 1000

    def _all_processes(self, device: Any) -> tuple[GpuProcess, ...] | None:
        compute = self._processes("nvmlDeviceGetComputeRunningProcesses", device, "compute")
        graphics = self._processes("nvmlDeviceGetGraphicsRunningProcesses", device, "graphics")
        if compute is None and graphics is None:
            return None
        by_pid = {**(graphics or {}), **(compute or {})}  # one that is in both lists is a compute process
        return tuple(by_pid[pid] for pid in sorted(by_pid))

    def _processes(self, name: str, device: Any, kind: str) -> dict[int, GpuProcess] | None:
        for suffix, layout in (("_v3", _Process), ("_v2", _Process), ("", _ProcessV1)):
            capacity = 0
            for _ in range(4):  # processes start and end between two calls
                count, entries = c_uint(capacity), (layout * max(capacity, 1))()
                code = self.call(name + suffix, device, byref(count), ctypes.cast(entries, POINTER(layout)))
                if code != INSUFFICIENT_SIZE:
                    break
                capacity = count.value + 8
            if code == DONE:
                return {
                    entry.pid: GpuProcess(
                        pid=entry.pid, memory_bytes=None if entry.memory == NOT_AVAILABLE else entry.memory, kind=kind
                    )
                    for entry in entries[: min(count.value, capacity)]
                }
        return None


def _decoded(value: bytes) -> str:
    return value.decode("utf-8", "replace")
