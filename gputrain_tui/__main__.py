"""Entry point ``python -m gputrain_tui``, the same as ``gputrain``; handles Ctrl-C also while modules load."""

from __future__ import annotations

import signal
import sys

STOPPED = 130
"""``trainer.contract.errors.ExitCode.STOPPED``, for a Ctrl-C during imports."""


def main() -> int:
    """Run the command line; return the exit code."""
    try:
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a command ends its children
        from gputrain_tui import cli

        return cli.main()
    except KeyboardInterrupt:
        return STOPPED


if __name__ == "__main__":
    sys.exit(main())
