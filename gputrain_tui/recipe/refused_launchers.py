"""Programs that start trainings, and that no recipe replaces: why, and what to do instead."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from trainer.contract.errors import RequestError, quoted

_MPI = (
    "gives each process its rank in variables of MPI and sets no RANK and MASTER_ADDR: if the script joins "
    "torch.distributed by env://, give init: torchrun --nproc-per-node N SCRIPT.py"
)
_SHELL = (
    "is a shell script, which may do anything: give init the line in it that starts torchrun or python, with the values of "
    "its variables"
)
_CONTAINER = "starts a container, which gputrain does not: install gputrain in the image, and give init the command behind it there"
_PROFILER = (
    "would watch the launcher and not the ranks that gputrain starts: give init the command behind it; "
    "`gputrain report` says what a step's time goes to"
)
REASONS = {
    "horovodrun": "starts ranks that meet over Horovod's own MPI or gloo, not in torch.distributed: gputrain can run the "
    "script once it calls init_process_group() and DistributedDataParallel; then give init: torchrun --nproc-per-node N "
    "SCRIPT.py",
    **dict.fromkeys(("mpirun", "mpiexec", "orterun", "jsrun", "flux", "aprun"), _MPI),
    **dict.fromkeys(("bash", "sh", "zsh", "dash", "ksh"), _SHELL),
    "sbatch": "submits a batch script: give init the line in it with srun, torchrun or python, and write its #SBATCH options "
    "into [slurm]; `gputrain run` submits the job",
    "salloc": "only gets an allocation: give init the command behind it; `gputrain run` starts in the allocation that it is in",
    "yolo": "starts its ranks from a file that it writes itself: call YOLO(MODEL).train(...) in a script of your own, and "
    "give init: torchrun --nproc-per-node N SCRIPT.py",
    "ray": "places workers on Ray's cluster and gives them their ranks itself: if the script does without Ray, give init: "
    "torchrun --nproc-per-node N SCRIPT.py",
    "tune": "runs a recipe that lies in torchtune's package: copy it with `tune cp RECIPE FILE.py`, and give init: torchrun "
    "--nproc-per-node N FILE.py --config CONFIG",
    "axolotl": "calls accelerate itself: give init: accelerate launch -m axolotl.cli.train CONFIG",
    "llamafactory-cli": "calls torchrun itself: give init: torchrun --nproc-per-node N src/train.py CONFIG",
    "torchx": "submits to a scheduler: give init the command of its role, such as torchrun --nproc-per-node N SCRIPT.py",
    "xla_dist": "starts ranks on TPUs, which gputrain does not know",
    **dict.fromkeys(("docker", "podman", "singularity", "apptainer", "enroot", "kubectl"), _CONTAINER),
    **dict.fromkeys(("make", "just", "invoke", "tox", "nox", "dvc", "snakemake"), "runs what stands in a file: " + (
        "give init the line in it that starts torchrun or python")),
    **dict.fromkeys(("nsys", "ncu", "py-spy", "viztracer", "scalene", "perf", "strace"), _PROFILER),
    **dict.fromkeys(("pdsh", "clush", "parallel-ssh", "ssh"), "starts the command on other hosts: give init the command "
    "behind it, and name the hosts in [[cluster.nodes]]; `gputrain run` starts all of them over ssh"),
    **dict.fromkeys(("tmux", "screen"), "keeps a terminal: give init the command behind it, and start `gputrain run --detach`"),
    "sudo": "changes the user: give init the command behind it, and start gputrain as that user",
    "jupyter": "runs a notebook, which has no ranks: write its cells into a Python file",
    "ipython": "runs a session: give init: python SCRIPT.py",
}  # fmt: skip
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
        reason = _SHELL
    if reason is not None:
        raise RequestError(f"{quoted(shown_as)} {reason}")
