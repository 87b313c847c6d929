"""Return rank and world size, and run collectives on CPU and GPU tensors.

Without a process group every function works too, as in a world of one rank.
"""

from __future__ import annotations

import os
import socket
import statistics
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from trainer.contract.backends import is_nccl
from trainer.contract.errors import RequestError, TrainingError
from trainer.distributed.encoding import decode, encode
from trainer.distributed.fairseq_arguments import settings_of
from trainer.distributed.host_copies import HostCopies, begin_copy, host_copies, on_device

Op = Literal["sum", "max", "min"]
Number = TypeVar("Number", Tensor, float, int)

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


Group = dist.ProcessGroup | None
"""A group of ranks; None is that of all."""

_exchanges: dict[str, int] = {}
"""Calls of ``all_gather_list`` by name of the group; ranks at the same point of the program have equal counts."""


def reset_exchange_counts() -> None:
    """Set the counts of exchanges to 0 for new groups."""
    _exchanges.clear()


# ---------------------------------------------------------------------------------------------------------- queries


def get_rank(group: Group = None) -> int:
    """Return this process's rank in a group; 0 without one."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def get_world_size(group: Group = None) -> int:
    """Return the number of ranks of a group; 1 without one."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def is_master(args: Any = None) -> bool:
    """Return whether this is rank 0, which reports, validates and saves for all; by ``args`` of fairseq if given."""
    return (get_rank() if args is None else settings_of(args).distributed_rank) == 0


def get_default_group() -> dist.ProcessGroup | None:
    """Return the group of all ranks; None without a group."""
    return dist.group.WORLD if dist.is_initialized() else None


# ------------------------------------------------------------------------------------------------------ collectives


def _on_backend_device(tensor: Tensor, group: Group = None) -> Tensor:
    """Return the tensor on a device that the backend supports: nccl takes CUDA tensors only."""
    if is_nccl(dist.get_backend(group)):
        return tensor.to(torch.device("cuda", torch.cuda.current_device())).contiguous()
    return tensor.contiguous()


def _as_tensor(value: Tensor | float) -> Tensor:
    """Return a tensor unchanged, a number as float64: torch's default float32 would round it."""
    return value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


def barrier(group: Group = None) -> None:
    """Block until every rank of the group has called this."""
    if get_world_size(group) > 1:
        dist.barrier(group)


def all_reduce(tensor: Tensor, group: Group | Op = None, op: Op = "sum") -> Tensor:
    """Reduce the tensor over all ranks of the group, in place, and return it.

    An operation in the place of ``group`` is ``op``, for all ranks.
    """
    if isinstance(group, str):
        op = group
        group = None
    if get_world_size(group) > 1:
        moved = _on_backend_device(tensor.detach(), group)
        dist.all_reduce(moved, _OPS[op], group=group)
        if moved.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(moved)
    return tensor


def sum_async(value: Tensor | float, device: torch.device) -> Callable[[], Tensor]:
    """Start summing a number, or those of a tensor, over all ranks; the returned callable gives the sum, in float64.

    On a CPU the callable waits for the other ranks; on a GPU the sum stays on the device and the host does not wait.
    """
    if isinstance(value, Tensor):
        total = value.detach().to(device, torch.float64, non_blocking=True).clone()
    else:
        total = torch.full((), value, dtype=torch.float64, device=device)  # a copy from the host would wait
    if get_world_size() == 1:
        return lambda: total
    moved = _on_backend_device(total.reshape(-1))
    work = dist.all_reduce(moved, async_op=True)

    def result() -> Tensor:
        assert work is not None
        work.wait()  # nccl: the current CUDA stream waits, not this thread
        return moved.reshape(total.shape)

    return result


def max_async(values: Sequence[int] | Tensor, copies: HostCopies | None = None) -> Callable[[], list[int]]:
    """Start taking the maximum of each number over all ranks; the returned callable waits for the result.

    With nccl it waits for kernels queued before this call, not for those queued afterwards.
    """
    if isinstance(values, Tensor):
        # A clone, because the reduction is in place.
        moved = _on_backend_device(values.clone()) if get_world_size() > 1 else values
    elif get_world_size() == 1:
        return lambda: [int(value) for value in values]
    else:
        on_gpu = is_nccl(dist.get_backend())
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


def all_reduce_dict(
    data: Mapping[str, Number], device: torch.device | None = None, group: Group = None
) -> dict[str, Number]:
    """Sum numbers and tensors by name over all ranks of the group, in float64; keep the order of keys.

    A number comes back as a float, a tensor as a float64 tensor of its shape on its device.

    Raises:
        TrainingError: the names or shapes differ between ranks.
    """
    names = sorted(data)
    values: list[Tensor] = [_as_tensor(data[name]) for name in names]
    where = device or torch.device("cpu")
    sizes = [value.numel() for value in values]
    _require_same_shapes({name: tuple(value.shape) for name, value in zip(names, values, strict=True)}, where, group)
    flat = torch.cat([torch.empty(0, dtype=torch.float64), *(value.cpu().double().reshape(-1) for value in values)])
    parts = torch.split_with_sizes(all_reduce(flat.to(where), group), sizes) if sizes else ()
    sums: dict[str, Any] = {}
    for name, value, part in zip(names, values, parts, strict=True):
        summed = part.reshape(value.shape)
        sums[name] = summed.to(value.device) if isinstance(data[name], Tensor) else float(summed)
    return {name: sums[name] for name in data}


def _require_same_shapes(shapes: Mapping[str, tuple[int, ...]], device: torch.device, group: Group) -> None:
    """Compare a checksum of names and shapes over the ranks.

    A collective over unequal sizes would hang or fail without naming the values.
    """
    own = zlib.crc32(repr(shapes).encode())
    extremes = all_reduce(torch.tensor([own, -own], dtype=torch.int64, device=device), group, "max").tolist()
    if extremes != [own, -own]:
        raise TrainingError(f"ranks reduce different values: rank {get_rank()} has {', '.join(shapes) or 'none'}")


