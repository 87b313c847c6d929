"""The commands, one module each: ``NAME``, ``HELP``, ``add_arguments(parser)`` and ``run(args) -> int``.

A command prints data on stdout and narration on stderr, refuses with ``RequestError`` and imports neither torch nor,
unless it is the console, textual.
"""
