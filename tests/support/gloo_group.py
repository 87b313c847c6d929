"""Processes started once per test module that join and leave gloo groups on request.

They are forked from a server that has torch loaded, so that another process costs milliseconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from forked_trainer import context
from waiting import LIMIT_S


@dataclass(frozen=True)
class Raised:
    """Exception raised in another process: type and message."""

    kind: str
    message: str


class Member:
    """Process that calls module-level functions and sends their results back."""

    def __init__(self) -> None:
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        self._connection.send((function, arguments, named))

    def outcome(self) -> Any:
        """Return the result of the call, or ``Raised``."""
        assert self._connection.poll(LIMIT_S), "a process does not answer"
        return self._connection.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self._connection.close()


class Processes:
    """Processes of a test module, started as needed."""

    def __init__(self) -> None:
        self.members: list[Member] = []

    def take(self, count: int) -> list[Member]:
        while len(self.members) < count:
            self.members.append(Member())
        return self.members[:count]

    def outcomes(self, function: Callable[..., Any], requests: Sequence[dict[str, Any]]) -> list[Any]:
        """Call the function once per request, concurrently; return the results, or ``Raised``, in order."""
        members = self.take(len(requests))
        for member, request in zip(members, requests, strict=True):
            member.begin(function, **request)
        return [member.outcome() for member in members]

    def results(self, function: Callable[..., Any], requests: Sequence[dict[str, Any]]) -> list[Any]:
        outcomes = self.outcomes(function, requests)
        assert not any(isinstance(outcome, Raised) for outcome in outcomes), outcomes
        return outcomes

    def close(self) -> None:
        for member in self.members:
            member.kill()


def _serve(connection: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            function, arguments, named = connection.recv()
        except EOFError:
            os._exit(0)
        try:
            connection.send(function(*arguments, **named))
        except Exception as error:  # noqa: BLE001 - reported to the test
            connection.send(Raised(type(error).__name__, str(error)))
