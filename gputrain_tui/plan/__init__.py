"""Pure: plans a run, one command per node, from a recipe and inventories."""
