"""The training program that runs on every node; it works alone, typed by hand."""
