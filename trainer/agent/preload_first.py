"""First import of the fork server: makes the kernel kill the server when the node agent ends.

A separate module, because it must run before ``trainer.agent.preload_torch``, whose import takes seconds.
"""

from __future__ import annotations

import os

from trainer.agent.forkserver import SERVER_OF
from trainer.host.descendants import die_with_parent_process

if os.environ.pop(SERVER_OF, None) == str(os.getppid()):
    die_with_parent_process()
