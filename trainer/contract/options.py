"""Every option of ``python -m trainer``, declared once and rendered as flag, recipe key, form field and help.

Torch-free: the console reads this schema. A field's ``Meta`` carries its help, its range and, in ``extra``, its
group and alternative names of the flag and its values, such as those of fairseq and HetSeq;
``trainer.contract.schema`` reads them.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

DEFAULT_BATCH_SIZE = 32
"""Samples per rank and micro-step if neither ``--batch-size`` nor ``--max-tokens`` is given."""


OPTIMIZER_CLASSES = {
    "SGD": "sgd",
    "Adam": "adam",
    "AdamW": "adamw",
    "Adadelta": "adadelta",
    "Adagrad": "adagrad",
    # HetSeq's classes; its Adam decays weights apart from the gradient, as adamw does.
    "_Adam": "adamw",
    "_Adadelta": "adadelta",
}
"""Class name of an optimizer in torch, PyText or HetSeq → choice of ``--optimizer``."""
SCHEDULE_CLASSES = {
    "PolynomialDecayScheduler": "polynomial_decay",
    "PolynomialDecaySchedule": "polynomial_decay",
    "PolynomialDecayLRSchedule": "polynomial_decay",
    "InverseSquareRootSchedule": "inverse_sqrt",
    "CosineSchedule": "cosine",
    "CosineLRSchedule": "cosine",
    "FixedSchedule": "fixed",
    "FixedLRSchedule": "fixed",
    "StepScheduler": "step",
    "StepLRSchedule": "step",
}
"""Class name of a schedule in HetSeq or fairseq → choice of ``--lr-scheduler``."""


class Distributed(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Ranks to start on this node and their rendezvous: flags with the names and meaning of fairseq's and HetSeq's."""

    distributed_init_method: (
        Annotated[str, Meta(description="rendezvous: tcp://HOST:PORT, file:///PATH or env://")] | None
    ) = None
    distributed_world_size: (
        Annotated[int, Meta(ge=1, description="ranks on all nodes together; default: the devices of this node")] | None
    ) = None
    distributed_gpus: (
        Annotated[int, Meta(ge=1, description="ranks on this node; default: its devices, at most the world size")]
        | None
    ) = None
    distributed_rank: Annotated[
        int, Meta(ge=0, description="first rank of this node; with --distributed-no-spawn the rank itself")
    ] = 0
    distributed_backend: Annotated[
        Literal["auto", "nccl", "gloo"], Meta(description="auto is nccl on GPUs and gloo on CPUs")
    ] = "auto"
    distributed_port: (
        Annotated[
            int,
            Meta(ge=1, le=65535, description="port on the first node when the init method is inferred"),
        ]
        | None
    ) = None
    distributed_timeout: Annotated[
        float,
        Meta(gt=0, description="seconds that a collective may take before it fails; hangs are found earlier"),
    ] = 600.0
    join_timeout: Annotated[
        float, Meta(gt=0, description="seconds to wait until all ranks have joined the process group")
    ] = 300.0
    stop_grace: Annotated[
        float,
        # At least three of their steps, see ``outcome.answer_s``.
        Meta(ge=0, description="seconds for ranks to respond when asked to stop and save; then they are killed"),
    ] = 10.0
    distributed_no_spawn: Annotated[bool, Meta(description="this process is the rank; start no others")] = False
    device_id: (
        Annotated[
            int,
            Meta(
                ge=0,
                description="the GPU of a rank that is not spawned; default: its local rank",
                extra={"aliases": ["--local_rank", "--local-rank"]},
            ),
        ]
        | None
    ) = None
    cpu: Annotated[bool, Meta(description="train on CPUs with gloo even where GPUs are present")] = False
    share_devices: Annotated[bool, Meta(description="allow two ranks on one GPU")] = False
    start_method: Annotated[
        Literal["forkserver", "spawn"],
        Meta(description="forkserver: ranks fork from a server that has torch loaded; spawn: torch.multiprocessing"),
        # forkserver is the default because it imports torch once per node, before any rank exists, with no
        # thread, tensor or CUDA context to inherit: ranks start in half the time of spawn, which imports it
        # in the parent and again in every rank.
    ] = "forkserver"
    run_dir: Annotated[str, Meta(description="folder for events, logs and checkpoints; default: no record")] | None = (
        None
    )
    node: Annotated[int, Meta(ge=0, description="index of this node in the plan, for the record")] = 0


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """Training script that ranks run instead of a task."""

    script: Annotated[
        str, Meta(min_length=1, description="a Python script to run instead of a task; its arguments follow --")
    ]
    module: Annotated[bool, Meta(description="script is the name of a module, which runs as with python -m")] = False
    local_rank_flag: (
        Annotated[
            str,
            Meta(
                min_length=1,
                pattern=r"^-{1,2}\w[\w-]*$(?!\n)",
                description="flag with which the script gets its local rank, such as --local-rank of "
                "torch.distributed.launch; default: by LOCAL_RANK alone",
            ),
        ]
        | None
    ) = None
    args: Annotated[tuple[str, ...], Meta(description="the script's arguments")] = ()
    instrument: Annotated[
        bool, Meta(description="measure the script's steps, phases and gradient synchronisation; needs a record")
    ] = True


