"""All imports of a rank, for a warm fork server to preload.

Like ``trainer.agent.preload_torch``, it starts no thread, makes no tensor and does not touch CUDA.
"""

from __future__ import annotations

import gc
import importlib

import trainer.agent.preload_torch
import trainer.engine.worker  # noqa: F401
from trainer.contract.builtin_tasks import BUILT_IN

for _target in BUILT_IN.values():
    importlib.import_module(_target.partition(":")[0])
# multiprocessing runs the file of the main module again in every rank; imported here, its imports are preloaded.
importlib.import_module("trainer.warm_agent")
gc.freeze()
