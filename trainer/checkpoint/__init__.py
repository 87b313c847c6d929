"""Checkpoints: a training's state, written atomically with a checksum, and read back.

Interface of the package: ``state`` copies tensors and random numbers, ``entries`` lists the entries of a state,
``file`` is the format of one file, ``writer`` and ``reader`` write and choose the files of a folder, ``weights`` reads
weights alone, and ``folder_lock`` keeps a folder to one training.
"""

from trainer.checkpoint.checkpoint_writer import CheckpointWriter, Saved
from trainer.checkpoint.entries import ENTRIES, difference, kinds
from trainer.checkpoint.file import BEST, has_trailer, step_name, write_file
from trainer.checkpoint.reader import good_ones, load, open_checkpoint, peek, run_of
from trainer.checkpoint.state import HostTensors, capture_rng, copy_to_cpu, restore_rng
from trainer.checkpoint.weights import exported_task_state, fit, load_weights, weights_of
from trainer.contract.errors import CheckpointError

__all__ = [
    "BEST",
    "ENTRIES",
    "CheckpointError",
    "CheckpointWriter",
    "HostTensors",
    "Saved",
    "capture_rng",
    "copy_to_cpu",
    "difference",
    "exported_task_state",
    "fit",
    "good_ones",
    "has_trailer",
    "kinds",
    "load",
    "load_weights",
    "open_checkpoint",
    "peek",
    "restore_rng",
    "run_of",
    "step_name",
    "weights_of",
    "write_file",
]
