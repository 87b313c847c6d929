"""Entry point ``python -m gputrain_tui``, the same as ``gputrain``; handles Ctrl-C also while modules load."""

from __future__ import annotations

import signal
import sys

STOPPED = 130
"""``trainer.contract.errors.ExitCode.STOPPED``, before that can be imported."""


def main() -> int:
    """Run the command line; return the exit code."""
    try:
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # a command then ends what it has started
        from gputrain_tui import cli

        return cli.main()
    except KeyboardInterrupt:
        return STOPPED


if __name__ == "__main__":
    sys.exit(main())
