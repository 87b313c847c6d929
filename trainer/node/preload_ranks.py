"""Imported by a fork server that has the time, before anybody has said what to train: all that a rank needs but data.

Like ``trainer.node.preload``, it starts no thread, makes no tensor and does not touch CUDA.
"""

from __future__ import annotations

import gc
import importlib

import trainer.node.preload
import trainer.rank  # noqa: F401
from trainer.tasks.registry import BUILT_IN

for _place in BUILT_IN.values():
    importlib.import_module(_place.partition(":")[0])
# The file of a process's main module is run again in every rank; this is what it imports.
importlib.import_module("trainer.node.warm")
gc.freeze()
