"""Options of the built-in tasks; torch-free, so that the console can render and check them."""

from __future__ import annotations
