"""Do all ranks still hold the same model? A checksum of every parameter and buffer, compared now and then.

DDP keeps replicas equal only as long as every rank applies the same update; a rank that skips one, steps with another
learning rate or has a bad memory chip trains on alone, and nothing fails. The check costs one pass over the
parameters at the speed of memory and one collective of a few bytes.
"""

from __future__ import annotations

import hashlib
import math
import struct
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.record import Checksum, Finding

DRIFT = 1e-6
"""Relative difference of a tensor's norm that counts as drift between unlike processors, not as desync (fairseq)."""


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Checksums of a model's tensors, in the order of their names."""

    parameters: tuple[int, ...]
    buffers: tuple[int, ...]

    @property
    def digests(self) -> tuple[int, int]:
        """One unsigned 64-bit number for all parameters and one for all buffers."""
        return _digest(self.parameters), _digest(self.buffers)


def fingerprint(model: nn.Module) -> Fingerprint:
    """Return checksums that are equal when, and practically only when, all tensors are bit for bit equal."""
    tensors = [tensor for _, tensor in _parameters(model)]
    count = len(tensors)
    tensors += [tensor for _, tensor in _buffers(model)]
    if not tensors:
        return Fingerprint(parameters=(), buffers=())
    with torch.no_grad():
        sums = torch.stack([_checksum(tensor) for tensor in tensors]).tolist()
    return Fingerprint(parameters=tuple(sums[:count]), buffers=tuple(sums[count:]))


def check(
    model: nn.Module,
    *,
    step: int,
    rank: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    now: float | None = None,
) -> list[Checksum | Finding]:
    """Compare the model across the ranks; all of them call this at the same step.

    Ranks on unlike processors may differ in the last bits of what they compute by themselves. Among such ranks a
    tensor counts as equal while its norms agree to ``DRIFT``, and the difference is reported as drift.

    Args:
        model: The model inside DDP.
        step: Optimizer steps done.
        rank: This process's global rank.
        device: Where the process group's tensors live.
        group: The ranks to compare; None for all.
        now: Unix seconds, for the events.

    Returns:
        This rank's checksum and, on the group's first rank, what was found.
    """
    moment = time.time() if now is None else now
    own = fingerprint(model)
    digests = own.digests
    events: list[Checksum | Finding] = [
        Checksum(time=moment, rank=rank, step=step, parameters=f"{digests[0]:016x}", buffers=f"{digests[1]:016x}")
    ]
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return events
    peers = _Peers(device, group)
    # The collectives carry signed numbers.
    held = [_processor(device), *(digest - 2**63 for digest in digests)]
    if peers.agree(held):
        return events
    rows = peers.gather([rank, *held], torch.int64)
    ranks = [int(row[0]) for row in rows]
    unlike = len({row[1] for row in rows}) > 1
    for column, what, tensors, sums in (
        (2, "parameter", _parameters(model), own.parameters),
        (3, "buffer", _buffers(model), own.buffers),
    ):
        if len({row[column] for row in rows}) > 1:
            told = _examine(what, tensors, sums, ranks=ranks, unlike=unlike, peers=peers)
            if rank == ranks[0]:
                events.append(_finding(told, what=what, time=moment, step=step))
    return events


@dataclass(frozen=True, kw_only=True)
class _Difference:
    """What sets some ranks apart."""

    ranks: list[int]
    """The smaller part; of two equal parts the one without the first rank."""
    where: str
    drift: float | None
    """Largest relative difference of a norm, when it is small and the processors are unlike."""


def _examine(
    what: str,
    tensors: Sequence[tuple[str, Tensor]],
    sums: Sequence[int],
    *,
    ranks: Sequence[int],
    unlike: bool,
    peers: _Peers,
) -> _Difference:
    """Find the first differing tensor and the ranks that stand apart; every rank takes part, with the same calls."""
    counts = [row[0] for row in peers.gather([len(sums)], torch.int64)]
    if len(set(counts)) > 1:
        return _Difference(ranks=_minority(counts, ranks), where=f"another number of {what}s", drift=None)
    rows = peers.gather(sums, torch.int64)
    differing = [index for index in range(len(sums)) if len({row[index] for row in rows}) > 1]
    where = f"first in {what} {tensors[differing[0]][0]} ({len(differing)} of {len(sums)} differ)"
    apart = _minority([tuple(row[index] for index in differing) for row in rows], ranks)
    drift = None
    if unlike:
        norms = torch.stack([torch.linalg.vector_norm(tensors[index][1].detach().double()) for index in differing])
        gathered = peers.gather(norms.tolist(), torch.float64)
        largest = max(_spread(column) for column in zip(*gathered, strict=True))
        drift = largest if largest <= DRIFT else None
    return _Difference(ranks=apart, where=where, drift=drift)


