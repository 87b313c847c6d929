"""Recipes as text, as files and as drafts that are being edited: what `gputrain_tui.recipe` reads and writes with."""
