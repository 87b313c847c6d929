"""Writes the record of a run in the formats of other programs; the record itself is only read."""
