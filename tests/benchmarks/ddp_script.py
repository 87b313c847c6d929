"""Minimal DDP training of a byte-level language model, as a user would write it for torchrun."""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    data = torch.frombuffer(bytearray(Path(args.data).read_bytes()), dtype=torch.uint8).long()
    windows = data[: len(data) // 65 * 65].view(-1, 65)
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, norm_first=True)
    model = DDP(
        nn.Sequential(
            nn.Embedding(256, 64), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(64, 256)
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(args.steps):
        batch = windows[(step * world_size + rank) * 8 :][:8]
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 0:
            Path(args.out, f"first_step.{rank}").write_text(repr(time.time()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
