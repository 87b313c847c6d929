"""Every option of ``python -m trainer``, declared once and rendered as flag, recipe key, form field and help.

Torch-free: the console reads this schema. A field's ``Meta`` carries its help, its range and, in ``extra``, its
group and alternative names of the flag and its values, such as those of fairseq; ``contract.schema`` reads them.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from trainer.contract.fairseq_flags import OPTIMIZER_CLASSES, SCHEDULE_CLASSES
from trainer.contract.schema import Positive, Positives, option_meta

BatchSize = Positives | Literal["balanced"] | None
"""Samples per rank and micro-step: one value for all, or one per rank; None: the default."""

_launch = partial(option_meta, "")
_data, _duration, _optimizer = (partial(option_meta, group) for group in ("Data", "Duration", "Optimizer"))
_schedule, _validation, _numerics = (partial(option_meta, group) for group in ("Schedule", "Validation", "Numerics"))
_sync, _checkpoints = (partial(option_meta, group) for group in ("Synchronisation", "Checkpoints"))


class Distributed(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Ranks to start on this node and their rendezvous: flags with the names and meaning of fairseq's and HetSeq's."""

    distributed_init_method: Annotated[str | None, _launch("rendezvous: tcp://HOST:PORT, file:///PATH or env://")] = (
        None
    )
    distributed_world_size: Annotated[
        Positive | None, _launch("ranks on all nodes together; default: the devices of this node")
    ] = None
    distributed_gpus: Annotated[
        Positive | None, _launch("ranks on this node; default: its devices, at most the world size")
    ] = None
    distributed_rank: Annotated[
        int, _launch("first rank of this node; with --distributed-no-spawn the rank itself", ge=0)
    ] = 0
    distributed_backend: Annotated[
        Literal["auto", "nccl", "gloo"], _launch("auto is nccl on GPUs and gloo on CPUs")
    ] = "auto"
    distributed_port: Annotated[
        Annotated[int, Meta(ge=1, le=65535)] | None, _launch("port on the first node when the init method is inferred")
    ] = None
    distributed_timeout: Annotated[
        float, _launch("seconds that a collective may take before it fails; hangs are found earlier", gt=0)
    ] = 600.0
    join_timeout: Annotated[float, _launch("seconds to wait until all ranks have joined the process group", gt=0)] = (
        300.0
    )
    stop_grace: Annotated[
        float,
        # At least three of their steps, see ``outcome.answer_s``.
        _launch("seconds for ranks to respond when asked to stop and save; then they are killed", ge=0),
    ] = 10.0
    distributed_no_spawn: Annotated[bool, _launch("this process is the rank; start no others")] = False
    device_id: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        _launch(
            "the GPU of a rank that is not spawned; default: its local rank", aliases=["--local_rank", "--local-rank"]
        ),
    ] = None
    cpu: Annotated[bool, _launch("train on CPUs with gloo even where GPUs are present")] = False
    share_devices: Annotated[bool, _launch("allow two ranks on one GPU")] = False
    start_method: Annotated[
        Literal["forkserver", "spawn"],
        _launch("forkserver: ranks fork from a server that has torch loaded; spawn: torch.multiprocessing"),
        # forkserver is the default because it imports torch once per node, before any rank exists, with no thread,
        # tensor or CUDA context to inherit: ranks start in half the time of spawn, which imports it in each of them.
    ] = "forkserver"
    run_dir: Annotated[str | None, _launch("folder for events, logs and checkpoints; default: no record")] = None
    node: Annotated[int, _launch("index of this node in the plan, for the record", ge=0)] = 0


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """Training script that ranks run instead of a task."""

    script: Annotated[str, _launch("a Python script to run instead of a task; its arguments follow --", min_length=1)]
    module: Annotated[bool, _launch("script is the name of a module, which runs as with python -m")] = False
    local_rank_flag: Annotated[
        Annotated[str, Meta(min_length=1, pattern=r"^-{1,2}\w[\w-]*$(?!\n)")] | None,
        _launch(
            "flag with which the script gets its local rank, such as --local-rank of torch.distributed.launch; "
            "default: by LOCAL_RANK alone"
        ),
    ] = None
    args: Annotated[tuple[str, ...], _launch("the script's arguments")] = ()
    starts_ranks: Annotated[
        bool, _launch("the script starts the ranks of its node itself, as with mp.spawn: start it once on each node")
    ] = False
    instrument: Annotated[
        bool, _launch("measure the script's steps, phases and gradient synchronisation; needs a record")
    ] = True


