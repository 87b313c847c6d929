"""The training loop and what surrounds it: model, evaluation, checkpointing, stopping."""
