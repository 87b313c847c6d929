"""Return rank and world size, and run collectives on CPU and GPU tensors.

Without a process group every function works too, as in a world of one rank.
"""

from __future__ import annotations

import statistics
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.contract.errors import RequestError, TrainingError
from trainer.distributed.encoding import decode, encode
from trainer.distributed.host_copies import HostCopies, begin_copy, host_copies, on_device

Op = Literal["sum", "max", "min"]
Number = TypeVar("Number", Tensor, float, int)

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

BROADCAST_BYTES = 64 << 20
"""Bytes of a broadcast that are on the GPU at a time: a checkpoint may be larger than its free memory."""

_exchanges = 0
"""Calls of ``all_gather_list`` in this group so far; ranks at the same point of the program have equal counts."""


def reset_exchange_count() -> None:
    """Set the count of exchanges to 0 for a new group."""
    global _exchanges
    _exchanges = 0


# ---------------------------------------------------------------------------------------------------------- queries


def get_rank() -> int:
    """Return this process's rank; 0 without a group."""
    return dist.get_rank() if dist.is_initialized() else 0


def get_world_size() -> int:
    """Return the number of ranks; 1 without a group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_master() -> bool:
    """Return whether this is rank 0, which reports, validates and saves for all."""
    return get_rank() == 0


def get_default_group() -> dist.ProcessGroup | None:
    """Return the group of all ranks; None without a group."""
    return dist.group.WORLD if dist.is_initialized() else None


# ------------------------------------------------------------------------------------------------------ collectives


def _on_backend_device(tensor: Tensor) -> Tensor:
    """Return the tensor on a device that the backend supports: nccl takes CUDA tensors only."""
    if dist.get_backend() == "nccl":
        return tensor.to(torch.device("cuda", torch.cuda.current_device())).contiguous()
    return tensor.contiguous()


def _as_tensor(value: Tensor | float) -> Tensor:
    """Return a tensor unchanged, a number as float64: torch's default float32 would round it."""
    return value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


def barrier() -> None:
    """Block until every rank has called this."""
    if get_world_size() > 1:
        dist.barrier()


def all_reduce(tensor: Tensor, op: Op = "sum") -> Tensor:
    """Reduce the tensor over all ranks, in place, and return it."""
    if get_world_size() > 1:
        moved = _on_backend_device(tensor.detach())
        dist.all_reduce(moved, _OPS[op])
        if moved.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(moved)
    return tensor


def sum_async(value: Tensor | float, device: torch.device) -> Callable[[], Tensor]:
    """Start summing a number over all ranks; the returned callable gives the sum [], in float64.

    On a CPU the callable waits for the other ranks; on a GPU the sum stays on the device and the host does not wait.

    Args:
        value: a number or a tensor of one element.
        device: device of the sum.
    """
    if isinstance(value, Tensor):
        total = value.detach().to(device, torch.float64, non_blocking=True).reshape(1).clone()
    else:
        total = torch.full((1,), value, dtype=torch.float64, device=device)  # a copy from the host would wait
    if get_world_size() == 1:
        return lambda: total.reshape(())
    moved = _on_backend_device(total)
    work = dist.all_reduce(moved, async_op=True)

    def result() -> Tensor:
        assert work is not None
        work.wait()  # nccl: the current CUDA stream waits, not this thread
        return moved.reshape(())

    return result


def max_async(values: Sequence[int] | Tensor, copies: HostCopies | None = None) -> Callable[[], list[int]]:
    """Start taking the maximum of each number over all ranks; the returned callable waits for the result.

    With nccl it waits for kernels queued before this call, not for those queued afterwards.

    Args:
        values: numbers, or a tensor of them [numbers], int64.
        copies: pool of copies to the host; default: that of the result's device.
    """
    if isinstance(values, Tensor):
        # A clone, because the reduction is in place.
        moved = _on_backend_device(values.clone()) if get_world_size() > 1 else values
    elif get_world_size() == 1:
        return lambda: [int(value) for value in values]
    else:
        on_gpu = dist.get_backend() == "nccl"
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        moved = on_device([int(value) for value in values], device)
    copies = copies or host_copies(moved.device)
    if get_world_size() == 1:
        return begin_copy(moved, copies).numbers
    work = dist.all_reduce(moved, dist.ReduceOp.MAX, async_op=True)
    assert work is not None
    if copies is None:

        def reduced() -> list[int]:
            work.wait()
            return list(moved.tolist())

        return reduced
    work.wait()  # nccl: the current CUDA stream waits, not this thread
    return copies.begin(moved).numbers


