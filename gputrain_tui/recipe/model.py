"""The model of a recipe: nodes, cluster, Slurm, training and task.

One schema serves the file, ``--set`` and the console's form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gputrain_tui.recipe.source import Source
from trainer.contract.options import Distributed, Script, Training
from trainer.contract.schema import Option, describe, option_meta


class ReportOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of ``[report]``."""

    tensorboard: (
        Annotated[
            str,
            option_meta(
                "Report",
                "write TensorBoard event files during the run: true for a folder in the run directory, or a folder "
                "that gets a subfolder for each run",
                or_kind="bool",
                min_length=1,
            ),
        ]
        | None
    ) = None
    wandb: (
        Annotated[str, option_meta("Report", "Weights & Biases project to log to during the run", min_length=1)] | None
    ) = None
    on_end: (
        Annotated[
            str,
            option_meta(
                "Report", "shell command to run at the end, with GPUTRAIN_RUN_STATUS and others set", min_length=1
            ),
        ]
        | None
    ) = None
    on_finding: (
        Annotated[
            str,
            option_meta(
                "Report",
                "shell command to run when a finding is raised and when it is cleared, with GPUTRAIN_FINDING_KIND and "
                "others set",
                min_length=1,
            ),
        ]
        | None
    ) = None

    def __post_init__(self) -> None:
        if self.tensorboard == "false":
            msgspec.structs.force_setattr(self, "tensorboard", None)


Gpus = int | tuple[int | str, ...] | Literal["all", "free"]
"""A count, device ids (indices or UUIDs), all GPUs of the machine, or its free ones."""
LAUNCH_OPTIONS = ("distributed_timeout", "join_timeout", "stop_grace", "start_method", "share_devices")
"""Options of ``trainer.contract.options.Distributed`` that ``[train]`` takes; the plan computes the others."""
MAX_NAME_CHARS = 100
"""Limit of a recipe's name, which lists of runs show."""
RANK_KEYS = ("gpus", "cpu_ranks", "ranks")
"""Keys of a node, exactly one of which is set, for the number of its ranks."""
MAX_RANKS_PER_NODE = 1024
"""More than the cores or GPUs of any machine: a larger number is a typing error."""
PATTERNS = {
    # A host becomes a word of ssh's and srun's command lines, where one that starts with a dash would be an option.
    # HOST:PORT is no name for ssh; an address of IPv6 has more colons.
    "host": (
        r"(?:ssh://|(?![^:]*:\d+$))[\w\[][\w.:%@\[\]-]*",
        "a host name or an address, user@host or ssh://host:port",
    ),
    "workdir": (r"~?/[\s\S]*|~", "an absolute path, or start with ~/"),
    "python": (r"[^-\s].*", "the path or the name of an interpreter"),
    "setup": (r"[^\n\r]*\S[^\n\r]*\n?", "one line of shell; join several with &&"),
}
"""Regular expressions of the values of a node's and a cluster's keys, in words too."""

Workdir = Annotated[str, Meta(description="working directory of the ranks on a host; default: the same path as here")]
Python = Annotated[str, Meta(description="Python interpreter with torch on a host; default: the same path as here")]
Setup = Annotated[str, Meta(description="shell line to run before a node's ranks start, such as module load cuda")]


class NodeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of a node except its table ``env``; at most one of ``gpus``, ``cpu_ranks`` and ``ranks`` is set."""

    host: Annotated[str, Meta(min_length=1, description="name or address; default: this machine")] | None = None
    gpus: (
        Annotated[
            int | tuple[int | str, ...] | Literal["all", "free"],
            Meta(description="one rank per GPU: a count, a list of device ids, all, or free (GPUs not in use)"),
        ]
        | None
    ) = None
    cpu_ranks: (
        Annotated[int, Meta(ge=1, le=MAX_RANKS_PER_NODE, description="ranks on the CPU, with gloo, instead of GPUs")]
        | None
    ) = None
    ranks: (
        Annotated[
            int,
            Meta(ge=1, le=MAX_RANKS_PER_NODE, description="ranks on GPUs where the machine has any, else on its CPU"),
        ]
        | None
    ) = None
    workdir: Workdir | None = None
    python: Python | None = None
    setup: Setup | None = None


class Node(NodeOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of ``[[cluster.nodes]]``; ``workdir``, ``python`` and ``setup`` default to those of the cluster."""

    env: dict[str, str] = {}


class ClusterOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of ``[cluster]`` except its nodes and its table ``env``."""

    init_method: Annotated[
        str, Meta(description="rendezvous: auto, tcp://HOST:PORT, file:///SHARED/PATH or env://")
    ] = "auto"
    backend: Annotated[
        Literal["auto", "nccl", "gloo"], Meta(description="auto is nccl on GPUs, and gloo if any rank is on a CPU")
    ] = "auto"
    launcher: Annotated[
        Literal["auto", "local", "ssh", "slurm"],
        Meta(description="auto is local for this machine, slurm with [slurm] or in an allocation, ssh otherwise"),
    ] = "auto"
    max_restarts: Annotated[int, Meta(ge=0, description="how many times to restart after a failure")] = 0
    on_stall: (
        Annotated[
            Literal["report", "stop", "restart"],
            Meta(description="what to do when a rank hangs; default: restart with max_restarts, else stop"),
        ]
        | None
    ) = None
    stall_timeout: (
        Annotated[
            float,
            Meta(
                ge=10,
                le=86400,
                description="seconds without progress until on_stall; default: ten times the longest step, at least 60",
            ),
        ]
        | None
    ) = None
    host_timeout: Annotated[
        float, Meta(ge=5, le=3600, description="seconds without contact after which a host on which ranks wait is lost")
    ] = 30.0
    restart_wait: Annotated[
        float, Meta(ge=0, le=86400, description="seconds that a restart waits for a lost host to answer again")
    ] = 600.0
    spare: Annotated[
        tuple[str, ...], Meta(description="hosts that take the places of lost ones at a restart, in this order")
    ] = ()
    min_ranks: (
        Annotated[
            int,
            Meta(
                ge=1,
                description="fewest ranks with which a restart goes on without lost hosts; default: never without them",
            ),
        ]
        | None
    ) = None
    port: Annotated[
        int, Meta(ge=0, le=65535, description="port on the first node; 0: a free one, found there at the launch")
    ] = 0
    workdir: Workdir | None = None
    python: Python | None = None
    setup: Setup | None = None


class Cluster(ClusterOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[cluster]``; without nodes, the ranks run on this machine."""

    env: dict[str, str] = {}
    nodes: tuple[Node, ...] = (Node(),)

    def of_node(self, index: int) -> Node:
        """Return a node with the cluster's values for the keys that it lacks."""
        node = self.nodes[index]
        return msgspec.structs.replace(
            node,
            workdir=node.workdir or self.workdir,
            python=node.python or self.python,
            setup=node.setup or self.setup,
            env=self.env | node.env,
        )


class SlurmOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[slurm]``: options of the job's submission."""

    nodes: (
        Annotated[int, Meta(ge=1, le=10_000, description="number of equal nodes; default: one per [[cluster.nodes]]")]
        | None
    ) = None
    partition: Annotated[str, Meta(min_length=1, description="partition to submit to")] | None = None
    account: Annotated[str, Meta(min_length=1, description="account to charge")] | None = None
    qos: Annotated[str, Meta(min_length=1, description="quality of service")] | None = None
    time: Annotated[str, Meta(min_length=1, description="time limit: minutes, HH:MM:SS or D-HH")] | None = None
    mem: Annotated[str, Meta(min_length=1, description="memory per node, such as 64G")] | None = None
    constraint: Annotated[str, Meta(min_length=1, description="features that the nodes must have")] | None = None
    gpu_type: Annotated[str, Meta(min_length=1, description="type of GPU, as sinfo names it")] | None = None
    setup: (
        Annotated[str, Meta(min_length=1, description="shell command before the run, such as module load cuda")] | None
    ) = None
    requeue: Annotated[
        bool, Meta(description="go on in the same run after a time limit, a pre-emption or a lost node")
    ] = False
    extra: Annotated[tuple[str, ...], Meta(description="more options for sbatch, such as --cpus-per-task=16")] = ()


CLUSTER_KEYS = (*ClusterOptions.__struct_fields__, "env", "nodes")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A validated recipe."""

    name: str
    """Name of its runs; by default the file's name without suffix."""
    cluster: Cluster
    slurm: SlurmOptions | None
    train: Training
    launch: Distributed
    """Options of the launch: only ``LAUNCH_OPTIONS`` may differ from their defaults."""
    script: Script | None
    task_options: Mapping[str, Any]
    """The options in ``[task]``, in the types of the task's schema; those that the recipe does not set are absent."""
    report: ReportOptions
    notes: tuple[str, ...]
    """A line for each key of another program's configuration that is accepted without effect."""
    origin: Source
    """The parsed text, with the line of each key for messages."""
    world_size: int | None = None
    """Ranks that the nodes must have together, by PyText's ``distributed_world_size``; None: they set it alone."""

    @property
    def is_for_slurm(self) -> bool:
        """Whether Slurm allocates the nodes."""
        launcher = self.cluster.launcher
        return launcher == "slurm" or (launcher == "auto" and self.slurm is not None)

    def where(self, *key: str | int) -> str:
        """Return the location ``FILE:LINE: key`` of a key, for messages."""
        return self.origin.where(key)


def train_options() -> list[Option]:
    """Return all options of ``[train]``."""
    launch = {option.name: option for option in describe(Distributed)}
    return [*describe(Training), *(launch[name] for name in LAUNCH_OPTIONS), *describe(Script)]
