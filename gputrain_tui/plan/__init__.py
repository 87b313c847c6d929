"""Pure: a recipe and inventories become one command per node."""
