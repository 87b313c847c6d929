"""The Textual console: reads runs, and acts on them through the same functions as the commands."""
