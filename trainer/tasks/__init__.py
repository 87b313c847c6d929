"""The ``Task`` protocol and the built-in tasks, one file each."""
