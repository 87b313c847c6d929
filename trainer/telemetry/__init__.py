"""Measure the phases of a step and its gradient synchronisation."""
