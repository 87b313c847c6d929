"""The ``Task`` protocol, the built-in tasks, and their options (torch-free, in ``options.py``)."""
