"""Checkpoints: what is saved of a training, atomically and checked, and how it comes back.

A face: what may be kept is in ``state``, which entries were kept in ``entries``, one file in ``file``, which of them
are written in ``writer`` and read in ``reader``, weights alone in ``weights``, and who may write into a folder in
``folder_lock``.
"""

from trainer.checkpoint.entries import ENTRIES, difference, kinds
from trainer.checkpoint.file import BEST, MAGIC, step_name, write_file
from trainer.checkpoint.reader import good_ones, load, newest, open_checkpoint, peek
from trainer.checkpoint.state import HostTensors, capture_rng, copy_to_cpu, restore_rng
from trainer.checkpoint.weights import fit, load_weights, weights_of
from trainer.checkpoint.writer import CheckpointWriter, NotSaved, Saved
from trainer.contract.errors import CheckpointError

__all__ = [
    "BEST",
    "ENTRIES",
    "MAGIC",
    "CheckpointError",
    "CheckpointWriter",
    "HostTensors",
    "NotSaved",
    "Saved",
    "capture_rng",
    "copy_to_cpu",
    "difference",
    "fit",
    "good_ones",
    "kinds",
    "load",
    "load_weights",
    "newest",
    "open_checkpoint",
    "peek",
    "restore_rng",
    "step_name",
    "weights_of",
    "write_file",
]
