"""Definitions that ranks and console share, torch-free: errors, options, the record of a run, outcomes."""