def all_reduce_dict(data: Mapping[str, Number], device: torch.device | None = None) -> dict[str, Number]:
    """Sum numbers and tensors by name over all ranks, in float64; keep the order of keys.

    A number comes back as a float, a tensor as a float64 tensor of its shape on its device.

    Args:
        data: values by name; names and shapes are equal on every rank, in any order.
        device: device of the reduction; default: the one that the backend needs.

    Raises:
        TrainingError: the names or shapes differ between ranks.
    """
    names = sorted(data)
    values: list[Tensor] = [_as_tensor(data[name]) for name in names]
    where = device or torch.device("cpu")
    sizes = [value.numel() for value in values]
    _require_same_shapes({name: tuple(value.shape) for name, value in zip(names, values, strict=True)}, where)
    flat = torch.cat([torch.empty(0, dtype=torch.float64), *(value.cpu().double().reshape(-1) for value in values)])
    parts = torch.split_with_sizes(all_reduce(flat.to(where)), sizes) if sizes else ()
    sums: dict[str, Any] = {}
    for name, value, part in zip(names, values, parts, strict=True):
        summed = part.reshape(value.shape)
        sums[name] = summed.to(value.device) if isinstance(data[name], Tensor) else float(summed)
    return {name: sums[name] for name in data}


def _require_same_shapes(shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
    """Compare a checksum of names and shapes over the ranks.

    A collective over unequal sizes would hang or fail without naming the values.
    """
    own = zlib.crc32(repr(shapes).encode())
    extremes = all_reduce(torch.tensor([own, -own], dtype=torch.int64, device=device), "max").tolist()
    if extremes != [own, -own]:
        raise TrainingError(f"ranks reduce different values: rank {get_rank()} has {', '.join(shapes) or 'none'}")


def all_gather_list(data: Any) -> list[Any]:
    """Return every rank's data, in rank order; the ranks exchange the sizes first, then the bytes.

    Args:
        data: None, numbers, strings, bytes, tensors, and lists, tuples, sets and dicts of them. Tensors come back on
            the CPU. Every rank holds world size times the largest rank's bytes while it gathers.

    Raises:
        TypeError: a value has another type.
        TrainingError: the ranks have called this function a different number of times.
    """
    global _exchanges
    # Counted before encoding can fail, so that a rank whose data was refused is detected at the next exchange.
    _exchanges += 1
    mine = encode(data)
    if get_world_size() == 1:
        return [decode(mine)]
    sizes = _exchange_sizes(mine.numel())
    sent = torch.zeros(max(sizes), dtype=torch.uint8)
    sent[: mine.numel()] = mine
    sent = _on_backend_device(sent)
    received = [torch.empty_like(sent) for _ in sizes]
    dist.all_gather(received, sent)
    return [decode(part[:size]) for part, size in zip(received, sizes, strict=True)]


def _exchange_sizes(size: int) -> list[int]:
    """Return the number of bytes that each rank will send; raise if ranks are at different exchanges."""
    mine = _on_backend_device(torch.tensor([_exchanges, size], dtype=torch.int64))
    gathered = [torch.empty_like(mine) for _ in range(get_world_size())]
    dist.all_gather(gathered, mine)
    pairs = torch.stack(gathered).tolist()
    counts = [count for count, _ in pairs]
    if len(set(counts)) > 1:
        usual = statistics.mode(counts)
        others = [f"rank {rank} at {count}" for rank, count in enumerate(counts) if count != usual]
        raise TrainingError(f"ranks are out of step at exchange {usual}: {', '.join(others)}")
    return [size for _, size in pairs]


def broadcast_object(data: Any, source: int = 0) -> Any:
    """Return the source's data on every rank; ``data`` is ignored on the others. Same types as ``all_gather_list``."""
    if get_world_size() == 1:
        return decode(encode(data))
    sends = get_rank() == source
    mine = encode(data) if sends else torch.empty(0, dtype=torch.uint8)
    size = _on_backend_device(torch.tensor([mine.numel()], dtype=torch.int64))
    dist.broadcast(size, source)
    data_bytes = mine if sends else torch.empty(int(size), dtype=torch.uint8)
    for piece in torch.split(data_bytes, BROADCAST_BYTES):
        wire = _on_backend_device(piece)
        dist.broadcast(wire, source)
        if not sends and wire.data_ptr() != piece.data_ptr():
            piece.copy_(wire)
    return decode(data_bytes)


def from_master(compute: Callable[[], Any]) -> Any:
    """Call a function on rank 0 only and return its result on every rank.

    Args:
        compute: returns data of the types that ``all_gather_list`` takes.

    Raises:
        RequestError: ``compute`` has raised one on rank 0; every rank raises it with the same message.
    """
    if get_world_size() == 1:
        return compute()
    result, refusal = None, ""
    if is_master():
        try:
            result = compute()
        except RequestError as error:
            refusal = str(error).encode(errors="backslashreplace").decode()  # a path may hold surrogates
    received, refusal = broadcast_object((result, refusal))
    if refusal:
        raise RequestError(refusal)
    return result if is_master() else received
