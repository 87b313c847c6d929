"""Checkpoints: a training's state, written atomically with a checksum, and read back.

Interface of the package: ``state`` copies tensors and random numbers and lists entries, ``file`` is the format of one
file, ``writer`` and ``reader`` write and choose the files of a folder, ``weights`` reads weights alone,
``dcp_folder`` those of ``torch.distributed.checkpoint``, and ``folder_lock`` keeps a folder to one training.
"""

from trainer.checkpoint.checkpoint_writer import CheckpointWriter as CheckpointWriter, Saved as Saved
from trainer.checkpoint.file import has_trailer as has_trailer, step_name as step_name, write_file as write_file
from trainer.checkpoint.reader import (
    good_ones as good_ones,
    load as load,
    open_checkpoint as open_checkpoint,
    peek as peek,
)
from trainer.checkpoint.state import (
    ENTRIES as ENTRIES,
    GatheredTensors as GatheredTensors,
    HostTensors as HostTensors,
    capture_rng as capture_rng,
    copy_to_cpu as copy_to_cpu,
    difference as difference,
    kinds as kinds,
    restore_rng as restore_rng,
)
from trainer.checkpoint.weights import (
    exported_task_state as exported_task_state,
    fit as fit,
    load_weights as load_weights,
    open_weights as open_weights,
    weights_of as weights_of,
)
from trainer.contract.errors import CheckpointError as CheckpointError
from trainer.contract.record.checkpoints import BEST as BEST
