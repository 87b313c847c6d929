"""Comparison of checksums of every parameter and buffer across the ranks.

DDP keeps replicas equal only as long as every rank applies the same update; a rank that skips one, steps with another
learning rate or has a bad memory chip trains on alone, and nothing fails. The check costs one pass over the
parameters at the speed of memory and one collective of a few bytes.
"""

from __future__ import annotations

import math
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.contract.record import Checksum, Finding
from trainer.distributed.collectives import max_async
from trainer.distributed.host_copies import HostCopies, begin_copy, host_copies

DRIFT = 1e-6
"""Relative difference of a norm that is reported as drift between unlike processors (fairseq's tolerance)."""


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Checksums of a model's tensors, in the order of ``ReplicatedTensors``, and digests of them."""

    digests: tuple[int, int]
    """Of all parameters and of all buffers; 64 bits each."""
    parameters: tuple[int, ...]
    buffers: tuple[int, ...]
    non_finite: bool
    """Whether a parameter is NaN or infinite: equal bits of such parameters are no sign of health."""
    divided: bool = False
    """Whether the parameters are divided among the ranks, and not compared."""

    def event(self, *, time: float, rank: int, step: int) -> Checksum:
        """Return the event of the record, with the digests in hexadecimal."""
        parameters, buffers = (f"{digest % (1 << 64):016x}" for digest in self.digests)
        if self.divided:
            parameters = ""
        return Checksum(
            time=time, rank=rank, step=step, parameters=parameters, buffers=buffers, non_finite=self.non_finite
        )


class _ModelTensor(NamedTuple):
    """Tensor with its name."""

    name: str
    tensor: Tensor


class ReplicatedTensors:
    """Tensors of a model that should be equal on all ranks.

    Of a parameter that is divided among the ranks, this rank's part is only checked to be finite.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.parameters: list[_ModelTensor] = []
        self.buffers: list[_ModelTensor] = []
        """As they were at the last ``checksums``."""
        self._divided = False

    @property
    def version(self) -> int:
        """Version counter of the first parameter, which every change in place increases; 0 without parameters."""
        parameter = next(self._model.parameters(), None)
        return 0 if parameter is None else parameter._version

    def checksums(self) -> Tensor:
        """Return checksums that are equal if, and practically only if, all tensors are bit for bit equal.

        They stay on the tensors' device, and nothing waits for it.
        """
        self.parameters, parts, self.buffers = _tensors(self._model)
        self._divided = bool(parts)
        held, count = [*self.parameters, *self.buffers], len(self.parameters)
        device = held[0].tensor.device if held else torch.device("cpu")
        with torch.no_grad():
            sums = torch.zeros(len(held), dtype=torch.int64, device=device)
            for slot, (_, tensor) in zip(sums.unbind(), held, strict=True):
                slot.copy_(_checksum(tensor), non_blocking=True)
            # With wrap-around: sums that differ have equal digests once in 2^64.
            weighted = sums * _weights(len(held), device)
            digests = [weighted[:count].sum(0, keepdim=True), weighted[count:].sum(0, keepdim=True)]
            return torch.cat([*digests, sums, _has_non_finite([*self.parameters, *parts], device)])

    def fingerprint(self, checksums: Sequence[int]) -> Fingerprint:
        """Return the fingerprint of the result of ``checksums``, copied to the host."""
        digests, count = (checksums[0], checksums[1]), 2 + len(self.parameters)
        return Fingerprint(
            digests=digests,
            parameters=tuple(checksums[2:count]),
            buffers=tuple(checksums[count:-1]),
            non_finite=bool(checksums[-1]),
            divided=self._divided,
        )


class DesyncCheck:
    """Comparison of the model across the ranks: started after one step, completed after the next.

    No rank waits for the others, which have all started it by the next step's synchronisation. All ranks start it at
    the same step, and read its result at the same place in their order of collectives.

    Ranks on unlike processors may differ in the last bits of their own computations. If the norms of a tensor agree to
    ``DRIFT`` among such ranks, the difference is reported as drift.
    """

    def __init__(
        self,
        replica: ReplicatedTensors,
        *,
        step: int,
        rank: int,
        device: torch.device,
        copies: HostCopies | None = None,
        now: float | None = None,
    ) -> None:
        """Start to compute this rank's checksum and to compare it.

        ``device`` is that of the process group's tensors; without ``copies`` they are chosen by the device. ``now`` are
        the Unix seconds of the events.
        """
        self.step = step
        self._replica = replica
        self._rank = rank
        self._device = device
        self._time = time.time() if now is None else now
        checksums = replica.checksums()
        processor = torch.full((1,), _processor(device), dtype=torch.int64, device=checksums.device)
        compared = torch.cat([processor, checksums[:2]])
        # Maximum and complement of the minimum (the negative could overflow): one reduction shows whether all are
        # equal, whatever the number of ranks.
        self._extremes = max_async(torch.cat([compared, ~compared]), copies)
        self._checksums = begin_copy(checksums, copies or host_copies(checksums.device))

    def result(self) -> tuple[Checksum, list[Finding]]:
        """Return this rank's checksum and, on rank 0, the findings; call it once, on all ranks."""
        own = self._replica.fingerprint(self._checksums.numbers())
        checksum = own.event(time=self._time, rank=self._rank, step=self.step)
        findings: list[Finding] = []
        compared, extremes = [_processor(self._device), *own.digests], self._extremes()
        if all(high == ~low for high, low in zip(extremes, extremes[len(compared) :], strict=False)):
            return checksum, findings
        rows = _gather([self._rank, *compared], torch.int64, self._device)
        ranks = [int(row[0]) for row in rows]
        unlike = len({row[1] for row in rows}) > 1
        for column, kind, tensors, sums in (
            (2, "parameter", self._replica.parameters, own.parameters),
            (3, "buffer", self._replica.buffers, own.buffers),
        ):
            if len({row[column] for row in rows}) > 1:
                difference = _find_difference(kind, tensors, sums, ranks=ranks, unlike=unlike, device=self._device)
                if self._rank == ranks[0]:
                    findings.append(_finding(difference, kind=kind, time=self._time, step=self.step))
        return checksum, findings


