"""A training with DistributedDataParallel and a loop by hand."""

import torch
import torch.distributed as dist
from points import net, points
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

EPOCHS = 4

dist.init_process_group("gloo")
model = DistributedDataParallel(net())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
sampler = DistributedSampler(points(6400))
loader = DataLoader(points(6400), batch_size=64, sampler=sampler)
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        valid = sum(mse_loss(model(x), y).item() for x, y in DataLoader(points(640), batch_size=64)) / 10
    model.train()
    print(f"epoch {epoch + 1}: {valid:.4f}")
torch.save(model.module.state_dict(), f"weights.{dist.get_rank()}.pt")
dist.destroy_process_group()
