"""Start of each Python process that a measured script starts: once it has joined a process group, it may be a rank.

This folder is first in the script's ``PYTHONPATH``. The user's own ``sitecustomize`` is imported in place of this one,
and neither the folder nor the module can be seen in the process afterwards.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import SourceFileLoader

_folder = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib takes milliseconds to load
sys.path[:] = [_each for _each in sys.path if os.path.abspath(_each or ".") != _folder]  # noqa: PTH100
try:
    _path = os.path.join(os.path.dirname(_folder), "started_process.py")  # noqa: PTH118, PTH120
    _names: dict[str, object] = {"__name__": "gputrain_started_process", "__file__": _path}
    exec(SourceFileLoader("gputrain_started_process", _path).get_code("gputrain_started_process") or "", _names)
    _names["prepare"]()  # type: ignore[operator]
except Exception as _error:  # noqa: BLE001 - whatever is wrong here, the process is the script's
    print(f"gputrain: not measured: {type(_error).__name__}: {_error}", file=sys.stderr)

del sys.modules["sitecustomize"]
# If there is none, the error is the one for which ``site`` looks then.
import sitecustomize as _users  # type: ignore[import-not-found]  # noqa: E402, F401
