"""Where every command begins, with as little as can be: Ctrl-C is answered from here on, also while modules load.

``python -m gputrain_tui`` is ``gputrain``, also where the console script is not on the path.
"""

from __future__ import annotations

import signal
import sys

STOPPED = 130
"""``trainer.contract.errors.ExitCode.STOPPED``, before that can be imported."""


def main() -> int:
    """Run the command line; return the exit code."""
    try:
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # what a command has started ends with it
        from gputrain_tui import cli

        return cli.main()
    except KeyboardInterrupt:
        return STOPPED


if __name__ == "__main__":
    sys.exit(main())