def _finding(difference: _Difference, *, what: str, time: float, step: int) -> Finding:
    ranks = difference.ranks
    who = f"rank {ranks[0]} holds" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} hold"
    finding = Finding(
        time=time,
        kind="desync",
        severity="critical" if what == "parameter" else "warning",
        rank=ranks[0],
        step=step,
        cause=f"{what}s",
        message=f"{who} other {what}s than the rest, {difference.where}",
        advice="stop and resume from the last checkpoint; look for a step, a learning rate or a random choice "
        "that depends on the rank",
    )
    if difference.drift is not None:
        finding.severity, finding.cause = "info", "drift"
        finding.message = f"unlike processors drift apart in the last bits, {difference.where}"
        finding.evidence = {"relative_difference": difference.drift}
        finding.advice = "small amounts are normal; a checkpoint holds rank 0's values"
    return finding


class _Peers:
    """The ranks that are compared."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self._device = device
        self._group = group

    def agree(self, numbers: Sequence[int]) -> bool:
        """Tell whether all ranks hold the same numbers, by one reduction however many ranks there are."""
        # The largest number and the complement of the smallest, which has no overflow as the negative would.
        extremes = torch.tensor([*numbers, *(~number for number in numbers)], dtype=torch.int64, device=self._device)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self._group)
        reduced = extremes.tolist()
        return all(high == ~low for high, low in zip(reduced, reduced[len(numbers) :], strict=False))

    def gather(self, row: Sequence[float], dtype: torch.dtype) -> list[list[int]] | list[list[float]]:
        """Return every rank's row, in the group's order; rows are of equal length."""
        own = torch.tensor(row, dtype=dtype, device=self._device)
        rows = [torch.empty_like(own) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(rows, own, group=self._group)
        gathered: list[list[int]] = torch.stack(rows).tolist()
        return gathered


def _parameters(model: nn.Module) -> list[tuple[str, Tensor]]:
    return list(model.named_parameters())


def _buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Buffers that should be equal: not the statistics of BatchNorm, which are of each rank's own data."""
    own_data = {
        id(buffer)
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, nn.SyncBatchNorm)
        for buffer in module.buffers(recurse=False)
    }
    return [(name, buffer) for name, buffer in model.named_buffers() if id(buffer) not in own_data]


def _checksum(tensor: Tensor) -> Tensor:
    """Sum [] of the tensor's bytes read as 64-bit integers, with wrap-around; runs at the speed of memory."""
    flat = tensor.contiguous().view(-1)
    if tensor.nbytes % 8 == 0 and tensor.storage_offset() * tensor.itemsize % 8 == 0 and not tensor.is_complex():
        return flat.view(torch.int64).sum()  # nearly every tensor: each call less counts, at some 5 µs
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    octets = flat.view(torch.uint8)
    if octets.storage_offset() % 8:
        octets = octets.clone()
    rest = octets.numel() % 8
    total = octets[: octets.numel() - rest].view(torch.int64).sum()
    if rest:
        total += nn.functional.pad(octets[-rest:], (0, 8 - rest)).view(torch.int64).sum()
    return total


def _digest(sums: Sequence[int]) -> int:
    packed = struct.pack(f"<{len(sums)}q", *sums)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest())


def _processor(device: torch.device) -> int:
    """A number for the kind of processor that a rank computes on."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{device.type} {torch.backends.cpu.get_cpu_capability()}"
    return zlib.crc32(name.encode())


def _minority(keys: Sequence[object], ranks: Sequence[int]) -> list[int]:
    """Return the ranks whose key is not the commonest; of equally common ones the first rank's counts."""
    common, _ = Counter(keys).most_common(1)[0]
    return [rank for rank, key in zip(ranks, keys, strict=True) if key != common]


def _spread(norms: Sequence[float]) -> float:
    """Relative difference between the largest and the smallest, infinite for numbers that are not finite."""
    low, high = min(norms), max(norms)
    if not (math.isfinite(low) and math.isfinite(high)):
        return math.inf
    return (high - low) / high if high else 0.0
