"""Imported first by the fork server: the kernel ends the server with the node's parent, and the ranks with the server.

A module of its own, because it must act before the seconds in which ``trainer.node.preload`` loads torch.
"""

from __future__ import annotations

import os

from trainer.node import guard
from trainer.node.forkserver import SERVER_OF

if os.environ.pop(SERVER_OF, None) == str(os.getppid()):
    guard.die_with_parent_process()
