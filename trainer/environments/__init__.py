"""Pure decision from flags, environment and device count: the ranks to start on this node, and their init method."""
