"""Imported by a warm fork server: everything that a rank needs but its data.

Like ``trainer.agent.preload_torch``, it starts no thread, makes no tensor and does not touch CUDA.
"""

from __future__ import annotations

import gc
import importlib

import trainer.agent.preload_torch
import trainer.engine.worker  # noqa: F401
from trainer.contract.builtin_tasks import BUILT_IN

for _place in BUILT_IN.values():
    importlib.import_module(_place.partition(":")[0])
# The file of a process's main module is run again in every rank; this is what it imports.
importlib.import_module("trainer.warm_agent")
gc.freeze()