def all_gather_list(data: Any, group: Group = None, max_size: int | None = None) -> list[Any]:
    """Return the data of every rank of the group, in rank order; the ranks exchange the sizes first, then the bytes.

    The data is None, numbers, strings, bytes, tensors, and lists, tuples, sets and dicts of them. Tensors come back on
    the CPU. Every rank holds world size times the largest rank's bytes while it gathers. ``max_size`` is accepted as in
    fairseq and HetSeq, and not needed: data may have any size.

    Raises:
        TypeError: a value has another type.
        TrainingError: the ranks have called this function a different number of times.
    """
    # Counted before encoding can fail, so that a rank whose data was refused is detected at the next exchange.
    exchange = _next_exchange(group)
    mine = encode(data)
    if get_world_size(group) == 1:
        return [decode(mine)]
    sizes = _exchange_sizes(exchange, mine.numel(), group)
    sent = torch.zeros(max(sizes), dtype=torch.uint8)
    sent[: mine.numel()] = mine
    sent = _on_backend_device(sent, group)
    received = [torch.empty_like(sent) for _ in sizes]
    dist.all_gather(received, sent, group=group)
    return [decode(part[:size]) for part, size in zip(received, sizes, strict=True)]


def _next_exchange(group: Group) -> int:
    """Return the number of this exchange in its group, from 1."""
    named = group or get_default_group()
    name = "" if named is None else named.group_name
    _exchanges[name] = _exchanges.get(name, 0) + 1
    return _exchanges[name]


def _exchange_sizes(exchange: int, size: int, group: Group) -> list[int]:
    """Return the number of bytes that each rank will send; raise if ranks are at different exchanges."""
    mine = _on_backend_device(torch.tensor([exchange, size], dtype=torch.int64), group)
    gathered = [torch.empty_like(mine) for _ in range(get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    pairs = torch.stack(gathered).tolist()
    counts = [count for count, _ in pairs]
    if len(set(counts)) > 1:
        usual = statistics.mode(counts)
        others = [f"rank {rank} at {count}" for rank, count in enumerate(counts) if count != usual]
        raise TrainingError(f"ranks are out of step at exchange {usual}: {', '.join(others)}")
    return [size for _, size in pairs]


def broadcast_object(data: Any, src_rank: int = 0, group: Group = None, dist_device: torch.device | None = None) -> Any:
    """Return the source's data on every rank of the group. Same types as ``all_gather_list``.

    The source is a rank among all. ``dist_device`` is accepted as in fairseq; the data goes over the device that the
    backend needs.
    """
    if get_world_size(group) == 1:
        return decode(encode(data))
    sends = get_rank() == src_rank
    mine = encode(data) if sends else torch.empty(0, dtype=torch.uint8)
    size = _on_backend_device(torch.tensor([mine.numel()], dtype=torch.int64), group)
    dist.broadcast(size, src_rank, group=group)
    data_bytes = mine if sends else torch.empty(int(size), dtype=torch.uint8)
    # Bytes of a broadcast that are on the GPU at a time: a checkpoint may be larger than its free memory.
    broadcast_bytes = 64 << 20
    for piece in torch.split(data_bytes, broadcast_bytes):
        wire = _on_backend_device(piece, group)
        dist.broadcast(wire, src_rank, group=group)
        if not sends and wire.data_ptr() != piece.data_ptr():
            piece.copy_(wire)
    return decode(data_bytes)


def from_master(compute: Callable[[], Any]) -> Any:
    """Call a function on rank 0 only and return its result, data as of ``all_gather_list``, on every rank.

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


class RankRequest(msgspec.Struct, kw_only=True, frozen=True):
    """Options and other values with which one rank was started."""

    rank: int
    process: str
    """Process of the rank, for a message: ``pid 7 on host``."""
    values: dict[str, str]
    """Values by the name used in messages, such as ``--lr``."""


def disagreement(first: RankRequest, second: RankRequest) -> str:
    """Return one line with the values in which two ranks differ, by rank and host; empty if they agree."""
    low, high = sorted((first, second), key=lambda request: request.rank)
    names = [name for name in {**low.values, **high.values} if low.values.get(name) != high.values.get(name)]
    if not names:
        return ""
    named = 3  # differing values listed in a refusal; the rest is counted
    differences = [
        f"{name}: {_shown(low, name)} on rank {low.rank} ({low.process}), "
        f"{_shown(high, name)} on rank {high.rank} ({high.process})"
        for name in names[:named]
    ]
    more = f"; and {len(names) - named} more" if len(names) > named else ""
    return f"ranks have different settings: {'; '.join(differences)}{more}"


def require_same(values: Mapping[str, str]) -> None:
    """Require equal values on all ranks of the group; a collective, and every rank raises the same message.

    DDP compares shapes only: ranks with different learning rates or data files would train without an error.

    Raises:
        RequestError: values differ; one line names the ranks, their hosts, the value's name and both values.
    """
    own = f"pid {os.getpid()} on {socket.gethostname()}"
    rows = all_gather_list((own, dict(values)))
    requests = [RankRequest(rank=rank, process=process, values=held) for rank, (process, held) in enumerate(rows)]
    for request in requests[1:]:
        if refusal := disagreement(requests[0], request):
            raise RequestError(refusal)


def _shown(request: RankRequest, name: str) -> str:
    value = request.values.get(name, "none")
    # Maximum characters of a value in a refusal: enough for a path, too few for a list of a thousand batch sizes.
    longest = 120
    return value if len(value) <= longest else f"{value[: longest - 1]}…"
