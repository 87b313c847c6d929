"""The ``Task`` interface and the built-in tasks, one file each."""
