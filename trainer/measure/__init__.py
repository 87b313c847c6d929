"""Clocks, comm hook, merging and checksums: what `trainer.sync` measures with."""
