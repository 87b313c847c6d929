"""Muon for matrices with AdamW for the rest, as one optimizer.

Muon orthogonalises the momentum of each matrix (Jordan et al. 2024, torch's own class). Its update is scaled to the
root mean square of AdamW's (Liu et al. 2025, section 2.2), so that one learning rate suits both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import AdamW, Optimizer

from trainer import distributed
from trainer.contract.errors import RequestError
from trainer.engine.worker_context import WorkerContext


class MuonWithAdamW(Optimizer):
    """Optimizer over groups with ``muon``, whether Muon or AdamW trains them.

    Raises:
        RequestError: this torch has no Muon, or there is no matrix.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        *,
        momentum: float,
        betas: tuple[float, float],
        eps: float,
        fused: bool,
    ) -> None:
        kind: Any = getattr(torch.optim, "Muon", None)
        if kind is None:
            raise RequestError(f"--optimizer muon needs torch 2.9 or newer, and this is {torch.__version__}")
        matrices = [dict(group) for group in groups if group["muon"]]
        others = [dict(group) for group in groups if not group["muon"]]
        if not matrices:
            raise RequestError("--optimizer muon needs matrices, and no trained parameter is one: take adamw")
        muon = kind(matrices, momentum=momentum, adjust_lr_fn="match_rms_adamw")
        adamw = AdamW(others, betas=betas, eps=eps, fused=fused) if others else None
        self._parts: list[Optimizer] = [muon] if adamw is None else [muon, adamw]
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Give both parts their groups of this optimizer, and its state."""
        for part, is_muon in zip(self._parts, (True, False), strict=False):
            part.param_groups = [group for group in self.param_groups if group["muon"] is is_muon]
            part.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self._parts:
            part.step()


def require_equal_products(optimizer: Optimizer, ctx: WorkerContext) -> None:
    """Require that all ranks compute equal matrix products, if the optimizer makes its updates from such.

    Other operations of optimizers give equal results on all devices.

    Raises:
        RequestError: the devices or the threads of the ranks differ; the same line on all of them.
    """
    if not isinstance(optimizer, MuonWithAdamW):
        return
    if ctx.device.type == "cuda":
        own = torch.cuda.get_device_name(ctx.device)
    else:
        own = f"a CPU with {torch.backends.cpu.get_cpu_capability()} and {torch.get_num_threads()} threads"
    kinds = distributed.all_gather_list(own)
    if len(set(kinds)) > 1:
        other = next(rank for rank, kind in enumerate(kinds) if kind != kinds[0])
        raise RequestError(
            f"--optimizer muon multiplies matrices, whose results differ between {kinds[0]} (rank 0) and "
            f"{kinds[other]} (rank {other}), so that the ranks' models would drift apart: train on equal devices with "
            "equal --threads, or take --optimizer adamw"
        )
