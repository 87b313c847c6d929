"""Which ranks start on this node, on which devices, and where they meet: what `trainer.dispatch` decides with."""
