"""Names of fairseq, PyText and HetSeq that are no options here: classes, flags without an effect, refused flags.

Torch-free. A flag with the meaning of one of our options is an alias of that option, in ``options``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.contract.errors import RequestError

OPTIMIZER_CLASSES = {
    "SGD": "sgd",
    "Adam": "adam",
    "AdamW": "adamw",
    "Adadelta": "adadelta",
    "Adagrad": "adagrad",
    "AdamWScheduleFree": "schedulefree_adamw",
    # HetSeq's classes; its Adam decays weights apart from the gradient, as adamw does.
    "_Adam": "adamw",
    "_Adadelta": "adadelta",
}
"""Class name of an optimizer in torch, schedulefree, PyText or HetSeq → choice of ``--optimizer``."""
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


@dataclass(frozen=True, kw_only=True)
class NoEffect:
    """Flag that is accepted without an effect, because the trainer always behaves that way."""

    why: str
    values: tuple[str, ...] = ()
    """Accepted values; empty for a switch."""


NO_EFFECT: dict[str, NoEffect] = {
    "--fast-stat-sync": NoEffect(why="counts and losses are always summed by all-reduce"),
    "--ddp-backend": NoEffect(why="gradients are always synchronised by DDP", values=("c10d", "pytorch_ddp")),
    "--log-format": NoEffect(why="lines are printed plainly", values=("simple", "none")),
    "--no-progress-bar": NoEffect(why="lines are printed plainly"),
    "--train-subset": NoEffect(why="training is on the split train", values=("train",)),
    "--valid-subset": NoEffect(why="validation is on the split valid", values=("valid",)),
}
"""Flags without an effect."""

_FRESH_WEIGHTS = "--finetune-from FILE starts from its weights and resets everything else"
_NO_SHARDS = "parameters and optimizer state are whole on every rank"
_OWN_TASK = "write a task of your own: --task module:Class"
_KEEP = (
    "--keep-last N keeps the newest checkpoints, --keep-last-epochs N those of epoch ends, and the best is always kept"
)

REFUSED: dict[str, str] = {
    "--arch": f"the task builds the model and has its sizes as options; {_OWN_TASK}",
    "--criterion": f"the task computes the loss; {_OWN_TASK}",
    "--user-dir": _OWN_TASK,
    "--config_file": "the task's own options have the sizes of the model, see --task TASK --help",
    "--dict": "the task builds its vocabulary from the data, see --task TASK --help",
    "--max_pred_length": "the task's own options have the lengths, such as --sequence-length of masked_lm",
    "--num_file": "--data names the files",
    "--hetseq_state_dict": "--finetune-from FILE",
    "--transformers_state_dict": "--finetune-from FILE",
    "--load_state_dict_strict": "--finetune-partial loads the weights that match",
    "--max-tokens-valid": "validation has the --max-tokens of training, or --valid-batch-size samples",
    "--skip-remainder-batch": "--drop-last leaves out the samples that do not fill the batch of every rank",
    "--data-buffer-size": "--num-workers N reads ahead in N processes",
    "--grouped-shuffling": "--fix-batches-to-gpus keeps the batches of a rank together",
    "--sentence-avg": "the loss is the mean over what the task's loss() counts: count samples there",
    "--stop-time-hours": "--stop-time MINUTES",
    "--force-anneal": "--lr-scheduler fixed takes a learning rate per epoch: --lr 0.1,0.1,0.01",
    "--lr-shrink": "--lr-scheduler step has --lr-step-updates and --lr-step-gamma",
    "--lr-decay": "--lr-scheduler step has --lr-step-updates and --lr-step-gamma",
    "--dadelta_weight_decay": "--weight-decay X",
    "--use-bmuf": "gradients are averaged at each step; --update-freq N averages them after N micro-steps",
    "--amp": "--precision fp16 or bf16 is autocast",
    "--memory-efficient-fp16": "--precision fp16 is autocast, with weights in fp32",
    "--memory-efficient-bf16": "--precision bf16 is autocast, with weights in fp32",
    "--fp16-init-scale": "the loss scale adjusts itself; --min-loss-scale X ends a run below it",
    "--fp16-scale-window": "the loss scale adjusts itself; --min-loss-scale X ends a run below it",
    "--fp16-scale-tolerance": "the loss scale adjusts itself; --min-loss-scale X ends a run below it",
    "--threshold-loss-scale": "--min-loss-scale X ends a run below it",
    "--store-ema": "--ema-decay X keeps the average",
    "--ema-fp32": "--ema-decay X keeps the average, in the weights' own precision",
    "--empty-cache-freq": "the record has the memory that torch holds; a run that is out of memory reports the cause",
    "--tpu": "ranks run on NVIDIA GPUs, or with --cpu on CPUs",
    "--zero-sharding": _NO_SHARDS,
    "--cpu-offload": _NO_SHARDS,
    "--fp16-no-flatten-grads": "DDP puts gradients into buckets of --bucket-cap-mb",
    "--heartbeat-timeout": "a stalled rank is found without a flag; --distributed-timeout SECONDS limits a collective",
    "--distributed-num-procs": "--distributed-gpus N",
    "--nprocs-per-node": "--distributed-gpus N",
    "--all-gather-list-size": "data that ranks exchange may have any size",
    "--reset-lr-scheduler": f"the schedule follows the number of steps; {_FRESH_WEIGHTS}",
    "--optimizer-overrides": "a resumed run uses its own flags, such as a new --weight-decay",
    "--continue-once": "--resume PATH; a run that is started again with --finetune-from as well resumes",
    "--keep-interval-updates": _KEEP,
    "--keep-best-checkpoints": _KEEP,
    "--no-last-checkpoints": f"--no-save writes none; {_KEEP}",
    "--no-save-optimizer-state": f"--no-save writes none; {_KEEP}",
    "--write-checkpoints-asynchronously": "checkpoints are always written in the background",
    "--validate-after-updates": "--valid-every-updates N",
    "--max-valid-steps": "validation is exact over the whole split; give the task a smaller one",
    "--tensorboard-logdir": "gputrain export RUN --to tensorboard DIR",
    "--wandb-project": "gputrain export RUN --to csv DIR",
    "--log-file": "with --run-dir DIR every rank has a log in DIR/logs",
    "--quantization-config-path": "weights are trained in fp32",
}
"""Refused flags, each with its replacement."""


def remove_fairseq_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Remove the flags of ``NO_EFFECT`` from arguments that belong to no option.

    Returns:
        The remaining arguments, and a line about each removed flag.

    Raises:
        RequestError: a flag of ``REFUSED``, or a value with an effect; the line names the replacement.
    """
    rest: list[str] = []
    notes: list[str] = []
    queue = list(argv)
    while queue:
        word = queue.pop(0)
        flag, equals, value = word.partition("=")
        if (known := NO_EFFECT.get(flag)) is not None:
            if known.values:
                value = value if equals else queue.pop(0) if queue else ""
                if value not in known.values:
                    allowed = " or ".join(known.values)
                    raise RequestError(f"{flag} is {value!r}, but may only be {allowed}: {known.why}")
            notes.append(f"{flag} has no effect: {known.why}")
        elif (instead := REFUSED.get(flag)) is not None:
            raise RequestError(f"{flag} is a flag of fairseq or HetSeq, not of this trainer: {instead}")
        else:
            rest.append(word)
    return rest, notes
