"""Commands, one module each, with ``add_arguments(parser)`` and ``run(args) -> int``.

A command prints data on stdout and messages on stderr, raises ``RequestError`` for wrong requests, and imports neither
torch nor, except for the console, textual.
"""
