"""The Textual console, which reads runs and acts on them by the functions that the commands use."""
