"""Entry point ``python -m gputrain_tui``, the same as ``gputrain``; handles Ctrl-C also while modules load."""

from __future__ import annotations

import os
import sys

ROOT = __file__.removesuffix("/gputrain_tui/__main__.py")
STOPPED = 130
"""``trainer.contract.errors.ExitCode.STOPPED``, for a Ctrl-C during imports."""


def main() -> int:
    """Run the command line; return the exit code."""
    try:
        _prefer_own_modules()
        import signal

        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a command ends its children
        from gputrain_tui import cli

        return cli.main()
    except KeyboardInterrupt:
        return STOPPED


def _prefer_own_modules() -> None:
    """Remove the user's folders from the import path, before anything else is imported."""
    if __name__ == "__main__" and not sys.flags.safe_path and sys.path[0] != ROOT:
        del sys.path[0]  # the working folder, which ``python -m`` puts first
    if "PYTHONPATH" in os.environ:
        sys.path.insert(0, ROOT)
        from trainer.host.import_path import set_aside

        aside = set_aside(os.environ)
        sys.path[:] = [folder for folder in sys.path[1:] if folder not in aside]


if __name__ == "__main__":
    sys.exit(main())
