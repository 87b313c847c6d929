"""What holds for all tests."""

from __future__ import annotations

import signal

# A pytest in the background of a script, as under some CI, inherits an ignored SIGINT, and so would each process that
# the tests start: the tests that send one would wait for ends that never come.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
