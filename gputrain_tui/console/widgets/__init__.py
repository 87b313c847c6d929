"""Widgets of the console: each draws rows of (text, role) by a pure function and paints them on a clock."""
