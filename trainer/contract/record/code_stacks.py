"""What an answer to a request for stacks is made of: calls, threads and collectives."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

WholeNumber = Annotated[int, Meta(ge=0, le=1 << 53)]
"""As ``Count`` of the events, which import this module."""


class CodeFrame(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A call on a stack."""

    file: str
    """Path; below the working folder it is relative."""
    line: WholeNumber
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
    number: WholeNumber
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
