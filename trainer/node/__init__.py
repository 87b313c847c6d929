"""One node's processes: its parent, the fork server, its ranks, and how none of them outlives another."""
