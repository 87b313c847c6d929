"""Gloo process group of a few processes, started once per test module to run functions."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from forked_trainer import context
from waiting import LIMIT_S

FSDP_ON_CPU = hasattr(torch.cpu.Stream, "record_event")
"""Whether FSDP2 of this torch divides models among CPU ranks."""


class Gang:
    """Process group whose ``run`` calls a module-level function on every rank and returns the results in rank order."""

    def __init__(self, world_size: int, *, timeout_s: float = LIMIT_S) -> None:
        self._timeout_s = timeout_s
        self._folder = tempfile.TemporaryDirectory()
        self._members = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_member, args=(theirs, rank, world_size, self._folder.name))
            process.start()
            theirs.close()
            self._members.append((process, ours))

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        for _, connection in self._members:
            connection.send((function, arguments))
        answers = []
        for rank, (_, connection) in enumerate(self._members):
            assert connection.poll(self._timeout_s), f"rank {rank} does not answer"
            answers.append(connection.recv())
        failures = [f"rank {rank}: {text}" for rank, (good, text) in enumerate(answers) if not good]
        assert not failures, "\n".join(failures)
        return [result for _, result in answers]

    def close(self) -> None:
        for process, connection in self._members:
            connection.close()  # the end of its input ends the member
            process.join(5.0)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


def _member(connection: Connection, rank: int, world_size: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = Path(folder, "store")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            os._exit(0)  # leaving the group in order can hang in gloo's threads
        try:
            connection.send((True, function(rank, world_size, *arguments)))
        except Exception:  # noqa: BLE001 - reported to the test, which fails
            connection.send((False, traceback.format_exc()))
