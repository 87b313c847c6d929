"""``python -m gputrain_tui`` is ``gputrain``, also where the console script is not on the path."""

from __future__ import annotations

import sys

from gputrain_tui.cli import main

if __name__ == "__main__":
    sys.exit(main())
