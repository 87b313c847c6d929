"""The recipe: its model, reading and writing it as text and files, and editing it."""
