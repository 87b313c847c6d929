"""A run without the console: progress line, closing table, JSON."""
