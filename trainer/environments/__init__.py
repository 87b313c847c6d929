"""Decide, purely, from flags, environment and device count which ranks start on this node, and their init method."""
