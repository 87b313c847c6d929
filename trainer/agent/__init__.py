"""One node's processes: the node agent, its fork server, its workers, and how none outlives another."""
