"""Run directories read back: list, follow, replay, series at every width, logs."""
