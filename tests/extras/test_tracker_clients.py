"""Unchanged scripts with the real clients: what their logger receives is mirrored."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import LIMIT_S

MIRROR = """
import json, sys
from trainer.telemetry.instrument import tracker_clients
from trainer.telemetry.own_metrics import OWN
mirrored = []
OWN.add = lambda metrics: mirrored.append({str(name): float(value) for name, value in metrics.items()})
tracker_clients.mirror()
exec(open(sys.argv[1]).read(), {"__name__": "__main__"})
print("\\n" + json.dumps(mirrored))
"""
"""Runs a script as a rank does, and prints what was mirrored."""
WANDB = """
import wandb
run = wandb.init(project="p", mode="{mode}", dir=".")
run.log({{"a": 1}}, step=2)
wandb.log({{"b": 2.5}})
run.finish()
"""
TENSORBOARD = """
from torch.utils.tensorboard import SummaryWriter
writer = SummaryWriter("tb")
writer.add_scalar("a", 1, 2)
writer.add_scalars("b", {"c": 2.5})
writer.close()
"""
ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, log_with={loggers}, project_dir="tb")
accelerator.init_trackers("p")
accelerator.log({{"a": 1}}, step=2)
accelerator.log(values={{"b": 2.5}})
accelerator.end_training()
"""
HUGGINGFACE = """
import json, torch
from transformers import Trainer, TrainerCallback, TrainingArguments

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def forward(self, x, labels):
        return {"loss": (self.layer(x) - labels).square().mean()}

class Logger(TrainerCallback):
    received = []
    def on_log(self, args, state, control, logs=None, **named):
        self.received.append(dict(logs))

data = [{"x": torch.ones(2), "labels": torch.ones(1)} for _ in range(16)]
arguments = TrainingArguments(output_dir="out", max_steps=4, logging_steps=2, report_to="none", use_cpu=True,
                              save_strategy="no", disable_tqdm=True)
Trainer(model=Model(), args=arguments, train_dataset=data, callbacks=[Logger()]).train()
print("\\n" + json.dumps(Logger.received))
"""
LIGHTNING = """
import json, torch
from {package} import LightningModule, Trainer
from {package}.loggers import Logger

class Received(Logger):
    name, version, received = "r", 0, []
    def log_hyperparams(self, *given, **named):
        pass
    def log_metrics(self, metrics, step=None):
        self.received.append(dict(metrics))

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, index):
        loss = self.layer(batch).square().mean()
        self.log("loss", loss)
        self.log("epoch_loss", loss, on_step=False, on_epoch=True)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

for logger in (Received(), False):
    Trainer(max_epochs=2, accelerator="cpu", logger=logger, log_every_n_steps=2, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
            ).fit(Module(), torch.utils.data.DataLoader(torch.ones(16, 2), batch_size=4))
print("\\n" + json.dumps(Received.received))
"""


def lines(script: str, folder: Path) -> list[list[dict[str, float]]]:
    """Run a script mirrored; return the lists that it and the mirror have printed."""
    (folder / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "-c", MIRROR, "script.py"],
        cwd=folder,
        env=os.environ | {"WANDB_SILENT": "true", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


@pytest.mark.parametrize(
    ("package", "script", "names"),
    [
        ("wandb", WANDB.format(mode="offline"), "ab"),
        ("wandb", WANDB.format(mode="disabled"), "ab"),
        ("tensorboard", TENSORBOARD, ["a", "b/c"]),
        ("accelerate", ACCELERATE.format(loggers="None"), "ab"),
        ("accelerate", ACCELERATE.format(loggers='"tensorboard"'), "ab"),
    ],
    ids=["wandb-offline", "wandb-disabled", "tensorboard", "accelerate", "accelerate-tensorboard"],
)
def test_each_number_is_mirrored_once(package: str, script: str, names: list[str], tmp_path: Path) -> None:
    pytest.importorskip(package, reason="needs the packages of an extra")
    (mirrored,) = lines(script, tmp_path)
    assert mirrored == [{names[0]: 1}, {names[1]: 2.5}]


def test_all_that_a_logger_of_hugging_face_receives_is_mirrored(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the packages of an extra")
    received, mirrored = lines(HUGGINGFACE, tmp_path)
    assert received == mirrored
    assert {"loss", "epoch", "grad_norm", "learning_rate"} <= mirrored[0].keys()


@pytest.mark.parametrize("package", ["lightning.pytorch", pytest.param("pytorch_lightning", marks=pytest.mark.slow)])
def test_all_that_a_logger_of_lightning_receives_is_mirrored(package: str, tmp_path: Path) -> None:
    pytest.importorskip(package.partition(".")[0], reason="needs the packages of an extra")
    received, both = lines(LIGHTNING.format(package=package), tmp_path)
    mirrored, unlogged = both[: len(received)], both[len(received) :]
    assert received == mirrored
    assert set().union(*mirrored) == {"loss", "epoch_loss", "epoch"}
    assert [entry.keys() for entry in unlogged] == [entry.keys() for entry in mirrored], "without a logger alike"
