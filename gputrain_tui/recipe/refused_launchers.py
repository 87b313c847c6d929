"""Programs that start trainings, and that no recipe replaces: why, and what to do instead."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from trainer.contract.errors import RequestError, quoted

_TORCHRUN = "give init: torchrun --nproc-per-node N SCRIPT.py"
_LINE = "give init the line in it that starts torchrun or python, with the values of its variables"
_BEHIND = "give init the command behind it"
_ROWS = (
    (
        "horovodrun",
        "starts ranks that meet over Horovod's own MPI or gloo: once the script calls init_process_group() and "
        f"DistributedDataParallel in place of Horovod, {_TORCHRUN}",
    ),
    (
        "mpirun mpiexec orterun jsrun flux aprun",
        "gives each process its rank in variables of MPI, not in RANK and MASTER_ADDR: if the script joins "
        f"torch.distributed by env://, {_TORCHRUN}",
    ),
    ("bash sh zsh dash ksh", f"runs a shell script, which may do anything: {_LINE}"),
    (
        "sbatch",
        "submits a batch script: give init the line in it with srun, torchrun or python, and write its #SBATCH options "
        "into [slurm]; `gputrain run` submits the job",
    ),
    ("salloc", f"only gets an allocation: {_BEHIND}; in an allocation `gputrain run` starts in that"),
    (
        "yolo",
        "starts its ranks from a file that it writes itself: call YOLO(MODEL).train(...) in a script of your own, and "
        + _TORCHRUN,
    ),
    (
        "ray",
        f"gives processes on Ray's cluster their ranks itself: if the script needs no Ray, {_TORCHRUN}",
    ),
    (
        "tune",
        "runs a file of torchtune's package: copy it with `tune cp RECIPE FILE.py`, and give init: torchrun "
        "--nproc-per-node N FILE.py --config CONFIG",
    ),
    ("axolotl", "calls accelerate itself: give init: accelerate launch -m axolotl.cli.train CONFIG"),
    ("llamafactory-cli", "calls torchrun itself: give init: torchrun --nproc-per-node N src/train.py CONFIG"),
    ("torchx", f"submits to a scheduler: {_TORCHRUN}"),
    (
        "docker podman singularity apptainer enroot kubectl",
        f"starts a container: {_BEHIND}, and start gputrain in the image",
    ),
    ("make just invoke tox nox dvc snakemake", f"runs what stands in a file: {_LINE}"),
    ("nsys ncu py-spy viztracer scalene perf strace", f"would watch the launcher and not the ranks: {_BEHIND}"),
    ("ssh pdsh clush", f"runs it on other hosts: {_BEHIND}, and name the hosts in [[cluster.nodes]] of the recipe"),
    ("tmux screen", f"keeps a terminal: {_BEHIND}; `gputrain run --detach` goes on in the background"),
    ("sudo", f"changes the user: {_BEHIND}, and start gputrain as that user"),
    (
        "jupyter ipython",
        "runs cells or a session, which have no ranks: write them into a file, and give init: python SCRIPT.py",
    ),
)
REASONS = {name: reason for names, reason in _ROWS for name in names.split()}
"""Names of programs → the end of a sentence about them."""
MODULES = {
    "horovod.runner": "horovodrun",
    "horovod.runner.launch": "horovodrun",
    "ultralytics": "yolo",
    "torchx.cli.main": "torchx",
}
"""Modules of Python that are these programs."""


def require_translatable(argv: Sequence[str], *, shown_as: str) -> None:
    """Raise for a program, or a module after ``-m``, that cannot be translated; return for any other."""
    name = MODULES.get(argv[1], "") if argv[0] == "-m" else PurePath(argv[0]).name
    reason = REASONS.get(name)
    if reason is None and name.endswith((".sh", ".bash", ".slurm", ".sbatch")):
        reason = REASONS["bash"].replace("runs", "is", 1)
    if reason is not None:
        raise RequestError(f"{quoted(shown_as)} {reason}")
