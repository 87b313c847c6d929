"""Program that listens on the port in a node's command before that starts: ``port_taker.py TIMES FILE COMMAND...``.

It does so ``TIMES`` times, by the ports in the file, in a process of its own. Other commands, of the preflight, are
left alone.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

FLAG = "--distributed-init-method"

if __name__ == "__main__":
    times, taken = int(sys.argv[1]), Path(sys.argv[2])
    if FLAG in sys.argv and len(taken.read_text().split()) < times:
        port = int(sys.argv[sys.argv.index(FLAG) + 1].rpartition(":")[2])
        server = socket.create_server(("", port))
        with taken.open("a") as file:
            file.write(f"{port} ")
        if not os.fork():
            signal.pause()