@dataclass(frozen=True, kw_only=True)
class _Difference:
    """Ranks that differ from the rest, and the first tensor that does."""

    ranks: list[int]
    """The minority; of two equal parts the one without the first rank."""
    where: str
    drift: float | None
    """Largest relative difference of a norm, where it is within ``DRIFT`` and the processors are unlike."""


def _find_difference(
    kind: str,
    tensors: Sequence[_ModelTensor],
    sums: Sequence[int],
    *,
    ranks: Sequence[int],
    unlike: bool,
    device: torch.device,
) -> _Difference:
    """Return the differing tensors and ranks; a collective, called on every rank."""
    counts = [row[0] for row in _gather([len(sums)], torch.int64, device)]
    if len(set(counts)) > 1:
        return _Difference(ranks=minority(counts, ranks), where=f"a different number of {kind}s", drift=None)
    rows = _gather(sums, torch.int64, device)
    differing = [index for index in range(len(sums)) if len({row[index] for row in rows}) > 1]
    where = f"first in {kind} {tensors[differing[0]].name} ({len(differing)} of {len(sums)} differ)"
    apart = minority([tuple(row[index] for index in differing) for row in rows], ranks)
    drift = None
    if unlike:
        norms = torch.stack([torch.linalg.vector_norm(tensors[index].tensor.detach().double()) for index in differing])
        gathered = _gather(norms.tolist(), torch.float64, device)
        largest = max(_spread(column) for column in zip(*gathered, strict=True))
        drift = largest if largest <= DRIFT else None
    return _Difference(ranks=apart, where=where, drift=drift)


def _finding(difference: _Difference, *, kind: str, time: float, step: int) -> Finding:
    ranks = difference.ranks
    holders = f"rank {ranks[0]} holds" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} hold"
    finding = Finding(
        time=time,
        kind="desync",
        severity="critical" if kind == "parameter" else "warning",
        rank=ranks[0],
        step=step,
        cause=f"{kind}s",
        message=f"{holders} different {kind}s than the others, {difference.where}",
        advice="stop and resume from the last checkpoint; look for a step, a learning rate or a random choice "
        "that depends on the rank",
    )
    if difference.drift is not None:
        finding.severity, finding.cause = "info", "drift"
        finding.message = f"different processors drift apart in the last bits, {difference.where}"
        finding.evidence = {"relative_difference": difference.drift}
        finding.advice = "small amounts are normal; a checkpoint holds rank 0's values"
    return finding


