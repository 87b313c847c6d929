"""The recipe: its model, reading and writing it as text and files, and editing it.

What is wrong in a recipe, a setting or a command is a ``RequestError`` of one line: where, what, allowed, nearest.
"""
