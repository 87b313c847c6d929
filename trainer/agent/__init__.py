"""One node's processes: the node agent, its fork server and its workers, from start to shutdown."""
