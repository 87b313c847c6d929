"""The answer to a request for stacks, and what it is made of: calls, threads and collectives."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile

import msgspec

from trainer.contract.record.events import Event
from trainer.contract.record.numbers import Count, Rank


class CodeFrame(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A call on a stack."""

    file: str
    """Path; below the working folder it is relative."""
    line: Count
    function: str
    user: bool = False
    """Whether it is code of the user, not of Python, of an installed package or of these packages."""


class ThreadStack(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Stack of one thread."""

    name: str
    frames: list[CodeFrame]
    """The innermost call first."""


class Collective(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A collective operation of a rank."""

    name: str
    """Such as ``all_reduce``."""
    number: Count
    """Sequence number in its process group, from 1; equal on all ranks for the same operation."""
    state: str
    """``complete``, ``started`` on the GPU, or ``scheduled``."""
    sizes: list[list[int]] = []
    """Shapes of the inputs."""
    group: str = ""
    """Process group, such as ``default_pg``."""

    @property
    def text(self) -> str:
        """Name, number and sizes, such as ``all_reduce 3 of [4, 1000]``."""
        sizes = " ".join(map(str, self.sizes))
        return f"{self.name} {self.number}" + (f" of {sizes}" if sizes else "")


class RankStacks(Event, kw_only=True, tag="rank_stacks"):
    """Answer to a request for the Python stacks of a rank."""

    rank: Rank
    host: str | None = None
    request: str
    """The request that is answered."""
    pid: Count | None = None
    threads: list[ThreadStack] = []  # noqa: RUF012 - msgspec copies it
    """The main thread first; empty if the rank did not answer."""
    problem: str = ""
    """Why there is no stack, or what its process was found to be, in a few words."""
    collectives: list[Collective] = []  # noqa: RUF012 - likewise
    """Its last collectives, the oldest first; empty if torch has recorded none."""
    workers: list[ThreadStack] = []  # noqa: RUF012 - likewise
    """Stacks of the worker processes that were forked for its DataLoader, where its main thread waits for one."""
    native: list[ThreadStack] = []  # noqa: RUF012 - likewise
    """The stacks with their native frames, in a second answer to a request for these."""
    native_problem: str = ""
    """Why there are none, in that answer."""


LOADER_FILE = "torch/utils/data/dataloader.py"
WORKER_FILE = "torch/utils/data/_utils/worker.py"


def waits_for_worker(frames: Iterable[CodeFrame]) -> bool:
    """Whether a thread waits for a worker process of a DataLoader."""
    outside = takewhile(lambda frame: not frame.user, frames)
    return any(frame.function == "_get_data" and frame.file.endswith(LOADER_FILE) for frame in outside)


def is_worker_loop(frame: CodeFrame) -> bool:
    """Whether a call is the outermost one of a DataLoader's worker process."""
    return frame.function == "_worker_loop" and frame.file.endswith(WORKER_FILE)
