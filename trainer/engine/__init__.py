"""The training loop and its parts: model, optimizer, evaluation, checkpointing, stopping."""