class Training(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of a training: all keys of a recipe's ``[train]`` table."""

    task: Annotated[
        str, Meta(description="lm, docnn, mnist, masked_lm, or your own as module:Class or path.py:Class")
    ] = ""

    batch_size: (
        Annotated[
            tuple[Annotated[int, Meta(ge=1)], ...],
            Meta(
                min_length=1,
                description="samples per rank and micro-step; a list gives one value per rank; default: 32, and with "
                "max_tokens as many as fit",
                extra={"group": "Data", "aliases": ["--max-sentences"]},
            ),
        ]
        | None
    ) = None
    max_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="limit batches to this many tokens per rank and micro-step, each sample padded to the longest; "
            "batch_size then limits their samples; 0: limit by samples only",
            extra={"group": "Data"},
        ),
    ] = 0
    required_batch_size_multiple: Annotated[
        int,
        Meta(
            ge=1,
            description="max_tokens: round the samples of a batch down to a multiple of this, if it has that many",
            extra={"group": "Data"},
        ),
    ] = 1
    valid_batch_size: (
        Annotated[
            int,
            Meta(
                ge=1,
                description="samples per rank in validation; default: as in training",
                extra={"group": "Data", "aliases": ["--max-sentences-valid", "--batch-size-valid"]},
            ),
        ]
        | None
    ) = None
    num_workers: Annotated[
        int, Meta(ge=0, description="data loading processes per rank", extra={"group": "Data", "per_rank": True})
    ] = 0
    shuffle: Annotated[
        bool,
        Meta(description="shuffle the training data every epoch, alike on all ranks", extra={"group": "Data"}),
    ] = True
    curriculum: Annotated[
        int,
        Meta(
            ge=0,
            description="do not shuffle in this many first epochs: shortest samples first if the task gives their "
            "lengths, else in the order of the data",
            extra={"group": "Data"},
        ),
    ] = 0
    fix_batches_to_gpus: Annotated[
        bool,
        Meta(
            description="each rank has the same batches in every epoch, in a different order", extra={"group": "Data"}
        ),
    ] = False
    drop_last: Annotated[
        bool,
        Meta(
            description="leave out the samples at an epoch's end that do not fill the batch of every rank",
            extra={"group": "Data"},
        ),
    ] = False

    max_epochs: Annotated[
        int,
        Meta(
            ge=0,
            description="stop after this many epochs; 0: no limit",
            extra={"group": "Duration", "aliases": ["--max-epoch", "--me"]},
        ),
    ] = 0
    max_updates: Annotated[
        int,
        Meta(
            ge=0,
            description="stop after this many optimizer steps; 0: no limit",
            extra={"group": "Duration", "aliases": ["--max-update", "--mu"]},
        ),
    ] = 0
    min_lr: Annotated[
        float,
        Meta(
            description="stop when the learning rate is not above this; -1: never",
            extra={"group": "Duration", "aliases": ["--stop-min-lr"]},
        ),
    ] = -1.0
    stop_time: Annotated[
        float,
        Meta(
            ge=0,
            description="stop after this many minutes, agreed across ranks; 0: never",
            extra={"group": "Duration"},
        ),
    ] = 0.0
    patience: Annotated[
        int,
        Meta(
            ge=0,
            description="stop after this many validations without improvement; 0: never",
            extra={"group": "Duration"},
        ),
    ] = 0

    optimizer: Annotated[
        Literal["sgd", "adam", "adamw", "adadelta", "adagrad"],
        Meta(description="optimizer", extra={"group": "Optimizer", "spellings": OPTIMIZER_CLASSES}),
    ] = "adamw"
    lr: Annotated[
        tuple[Annotated[float, Meta(gt=0)], ...],
        Meta(
            min_length=1,
            description="learning rate at its peak; a list gives one value per epoch",
            extra={"group": "Optimizer", "aliases": ["--learning-rate"]},
        ),
    ] = (1e-3,)
    weight_decay: Annotated[
        float, Meta(ge=0, description="weight decay", extra={"group": "Optimizer", "aliases": ["--wd"]})
    ] = 0.0
    momentum: Annotated[float, Meta(ge=0, lt=1, description="momentum of sgd", extra={"group": "Optimizer"})] = 0.0
    nesterov: Annotated[bool, Meta(description="Nesterov momentum of sgd", extra={"group": "Optimizer"})] = False
    adam_betas: Annotated[
        tuple[Annotated[float, Meta(ge=0, lt=1)], ...],
        Meta(
            min_length=2,
            max_length=2,
            description="decay rates of adam's and adamw's two moments",
            extra={"group": "Optimizer"},
        ),
    ] = (0.9, 0.999)
    adam_eps: Annotated[
        float,
        Meta(
            gt=0,
            description="added to the denominator of adam, adamw and adagrad",
            extra={"group": "Optimizer"},
        ),
    ] = 1e-8
    adadelta_rho: Annotated[
        float,
        Meta(
            ge=0,
            lt=1,
            description="decay rate of adadelta's averages",
            extra={"group": "Optimizer", "aliases": ["--adadelta_rho"]},
        ),
    ] = 0.9
    adadelta_eps: Annotated[
        float,
        Meta(
            gt=0,
            description="added under adadelta's square roots",
            extra={"group": "Optimizer", "aliases": ["--adadelta_eps"]},
        ),
    ] = 1e-6
    clip_norm: Annotated[
        float,
        Meta(ge=0, description="clip the gradient to this global norm; 0: no", extra={"group": "Optimizer"}),
    ] = 0.0
    update_freq: Annotated[
        tuple[Annotated[int, Meta(ge=1)], ...],
        Meta(
            min_length=1,
            description="micro-steps per optimizer step; a list gives one value per epoch",
            extra={"group": "Optimizer"},
        ),
    ] = (1,)

    lr_scheduler: Annotated[
        Literal["fixed", "polynomial_decay", "inverse_sqrt", "cosine", "step"],
        Meta(
            description="learning-rate schedule",
            extra={"group": "Schedule", "aliases": ["--lr_scheduler"], "spellings": SCHEDULE_CLASSES},
        ),
    ] = "fixed"
    warmup_updates: Annotated[
        int,
        Meta(ge=0, description="optimizer steps of linear warm-up", extra={"group": "Schedule"}),
    ] = 0
    warmup_init_lr: Annotated[
        float,
        Meta(ge=0, description="learning rate at the start of the warm-up", extra={"group": "Schedule"}),
    ] = 0.0
    total_num_update: Annotated[
        int,
        Meta(
            ge=0,
            description="optimizer steps at which polynomial_decay and cosine end; 0: max_updates",
            extra={"group": "Schedule"},
        ),
    ] = 0
    end_learning_rate: Annotated[
        float,
        Meta(
            ge=0,
            description="learning rate at the end of polynomial_decay and cosine",
            extra={"group": "Schedule"},
        ),
    ] = 0.0
    power: Annotated[float, Meta(gt=0, description="exponent of polynomial_decay", extra={"group": "Schedule"})] = 1.0
    lr_step_updates: Annotated[
        int,
        Meta(ge=0, description="step: optimizer steps between two decays", extra={"group": "Schedule"}),
    ] = 0
    lr_step_gamma: Annotated[
        float, Meta(gt=0, le=1, description="step: factor of each decay", extra={"group": "Schedule"})
    ] = 0.1

    valid_every_updates: Annotated[
        int,
        Meta(
            ge=0,
            description="validate every N optimizer steps; 0: only at the end of an epoch",
            extra={"group": "Validation", "aliases": ["--validate-interval-updates"]},
        ),
    ] = 0
    valid_every_epochs: Annotated[
        int,
        Meta(
            ge=0,
            description="validate every N epochs; 0: never",
            extra={
                "group": "Validation",
                "aliases": ["--validate-interval"],
                "switches": {"--disable-validation": "0"},
            },
        ),
    ] = 1
    best_metric: Annotated[
        str,
        Meta(
            description="metric for the best checkpoint and for patience: loss or a metric of the task",
            extra={"group": "Validation", "aliases": ["--best-checkpoint-metric"]},
        ),
    ] = "loss"
    maximize_best_metric: (
        Annotated[
            bool,
            Meta(
                description="whether a higher best_metric is better; default: yes for every metric but loss",
                extra={"group": "Validation", "aliases": ["--maximize-best-checkpoint-metric"]},
            ),
        ]
        | None
    ) = None
    test: Annotated[
        bool,
        Meta(
            description="evaluate the test split at the end, where the task has one",
            extra={"group": "Validation"},
        ),
    ] = True
    test_best: Annotated[
        bool,
        Meta(
            description="test the weights of the best validation, if there was one; otherwise the last weights",
            extra={"group": "Validation"},
        ),
    ] = True
    eval_only: (
        Annotated[
            str,
            Meta(
                description="evaluate this checkpoint, or the newest intact one of a folder, and do not train",
                extra={"group": "Validation"},
            ),
        ]
        | None
    ) = None
    eval_split: (
        Annotated[
            Literal["test", "valid"],
            Meta(
                description="the split that --eval-only evaluates; default: test, or valid of a task without one",
                extra={"group": "Validation"},
            ),
        ]
        | None
    ) = None

    seed: Annotated[int, Meta(ge=0, le=2**32 - 1, description="seed", extra={"group": "Numerics"})] = 1
    precision: Annotated[
        Literal["fp32", "bf16", "fp16"],
        Meta(
            description="bf16 and fp16 are autocast; fp16 scales the loss",
            extra={"group": "Numerics", "switches": {"--fp16": "fp16", "--bf16": "bf16"}},
        ),
    ] = "fp32"
    tf32: Annotated[
        bool,
        Meta(
            description="round products of 32-bit floats to TF32 on GPUs that have it (NVIDIA Ampere and later)",
            extra={"group": "Numerics"},
        ),
    ] = True
    min_loss_scale: Annotated[
        float,
        Meta(
            gt=0,
            description="fp16: end the training when overflowing gradients push the loss scale below this",
            extra={"group": "Numerics"},
        ),
    ] = 1e-4
    ema_decay: Annotated[
        float,
        Meta(
            ge=0,
            lt=1,
            description="keep an exponential moving average of the weights, which is validated, tested and saved as "
            "the model; this is the decay per step; 0: no average",
            extra={"group": "Numerics"},
        ),
    ] = 0.0
    activation_checkpointing: Annotated[
        bool,
        Meta(
            description="compute the activations of the task's checkpointed_modules again in the backward pass instead "
            "of keeping them: less memory, the same gradients",
            extra={"group": "Numerics", "aliases": ["--checkpoint-activations"]},
        ),
    ] = False
    log_interval: Annotated[
        int,
        Meta(
            ge=0,
            description="print the loss every N optimizer steps; 0: every two seconds",
            extra={"group": "Duration"},
        ),
    ] = 0
    count_flops: Annotated[
        Literal["auto", "on", "off"],
        Meta(
            description="count the FLOPs of the first steps, to show the share of the GPU's peak; auto: on GPUs only",
            extra={"group": "Numerics"},
        ),
    ] = "auto"
    compile: Annotated[bool, Meta(description="compile the model with torch.compile", extra={"group": "Numerics"})] = (
        False
    )
    deterministic: Annotated[
        bool, Meta(description="use deterministic algorithms only", extra={"group": "Numerics"})
    ] = False
    threads: Annotated[
        int,
        Meta(
            ge=0,
            description="CPU threads per rank; 0: cores of the node divided by its ranks",
            extra={"group": "Numerics", "per_rank": True},
        ),
    ] = 0

    bucket_cap_mb: Annotated[
        float,
        Meta(gt=0, description="size of a gradient bucket, MiB", extra={"group": "Synchronisation"}),
    ] = 25.0
    find_unused_parameters: Annotated[
        bool,
        Meta(
            description="search for parameters that a step does not use",
            extra={"group": "Synchronisation"},
        ),
    ] = False
    gradient_as_bucket_view: Annotated[
        bool,
        Meta(description="gradients share memory with the buckets", extra={"group": "Synchronisation"}),
    ] = True
    static_graph: Annotated[
        bool,
        Meta(description="the graph is the same at every step", extra={"group": "Synchronisation"}),
    ] = False
    broadcast_buffers: Annotated[
        bool,
        Meta(
            description="copy rank 0's buffers to all ranks before each forward",
            extra={"group": "Synchronisation"},
        ),
    ] = False
    ddp_comm_hook: Annotated[
        Literal["none", "fp16", "bf16", "powersgd"],
        Meta(description="compress gradients on the wire", extra={"group": "Synchronisation"}),
    ] = "none"
    sync_detail_every: Annotated[
        int,
        Meta(
            ge=0,
            description="measure each bucket and the local gradient norm every N steps; 0: never",
            extra={"group": "Synchronisation"},
        ),
    ] = 32
    desync_every: Annotated[
        int,
        Meta(
            ge=0,
            description="compare parameters across ranks every N steps, and at the end; 0: only at the end",
            extra={"group": "Synchronisation"},
        ),
    ] = 100

    save_every_updates: Annotated[
        int,
        Meta(
            ge=0,
            description="checkpoint every N optimizer steps; 0: no",
            extra={"group": "Checkpoints", "aliases": ["--save-interval-updates"]},
        ),
    ] = 0
    save_every_epochs: Annotated[
        int,
        Meta(
            ge=0,
            description="checkpoint every N epochs; 0: no",
            extra={
                "group": "Checkpoints",
                "aliases": ["--save-interval"],
                "switches": {"--no-epoch-checkpoints": "0"},
            },
        ),
    ] = 1
    save_every_minutes: Annotated[
        float,
        Meta(ge=0, description="checkpoint every X minutes; 0: no", extra={"group": "Checkpoints"}),
    ] = 0.0
    keep_last: Annotated[
        int,
        Meta(ge=1, description="checkpoints to keep besides the best", extra={"group": "Checkpoints"}),
    ] = 2
    keep_last_epochs: Annotated[
        int,
        Meta(
            ge=-1,
            description="also keep the checkpoints at the end of the last N epochs, as epoch_N.pt; -1: of all; 0: none",
            extra={"group": "Checkpoints"},
        ),
    ] = 0
    save: Annotated[
        bool,
        Meta(
            description="write checkpoints; without them nothing of the training is kept",
            extra={"group": "Checkpoints"},
        ),
    ] = True
    save_dir: (
        Annotated[
            str,
            Meta(
                description="folder for checkpoints; default: checkpoints/ of the run directory",
                extra={"group": "Checkpoints", "per_rank": True},
            ),
        ]
        | None
    ) = None
    resume: (
        Annotated[
            str,
            Meta(
                description="checkpoint file, or a folder, whose newest intact checkpoint is loaded",
                extra={"group": "Checkpoints", "aliases": ["--restore-file"]},
            ),
        ]
        | None
    ) = None
    checkpoint_run: Annotated[
        str,
        Meta(
            description="resume, eval_only: take only checkpoints of the run with this id, where a folder holds those "
            "of several; default: of any",
            extra={"group": "Checkpoints", "per_rank": True},
        ),
    ] = ""
    reset_optimizer: Annotated[
        bool,
        Meta(
            description="resume: reset the state of the optimizer; steps, schedule and data continue",
            extra={"group": "Checkpoints"},
        ),
    ] = False
    reset_dataloader: Annotated[
        bool,
        Meta(
            description="resume: start the data at epoch 1 again, such as for new data; steps and schedule continue",
            extra={"group": "Checkpoints"},
        ),
    ] = False
    reset_meters: Annotated[
        bool,
        Meta(description="resume: forget the best validation so far", extra={"group": "Checkpoints"}),
    ] = False
    finetune_from: (
        Annotated[
            str,
            Meta(
                description="start from the weights of this file: a checkpoint, a state_dict in .pt, or .safetensors; "
                "optimizer, schedule and data start anew",
                extra={"group": "Checkpoints", "aliases": ["--finetune-from-model"]},
            ),
        ]
        | None
    ) = None
    finetune_partial: Annotated[
        bool,
        Meta(
            description="finetune_from: load the weights whose name and shape match the model, and list the others",
            extra={"group": "Checkpoints"},
        ),
    ] = False
