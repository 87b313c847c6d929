"""Machines: names and addresses, inventories, connections over ssh, and devices for the ranks of a recipe."""
