"""Screens of the console, each imported when it is first shown."""
