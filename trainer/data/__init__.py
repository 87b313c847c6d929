"""Assignment of batches to ranks, and loading of batches."""
