"""Which rank sees which batch, and how batches are read."""
