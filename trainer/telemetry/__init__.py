"""Measures what a step's phases and its gradient synchronisation take."""
