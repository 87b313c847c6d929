"""Imported first by the fork server: has the kernel end the server with the node agent.

A module of its own, because it must act before the seconds in which ``trainer.agent.preload_torch`` loads torch.
"""

from __future__ import annotations

import os

from trainer.agent.forkserver import SERVER_OF
from trainer.host import process_guard

if os.environ.pop(SERVER_OF, None) == str(os.getppid()):
    process_guard.die_with_parent_process()
