"""A training with accelerate, two batches for each step of the optimizer."""

import torch
from accelerate import Accelerator
from points import net, points
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

EPOCHS = 4

accelerator = Accelerator(gradient_accumulation_steps=2)
model = net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
loader = DataLoader(points(6400), batch_size=32, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(EPOCHS):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = mse_loss(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"loss {loss.item():.4f}")
torch.save(accelerator.unwrap_model(model).state_dict(), f"weights.{accelerator.process_index}.pt")
accelerator.end_training()
