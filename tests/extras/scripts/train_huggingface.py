"""A training of a small causal language model with the Trainer of Hugging Face."""

from typing import Any

import torch
from fault import FaultLayer
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences of numbers that follow each other."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        numbers = torch.arange(index, index + 16) % 97
        return {"input_ids": numbers, "labels": numbers}


class Model(GPT2LMHeadModel):
    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        self.fault = FaultLayer()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **named: Any) -> Any:
        return super().forward(input_ids=self.fault(input_ids), labels=labels, **named)


torch.manual_seed(1)
model = Model(GPT2Config(vocab_size=97, n_positions=16, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0))
arguments = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=16,
    max_steps=200,
    learning_rate=1e-3,
    logging_steps=50,
    eval_strategy="steps",
    eval_steps=50,
    save_strategy="no",
    report_to="none",
)
trainer = Trainer(model=model, args=arguments, train_dataset=Counting(6400), eval_dataset=Counting(64))
trainer.train()
torch.save(model.state_dict(), f"weights.{arguments.process_index}.pt")