class Training(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of a training: all keys of a recipe's ``[train]`` table."""

    task: Annotated[str, _launch("lm, docnn, mnist, masked_lm, or your own as module:Class or path.py:Class")] = ""

    batch_size: Annotated[
        BatchSize,
        _data(
            "samples per rank and micro-step; a list gives one value per rank; balanced: each rank gets the share of "
            "global_batch_size that it can carry; default: 32, and with max_tokens as many as fit",
            aliases=["--max-sentences"],
        ),
    ] = None
    global_batch_size: Annotated[
        int, _data("batch_size balanced: samples, with max_tokens tokens, of all ranks in a micro-step; 0: none", ge=0)
    ] = 0
    shares_from: Annotated[
        str | None,
        _data(
            "batch_size balanced: change the shares as the run in this run directory did, and measure nothing, so that "
            "its training repeats bit for bit"
        ),
    ] = None
    max_tokens: Annotated[
        int,
        _data(
            "limit batches to this many tokens per rank and micro-step, each sample padded to the longest; "
            "batch_size then limits their samples; 0: limit by samples only",
            ge=0,
        ),
    ] = 0
    required_batch_size_multiple: Annotated[
        int, _data("max_tokens: round the samples of a batch down to a multiple of this, if it has that many", ge=1)
    ] = 1
    valid_batch_size: Annotated[
        Positive | None,
        _data(
            "samples per rank in validation; default: as in training",
            aliases=["--max-sentences-valid", "--batch-size-valid"],
        ),
    ] = None
    num_workers: Annotated[int, _data("data loading processes per rank", ge=0, per_rank=True)] = 0
    shuffle: Annotated[bool, _data("shuffle the training data every epoch, alike on all ranks")] = True
    curriculum: Annotated[
        int,
        _data(
            "do not shuffle in this many first epochs: shortest samples first if the task gives their "
            "lengths, else in the order of the data",
            ge=0,
        ),
    ] = 0
    fix_batches_to_gpus: Annotated[
        bool, _data("each rank has the same batches in every epoch, in a different order")
    ] = False
    drop_last: Annotated[
        bool, _data("leave out the samples at an epoch's end that do not fill the batch of every rank")
    ] = False

    max_epochs: Annotated[
        int, _duration("stop after this many epochs; 0: no limit", ge=0, aliases=["--max-epoch", "--me"])
    ] = 0
    max_updates: Annotated[
        int, _duration("stop after this many optimizer steps; 0: no limit", ge=0, aliases=["--max-update", "--mu"])
    ] = 0
    min_lr: Annotated[
        float, _duration("stop when the learning rate is not above this; -1: never", aliases=["--stop-min-lr"])
    ] = -1.0
    stop_time: Annotated[float, _duration("stop after this many minutes, agreed across ranks; 0: never", ge=0)] = 0.0
    patience: Annotated[int, _duration("stop after this many validations without improvement; 0: never", ge=0)] = 0

    optimizer: Annotated[
        Literal["sgd", "adam", "adamw", "adadelta", "adagrad", "muon", "schedulefree_adamw"],
        _optimizer("optimizer; muon: for matrices, and adamw for the rest", spellings=OPTIMIZER_CLASSES),
    ] = "adamw"
    lr: Annotated[
        tuple[Annotated[float, Meta(gt=0)], ...],
        _optimizer(
            "learning rate at its peak; a list gives one value per epoch", min_length=1, aliases=["--learning-rate"]
        ),
    ] = (1e-3,)
    weight_decay: Annotated[float, _optimizer("weight decay", ge=0, aliases=["--wd"])] = 0.0
    decay_norms: Annotated[
        bool, _optimizer("weight decay of biases and norms too: of parameters with fewer than two dimensions")
    ] = True
    momentum: Annotated[float, _optimizer("momentum of sgd", ge=0, lt=1)] = 0.0
    nesterov: Annotated[bool, _optimizer("Nesterov momentum of sgd")] = False
    adam_betas: Annotated[
        tuple[Annotated[float, Meta(ge=0, lt=1)], ...],
        _optimizer("decay rates of the two moments of adam, of all adamw", min_length=2, max_length=2),
    ] = (0.9, 0.999)
    adam_eps: Annotated[float, _optimizer("added to the denominator of adam, adamw and adagrad", gt=0)] = 1e-8
    muon_momentum: Annotated[float, _optimizer("momentum of muon", ge=0, lt=1)] = 0.95
    adadelta_rho: Annotated[
        float, _optimizer("decay rate of adadelta's averages", ge=0, lt=1, aliases=["--adadelta_rho"])
    ] = 0.9
    adadelta_eps: Annotated[
        float, _optimizer("added under adadelta's square roots", gt=0, aliases=["--adadelta_eps"])
    ] = 1e-6
    clip_norm: Annotated[float, _optimizer("clip the gradient to this global norm; 0: no", ge=0)] = 0.0
    update_freq: Annotated[
        Positives, _optimizer("micro-steps per optimizer step; a list gives one value per epoch")
    ] = (1,)

    lr_scheduler: Annotated[
        Literal["fixed", "polynomial_decay", "inverse_sqrt", "cosine", "step", "wsd"],
        _schedule(
            "learning-rate schedule; wsd: warm-up, stable, decay",
            aliases=["--lr_scheduler"],
            spellings=SCHEDULE_CLASSES,
        ),
    ] = "fixed"
    warmup_updates: Annotated[int, _schedule("optimizer steps of linear warm-up", ge=0)] = 0
    warmup_init_lr: Annotated[
        float, _schedule("learning rate at the start of the warm-up; 0: the first step has that of the second", ge=0)
    ] = 0.0
    total_num_update: Annotated[
        int,
        _schedule(
            "optimizer steps at which polynomial_decay, cosine and wsd end; 0: max_updates, else those of max_epochs",
            ge=0,
        ),
    ] = 0
    end_learning_rate: Annotated[
        float, _schedule("learning rate at the end of polynomial_decay, cosine and wsd", ge=0)
    ] = 0.0
    power: Annotated[float, _schedule("exponent of polynomial_decay and of the decay of wsd", gt=0)] = 1.0
    decay_updates: Annotated[int, _schedule("wsd: optimizer steps of the decay at the end", ge=0)] = 0
    lr_step_updates: Annotated[int, _schedule("step: optimizer steps between two decays", ge=0)] = 0
    lr_step_gamma: Annotated[float, _schedule("step: factor of each decay", gt=0, le=1)] = 0.1

    valid_every_updates: Annotated[
        int,
        _validation(
            "validate every N optimizer steps; 0: only at the end of an epoch",
            ge=0,
            aliases=["--validate-interval-updates"],
        ),
    ] = 0
    valid_every_epochs: Annotated[
        int,
        _validation(
            "validate every N epochs; 0: never",
            ge=0,
            aliases=["--validate-interval"],
            switches={"--disable-validation": "0"},
        ),
    ] = 1
    best_metric: Annotated[
        str,
        _validation(
            "metric for the best checkpoint and for patience: loss or a metric of the task",
            aliases=["--best-checkpoint-metric"],
        ),
    ] = "loss"
    maximize_best_metric: Annotated[
        bool | None,
        _validation(
            "whether a higher best_metric is better; default: no for loss, a metric with loss in its name and one in "
            "the task's lower_is_better, else yes",
            aliases=["--maximize-best-checkpoint-metric"],
        ),
    ] = None
    test: Annotated[bool, _validation("evaluate the test split at the end, where the task has one")] = True
    test_best: Annotated[
        bool, _validation("test the weights of the best validation, if there was one; otherwise the last weights")
    ] = True
    eval_only: Annotated[
        str | None, _validation("evaluate this checkpoint, or the newest intact one of a folder, and do not train")
    ] = None
    eval_split: Annotated[
        Literal["test", "valid"] | None,
        _validation("the split that --eval-only evaluates; default: test, or valid of a task without one"),
    ] = None

    seed: Annotated[int, _numerics("seed", ge=0, le=2**32 - 1)] = 1
    precision: Annotated[
        Literal["fp32", "bf16", "fp16"],
        _numerics("bf16 and fp16 are autocast; fp16 scales the loss", switches={"--fp16": "fp16", "--bf16": "bf16"}),
    ] = "fp32"
    tf32: Annotated[
        bool, _numerics("round products of 32-bit floats to TF32 on GPUs that have it (NVIDIA Ampere and later)")
    ] = True
    min_loss_scale: Annotated[
        float, _numerics("fp16: end the training when overflowing gradients push the loss scale below this", gt=0)
    ] = 1e-4
    ema_decay: Annotated[
        float,
        _numerics(
            "keep an exponential moving average of the weights, which is validated, tested and saved as "
            "the model; this is the decay per step; 0: no average",
            ge=0,
            lt=1,
        ),
    ] = 0.0
    ema_start: Annotated[
        int, _numerics("optimizer steps after which ema_decay's average begins; it is the weights until then", ge=0)
    ] = 0
    activation_checkpointing: Annotated[
        bool,
        _numerics(
            "compute the activations of the task's checkpointed_modules again in the backward pass instead "
            "of keeping them: less memory, the same gradients",
            aliases=["--checkpoint-activations"],
        ),
    ] = False
    log_interval: Annotated[
        int, _duration("print the loss of rank 0 every N optimizer steps; 0: every two seconds", ge=0)
    ] = 0
    count_flops: Annotated[
        Literal["auto", "on", "off"],
        _numerics("count the FLOPs of the first steps, to show the share of the GPU's peak; auto: on GPUs only"),
    ] = "auto"
    compile: Annotated[
        Literal["off", "on", "auto"],
        _numerics(
            "compile the model with torch.compile before the first step; auto: train without it where that fails",
            or_kind="bool",
            spellings={"true": "on", "false": "off"},
            switches={"--compile": "on", "--no-compile": "off"},
        ),
    ] = "off"
    deterministic: Annotated[bool, _numerics("use deterministic algorithms only")] = False
    threads: Annotated[
        int, _numerics("CPU threads per rank; 0: cores of the node divided by its ranks", ge=0, per_rank=True)
    ] = 0

    strategy: Annotated[
        Literal["ddp", "fsdp"],
        _sync(
            "ddp: the whole model on every rank; fsdp: parameters, gradients and optimizer state divided among the "
            "ranks, for a model that does not fit"
        ),
    ] = "ddp"
    bucket_cap_mb: Annotated[float, _sync("size of a gradient bucket, MiB", gt=0)] = 25.0
    find_unused_parameters: Annotated[bool, _sync("search for parameters that a step does not use")] = False
    gradient_as_bucket_view: Annotated[bool, _sync("gradients share memory with the buckets")] = True
    static_graph: Annotated[bool, _sync("the graph is the same at every step")] = False
    broadcast_buffers: Annotated[bool, _sync("copy rank 0's buffers to all ranks before each forward")] = False
    ddp_comm_hook: Annotated[Literal["none", "fp16", "bf16", "powersgd"], _sync("compress gradients on the wire")] = (
        "none"
    )
    sync_detail_every: Annotated[
        int, _sync("measure each bucket and the local gradient norm every N steps; 0: measure no synchronisation", ge=0)
    ] = 32
    desync_every: Annotated[
        int, _sync("compare parameters across ranks every N steps, and at the end; 0: only at the end", ge=0)
    ] = 100

    save_every_updates: Annotated[
        int, _checkpoints("checkpoint every N optimizer steps; 0: no", ge=0, aliases=["--save-interval-updates"])
    ] = 0
    save_every_epochs: Annotated[
        int,
        _checkpoints(
            "checkpoint every N epochs; 0: no",
            ge=0,
            aliases=["--save-interval"],
            switches={"--no-epoch-checkpoints": "0"},
        ),
    ] = 1
    save_every_minutes: Annotated[float, _checkpoints("checkpoint every X minutes; 0: no", ge=0)] = 0.0
    keep_last: Annotated[int, _checkpoints("checkpoints to keep besides the best", ge=1)] = 2
    keep_last_epochs: Annotated[
        int,
        _checkpoints(
            "also keep the checkpoints at the end of the last N epochs, as epoch_N.pt; -1: of all; 0: none", ge=-1
        ),
    ] = 0
    save: Annotated[bool, _checkpoints("write checkpoints; without them nothing of the training is kept")] = True
    save_dir: Annotated[
        str | None, _checkpoints("folder for checkpoints; default: checkpoints/ of the run directory", per_rank=True)
    ] = None
    resume: Annotated[
        str | None,
        _checkpoints(
            "checkpoint file, or a folder, whose newest intact checkpoint is loaded", aliases=["--restore-file"]
        ),
    ] = None
    checkpoint_run: Annotated[
        str,
        _checkpoints(
            "resume, eval_only: take only checkpoints of the run with this id, where a folder holds those "
            "of several; default: of any",
            per_rank=True,
        ),
    ] = ""
    reset_optimizer: Annotated[
        bool, _checkpoints("resume: reset the state of the optimizer; steps, schedule and data continue")
    ] = False
    reset_dataloader: Annotated[
        bool, _checkpoints("resume: start the data at epoch 1 again, such as for new data; steps and schedule continue")
    ] = False
    reset_meters: Annotated[bool, _checkpoints("resume: forget the best validation so far")] = False
    finetune_from: Annotated[
        str | None,
        _checkpoints(
            "start from the weights of this file: a checkpoint, a state_dict in .pt, or .safetensors; or of a folder "
            "of torch.distributed.checkpoint; optimizer, schedule and data start anew",
            aliases=["--finetune-from-model"],
        ),
    ] = None
    finetune_partial: Annotated[
        bool, _checkpoints("finetune_from: load the weights whose name and shape match the model, and list the others")
    ] = False


class TrainingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a training and of its task."""

    training: Training
    task_options: Any = None
    """Options of a built-in task; None for a user's own, whose schema a rank gets with the task's import."""
    task_flags: tuple[str, ...] = ()
    """Flags that are not the trainer's, for the schema of a user's own task."""
    notes: tuple[str, ...] = ()
    """Lines about flags without an effect, which rank 0 prints."""
