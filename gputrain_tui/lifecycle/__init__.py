"""One run from start to end: supervisor, launchers, attempts, restart, stop."""
