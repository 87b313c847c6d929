"""The Textual console: a reader of runs. Everything it does goes through the same functions as the commands."""
