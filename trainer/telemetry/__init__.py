"""Measurement of a step's phases and its gradient synchronisation."""