def _gather(row: Sequence[float], dtype: torch.dtype, device: torch.device) -> list[list[int]] | list[list[float]]:
    """Return every rank's row; all have the same length."""
    own = torch.tensor(row, dtype=dtype, device=device)
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, own)
    gathered: list[list[int]] = torch.stack(rows).tolist()
    return gathered


def _tensors(model: nn.Module) -> tuple[list[_ModelTensor], list[_ModelTensor], list[_ModelTensor]]:
    """Return the parameters that should be equal, this rank's parts of divided ones, and such buffers, each once.

    Statistics of a BatchNorm are left out: each rank has those of its own data.
    """
    parts: dict[Tensor, _ModelTensor] = {}
    parameters: dict[Tensor, _ModelTensor] = {}
    buffers: dict[Tensor, _ModelTensor] = {}
    own_data: set[Tensor] = set()
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            part: Tensor = getattr(parameter, "_local_tensor", parameter)  # of a DTensor, whose import takes long
            kept = parameters if part is parameter else parts
            kept.setdefault(part, _ModelTensor(prefix + key, part))
        batch_norm = isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, nn.SyncBatchNorm)
        for key, buffer in module._buffers.items():
            if buffer is None:
                continue
            if batch_norm:
                own_data.add(buffer)
            else:
                buffers.setdefault(buffer, _ModelTensor(prefix + key, buffer))
    return (
        [*parameters.values()],
        [*parts.values()],
        [held for buffer, held in buffers.items() if buffer not in own_data],
    )


def _checksum(tensor: Tensor) -> Tensor:
    """Return the sum [] of the tensor's bytes as 64-bit integers, with wrap-around; runs at the speed of memory."""
    flat = tensor.contiguous().view(-1)
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


def _has_non_finite(tensors: Sequence[_ModelTensor], device: torch.device) -> Tensor:
    """Return 1 if any of the tensors has a NaN or infinite element, else 0: [1], int64 on ``device``."""
    # A sum is not finite if an element is not, and takes a tenth of the time of a maximum on a CPU. Of a complex number
    # both parts are added; half-precision numbers are added as 32-bit floats, whose range no sum of weights exceeds.
    finite = [
        (torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach())
        .sum(dtype=torch.float64 if tensor.dtype in (torch.float64, torch.complex128) else torch.float32)
        .isfinite()
        .to(device, non_blocking=True)
        for _, tensor in tensors
        if tensor.is_floating_point() or tensor.is_complex()
    ]
    if not finite:
        return torch.zeros(1, dtype=torch.int64, device=device)
    return (~torch.stack(finite)).any().to(torch.int64).reshape(1)


def _weights(count: int, device: torch.device) -> Tensor:
    """Return odd pseudorandom numbers, [count], int64 (mixed as by splitmix64)."""
    weights = torch.arange(1, count + 1, device=device) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        weights = (weights ^ (weights >> shift)) * factor
    return (weights ^ (weights >> 31)) | 1


@cache
def _processor(device: torch.device) -> int:
    """Return a number that identifies the model of the device, or the instruction set of a CPU."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{device.type} {torch.backends.cpu.get_cpu_capability()}"
    return zlib.crc32(name.encode())


def minority(keys: Sequence[object], ranks: Sequence[int]) -> list[int]:
    """Return the ranks that lack the most common key; among equally common keys, that of the earliest rank counts."""
    common, _ = Counter(keys).most_common(1)[0]
    return [rank for rank, key in zip(ranks, keys, strict=True) if key != common]


def _spread(norms: Sequence[float]) -> float:
    """Return the relative difference of the largest and smallest norm; infinite if one is not finite."""
    low, high = min(norms), max(norms)
    if not (math.isfinite(low) and math.isfinite(high)):
        return math.inf
    return (high - low) / high if high else 0.0
