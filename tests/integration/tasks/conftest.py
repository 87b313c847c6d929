from __future__ import annotations

from text_cache import own_cache as own_cache
