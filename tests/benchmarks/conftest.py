from __future__ import annotations

import sys
from pathlib import Path

# The process group that the trainer's tests use serves the benchmarks too.
sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))
