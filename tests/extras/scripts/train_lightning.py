"""A training with Lightning."""

import os
from typing import Any

import lightning
import torch
from points import net, points
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def training_step(self, batch: Any, _: int) -> Tensor:
        loss = mse_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("valid_loss", mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


trainer = lightning.Trainer(
    devices=int(os.environ["WORLD_SIZE"]),
    strategy="ddp",
    max_epochs=4,
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
)
model = Regression()
trainer.fit(model, DataLoader(points(6400), batch_size=64, shuffle=True), DataLoader(points(640), batch_size=64))
torch.save(model.state_dict(), f"weights.{trainer.global_rank}.pt")
