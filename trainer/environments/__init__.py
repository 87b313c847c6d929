"""Pure: flags, environment and device count become the ranks that start on this node and their init method."""
