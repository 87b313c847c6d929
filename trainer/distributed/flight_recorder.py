"""Read torch's flight recorder, the last collectives of this process; write it into the run directory.

NCCL's watchdog writes its own file when it aborts; a rank that waits long or fails writes one here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
import torch
import torch.distributed as dist

from trainer.agent import code_position
from trainer.contract.record import Collective

ENTRIES = "2000"
"""Size of the recorder: the default of newer torch versions; older ones record nothing by default."""
OLD_NAMES = {
    "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE": "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
}
"""Environment variables of torch, and their names in earlier versions."""
RENAMED_IN = (2, 10)
"""First version of torch that warns about the old names."""
RECORDING = frozenset(("ProcessGroupNCCL", "ProcessGroupGloo"))
"""Backends that record by themselves; ``ProcessGroupNCCL2``, which ``nccl`` means from torch 2.15 on, and in 2.14 with
``TORCH_DIST_USE_NCCL2=1``, does not."""
HOOKED = "c10d:"
"""Beginning of the names of collectives that the hook of torch 2.14 has recorded, in place of the backend's."""
GLOO = "gloo"
LAST = 3
"""Collectives that are described, and that an answer to a request for stacks has."""

_file: Path | None = None
_hooks: WeakKeyDictionary[dist.ProcessGroup, Any] = WeakKeyDictionary()
"""torch's hooks by group, which record as long as they exist."""


def prepare(file: Path, rank: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the environment so that torch records the collectives, and writes them when NCCL aborts.

    Call it before the process group exists. Variables that the user has set keep their values. NCCL writes ``file`` in
    its own format, ``dump`` writes JSON beside it, with ``.json``.
    """
    global _file
    _file = file.with_name(f"{file.name}.json")
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    settings = {
        "TORCH_FR_BUFFER_SIZE": ENTRIES,
        "TORCH_FR_DUMP_TEMP_FILE": str(file).removesuffix(str(rank)),  # torch adds the rank
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        # A collective that fails or takes too long ends the process, and its node agent reports it.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    }
    if version < RENAMED_IN:
        settings |= {old: settings[name] for name, old in OLD_NAMES.items()}
    for name, value in settings.items():
        if name not in environ and OLD_NAMES.get(name, name) not in environ:
            environ[name] = value


def attach(group: dist.ProcessGroup | None) -> bool:
    """Record the collectives of a group whose backend does not; return whether that was needed and is possible.

    torch from 2.15 on attaches the same hook by itself when it makes such a group.
    """
    hook = getattr(torch._C._distributed_c10d, "FlightRecorderHook", None)
    if hook is None or hasattr(dist.distributed_c10d._world, "pg_flight_recorder_hooks"):
        return False
    if group is None or group in _hooks or {type(each).__name__ for each in _backends(group)} <= RECORDING:
        return False
    _hooks[group] = hook.attach(group)
    return True


def attach_all() -> None:
    """Do so for all groups of this process, which a script has made."""
    for group in list(dist.distributed_c10d._world.pg_map) if dist.is_available() else ():
        with contextlib.suppress(RuntimeError):  # torch refuses it: the script trains without
            attach(group)


def _backends(group: Any) -> list[Any]:
    """Return a group's backends, of which its name does not tell the classes: ``nccl`` may be either of two."""
    backends = (group._get_backend(device) for device in group._device_types)
    # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps them.
    return [getattr(backend, "wrapped_pg", backend) for backend in backends]


def dump() -> str:
    """Write the collectives into the file, if one was prepared; describe the last ones, or return an empty string.

    Never waits for a collective and never raises: the caller is about to report a failure.
    """
    if not dist.is_available() or not dist.is_initialized():
        return ""
    with contextlib.suppress(Exception):
        written = _recorded()
        if _file is not None:
            with contextlib.suppress(OSError):
                _file.write_bytes(written)
        return describe_collectives(msgspec.json.decode(written))
    return ""


def last_collectives() -> list[Collective]:
    """Return the last collectives of this process, the oldest first; empty where torch records none.

    Never waits for a collective and never raises: the training goes on meanwhile.
    """
    if not dist.is_available() or not dist.is_initialized():
        return []
    with contextlib.suppress(Exception):
        return collectives_of(msgspec.json.decode(_recorded()))
    return []


code_position.collectives = last_collectives


def collectives_of(recorded: Mapping[str, Any]) -> list[Collective]:
    """Return the last collectives of torch's record, the oldest first."""
    entries = sorted(recorded.get("entries", ()), key=lambda entry: int(entry["record_id"]))
    return [_collective(entry, _status(recorded, entry)) for entry in entries[-LAST:]]


def describe_collectives(recorded: dict[str, Any]) -> str:
    """Describe the last collectives of a record in one line; empty if it has none."""
    if not (last := collectives_of(recorded)):
        return ""
    status = _status(recorded, max(recorded["entries"], key=lambda entry: int(entry["record_id"])))
    begun, done = status.get("last_enqueued_collective"), status.get("last_completed_collective")
    progress = f"; {done} of {begun} are complete" if begun is not None and done is not None else ""
    return f"its last collectives are {', '.join(each.text for each in last)}{progress}"


def _status(recorded: Mapping[str, Any], entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the progress of the process group of an entry; empty if unknown.

    torch's hook counts a collective as complete once it has been issued, which says nothing about its end.
    """
    if str(entry["profiling_name"]).startswith(HOOKED):
        return {}
    status: Mapping[str, Any] = recorded.get("pg_status", {}).get(str(entry["pg_id"]), {})
    return status


def _collective(entry: Mapping[str, Any], status: Mapping[str, Any]) -> Collective:
    is_p2p = bool(entry.get("is_p2p"))
    number = max(int(entry["p2p_seq_id" if is_p2p else "collective_seq_id"]), 0)
    state = "complete" if entry.get("state") == "completed" else str(entry.get("state", "scheduled"))
    # gloo's entries stay "scheduled": only the group's count tells which are complete.
    if not is_p2p and number <= int(status.get("last_completed_collective", -1)):
        state = "complete"
    name = str(entry["profiling_name"]).rpartition(":")[2]
    return Collective(
        name=name.replace("allreduce", "all_reduce").replace("allgather", "all_gather"),  # as backends spell them
        number=number,
        state=state,
        sizes=[[int(size) for size in shape] for shape in entry.get("input_sizes", [])],
        group=" ".join(map(str, entry.get("process_group", [])[1:])),
    )


def _recorded() -> bytes:
    module: Any = torch._C._distributed_c10d
    backends = _backends(dist.group.WORLD)
    # Older versions have the function for NCCL only; other backends, and torch's hook, have a record of their own.
    if "ProcessGroupNCCL" in [type(each).__name__ for each in backends] and hasattr(module, "_dump_nccl_trace_json"):
        return bytes(module._dump_nccl_trace_json())
    dump_json: Callable[..., bytes] = module._dump_fr_trace_json
    # From torch 2.15 on each backend has its own; of a group with several, that of the GPUs.
    names = sorted((each.name() for each in backends), key=GLOO.__eq__) if "backend" in str(dump_json.__doc__) else []
    return bytes(dump_json(backend=names[0]) if names else dump_json())
